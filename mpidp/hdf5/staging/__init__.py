"""Files copied to each node's own disk: the mode `stage`."""
