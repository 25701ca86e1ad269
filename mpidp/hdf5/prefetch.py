"""Prefetching: a thread makes batches ahead of use, in memory that is allocated once and used in turn.

The thread never calls MPI. It is no process, since forking after MPI has started is unsafe. A batch's memory is used
again when neither the batch nor any tensor or array that shares its memory is referred to.
"""

import os
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from mpidp.hdf5.dataset import Rows
from mpidp.hdf5.field import Field

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
            self._free.pop()  # allocated while the program kept many batches
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
        """Bytes of the memory that is in use or waiting, as long as the program keeps no batches."""
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


T = TypeVar("T")

_POLL_S = 0.2


@dataclass(frozen=True)
class _End:
    """The last thing the thread sends: why it ended."""

    error: BaseException | None


class Prefetcher(Generic[T]):
    """Iterates over the items of the generator `make()`, which runs in a thread up to `depth` items ahead.

    The thread is joined by `close`, at the end of the items, and when the prefetcher is collected.
    """

    def __init__(self, make: Callable[[], "Iterator[T]"], depth: int) -> None:
        self._items: queue.Queue[T | _End] = queue.Queue(maxsize=depth)
        self._stop = threading.Event()
        # The thread must not hold `self`, or `self` would never be collected while it runs.
        wanted = partial(_wanted, self._stop, threading.current_thread())
        self._thread = threading.Thread(target=_produce, args=(make, self._items, wanted), name="mpidp-prefetch")
        self._finalizer = weakref.finalize(self, _end, os.getpid(), self._stop, self._thread, self._items)
        self._thread.start()

    def __iter__(self) -> "Prefetcher[T]":
        return self

    def __next__(self) -> T:
        if not self._finalizer.alive:
            raise RuntimeError("this pass over the loader was closed, for instance by another pass that began")
        item = self._items.get()
        if not isinstance(item, _End):
            return item
        self.close()
        raise StopIteration if item.error is None else item.error

    def close(self) -> None:
        """Stop the thread and wait for its end. What it made ahead is dropped."""
        self._finalizer()


def _produce(make: Callable[[], "Iterator[T]"], items: "queue.Queue[T | _End]", wanted: Callable[[], bool]) -> None:
    end = _End(None)
    try:
        with closing(make()) as made:  # type: ignore[type-var]
            for item in made:
                if not _put(items, item, wanted):
                    return
    except BaseException as error:
        end = _End(error)
    _put(items, end, wanted)


def _wanted(stop: threading.Event, owner: threading.Thread) -> bool:
    # When the main thread ends with a pass left open (its traceback may hold it), the interpreter joins all
    # threads before anything could tell them to stop: so they look themselves whether their owner lives.
    return not stop.is_set() and owner.is_alive()


def _put(items: "queue.Queue[T | _End]", item: "T | _End", wanted: Callable[[], bool]) -> bool:
    """Put an item when there is room; return False if the prefetcher is closed."""
    while wanted():
        try:
            items.put(item, timeout=_POLL_S)
            return True
        except queue.Full:
            continue
    return False


def _end(pid: int, stop: threading.Event, thread: threading.Thread, items: "queue.Queue[T | _End]") -> None:
    if os.getpid() != pid:
        return  # in a fork, where the thread is not, and a lock that it held stays locked
    stop.set()
    with suppress(queue.Empty):  # room for what the thread may be about to put, so that it looks at once
        while True:
            items.get_nowait()
    # The collector may run this in any thread, also in the one that is to end.
    if thread is not threading.current_thread():
        thread.join()
