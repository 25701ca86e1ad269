"""Runs in bf16, fp16 and float64: near float32, resumed exactly, and overflow on one rank is met by all."""

from pathlib import Path

import pytest
import torch
from mpi_helpers import SUMMING
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  # the name every PyTorch program gives it
from training_runs import assert_resumed_alike, records, run, state_of

import mpidp
from mpidp.world.status import status

SPIKE = 3  # steps done before the one that overflows


def spiked(output: Tensor, target: Tensor) -> Tensor:
    """A loss whose gradient exceeds float16 in one step on the last rank."""
    world = mpidp.init()
    loss = F.cross_entropy(output, target)
    return loss * 1e6 if status.step == SPIKE and world.rank == world.size - 1 else loss


@pytest.mark.sizes
@pytest.mark.parametrize("precision", ["bf16", "fp16", "float64"])
@pytest.mark.parametrize("sharded", [False, True])
def test_a_run_is_resumed_exactly(world: mpidp.World, mpi_tmp_path: Path, precision: str, sharded: bool) -> None:
    """Behaviour 43."""
    changes = {"train__precision": precision, "optimizer__sharded": sharded, "train__clip_norm": 0.5}
    folder = assert_resumed_alike(world, mpi_tmp_path, 6, **changes)
    dtype = torch.float64 if precision == "float64" else torch.float32
    state = state_of(folder, 10)
    assert {tensor.dtype for tensor in state["model"].values()} == {dtype}
    assert ("others" in state) == (precision == "fp16")


@pytest.mark.parametrize(("precision", "tolerance"), [("bf16", 2**-7), ("fp16", 2**-9), ("float64", 1e-6)])
def test_losses_are_near_those_of_float32(
    world: mpidp.World, mpi_tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str, tolerance: float
) -> None:
    """Steps and losses, norms and the evaluation; scaling changes none of them."""
    # With torch's first scale the share of some rank of four overflows, and the first step is left out.
    monkeypatch.setattr("mpidp.train.precision._FIRST_SCALE", 2.0**10)
    changes = {"train__micro_batch": 2, "train__clip_norm": 0.5, "optimizer__name": "SGD"}
    full = run(world, mpi_tmp_path, **changes)
    short = run(world, mpi_tmp_path, train__precision=precision, **changes)
    for kind in ("train", "validation"):
        for ours, theirs in zip(records(short, kind), records(full, kind), strict=True):
            assert ours["step"] == theirs["step"] and ours["samples"] == theirs["samples"]
            assert ours["loss"] == pytest.approx(theirs["loss"], rel=tolerance)
            if kind == "train":
                assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=4 * tolerance)


@pytest.mark.sizes
@pytest.mark.parametrize("clip_norm", [0.0, 0.5])
@pytest.mark.parametrize(
    ("reducer", "sharded", "comm_dtype"),
    [
        *((name, False, "full") for name in SUMMING),
        *((name, True, "full") for name in ("flat", "node")),
        ("node", False, "fp16"),
        ("flat", True, "bf16"),
    ],
)
def test_an_overflow_on_one_rank_leaves_the_step_out_on_all(
    world: mpidp.World, mpi_tmp_path: Path, reducer: str, sharded: bool, comm_dtype: str, clip_norm: float
) -> None:
    """Behaviour 11: nothing is stepped, neither optimizer nor schedule, and the scale is halved."""
    folder = run(
        world,
        mpi_tmp_path,
        loss__name=f"{__name__}:spiked",
        scheduler__name="ExponentialLR",
        scheduler__arguments={"gamma": 0.9},
        train__precision="fp16",
        train__clip_norm=clip_norm,
        train__epochs=1,
        optimizer__sharded=sharded,
        reduce__reducer=reducer,
        reduce__comm_dtype=comm_dtype,
    )
    lines = records(folder, "train")
    assert [line["skipped_steps"] for line in lines] == [0, 0, 0, 1, 0]
    assert [line["loss_scale"] for line in lines] == [65536, 65536, 65536, 32768, 32768]
    assert [line["lr"] for line in lines] == pytest.approx([0.01 * 0.9**steps for steps in (1, 2, 3, 3, 4)])
    assert lines[3]["grad_norm"] is None and all(0 < lines[step]["grad_norm"] < 5 for step in (0, 1, 2, 4))
    before, after, last = (state_of(folder, step)["model"] for step in (3, 4, 5))
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert all(tensor.isfinite().all() and not torch.equal(tensor, after[name]) for name, tensor in last.items())
