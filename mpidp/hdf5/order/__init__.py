"""Rows in the order in which an epoch uses them: arithmetic, without files, torch or MPI."""
