"""A GPU's index in, an exit code out: does this MPI library handle device memory? Run as a child, never imported.

A world of one rank still moves bytes: the result buffer of an Allreduce and a message to oneself are copied by MPI,
which a library without device support cannot do.
"""

import sys

import torch

from mpidp.world.mpi import MPI


def main(index: int) -> int:
    """Returns 0 when both results on the device are right."""
    torch.cuda.set_device(index)
    source = torch.arange(1 << 18, dtype=torch.float32, device="cuda")
    summed, received = torch.zeros_like(source), torch.zeros_like(source)
    torch.cuda.synchronize()
    MPI.COMM_WORLD.Allreduce(source, summed, op=MPI.SUM)
    MPI.COMM_WORLD.Sendrecv(source, dest=0, recvbuf=received, source=0)
    torch.cuda.synchronize()
    if torch.equal(source, summed) and torch.equal(source, received):
        return 0
    print("wrong values in device memory", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
