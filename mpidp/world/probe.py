"""A device in, an exit code out: does this MPI library handle its memory? Run as a child, never imported.

A world of one rank still moves bytes: the result buffer of an Allreduce and a message to oneself are copied by MPI,
which a library without device support cannot do. The device "cpu" tests the test.
"""

import sys

import torch

from mpidp.world.mpi import MPI


def main(device: torch.device) -> int:
    """Returns 0 when both results on the device are right."""
    MPI.Init_thread(MPI.THREAD_MULTIPLE)
    source = torch.arange(1 << 18, dtype=torch.float32, device=device)
    summed, received = torch.zeros_like(source), torch.zeros_like(source)
    _finish_kernels(device)
    MPI.COMM_WORLD.Allreduce(source, summed, op=MPI.SUM)
    MPI.COMM_WORLD.Sendrecv(source, dest=0, recvbuf=received, source=0)
    _finish_kernels(device)
    if torch.equal(source, summed) and torch.equal(source, received):
        return 0
    print("wrong values in device memory", file=sys.stderr)
    return 1


def _finish_kernels(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    sys.exit(main(torch.device(sys.argv[1])))
