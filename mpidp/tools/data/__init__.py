"""`mpidp data`: inspect and verify HDF5 files, convert data to files that are read fast, or make some."""
