"""What `HDF5Loader` and `Batch` give, on one process and on ranks that are only pretended."""

import gc
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from torch.nn import functional as F  # noqa: N812  # the name every PyTorch program gives it

from mpidp.errors import DataError, MismatchError
from mpidp.hdf5.batch import Batch
from mpidp.hdf5.dataset import Rows
from mpidp.hdf5.gather import RowGatherer
from mpidp.hdf5.loader import HDF5Loader
from mpidp.hdf5.order.order import Shuffle
from mpidp.hdf5.read import RowReader
from mpidp.world.world import World

pytestmark = pytest.mark.usefixtures("no_thread_is_left")
SHUFFLES: tuple[Shuffle, ...] = ("streams", "full", "none")
ROWS = 150
CPU = torch.device("cpu")


@dataclass(frozen=True)
class OneOf:
    """A rank of a world whose other ranks are not there: collectives give what this rank alone would."""

    rank: int
    size: int
    local_rank: int = 0
    local_size: int = 1
    cores: int = 1
    device: torch.device = CPU
    roots: Any = None

    def broadcast(self, obj: Any) -> Any:
        return self.roots or obj

    def call_on_root(self, function: Callable[[], Any]) -> Any:
        return function()

    def sum(self, values: list[float]) -> list[float]:
        return [value * self.size for value in values]

    @contextmanager
    def raise_on_all_ranks(self, what: str) -> Iterator[None]:
        yield


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two files, differently stored; row i holds x = [i, i + 0.5, ...] and y = i."""
    folder = tmp_path_factory.mktemp("data")
    x = np.arange(ROWS, dtype="f4")[:, None] + np.array([0, 0.5, 0.25], dtype="f4")
    with h5py.File(folder / "a.h5", "w") as file:
        file.create_dataset("x", data=x[:101].astype(">f4"), chunks=(8, 3), compression="gzip")
        file.create_dataset("y", data=np.arange(101, dtype="u2"), chunks=(50,))
    with h5py.File(folder / "b.h5", "w") as file:
        file.create_dataset("x", data=x[101:])
        file.create_dataset("y", data=np.arange(101, ROWS, dtype="u2"))
    return [folder / "a.h5", folder / "b.h5"]


@pytest.fixture
def no_thread_is_left() -> Iterator[None]:
    """Loaders read on until they are closed or collected."""
    yield
    gc.collect()
    assert not _threads()


def make(paths: list[Path], **options: Any) -> HDF5Loader:
    return HDF5Loader(paths, **{"fields": ("x", "y"), "global_batch": 32, "streams": 4, **options})


def rows(batches: Any) -> list[int]:
    return [row for batch in batches for row in batch.indices.tolist()]


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


def test_parts_of_a_split_are_disjoint(paths: list[Path]) -> None:
    train, validation = (rows(make(paths, split=(part, 0.2), global_batch=16)) for part in ("train", "validation"))
    assert sorted(train + validation) == list(range(ROWS))


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
def test_resume_with_drop_last(paths: list[Path], shuffle: Shuffle) -> None:
    """Behaviour 25: at any step; with another global batch the unseen samples follow, up to its incomplete step."""
    for steps in range(5):
        loader = make(paths, shuffle=shuffle, drop_last=True)
        seen = rows(batch for _, batch in zip(range(steps), loader, strict=False))
        state = loader.state_dict()
        assert state["position"] == 32 * steps
        same = make(paths, shuffle=shuffle, drop_last=True)
        same.load_state_dict(state)
        assert same.remaining_steps == 4 - steps
        all_of_it = make(paths, shuffle=shuffle, global_batch=7)
        all_of_it.load_state_dict(state)
        assert sorted(seen + rows(all_of_it)) == list(range(ROWS))
        other = make(paths, shuffle=shuffle, global_batch=40, drop_last=True)
        other.load_state_dict(state)
        left = (ROWS - 32 * steps) // 40
        assert other.remaining_steps == left
        if left:
            rest = rows(other)
            assert len(rest) == 40 * left and not set(rest) & set(seen)
        else:  # nothing is left of that epoch, so this is the next
            assert [batch.global_size for batch in other] == [40] * 3
        assert other.epoch == 1 + (not left)


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
        ({"num_samples": 9}, "num_samples = 9, this loader has 150"),
        ({"shuffle": "full"}, "shuffle = 'full', this loader has 'streams'"),
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
    with pytest.raises(DataError, match="seed = 1, this loader has 2"):
        make(paths, split=("train", 0.2), seed=2).load_state_dict(state)


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


def test_ranks_must_agree(paths: list[Path]) -> None:
    """Behaviour 33: both sides are named."""
    with pytest.raises(MismatchError, match=r"rank 1 made .*32.*rank 0 with .*'other'"):
        make(paths, world=OneOf(1, 2, roots=(("other",), ())))


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


@pytest.fixture(autouse=True, params=["by a thread", "by the caller"])
def maker(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Who makes the batches: a thread where they are large, the caller where they are small. All holds for both."""
    monkeypatch.setattr("mpidp.hdf5.loader.INLINE_BYTES", -1 if request.param == "by a thread" else 2**20)
    return str(request.param)


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


def test_more_ranks_than_samples(paths: list[Path]) -> None:
    """Behaviour 16: a rank without samples gets tensors of the right shapes and types."""
    batches = list(make(paths, world=OneOf(60, 64), global_batch=40, shuffle="none"))
    assert len(batches) == 4
    assert batches[3].size == 0 and batches[3].global_size == 30
    assert batches[3].x.shape == (0, 3) and batches[3].y.dtype == torch.int32


def _batch(size: int, global_size: int, world: Any = None) -> Batch:
    x = torch.arange(size * 3, dtype=torch.float32).reshape(size, 3)
    return Batch(
        {"x": x, "y": torch.zeros(size, dtype=torch.int64)}, np.arange(size), global_size, world or World.alone()
    )


def test_weigh_at_size_1_is_the_loss_itself() -> None:
    """Behaviour 6: bit for bit what plain torch gives."""
    loss = torch.tensor(1.5, requires_grad=True)
    assert _batch(4, 4).weigh(loss) is loss
    assert _batch(4, 4).weigh(loss, count=9) is loss
    assert _batch(4, 8, OneOf(0, 2)).weigh(loss) is loss


def test_weighed_losses_average_to_the_global_mean() -> None:
    """Behaviour 16: uneven parts, one of them empty."""
    losses = torch.arange(10, dtype=torch.float64)
    total = torch.tensor(0.0, dtype=torch.float64)
    start = 0
    for rank, size in enumerate((5, 0, 3, 2)):
        part = losses[start : start + size]
        total += _batch(size, 10, OneOf(rank, 4)).weigh(part.mean())
        start += size
    assert (total / 4).item() == pytest.approx(losses.mean().item())


def test_weigh_counts_things() -> None:
    """Behaviour 16: tokens instead of samples; OneOf pretends that both ranks have 6."""
    batch = _batch(4, 8, OneOf(0, 2))
    loss = torch.tensor(3.0)
    assert batch.weigh(loss, count=6) is loss
    assert batch.weigh(loss * float("nan"), count=0).item() == 0
    with pytest.raises(DataError, match="count of -1"):
        batch.weigh(loss, count=-1)
    with pytest.raises(DataError, match="one of several micro batches"):
        batch.micro_batches(2)[0].weigh(loss, count=6)
    with pytest.raises(DataError, match=r"loss of shape \(4,\)"):
        batch.weigh(torch.zeros(4))


def test_a_rank_without_samples_passes_all_parameters_and_touches_none() -> None:
    """Behaviour 16: 0 x NaN is NaN, so the mean over nothing must not be multiplied by 0."""
    model = torch.nn.Linear(3, 2)
    passed: list[str] = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: passed.append(name))
    batch = _batch(0, 4, OneOf(1, 2))
    loss = F.cross_entropy(model(batch.x), batch.y)
    assert loss.isnan()
    weighed = batch.weigh(loss)
    assert weighed.item() == 0
    weighed.backward()
    assert sorted(passed) == ["bias", "weight"]
    assert model.weight.grad is None and model.bias.grad is None
    assert not batch.weigh(loss.detach()).requires_grad


@pytest.mark.parametrize(("size", "max_size", "sizes"), [(10, 4, [3, 3, 4]), (4, 4, [4]), (0, 4, [0])])
def test_micro_batches(size: int, max_size: int, sizes: list[int]) -> None:
    """Behaviour 13: their weighed losses sum to that of the whole."""
    batch = _batch(size, 16, OneOf(0, 3))
    parts = batch.micro_batches(max_size)
    assert [part.size for part in parts] == sizes
    assert [part.last for part in parts] == [False] * (len(parts) - 1) + [True]
    assert torch.equal(torch.cat([part.x for part in parts]), batch.x)
    assert np.array_equal(np.concatenate([part.indices for part in parts]), batch.indices)
    whole = batch.weigh(batch.x.mean(dim=1).mean())
    assert sum(part.weigh(part.x.mean(dim=1).mean()).item() for part in parts) == pytest.approx(whole.item())
    with pytest.raises(DataError, match="micro batches of 0"):
        batch.micro_batches(0)


def test_fields_of_a_batch() -> None:
    batch = _batch(2, 4)
    assert batch.fields == ("x", "y")
    assert batch.x is batch["x"]
    assert repr(batch) == "Batch(x (2, 3), y (2,); 2 of 4 samples)"
    with pytest.raises(AttributeError, match='no field "z"; this batch has x, y'):
        _ = batch.z
    with pytest.raises(KeyError, match="this batch has x, y"):
        batch["z"]
    x, y = batch
    assert x is batch.x and y is batch.y


def test_a_batch_goes_to_a_device() -> None:
    """As a tensor does; what it knows of its step goes with it."""
    part = _batch(6, 8, OneOf(0, 2)).micro_batches(4)[0]
    moved = part.to("meta", non_blocking=True)
    assert [tensor.device.type for tensor in moved] == ["meta", "meta"]
    assert (moved.size, moved.global_size, moved.last, moved.fields) == (3, 8, False, ("x", "y"))
    assert moved.indices is part.indices
    with pytest.raises(DataError, match="one of several micro batches"):
        moved.weigh(torch.tensor(1.0), count=3)
    assert moved.weigh(torch.tensor(1.0)).item() == 3 * 2 / 8
    assert part.to(CPU).x is part.x


def test_the_example_of_the_readme_learns(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    x = generator.normal(size=(256, 4)).astype("f4")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", data=x, chunks=(16, 4))
        file["y"] = (x[:, 0] > 0).astype("i8")
    loader = HDF5Loader(tmp_path / "a.h5", fields=("x", "y"), global_batch=64, seed=0)
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    losses = []
    for _ in range(5):
        for batch in loader:
            loss = batch.weigh(F.cross_entropy(model(batch.x), batch.y))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert len(losses) == 20
    assert losses[-1] < losses[0] / 2


def test_memory_and_files_stay_flat(paths: list[Path]) -> None:
    """Behaviour 28: over many batches neither open files nor Python objects pile up."""
    loader = make(paths, global_batch=1)

    def used() -> tuple[int, int]:
        loader.stop()  # a thread that makes a tuple while `gc` lists it fails
        gc.collect()
        return len(list(Path("/proc/self/fd").iterdir())), len(gc.get_objects())

    for _ in range(3):
        list(loader)
    files, objects = used()
    for _ in range(10):
        list(loader)
    files_later, objects_later = used()
    assert files_later <= files
    assert objects_later - objects < 200
