"""An HDF5 file in, batches out: what is in the file, the order of its rows, reading them ahead of use."""
