"""`mpidp bench` on real ranks: every side's result is right, all ranks report alike, and one wrong rank stops all."""

import pytest

from mpidp.errors import MpidpError
from mpidp.models.gpt import gpt
from mpidp.reduce.buckets import Bucket
from mpidp.reduce.choice import FlatReducer
from mpidp.tools.bench import allreduce, step
from mpidp.tools.bench.allreduce import gloo
from mpidp.tools.bench.options import AllreduceOptions, StepOptions
from mpidp.world.world import World

SIZES = (4, 4096, 100_004)  # fewer elements than ranks; in one piece; a slice of odd length


@pytest.fixture
def small_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "VOCABULARY", 32)
    monkeypatch.setitem(
        step.MODELS, "transformer", lambda: gpt(vocabulary=32, context=step.CONTEXT, layers=1, width=32)
    )


def test_allreduce_of_every_name(world: World) -> None:
    """Behaviours 1 and 2: each reducer's mean, and the sums beside it, are held against arithmetic, twice."""
    options = AllreduceOptions(SIZES, allreduce.NAMES, "gloo", repeats=2)
    with gloo(world):
        rows = allreduce.allreduce_rows(options, world)
    assert [row["name"] for row in rows] == [*allreduce.NAMES, "gloo"] * len(SIZES)
    assert rows == world.broadcast(rows)  # times are those of the slowest rank, everywhere


@pytest.mark.usefixtures("small_model")
def test_step_of_every_name(world: World) -> None:
    """Behaviours 2 and 10: gradients of a whole step, each wrapper against the mean of plain torch's."""
    options = StepOptions(reducers=step.NAMES, against="ddp", repeats=2)
    with gloo(world):
        rows = step.step_rows(options, world)
    assert [row["name"] for row in rows] == [*step.NAMES, "ddp"]
    assert rows == world.broadcast(rows)


@pytest.mark.mpi(min_size=2)
@pytest.mark.usefixtures("small_model")
def test_one_wrong_rank_stops_all(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behaviour 1, and that the error reaches every rank: only the last one's result is off."""
    right = FlatReducer.mean

    def mean(self: FlatReducer, bucket: Bucket) -> None:
        right(self, bucket)
        if world.rank == world.size - 1:
            bucket.flat[0] *= world.size

    monkeypatch.setattr(FlatReducer, "mean", mean)
    with pytest.raises(MpidpError, match="flat, 4096 bytes: 1 of 1024 elements are wrong; element 0 is "):
        allreduce.allreduce_rows(AllreduceOptions((4096,), ("mpi", "flat"), repeats=1), world)
    with pytest.raises(MpidpError, match=r"flat: the gradient of .* is off by"):
        step.step_rows(StepOptions(reducers=("null", "flat"), repeats=1), world)
