"""Files of many kinds in, HDF5 files that are read fast out: behind `mpidp data convert` and `make`."""
