"""Copies to a GPU that go on after they were asked for: what they read from is held until they have finished."""

import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mpidp.hdf5.field import Field
from mpidp.hdf5.prefetch import BatchRing
from mpidp.hdf5.transform import DeviceCopier


class FakeEvent:
    """Stands for an event of CUDA: done when the test says so."""

    def __init__(self) -> None:
        self.done = False

    def query(self) -> bool:
        return self.done


class FakeHostTensor:
    """Stands for a pinned tensor: notes how it was copied."""

    def __init__(self, rows: np.ndarray) -> None:
        self.rows = rows
        self.copies: list[tuple[Any, bool]] = []

    def to(self, device: Any, non_blocking: bool = False) -> str:
        self.copies.append((device, non_blocking))
        return "on the device"


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FakeEvent]]:
    """Events that streams recorded."""
    recorded: list[FakeEvent] = []

    def record() -> FakeEvent:
        recorded.append(FakeEvent())
        return recorded[-1]

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(record_event=record))
    yield recorded


def test_a_batch_on_the_cpu_is_not_copied() -> None:
    tensors = {"x": torch.zeros(3)}
    assert DeviceCopier(torch.device("cpu"))(tensors) is tensors


def test_memory_is_held_until_the_copy_has_finished(events: list[FakeEvent]) -> None:
    """Only then is it given back to the ring, and in no case before."""
    ring = BatchRing((Field("x", (2,), np.dtype("f4")),), 4, 8, torch.device("cpu"))
    copier = DeviceCopier(torch.device("cuda", 0))
    leases: list[weakref.ref[Any]] = []

    def copy() -> None:
        host = FakeHostTensor(ring.take(4).fields["x"])
        leases.append(weakref.ref(host))
        assert copier({"x": host}) == {"x": "on the device"}  # type: ignore[dict-item]
        assert host.copies == [(torch.device("cuda", 0), True)]

    copy()
    copy()
    copy()
    assert len(events) == 3 and all(lease() for lease in leases) and not ring._free
    events[0].done = True
    copy()
    assert leases[0]() is None and all(lease() for lease in leases[1:]) and len(ring._free) == 1
    events[2].done = True  # copies of a stream finish in order: the second is not done yet
    copy()
    assert all(lease() for lease in leases[1:])
    for event in events:
        event.done = True
    copy()
    assert not any(lease() for lease in leases[:5]) and leases[5]()
    assert len(ring._free) == 4  # of five, one of which was taken again
