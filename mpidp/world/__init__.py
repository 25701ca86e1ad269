"""The ranks of a job: start, topology, collectives, watchdog and exit. The only package that imports mpi4py."""
