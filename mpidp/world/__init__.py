"""Who am I, where do I run, what if someone fails: the only folder that imports mpi4py."""
