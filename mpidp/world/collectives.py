"""Collective helpers: barriers, integers, errors, rows of a data set, and results that come one call later.

The messages of `DelayedMaximum` and `DelayedEquality` travel while the next step computes, so that asking at every step
costs a call and no waiting.
"""

import logging
import os
import pickle
import time
from collections.abc import Sequence
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mpidp.errors import DataError, MpidpError, marked
from mpidp.world.mpi import MPI, keep_at_loss
from mpidp.world.status import status

# The next pause, as a share of the time waited so far: so the end of a short wait is noticed at once.
SHARE = 1 / 8
SHORTEST_S = 1e-5
PAUSE_S = 1e-4  # between two tests of a delayed result, where a rank is late: it may need the core


def wait(request: MPI.Request, longest_pause_s: float = 0.0) -> None:
    """Returns when the request is done. MPI makes progress, on all requests, only while it is called.

    Args:
        request: what to wait for.
        longest_pause_s: how many seconds the thread may sleep between two tests; 0 never sleeps, and yields the core
            only to a thread that needs it at that moment.
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


log = logging.getLogger("mpidp.rank")


def share_error(comm: MPI.Intracomm, error: Exception | None, note: str, same: Sequence[int] = ()) -> bool:
    """Raises on every rank if some rank has an error, else returns on every rank. Collective.

    All ranks raise the error of the lowest failing rank: that rank its own, which has the traceback, the others a
    copy of the same type and text.

    Args:
        comm: the ranks.
        error: this rank's error, if any.
        note: where it happened; added to the exception.
        same: integers (64 bits, signed), equally many on all ranks, that are compared in the same message.

    Returns:
        Whether `same` is the same on all ranks.
    """
    if comm.size == 1:
        if error is not None:
            raise marked(error, note)
        return True
    # The minimum of all numbers is the complement of the minimum of all complements only if all are equal.
    values = np.array([comm.size if error is None else comm.rank, *same, *(~value for value in same)], dtype=np.int64)
    comm.Allreduce(MPI.IN_PLACE, values, op=MPI.MIN)
    failing = int(values[0])
    if failing == comm.size:
        least, complements = np.split(values[1:], 2)
        return bool((least == ~complements).all())
    mine = error is not None and comm.rank == failing
    if mine:
        error = marked(cast(Exception, error), note)
    copy = comm.bcast(_portable(error) if mine else None, root=failing)
    raise marked(cast(Exception, error if mine else copy))


def _portable(error: Exception | None) -> Exception:
    """The exception itself if it can be pickled, else a MpidpError with the same text."""
    try:
        copy = cast(Exception, pickle.loads(pickle.dumps(error)))
        if str(copy) == str(error):
            return copy
    except Exception:
        log.debug("this exception cannot be pickled; other ranks raise a MpidpError with its text", exc_info=True)
    # Some exceptions cannot be constructed from their arguments, or have another text then.
    substitute = MpidpError(f"{type(error).__name__}: {error}")
    for note in getattr(error, "__notes__", []):
        substitute.add_note(note)
    return substitute


Rows = Sequence[int] | npt.NDArray[np.integer] | Tensor

_Kind = tuple[int, torch.dtype, tuple[int, ...]]  # number of rows, dtype, shape of a row

_NAMED = 5


def gather_rows(comm: MPI.Intracomm, values: Tensor, rows: Rows, num_rows: int | None) -> Tensor:
    """Return the values of all ranks, in ascending order of their row numbers; see `World.gather_rows`. Collective."""
    numbers = torch.as_tensor(rows, dtype=torch.int64).reshape(-1).cpu()
    note = f"on rank {comm.rank} of {comm.size}, gathering rows"
    share_error(comm, _unequal_lengths(values, numbers), note)
    kinds: list[_Kind] = comm.allgather((len(numbers), values.dtype, tuple(values.shape[1:])))
    counts = [count for count, _, _ in kinds]
    first = next((rank for rank, count in enumerate(counts) if count), comm.rank)
    share_error(comm, _unequal_kinds(kinds, first), note)
    _, dtype, shape = kinds[first]
    own = values.detach().cpu() if len(numbers) else torch.empty((0, *shape), dtype=dtype)
    all_numbers = _allgather(comm, numbers, counts)
    gathered = _allgather(comm, own, counts)
    order = torch.argsort(all_numbers)
    share_error(comm, _unequal_rows(all_numbers[order].numpy(), num_rows), note)
    return gathered[order]


def _allgather(comm: MPI.Intracomm, own: Tensor, counts: list[int]) -> Tensor:
    """Return the rows of all ranks, in the order of the ranks. Collective."""
    if comm.size == 1:
        return own
    row_bytes = own[:0].new_empty(own.shape[1:]).numel() * own.element_size()
    gathered = own.new_empty((sum(counts), *own.shape[1:]))
    if row_bytes == 0 or not len(gathered):
        return gathered
    row = MPI.BYTE.Create_contiguous(row_bytes).Commit()  # so that counts are of rows, and stay small
    try:
        comm.Allgatherv([_bytes(own), len(own), row], [_bytes(gathered), counts, None, row])
    finally:
        row.Free()
    return gathered


def _bytes(tensor: Tensor) -> npt.NDArray[np.uint8]:
    """Return the memory of a contiguous tensor, of any dtype; a copy where it is not contiguous."""
    if not tensor.numel():  # an empty NumPy array may have strides of 0, which torch does not view as bytes
        return np.empty(0, dtype=np.uint8)
    array: npt.NDArray[np.uint8] = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return array


def _unequal_lengths(values: Tensor, numbers: Tensor) -> DataError | None:
    if (len(numbers) == 0 and values.numel() == 0) or (values.dim() > 0 and len(values) == len(numbers)):
        return None
    return DataError(
        f"gather_rows was given values of shape {tuple(values.shape)} and {len(numbers)} row numbers; "
        f"give one row of the first axis for each number"
    )


def _unequal_kinds(kinds: list[_Kind], first: int) -> DataError | None:
    for rank, kind in enumerate(kinds):
        if kind[0] and kind[1:] != kinds[first][1:]:
            return DataError(
                f"gather_rows was given rows of {kinds[first][1]} and shape {kinds[first][2]} on rank {first}, of "
                f"{kind[1]} and shape {kind[2]} on rank {rank}; give the same on every rank"
            )
    return None


def _unequal_rows(numbers: npt.NDArray[np.int64], num_rows: int | None) -> DataError | None:
    """Return an error for rows that came twice or, of `num_rows`, not at all; `numbers` are ascending."""
    twice = np.unique(numbers[1:][numbers[1:] == numbers[:-1]])
    if len(twice):
        return DataError(
            f"gather_rows was given {_some(twice)} more than once; give each row of the data set on one rank, once"
        )
    if num_rows is None or len(numbers) == num_rows:
        return None
    text = f"gather_rows was given {len(numbers)} rows, and {num_rows} were expected"
    if len(numbers) < num_rows and (not len(numbers) or numbers[-1] < num_rows):  # else they are a part of a split
        text += f": {_some(np.setdiff1d(np.arange(num_rows), numbers))} did not come"
    return DataError(f"{text}; give the rows of all batches of a whole pass over the data")


def _some(numbers: npt.NDArray[np.int64]) -> str:
    named = ", ".join(map(str, numbers[:_NAMED]))
    if len(numbers) == 1:
        return f"row {named}"
    return f"rows {named}" + (f" and {len(numbers) - _NAMED} more" if len(numbers) > _NAMED else "")


class _Delayed:
    """A number of each rank, given now and compared later. Making one is collective.

    Args:
        comm: the ranks; it is duplicated, so that an open message never mixes with other traffic.
    """

    def __init__(self, comm: MPI.Intracomm):
        self._comm = comm.Dup() if comm.size > 1 else None
        self._given = np.zeros(2, dtype=np.int64)
        self._greatest = np.zeros(2, dtype=np.int64)
        self._request: MPI.Request | None = None
        keep_at_loss(self)

    def give(self, value: int) -> None:
        """Begins to compare this rank's number (64 bits, signed). Collective; the former result must be taken."""
        assert self._comm is not None and self._request is None
        self._given[:] = value, ~value
        self._request = self._comm.Iallreduce(self._given, self._greatest, op=MPI.MAX)

    def close(self) -> None:
        """Waits for the open message and frees the communicator. Collective."""
        if self._comm is not None:
            self._finish()
            self._comm.Free()
            self._comm = None

    def _finish(self) -> bool:
        """Whether there was an open message; `_greatest` then holds its result."""
        if self._request is None:
            return False
        wait(self._request, PAUSE_S)
        self._request = None
        return True


class DelayedMaximum(_Delayed):
    """The maximum over ranks of what each gave at the previous call."""

    def exchange(self, value: int) -> int:
        """Gives this rank's number; returns the maximum of the previous call, 0 at the first. Collective.

        With one rank it returns `value` at once.
        """
        if self._comm is None:
            return value
        before = int(self._greatest[0]) if self._finish() else 0
        self.give(value)
        return before


class DelayedEquality(_Delayed):
    """Whether the numbers that ranks gave differ."""

    def differ(self) -> bool:
        """Whether the numbers given last differ; False when none was given since. The same on all ranks.

        The maximum of all numbers is the complement of the maximum of all complements only if all are equal.
        """
        return self._finish() and bool(self._greatest[0] != ~self._greatest[1])
