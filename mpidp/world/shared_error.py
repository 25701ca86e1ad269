"""One rank's exception in, the same exception on every rank out, so that all leave together and nobody waits."""

import logging
import pickle
from collections.abc import Sequence
from typing import cast

import numpy as np

from mpidp.errors import SHARED_MARK, MpidpError
from mpidp.world.mpi import MPI

log = logging.getLogger("mpidp.rank")


def share_error(comm: MPI.Intracomm, error: Exception | None, note: str, same: Sequence[int] = ()) -> bool:
    """Raises on every rank when some rank brings an error, else returns on every rank. Collective.

    All ranks raise the error of the lowest failing rank: that rank its own, which has the traceback, the others a
    copy of the same type and text. The note says where it came from.

    Args:
        comm: the ranks.
        error: of this rank, if any.
        note: where it happened.
        same: integers (64 bits, signed), equally many on all ranks, that are compared in the same message.

    Returns:
        Whether all ranks brought the same integers.
    """
    # The least of all numbers and of all their complements are each other's only if all are equal.
    values = np.array([comm.size if error is None else comm.rank, *same, *(~value for value in same)], dtype=np.int64)
    comm.Allreduce(MPI.IN_PLACE, values, op=MPI.MIN)
    failing = int(values[0])
    if failing == comm.size:
        least, complements = np.split(values[1:], 2)
        return bool((least == ~complements).all())
    mine = error is not None and comm.rank == failing
    if mine:
        assert error is not None
        error.add_note(note)
    copy = comm.bcast(_portable(error) if mine else None, root=failing)
    shared = error if mine else cast(Exception, copy)
    assert shared is not None
    setattr(shared, SHARED_MARK, True)
    raise shared


def _portable(error: Exception | None) -> Exception:
    """An equal exception that survives pickling; a MpidpError with the same text when the original does not."""
    try:
        copy = cast(Exception, pickle.loads(pickle.dumps(error)))
        if str(copy) == str(error):
            return copy
    except Exception:
        log.debug("this exception does not survive pickling", exc_info=True)
    # Some exceptions cannot be rebuilt from their arguments, or say something else then. The type's name and the text
    # are what matters.
    substitute = MpidpError(f"{type(error).__name__}: {error}")
    for note in getattr(error, "__notes__", []):
        substitute.add_note(note)
    return substitute
