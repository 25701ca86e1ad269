"""HDF5 files in, what lies in them and where out: metadata, read once by one rank."""
