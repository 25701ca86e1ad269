"""Values that ranks hold for rows of a data set, gathered in the order of the rows."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mpidp.errors import DataError
from mpidp.world.mpi import MPI
from mpidp.world.shared_error import share_error

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
