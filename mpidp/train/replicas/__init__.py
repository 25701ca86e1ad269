"""The copies of a model on all ranks in; which of them has gone astray out."""
