"""What is in HDF5 files and where: metadata, read once by one rank."""
