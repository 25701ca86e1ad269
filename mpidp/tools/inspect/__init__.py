"""An HDF5 file in, what the loader will make of it out: behind `mpidp data inspect`."""
