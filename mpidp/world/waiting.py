"""A request of MPI in, its end out, with or without keeping the core that backward could use."""

import os
import time

from mpidp.world.mpi import MPI
from mpidp.world.status import status

# Of the time waited so far, how much the next pause may take: a short wait is noticed at once.
SHARE = 1 / 8
SHORTEST_S = 1e-5


def wait(request: MPI.Request, longest_pause_s: float = 0.0) -> None:
    """Returns when the request is done. MPI makes progress, on all requests, only while it is called.

    Args:
        request: what to wait for.
        longest_pause_s: how long the thread may sleep between two looks; 0 keeps looking, and gives the core only to
            who wants it at that moment.
    """
    if request.Test():
        return
    start = time.perf_counter()
    with status.waiting("a request"):
        while not request.Test():
            pause_s = min((time.perf_counter() - start) * SHARE, longest_pause_s)
            if pause_s < SHORTEST_S:
                os.sched_yield()
            else:
                time.sleep(pause_s)
