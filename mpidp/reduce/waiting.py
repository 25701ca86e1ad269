"""A request of MPI in, its end out, without keeping a core busy that backward could use."""

import os
import time

from mpidp.world.mpi import MPI

# Of the time waited so far, how much the next sleep may take: a short wait is noticed at once, and a long one is
# prolonged by an eighth of itself at most.
SHARE = 1 / 8
LONGEST_S = 0.0005


def wait(request: MPI.Request) -> None:
    """Returns when the request is done. MPI makes progress, on all requests, only while it is called."""
    start = time.perf_counter()
    while not request.Test():
        pause_s = min((time.perf_counter() - start) * SHARE, LONGEST_S)
        if pause_s < 1e-5:
            os.sched_yield()
        else:
            time.sleep(pause_s)
