"""Every mode on real ranks: the same global batches at any number of ranks, each sample once, resume, flat memory."""

import gc
import os
import resource
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from mpidp.errors import DataError, MismatchError
from mpidp.hdf5.field import FieldSpec
from mpidp.hdf5.loader import HDF5Loader, Mode
from mpidp.hdf5.order import Shuffle
from mpidp.world.world import World

MODES: tuple[Mode, ...] = ("stream", "node", "store", "stage")
SHUFFLES: tuple[Shuffle, ...] = ("streams", "full", "none")
ROWS = 203
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*mode=.stage. copies to"),
    pytest.mark.filterwarnings("ignore:.*a batch of .* comes from about"),
    pytest.mark.filterwarnings("ignore:.*bytes are decoded for each byte used"),
]


@pytest.fixture(scope="module")
def paths(world: World, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two files that rank 0 writes: row i holds x = [i, -i, ...] (large, gzip) and y = i % 7 (plain in one file)."""
    folder = Path(world.broadcast(str(tmp_path_factory.mktemp("modes"))))
    paths = [folder / "a.h5", folder / "b.h5"]
    if world.rank == 0:
        i = np.arange(ROWS)
        x = (i[:, None] * np.where(np.arange(900) % 2, -1, 1)).astype(">f4")
        for path, part, chunks in ((paths[0], slice(0, 130), (16,)), (paths[1], slice(130, ROWS), None)):
            with h5py.File(path, "w") as file:
                file.create_dataset("x", data=x[part], chunks=(8, 500), compression="gzip", shuffle=True)
                file.create_dataset("y", data=(i % 7).astype("u2")[part], chunks=chunks)
    world.barrier()
    return paths


@pytest.fixture
def folder(world: World, tmp_path: Path) -> Iterator[Path]:
    """A folder seen by all ranks."""
    yield Path(world.broadcast(str(tmp_path)))
    world.barrier()


def make(paths: Any, world: World, folder: Path, mode: Mode, **options: Any) -> HDF5Loader:
    given = {"fields": ("x", "y"), "global_batch": 16, "streams": 6, "stage_folder": folder, "threads": 1}
    return HDF5Loader(paths, world=world, mode=mode, **{**given, **options})


def alone(paths: Any, **options: Any) -> HDF5Loader:
    """The same on one process, streaming."""
    given = {"fields": ("x", "y"), "global_batch": 16, "streams": 6, "threads": 1}
    return HDF5Loader(paths, world=World.alone(), **{**given, **options})


def all_rows(world: World, indices: np.ndarray) -> list[int]:
    """The row numbers of all ranks."""
    return sorted(np.concatenate(world.comm.allgather(indices)).tolist())


def check_values(batch: Any) -> None:
    assert batch.x.dtype == torch.float32 and batch.y.dtype == torch.int32
    assert batch.x.shape == (batch.size, 900)
    np.testing.assert_array_equal(batch.x[:, 0], batch.indices)
    np.testing.assert_array_equal(batch.x[:, 899], -batch.indices)
    np.testing.assert_array_equal(batch.y, batch.indices % 7)


@pytest.mark.parametrize("shuffle", SHUFFLES)
@pytest.mark.parametrize("mode", MODES)
def test_the_same_global_batches(world: World, paths: list[Path], folder: Path, mode: Mode, shuffle: Shuffle) -> None:
    """Behaviours 23, 24 and 27: those of one process that streams, with their values; a new order each epoch."""
    loader = make(paths, world, folder, mode, shuffle=shuffle)
    single = alone(paths, shuffle=shuffle)
    epochs = []
    for epoch in range(2):
        steps, seen = 0, []
        plan = single.order.plan(epoch)
        for step, batch in enumerate(loader):
            check_values(batch)
            rows = all_rows(world, batch.indices)
            assert rows == sorted(plan.rows(plan.local_indices(step * 16, 1, 0)).tolist())
            assert batch.global_size == len(rows)
            seen.append(rows)
            steps += 1
        assert steps == len(loader) == 13
        assert sorted(row for rows in seen for row in rows) == list(range(ROWS))
        epochs.append(seen)
    assert (epochs[0] == epochs[1]) == (shuffle == "none")
    loader.close()
    single.close()


@pytest.mark.parametrize("rows", ["1", "size - 1", "size", "5 size - 1"])
@pytest.mark.parametrize("mode", MODES)
def test_few_samples(world: World, folder: Path, mode: Mode, rows: str) -> None:
    """Behaviour 23: equal step counts, also on ranks that have nothing."""
    count = {"1": 1, "size - 1": max(1, world.size - 1), "size": world.size, "5 size - 1": 5 * world.size - 1}[rows]
    if world.rank == 0:
        with h5py.File(folder / "a.h5", "w") as file:
            file["x"] = np.arange(count)
    world.barrier()
    for global_batch in {1, min(3, count)}:
        loader = make(folder / "a.h5", world, folder, mode, fields=("x",), global_batch=global_batch, streams=None)
        for _ in range(2):
            seen = []
            for batch in loader:
                np.testing.assert_array_equal(batch.x, batch.indices)
                seen += all_rows(world, batch.indices)
            assert sorted(seen) == list(range(count))
        loader.close()


@pytest.mark.parametrize(("chunk_rows", "compression"), [(1, "gzip"), (2, None), (4, "gzip")])
@pytest.mark.parametrize("mode", MODES)
def test_large_samples(world: World, folder: Path, mode: Mode, chunk_rows: int, compression: str | None) -> None:
    """Behaviours 23 and 24: in the order chosen by default, read one by one or by the chunk, also a part of them."""
    if world.rank == 0:
        x = np.arange(30)[:, None] + np.zeros(17_000, ">f4")
        with h5py.File(folder / "a.h5", "w") as file:
            file.create_dataset("x", data=x, chunks=(chunk_rows, 17_000), compression=compression)
    world.barrier()
    for split in (None, ("train", 0.3)):
        options: Any = {"fields": ("x",), "global_batch": 4, "streams": None, "split": split}
        loader = make(folder / "a.h5", world, folder, mode, **options)
        single = alone(folder / "a.h5", **options)
        assert loader.order.shuffle == ("streams" if chunk_rows == 4 else "full")
        for batch, expected in zip(loader, single, strict=True):
            assert all_rows(world, batch.indices) == sorted(expected.indices.tolist())
            np.testing.assert_array_equal(batch.x, batch.indices[:, None] + np.zeros(17_000))
        loader.close()
        single.close()


@pytest.mark.parametrize("shuffle", SHUFFLES)
@pytest.mark.parametrize("mode", MODES)
def test_resume(world: World, paths: list[Path], folder: Path, mode: Mode, shuffle: Shuffle) -> None:
    """Behaviour 25: at a random step, in another mode, on another number of ranks, with another global batch."""
    generator = np.random.default_rng(MODES.index(mode) * 3 + SHUFFLES.index(shuffle))
    first = alone(paths, global_batch=25, seed=4, shuffle=shuffle)
    batches = iter(first)
    seen = [row for _ in range(int(generator.integers(1, 6))) for row in next(batches).indices.tolist()]
    loader = make(paths, world, folder, mode, shuffle=shuffle, prefetch_batches=3)
    next(iter(loader))  # what was read ahead for another place is dropped
    loader.load_state_dict(first.state_dict())
    first.close()
    batches = iter(loader)
    for _ in range(int(generator.integers(1, loader.remaining_steps))):
        batch = next(batches)
        check_values(batch)
        seen += all_rows(world, batch.indices)
    last = alone(paths, global_batch=7, streams=3, shuffle=shuffle)
    last.load_state_dict(loader.state_dict())
    seen += [row for batch in last for row in batch.indices.tolist()]
    assert sorted(seen) == list(range(ROWS))
    # The loader of all ranks goes on too, after a break.
    rest = [row for batch in loader for row in all_rows(world, batch.indices)]
    assert len(rest) == len(set(rest)) and set(rest) <= set(range(ROWS)) and loader.epoch == 1
    loader.close()
    last.close()


@pytest.mark.parametrize("mode", MODES)
def test_evaluation_counts_every_sample_once(world: World, paths: list[Path], folder: Path, mode: Mode) -> None:
    """Behaviour 26: a metric over uneven parts equals that of one process; the parts of a split are disjoint."""
    train = make(paths, world, folder, mode, split=("train", 0.3))
    held_out = make(paths, world, folder, mode, split=("validation", 0.3), shuffle="none", global_batch=7)
    single = alone(paths, split=("validation", 0.3), shuffle="none", global_batch=held_out.num_samples)
    expected = next(iter(single)).x[:, 0].mean().item()
    sums, rows = [0.0, 0.0], []
    for batch in held_out:
        check_values(batch)
        sums = [sums[0] + batch.x[:, 0].sum().item(), sums[1] + batch.size]
        rows += all_rows(world, batch.indices)
    total, count = world.sum(sums)
    assert count == held_out.num_samples and total / count == pytest.approx(expected)
    assert rows == sorted(rows)
    others = [row for batch in train for row in all_rows(world, batch.indices)]
    assert sorted(rows + others) == list(range(ROWS))
    for loader in (train, held_out, single):
        loader.close()


@pytest.mark.parametrize("streams", [1, 2])
@pytest.mark.parametrize("mode", MODES)
def test_more_ranks_than_streams(world: World, paths: list[Path], folder: Path, mode: Mode, streams: int) -> None:
    """Behaviour 23: ranks share a stream by place."""
    loader = make(paths, world, folder, mode, streams=streams, global_batch=5)
    seen = []
    for batch in loader:
        check_values(batch)
        seen += all_rows(world, batch.indices)
    assert sorted(seen) == list(range(ROWS))
    loader.close()


FIELDS = (
    FieldSpec("x", dtype="bfloat16"),
    FieldSpec("y", name="label", decode=lambda values: values % 2 == 0),
    FieldSpec("y", scale=0.5, offset=1.0),
)


@pytest.mark.parametrize("mode", MODES)
def test_fields_of_all_kinds(world: World, paths: list[Path], folder: Path, mode: Mode) -> None:
    """Behaviour 27: bfloat16, a decode function and a scale go through all modes."""
    loader = make(paths, world, folder, mode, fields=FIELDS)
    for batch in loader:
        assert batch.fields == ("x", "label", "y")
        assert [batch[name].dtype for name in batch.fields] == [torch.bfloat16, torch.bool, torch.float32]
        np.testing.assert_array_equal(batch.x[:, 0].float(), batch.indices)
        np.testing.assert_array_equal(batch.label, batch.indices % 7 % 2 == 0)
        np.testing.assert_array_equal(batch.y, batch.indices % 7 * 0.5 + 1)
    loader.close()


@pytest.mark.parametrize("mode", MODES)
def test_augmentation_is_that_of_one_rank(world: World, paths: list[Path], folder: Path, mode: Mode) -> None:
    """Behaviour 24: random numbers belong to the samples."""
    options: dict[str, Any] = {"transform": lambda fields, random: {"noise": random.normal(2)}}
    loader = make(paths, world, folder, mode, **options)
    drawn = [dict(zip(batch.indices.tolist(), batch.noise.tolist(), strict=True)) for batch in loader]
    loader.close()
    mine = {row: noise for each in drawn for row, noise in each.items()}
    single = alone(paths, global_batch=61, **options)
    expected = {row: noise for b in single for row, noise in zip(b.indices.tolist(), b.noise.tolist(), strict=True)}
    assert mine.items() <= expected.items()
    assert world.sum([len(mine)]) == [ROWS]
    single.close()


@pytest.mark.parametrize("mode", MODES)
def test_errors_reach_every_rank(world: World, paths: list[Path], folder: Path, mode: Mode) -> None:
    """Behaviour 29: what rank 0 finds out at construction; afterwards a good loader works."""
    with pytest.raises(DataError, match='no dataset "z"'):
        make(paths, world, folder, mode, fields=("x", "z"))
    with pytest.raises(DataError, match="no such file"):
        make([*paths, folder / "missing.h5"], world, folder, mode)
    assert world.all(True)  # all ranks are here
    loader = make(paths, world, folder, mode)
    assert sum(batch.size for batch in loader) <= ROWS
    loader.close()


@pytest.mark.parametrize("mode", MODES)
def test_a_damaged_chunk(world: World, folder: Path, mode: Mode) -> None:
    """Behaviour 29: where all is read at the start, every rank raises; else the rank that reads it, naming it."""
    path = folder / "a.h5"
    if world.rank == 0:
        with h5py.File(path, "w") as file:
            x = file.create_dataset(
                "x", data=np.random.default_rng(0).random((40, 2000)), chunks=(5, 2000), fletcher32=True
            )
            places = [x.id.get_chunk_info(1).byte_offset + 77]
        with path.open("r+b") as raw:
            raw.seek(places[0])
            raw.write(b"damaged!")
    world.barrier()
    text = r'a\.h5: dataset "x", rows 5 to 9: chunk at byte .* checksum fletcher32 is'
    if mode in ("node", "store"):
        with pytest.raises(DataError, match=text):
            make(path, world, folder, mode, fields=("x",), streams=1, mixing_chunks=1)
    else:
        loader = make(path, world, folder, mode, fields=("x",), streams=1, mixing_chunks=1, global_batch=8)
        with pytest.raises(DataError, match=text):  # ranks share the stream, so each of them needs the chunk
            list(loader)
        loader.close()
    assert world.all(True)


@pytest.mark.parametrize(
    ("mode", "shuffle"), [*((mode, "streams") for mode in MODES), ("stream", "full"), ("store", "none")]
)
def test_memory_stays_flat(world: World, paths: list[Path], folder: Path, mode: Mode, shuffle: Shuffle) -> None:
    """Behaviour 28: descriptors, threads and resident memory do not grow with epochs; after close nothing is left."""
    before = _used()
    loader = make(paths, world, folder, mode, shuffle=shuffle, global_batch=8)
    for _ in range(3):
        for _batch in loader:
            pass
    settled = _used()
    for _ in range(12):
        for _batch in loader:
            pass
    later = _used()
    assert later["descriptors"] <= settled["descriptors"] + len(paths)
    assert later["threads"] <= settled["threads"] + 1
    assert later["bytes"] - settled["bytes"] < 16 * 2**20
    loader.close()
    del loader, _batch
    names = [thread.name for thread in threading.enumerate()]
    assert not [name for name in names if name.startswith(("mpidp-prefetch", "mpidp-decode", "mpidp-fill"))]
    left = _used()
    assert left["descriptors"] <= before["descriptors"] + 2  # what MPI may keep for its next window


def _used() -> dict[str, int]:
    gc.collect()
    with open("/proc/self/statm", encoding="ascii") as statm:
        pages = int(statm.read().split()[1])
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "bytes": pages * resource.getpagesize(),
    }


@pytest.mark.parametrize("mode", MODES)
def test_after_close(world: World, paths: list[Path], folder: Path, mode: Mode) -> None:
    """A closed loader gives its memory back; only streaming opens what it needs again."""
    loader = make(paths, world, folder, mode)
    first = next(iter(loader))
    rows = all_rows(world, first.indices)
    loader.close()
    loader.close()
    np.testing.assert_array_equal(first.x[:, 0], first.indices)  # a batch outlives its loader
    if mode == "stream":
        rest = [row for batch in loader for row in all_rows(world, batch.indices)]
        assert sorted(rows + rest) == list(range(ROWS))
        loader.close()
    else:
        with pytest.raises(DataError, match="this loader is closed; make another"):
            next(iter(loader))


def test_modes_are_named(world: World, paths: list[Path], folder: Path) -> None:
    """Behaviour 33: a mode that is not there, and ranks that disagree."""
    with pytest.raises(DataError, match='mode is \'memory\'; give "stream", "node", "store" or "stage"'):
        make(paths, world, folder, "memory")  # type: ignore[arg-type]
    if world.size > 1:
        with pytest.raises(MismatchError, match=r"rank 1 made an HDF5Loader .*'node'.*rank 0 with .*'stream'"):
            make(paths, world, folder, "node" if world.rank == 1 else "stream")
