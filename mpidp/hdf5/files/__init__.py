"""Metadata of HDF5 files: what they hold and where, read once by one rank."""
