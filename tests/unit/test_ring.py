"""Memory of batches: allocated once, used again when nobody refers to it, and never before."""

import gc
import threading
from pathlib import Path

import h5py
import numpy as np
import torch

from mpidp.hdf5.field import Field
from mpidp.hdf5.loader import HDF5Loader
from mpidp.hdf5.prefetch import BatchRing

CPU = torch.device("cpu")
FIELDS = (Field("x", (3,), np.dtype("f4")), Field("y", (), np.dtype("i8")))


def address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


def test_memory_is_used_again() -> None:
    """Behaviour 28: what was given back is what is taken next, whatever the number of rows."""
    ring = BatchRing(FIELDS, 10, 2, CPU)
    seen = set()
    for count in (10, 3, 0, 7, 10):
        rows = ring.take(count)
        assert rows.fields["x"].shape == (count, 3) and rows.fields["y"].shape == rows.numbers.shape == (count,)
        seen.add(address(rows.fields["x"]))
        del rows
    assert len(seen) == 1


def test_whoever_refers_to_the_memory_keeps_it() -> None:
    """The array, a tensor of it, a slice or view of that tensor, or a NumPy array of it."""
    ring = BatchRing(FIELDS, 4, 2, CPU)
    kept = []
    for number, keep in enumerate(
        (lambda t: t, lambda t: t[1:], lambda t: t.view(-1), lambda t: t.numpy(), lambda t: t[2, 1])
    ):
        rows = ring.take(4)
        rows.fields["x"][:] = number
        kept.append(keep(torch.from_numpy(rows.fields["x"])))
        del rows
    others = ring.take(4)
    others.fields["x"][:] = 99
    assert [np.unique(each).tolist() for each in kept] == [[0], [1], [2], [3], [4]]
    kept.clear()
    assert len(ring._free) == 5


def test_spare_memory_is_given_up() -> None:
    """After somebody kept many batches, no more stay than the depth and the one in use."""
    ring = BatchRing(FIELDS, 4, 2, CPU)
    many = [ring.take(4) for _ in range(20)]
    many.clear()
    assert len(ring._free) == 20
    rows = ring.take(4)
    assert len(ring._free) <= 2
    del rows
    assert ring.num_bytes == 3 * 4 * 20


def test_memory_outlives_the_ring() -> None:
    ring = BatchRing(FIELDS, 4, 2, CPU)
    rows = ring.take(4)
    rows.fields["x"][:] = 5
    del ring
    gc.collect()
    assert (rows.fields["x"] == 5).all()


def test_several_threads_take_and_give_back() -> None:
    """No two batches that are in use share memory."""
    ring = BatchRing(FIELDS, 1, 8, CPU)
    wrong: list[int] = []

    def use(number: int) -> None:
        for turn in range(300):
            rows = ring.take(1)
            rows.fields["y"][0] = number * 1000 + turn
            if rows.fields["y"][0] != number * 1000 + turn:
                wrong.append(number)

    threads = [threading.Thread(target=use, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and len(ring._free) <= 9


def test_batches_that_are_kept_keep_their_values(tmp_path: Path) -> None:
    """Behaviour 23: a list of all batches of an epoch, and what is left of a batch after it was dropped."""
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", data=np.arange(600).reshape(200, 3), chunks=(16, 3))
    loader = HDF5Loader(tmp_path / "a.h5", ("x",), 8, prefetch_batches=1)
    batches = list(loader)
    slices = [batch.x[::2, 1] for batch in loader]
    second = np.concatenate([batch.indices[::2] for batch in loader])  # a third epoch, written over nothing of these
    for batch in batches:
        np.testing.assert_array_equal(batch.x[:, 0], 3 * batch.indices)
    assert len(second) == 100
    plan = loader.order.plan(1)
    for step, found in enumerate(slices):
        rows = plan.rows(plan.local_indices(8 * step, 1, 0))
        np.testing.assert_array_equal(found, 3 * rows[::2] + 1)
    loader.close()
