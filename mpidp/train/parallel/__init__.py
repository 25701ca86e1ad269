"""A module in, one that trains on a share of each global batch out: the wrapper and what it watches."""
