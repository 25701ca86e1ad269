"""Passes over a loader: where they begin and end, what a state resumes, and the threads that read ahead."""

import gc
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from loaders import ROWS, SHUFFLES, OneOf, make, rows, write

from mpidp.errors import DataError
from mpidp.hdf5.loader import HDF5Loader
from mpidp.hdf5.order import Shuffle

pytestmark = pytest.mark.usefixtures("no_thread_is_left")


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write(tmp_path_factory.mktemp("data"))


@pytest.fixture
def no_thread_is_left() -> Iterator[None]:
    """Loaders read on until they are closed or collected."""
    yield
    gc.collect()
    assert not _threads()


@pytest.fixture(autouse=True, params=["by a thread", "by the caller"])
def maker(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Who makes the batches: a thread where they are large, the caller where they are small. All holds for both."""
    monkeypatch.setattr("mpidp.hdf5.loader.INLINE_BYTES", -1 if request.param == "by a thread" else 2**20)
    return str(request.param)


@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_resume_anywhere(paths: list[Path], shuffle: Shuffle) -> None:
    """Behaviour 25: another global batch and size; seed, streams and mixing of the checkpoint are adopted."""
    for steps in range(6):
        loader = make(paths, seed=3, shuffle=shuffle)
        seen = []
        for step, batch in enumerate(loader, start=1):
            seen += batch.indices.tolist()
            state = loader.state_dict()
            if step > steps:
                break
        rest: list[int] = []
        for rank in range(3):
            other = make(paths, global_batch=7, streams=2, mixing_chunks=1, shuffle=shuffle, world=OneOf(rank, 3))
            other.load_state_dict(state)
            remaining = other.remaining_steps
            found = list(other)
            assert len(found) == remaining or state["position"] == ROWS
            rest += rows(found)
        if state["position"] == ROWS:
            assert sorted(rest) == list(range(ROWS))  # nothing was left of that epoch, so this is the next
        else:
            assert sorted(seen + rest) == list(range(ROWS))


def test_state_counts_what_was_handed_out(paths: list[Path]) -> None:
    loader = make(paths, prefetch_batches=4)
    positions = [(loader.state_dict()["position"], loader.epoch) for _ in loader]
    assert positions == [(32, 0), (64, 0), (96, 0), (128, 0), (150, 0)]
    assert (loader.state_dict()["position"], loader.epoch) == (0, 1)


def test_after_a_break_the_next_loop_goes_on(paths: list[Path]) -> None:
    loader = make(paths)
    first = rows([next(iter(loader))])
    assert sorted(first + rows(loader)) == list(range(ROWS))
    for batch in loader:
        assert batch.global_size == 32 or loader.position == ROWS
        if loader.position == ROWS:
            break  # on the last batch of epoch 1
    assert sorted(rows(loader)) == list(range(ROWS))
    assert (loader.epoch, loader.position) == (3, 0)


@pytest.mark.parametrize("split", [None, ("validation", 0.4)])
def test_a_pass_in_file_order_begins_at_the_start(paths: list[Path], split: Any) -> None:
    """Behaviour 26: whatever was left of another pass; only a state that was loaded is continued, once."""
    loader = make(paths, shuffle="none", global_batch=16, split=split)
    whole = sorted(rows(make(paths, shuffle="none", global_batch=16, split=split)))
    assert len(whole) == len(loader.dataset) == loader.num_samples
    next(iter(loader))
    assert rows(loader) == whole
    list(zip(range(2), loader, strict=False))
    assert rows(loader) == whole
    assert [rows([next(iter(loader))]) for _ in range(2)] == [whole[:16]] * 2
    for step, _ in enumerate(loader, start=1):
        if step == len(loader):
            break  # on the last batch
    assert rows(loader) == whole
    next(iter(loader))
    loader.load_state_dict(loader.state_dict())
    assert rows(loader) == whole[16:]
    assert rows(loader) == whole


def test_a_training_loader_says_once_that_it_goes_on(paths: list[Path], caplog: pytest.LogCaptureFixture) -> None:
    """A pass that broke off; not one that was resumed, nor one that broke off at its end."""
    loader = make(paths)
    loader.load_state_dict({**loader.state_dict(), "position": 64})
    assert len(rows(loader)) == ROWS - 64
    for batch in loader:
        if batch.global_size < 32:
            break
    assert len(rows(loader)) == ROWS and not caplog.records
    for _ in range(3):
        next(iter(loader))
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("mpidp", "WARNING")
    assert "goes on behind the 32 of 150 samples of epoch 3" in record.getMessage()
    assert "loader.restart()" in record.getMessage()
    assert len(rows(loader)) == ROWS - 96 and len(caplog.records) == 1
    other = make(paths, world=OneOf(1, 2))
    for _ in range(2):
        next(iter(other))
    assert len(caplog.records) == 1  # rank 0 speaks


@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_restart_begins_the_epoch_anew(paths: list[Path], shuffle: Shuffle, caplog: pytest.LogCaptureFixture) -> None:
    loader, again = make(paths, shuffle=shuffle), make(paths, shuffle=shuffle)
    first, second = rows(again), rows(again)
    list(zip(range(2), loader, strict=False))
    loader.restart()
    assert loader.position == 0 and rows(loader) == first
    running = iter(loader)
    next(running)
    loader.restart()
    with pytest.raises(RuntimeError, match="was closed"):
        next(running)
    loader.load_state_dict({**loader.state_dict(), "position": 50})
    loader.restart()
    assert rows(loader) == second and not caplog.records


@pytest.mark.parametrize("shuffle", SHUFFLES)
@pytest.mark.parametrize("size", [1, 3])
def test_drop_last(paths: list[Path], shuffle: Shuffle, size: int) -> None:
    """Behaviour 23: an incomplete last step is left out, on all ranks, and nothing else changes; three epochs."""
    dropping = [make(paths, shuffle=shuffle, drop_last=True, world=OneOf(rank, size)) for rank in range(size)]
    complete = [make(paths, shuffle=shuffle, world=OneOf(rank, size)) for rank in range(size)]
    for epoch in range(3):
        for loader, other in zip(dropping, complete, strict=True):
            assert len(loader) == loader.remaining_steps == 4
            batches = list(loader)
            assert [batch.global_size for batch in batches] == [32] * 4
            assert [batch.indices.tolist() for batch in batches] == [b.indices.tolist() for b in list(other)[:4]]
            assert (loader.epoch, loader.position) == (epoch + 1, 0)
            assert len(loader.dataset) == ROWS


@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_resume_with_drop_last_where_no_step_is_left(paths: list[Path], shuffle: Shuffle) -> None:
    """Behaviour 25: fewer unseen samples than another global batch takes, so the next epoch begins."""
    loader = make(paths, shuffle=shuffle, drop_last=True)
    rows(batch for _, batch in zip(range(4), loader, strict=False))
    state = loader.state_dict()
    assert (state["epoch"], state["position"]) == (0, 128)
    other = make(paths, shuffle=shuffle, global_batch=40, drop_last=True)
    other.load_state_dict(state)
    assert other.remaining_steps == 0
    assert [batch.global_size for batch in other] == [40] * 3
    assert (other.epoch, other.position) == (2, 0)


def test_a_second_pass_ends_the_first(paths: list[Path]) -> None:
    loader = make(paths)
    first = iter(loader)
    next(first)
    second = iter(loader)
    next(second)
    with pytest.raises(RuntimeError, match="another pass that began"):
        list(first)
    assert loader.position == 64


def test_streams_of_a_state_may_give_a_rank_more_samples(paths: list[Path]) -> None:
    """Behaviour 25: three streams of a run on one rank, taken over by two ranks with memory for their share of 64."""
    state = make(paths, global_batch=64, streams=3).state_dict()
    loader = make(paths, global_batch=64, streams=64, world=OneOf(0, 2))
    loader.load_state_dict(state)
    assert max(batch.size for batch in loader) == 43


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"num_samples": 9}, "num_samples = 9, and here it is 150"),
        ({"shuffle": "full"}, "shuffle = 'full', and here it is 'streams'"),
        ({"position": 151}, "epoch 0, position 151"),
        ({"epoch": -1}, "epoch -1"),
    ],
)
def test_states_of_something_else(paths: list[Path], changed: dict[str, Any], text: str) -> None:
    loader = make(paths)
    with pytest.raises(DataError, match=text):
        loader.load_state_dict({**loader.state_dict(), **changed})
    with pytest.raises(DataError, match="lacks epoch, files, global_batch"):
        loader.load_state_dict({})


def test_another_seed_would_change_the_split(paths: list[Path]) -> None:
    state = make(paths, split=("train", 0.2), seed=1).state_dict()
    with pytest.raises(DataError, match="seed = 1, and here it is 2"):
        make(paths, split=("train", 0.2), seed=2).load_state_dict(state)


def _threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(("mpidp-prefetch", "mpidp-decode"))]


def test_the_threads_always_end(paths: list[Path], maker: str) -> None:
    """Behaviour 36: they read on over the end of an epoch, a break and an exception, until close or collection."""
    loader = make(paths, global_batch=4, prefetch_batches=1)
    list(loader)
    assert [thread.name for thread in _threads()].count("mpidp-prefetch") == (maker == "by a thread")
    for _ in loader:
        break
    with pytest.raises(ZeroDivisionError):
        for _ in loader:
            raise ZeroDivisionError
    assert [thread.name for thread in _threads()].count("mpidp-prefetch") == (maker == "by a thread")
    loader.close()
    assert not _threads()
    running = iter(loader)
    next(running)
    loader.close()
    assert not _threads()
    running = iter(loader)
    next(running)
    del running, loader
    gc.collect()
    assert not _threads()


def test_the_next_epoch_is_read_ahead(paths: list[Path]) -> None:
    """Behaviour 24: the same thread goes on, and what it read ahead is right also behind a break and a resume."""
    loader, again = make(paths, seed=2), make(paths, seed=2)
    first, threads = rows(loader), _threads()
    second = rows(loader)
    assert [thread for thread in _threads() if thread.name == "mpidp-prefetch"] == [
        thread for thread in threads if thread.name == "mpidp-prefetch"
    ]
    again.load_state_dict({**again.state_dict(), "epoch": 1})
    assert rows(again) == second != first
    next(iter(loader))
    again.load_state_dict(loader.state_dict())
    assert rows(again) == rows(loader)


@pytest.mark.job
def test_an_open_pass_does_not_hang_the_interpreter(paths: list[Path]) -> None:
    """Behaviour 36: a pass that is still referenced, its thread waiting for room, when the program ends."""
    program = (
        "import sys; from mpidp.hdf5.loader import HDF5Loader\n"
        f"loader = HDF5Loader({str(paths[0])!r}, ('x',), 4); batches = iter(loader); next(batches)\n"
        "assert 'mpi4py' not in sys.modules\n"
        "raise ValueError('on purpose')"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert ended.stderr.strip().endswith("ValueError: on purpose")


def test_an_error_of_the_thread_reaches_the_loop(tmp_path: Path) -> None:
    """Behaviours 29 and 30: a file that goes away after construction; once it is back, the loader goes on."""
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file["x"] = np.zeros(9)
    loader = HDF5Loader(path, ("x",), 3)
    path.rename(tmp_path / "b.h5")
    for _ in range(2):
        with pytest.raises(DataError, match=r'a\.h5: dataset "x", rows .*No such file'):
            list(loader)
        assert not _threads()
    (tmp_path / "b.h5").rename(path)
    assert len(list(loader)) == 3
