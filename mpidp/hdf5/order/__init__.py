"""The order of samples in an epoch: arithmetic, without files, torch or MPI."""
