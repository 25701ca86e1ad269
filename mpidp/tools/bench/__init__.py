"""Benchmarks behind `mpidp bench`: competing ways to do the same work, timed fairly in one run."""
