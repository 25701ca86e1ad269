"""Rows held in the memory of a node, or of all ranks: the modes `node` and `store`."""
