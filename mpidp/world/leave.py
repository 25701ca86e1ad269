"""An exit code that is no failure in, the end of all ranks out, so that the launcher reports that code."""

import sys
from typing import TYPE_CHECKING, NoReturn

from mpidp.world import signals
from mpidp.world.communicators import is_survived
from mpidp.world.mpi import MPI

if TYPE_CHECKING:
    from mpidp.world.world import World

# sysexits.h calls it EX_TEMPFAIL: try again later. Job scripts requeue on it.
STOPPED_EARLY = 75


def leave(world: "World", code: int) -> NoReturn:
    """Ends every rank; the job's exit code is rank 0's, `code`. Collective."""
    world.guard.remove()
    signals.ignore()
    try:
        world.barrier()
    except MPI.Exception as error:
        if not is_survived(error):  # else whoever died has left, too
            raise
    sys.exit(code if world.rank == 0 else 0)
