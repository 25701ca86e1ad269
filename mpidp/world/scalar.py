"""One integer a rank in, their reduction on every rank out."""

import numpy as np

from mpidp.world.mpi import MPI


def reduced(comm: MPI.Intracomm, value: int, op: MPI.Op) -> int:
    """Reduces one integer (64 bits) over the ranks, by an operation of MPI's. Collective.

    Not `comm.allreduce`: mpi4py does that by messages on a communicator of its own, which nobody can revoke. When a
    rank has died, one that waits there for a living rank, which went on to the recovery, would wait for ever.
    """
    number = np.array([value], dtype=np.int64)
    comm.Allreduce(MPI.IN_PLACE, number, op=op)
    return int(number[0])
