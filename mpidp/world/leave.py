"""An exit code that is no failure in, the end of all ranks out, so that the launcher reports that code."""

import signal
import sys
from typing import NoReturn

from mpidp.world.mpi import MPI
from mpidp.world.signals import STOP_SIGNALS
from mpidp.world.tolerance import is_survived
from mpidp.world.world import World

# sysexits.h calls it EX_TEMPFAIL: try again later. Job scripts requeue on it.
STOPPED_EARLY = 75


def leave(world: World, code: int) -> NoReturn:
    """Ends every rank; the job's exit code is rank 0's, `code`. Collective.

    A launcher that ends a job on its first bad exit code (`srun -K`) sends SIGTERM to the ranks that are still
    clearing up, and would then report that signal instead of the code. So from here on they do not hear it.
    """
    world.guard.remove()
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    try:
        world.barrier()
    except MPI.Exception as error:
        if not is_survived(error):  # else whoever died has left, too
            raise
    sys.exit(code if world.rank == 0 else 0)
