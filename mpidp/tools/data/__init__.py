"""`mpidp data`: look at data, check it, bring it into HDF5 files that are read fast, or make some."""
