"""Staging on several ranks: each copies its part, errors reach all, and the last one out removes the copies."""

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest

import mpidp
from mpidp.errors import DataError
from mpidp.hdf5.modes import stage as staging
from mpidp.hdf5.modes.stage import Staging, copy_range

SHARED_MEMORY = Path("/dev/shm")
SIZES = (10_000, 1, 0, 4_321)


@pytest.fixture
def node(world: mpidp.World) -> Iterator[Path]:
    """A folder that stands for each node's own disk: on another file system than the sources."""
    if not SHARED_MEMORY.is_dir() or SHARED_MEMORY.stat().st_dev == Path("/tmp").stat().st_dev:
        pytest.skip("this machine has no second file system")
    with TemporaryDirectory(dir=SHARED_MEMORY) as own:
        yield Path(world.node_comm.bcast(own, root=0))
        world.barrier()


@pytest.fixture
def sources(world: mpidp.World, mpi_tmp_path: Path) -> list[str]:
    """Files of random bytes."""
    paths = [mpi_tmp_path / f"{number}.h5" for number in range(len(SIZES))]
    if world.rank == 0:
        for path, size in zip(paths, SIZES, strict=True):
            path.write_bytes(np.random.default_rng(size).bytes(size))
    world.barrier()
    return [str(path) for path in paths]


def test_every_rank_copies_a_part(
    world: mpidp.World, node: Path, sources: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranges of all files are dealt to the ranks of a node; all get the same paths, and the copies are the files."""
    monkeypatch.setattr(staging, "RANGE_BYTES", 1000)
    ranges: list[int] = []

    def copy(source: str, target: str, start: int, stop: int) -> None:
        ranges.append(stop - start)
        copy_range(source, target, start, stop)

    monkeypatch.setattr(staging, "copy_range", copy)
    copies = Staging(sources, world, node)
    assert len(set(world.node_comm.allgather(tuple(copies.paths.items())))) == 1
    for source in sources:
        assert Path(copies.paths[source]).read_bytes() == Path(source).read_bytes()
    counts = world.node_comm.allgather(len(ranges))
    assert sum(counts) == 10 + 1 + 5 and max(counts) - min(counts) <= 1
    assert world.node_comm.allreduce(sum(ranges)) == sum(SIZES)
    ranges.clear()
    again = Staging(sources, world, node)
    assert again.paths == copies.paths and not ranges
    again.close()
    copies.close()
    world.barrier()
    assert not list(node.iterdir())


def test_ranks_leave_one_by_one(world: mpidp.World, node: Path, sources: list[str]) -> None:
    """Closing waits for nobody, and the copies stay for who still needs them."""
    copies = Staging(sources, world, node)
    for rank in range(world.size):
        if world.rank == rank:
            assert all(Path(copy).exists() for copy in copies.paths.values())
            copies.close()
        world.barrier()
    assert not list(node.iterdir())


@pytest.mark.parametrize("failing", ["first", "last"])
def test_an_error_on_one_rank(
    world: mpidp.World, node: Path, sources: list[str], failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behaviour 29: a range that cannot be read is an error on every rank; nothing stays, and a second try works."""
    fails = world.rank == (0 if failing == "first" else world.size - 1)

    def copy(source: str, target: str, start: int, stop: int) -> None:
        if fails:
            raise DataError(f"{source}: cannot be read")
        copy_range(source, target, start, stop)

    monkeypatch.setattr(staging, "RANGE_BYTES", 1000)
    monkeypatch.setattr(staging, "copy_range", copy)
    with pytest.raises(DataError, match=r"\d\.h5: cannot be read"):
        Staging(sources, world, node)
    world.barrier()
    assert not list(node.iterdir())
    world.barrier()
    monkeypatch.setattr(staging, "copy_range", copy_range)
    Staging(sources, world, node).close()
