"""Bytes of a file in, values as batches hold them out, without HDF5 and by any number of threads."""
