"""What `HDF5Loader` gives, on one process and on ranks that are only pretended."""

from contextlib import closing
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from loaders import ROWS, SHUFFLES, OneOf, make, rows, write

from mpidp.errors import DataError
from mpidp.hdf5.dataset import Rows
from mpidp.hdf5.gather import RowGatherer
from mpidp.hdf5.loader import HDF5Loader
from mpidp.hdf5.order import Shuffle
from mpidp.hdf5.read import RowReader


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write(tmp_path_factory.mktemp("data"))


@pytest.mark.parametrize("shuffle", SHUFFLES)
@pytest.mark.parametrize("split", [None, ("train", 0.3), ("validation", 0.3)])
@pytest.mark.parametrize("size", [1, 3, 7])
def test_values_belong_to_their_rows(paths: list[Path], shuffle: Shuffle, split: Any, size: int) -> None:
    """Behaviours 23 and 24: each rank gets its rows of the order, with their values, once each."""
    seen: list[int] = []
    for rank in range(size):
        loader = make(paths, world=OneOf(rank, size), shuffle=shuffle, split=split)
        plan = loader.order.plan(0)
        batches = list(loader)
        assert len(batches) == len(loader)
        for step, batch in enumerate(batches):
            assert batch.x.dtype == torch.float32 and batch.y.dtype == torch.int32
            assert batch.x.shape == (batch.size, 3)
            np.testing.assert_array_equal(batch.y.numpy(), batch.indices)
            np.testing.assert_array_equal(batch.x.numpy()[:, 1], batch.indices + 0.5)
            if split is None:
                local = plan.local_indices(step * 32, size, rank)
                np.testing.assert_array_equal(batch.indices, plan.rows(local))
        seen += rows(batches)
    expected = {None: ROWS, ("train", 0.3): 105, ("validation", 0.3): 45}[split]
    assert len(seen) == len(set(seen)) == expected == loader.num_samples


def test_validation_in_file_order(paths: list[Path]) -> None:
    """Behaviour 26: every sample once, in file order, the last batch smaller."""
    loader = make(paths, split=("validation", 0.2), shuffle="none", global_batch=8)
    batches = list(loader)
    assert [batch.global_size for batch in batches] == [8, 8, 8, 6]
    assert rows(batches) == sorted(rows(batches))


def test_a_new_order_each_epoch(paths: list[Path]) -> None:
    """Behaviour 24: without the user doing anything; another loader with the same seed repeats it."""
    loader = make(paths, seed=5)
    epochs = [rows(loader) for _ in range(3)]
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert loader.epoch == 3
    again = make(paths, seed=5)
    assert [rows(again) for _ in range(3)] == epochs
    assert rows(make(paths, seed=6)) != epochs[0]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"global_batch": 0}, "global_batch is 0"),
        ({"global_batch": 151}, "global_batch is 151, but there are only 150 samples"),
        ({"global_batch": 151, "drop_last": True}, "global_batch is 151, but there are only 150 samples"),
        ({"prefetch_batches": 0}, "prefetch_batches is 0"),
        ({"streams": 0}, "streams is 0"),
        ({"mixing_chunks": 0}, "mixing_chunks is 0"),
        ({"streams": None, "mixing_chunks": 0}, "mixing_chunks is 0"),
        ({"seed": -1}, "seed is -1"),
        ({"split": ("test", 0.1)}, "part 'test'"),
        ({"split": ("train", 0.001)}, "both need at least one"),
        ({"shuffle": True}, "shuffle is True"),
        ({"fields": ("x", "z")}, 'no dataset "z"'),
    ],
)
def test_options_that_cannot_be(paths: list[Path], options: dict[str, Any], text: str) -> None:
    with pytest.raises(DataError, match=text):
        make(paths, **options)


def test_automatic_streams_do_not_depend_on_size(paths: list[Path]) -> None:
    assert {make(paths, streams=None, world=OneOf(0, size)).order.streams for size in (1, 2, 64)} == {64}


def test_transform(paths: list[Path]) -> None:
    loader = make(paths, transform=lambda fields: {"z": fields["x"] * 2})
    batch = next(iter(loader))
    assert batch.fields == ("z",)
    np.testing.assert_array_equal(batch.z.numpy()[:, 0], batch.indices * 2)
    loader = make(paths, transform=lambda fields: {"z": fields["x"][:5]})
    with pytest.raises(DataError, match=r'"z" of shape \(5, 3\) for a batch of 32'):
        next(iter(loader))


@pytest.mark.parametrize("keep_all", [False, True])
def test_decoded_chunks_of_a_full_shuffle_are_bounded(tmp_path: Path, keep_all: bool) -> None:
    """Behaviour 28: room for three of seven chunks, and room for all."""
    x = np.arange(50 * 9000, dtype="f4").reshape(50, 9000)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", data=x, chunks=(8, 9000), compression="gzip")
    loader = HDF5Loader(tmp_path / "a.h5", ("x",), 10, shuffle="full")
    plan = loader.order.plan(0)
    most_bytes = (7 if keep_all else 3) * 8 * (36_000 + 8)
    with closing(RowReader(loader._selection)) as reader:
        gatherer = RowGatherer(reader, most_bytes, keep_all, reader.empty)
        for start in range(0, 50, 10):
            indices = np.arange(start, start + 10)
            into = Rows.empty(loader.dataset.fields, 10)
            gatherer.gather(plan.rows(indices), np.arange(10), into)
            np.testing.assert_array_equal(into.numbers, plan.rows(indices))
            np.testing.assert_array_equal(into.fields["x"], x[into.numbers])
            assert gatherer._chunks._bytes <= most_bytes


def test_slow_full_shuffle_is_announced(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", data=np.zeros((64, 9000)), chunks=(16, 9000), compression="gzip")
    with pytest.warns(UserWarning, match="16 bytes are decoded for each byte used, because a chunk of about 16"):
        HDF5Loader(tmp_path / "a.h5", ("x",), 4, shuffle="full", memory_bytes=2**20)


def test_more_ranks_than_samples(paths: list[Path]) -> None:
    """Behaviour 16: a rank without samples gets tensors of the right shapes and types."""
    batches = list(make(paths, world=OneOf(60, 64), global_batch=40, shuffle="none"))
    assert len(batches) == 4
    assert batches[3].size == 0 and batches[3].global_size == 30
    assert batches[3].x.shape == (0, 3) and batches[3].y.dtype == torch.int32
