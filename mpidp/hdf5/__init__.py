"""Batches from HDF5 files: descriptions of the files, the order of samples, reading and prefetching."""
