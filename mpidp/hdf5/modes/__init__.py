"""The modes of a loader: rows read as needed, held by each node, spread over all ranks, or copied to a node's disk."""
