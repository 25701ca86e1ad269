"""Arrays in, HDF5 files out."""
