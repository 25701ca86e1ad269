"""HDF5 files in, all that is wrong with them out: behind `mpidp data verify`."""
