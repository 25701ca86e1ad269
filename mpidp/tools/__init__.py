"""The tools of the command line, for work around a training run; each has one entry function."""
