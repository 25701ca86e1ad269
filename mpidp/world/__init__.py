"""The ranks of a job: how it starts, who and where they are, how they wait and end. Alone in importing mpi4py."""
