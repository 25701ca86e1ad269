"""Enters: fields, the most rows of a batch. Leaves: memory for batches, allocated once and used in turn.

A batch's memory is used again when nothing refers to it any more, neither the batch nor any tensor or array
that shares its memory: who keeps batches keeps their values, at the price of memory allocated anew.
"""

import weakref
from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mpidp.hdf5.decode.field import Field
from mpidp.hdf5.files.dataset import Rows

Slot = dict[str, npt.NDArray[Any]]


class BatchRing:
    """Memory for `depth` batches of at most `most_rows` rows; pinned where `device` is a GPU."""

    def __init__(self, fields: tuple[Field, ...], most_rows: int, depth: int, device: torch.device) -> None:
        self._fields = fields
        self._most_rows = most_rows
        self._depth = depth
        self._device = device
        # Slots come back from a finalizer, which may run in any thread at any time: only atomic operations here.
        self._free: deque[Slot] = deque()

    def take(self, count: int) -> Rows:
        """Return room for `count` rows, at most `most_rows`."""
        assert count <= self._most_rows, (count, self._most_rows)
        try:
            slot = self._free.popleft()
        except IndexError:
            slot = {field.name: self._allocate(field) for field in self._fields}
        while len(self._free) > self._depth:
            self._free.pop()  # allocated while somebody kept many batches
        lease = _Lease()
        weakref.finalize(lease, self._free.append, slot).atexit = False
        leased = {name: np.asarray(_Leased(array[:count], lease)) for name, array in slot.items()}
        return Rows(leased, np.empty(count, np.int64))

    @property
    def batch_bytes(self) -> int:
        """Bytes of the largest batch."""
        return self._most_rows * sum(field.row_bytes for field in self._fields)

    @property
    def num_bytes(self) -> int:
        """Bytes of the memory that is in use or waiting, as long as nobody keeps batches."""
        return (self._depth + 1) * self._most_rows * sum(field.row_bytes for field in self._fields)

    def _allocate(self, field: Field) -> npt.NDArray[Any]:
        shape = (self._most_rows, *field.shape)
        if self._device.type != "cuda":
            return np.empty(shape, field.dtype)
        # A thread starts on GPU 0, and pinning there would open a context on it in every rank.
        with torch.cuda.device(self._device):
            num_bytes = self._most_rows * field.row_bytes
            pinned: npt.NDArray[Any] = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True).numpy()
            return pinned.view(field.dtype).reshape(shape)


class _Lease:
    """Lives as long as something refers to the memory of a slot."""

    __slots__ = ("__weakref__",)


class _Leased:
    """What NumPy makes an array of that refers to this object, and so to the lease, for as long as it lives."""

    __slots__ = ("__array_interface__", "_lease")

    def __init__(self, array: npt.NDArray[Any], lease: _Lease) -> None:
        self.__array_interface__ = array.__array_interface__
        self._lease = lease
