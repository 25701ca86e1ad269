"""Precision of runs in one process: plain torch's numbers, and what is refused or ends a run."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import records, small_config, small_net, small_run, weights
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # the name every PyTorch program gives it

import mpidp
from mpidp.config import RunConfig, from_dict
from mpidp.errors import CheckpointError, ConfigError, MpidpError
from mpidp.train.losses import LOSSES
from mpidp.train.precision import Precision
from mpidp.validate import validate

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Path]:
    return partial(small_run, tmp_path)


@pytest.mark.parametrize("precision", ["bf16", "fp16", "float64"])
def test_the_steps_of_plain_torch(run: Callable[..., Path], tmp_path: Path, precision: str) -> None:
    """Behaviour 6: with autocast, scaling and clipping, bit for bit; and the norm is the one that clipping takes."""
    folder = run(train__precision=precision, train__clip_norm=0.3, train__epochs=1, log__every_steps=1)
    loader = mpidp.HDF5Loader(small_config(tmp_path).data.train, ("x", "y"), 10, 0, split=("train", 0.2))
    torch.manual_seed(0)
    dtype = torch.float64 if precision == "float64" else torch.float32
    low = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    model = small_net().to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", enabled=precision == "fp16")
    norms = []
    for batch in loader:
        with torch.autocast("cpu", low, enabled=low is not None):
            loss = F.cross_entropy(model(batch.x.to(dtype)), batch.y)
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        scaler.unscale_(optimizer)
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.3)))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    for name, tensor in model.state_dict().items():
        assert torch.equal(weights(folder)[name], tensor), name
    assert [record["grad_norm"] for record in records(folder, "train")] == norms


@pytest.mark.parametrize("every_steps", [1, 3])
def test_the_norm_is_that_of_the_last_step_and_needs_no_clipping(run: Callable[..., Path], every_steps: int) -> None:
    settings = {"train__epochs": 1, "optimizer__name": "SGD", "optimizer__lr": 0.01}
    single = [record["grad_norm"] for record in records(run(log__every_steps=1, **settings), "train")]
    several = [record["grad_norm"] for record in records(run(log__every_steps=every_steps, **settings), "train")]
    assert len(set(single)) == 5
    assert several == [single[min(start + every_steps, 5) - 1] for start in range(0, 5, every_steps)]


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_losses_of_16_bit_outputs_are_taken_in_float32(name: str, dtype: torch.dtype) -> None:
    """Under autocast; a loss in 16 bits would be wrong by up to 2^-8."""
    function: Any = getattr(F, name)
    output = torch.linspace(-3, 3, 40).view(8, 5).to(dtype)
    target = torch.arange(8) % 5 if name in ("cross_entropy", "nll_loss") else torch.linspace(0, 1, 40).view(8, 5)
    with torch.autocast("cpu", dtype):
        loss = function(output, target)
    assert loss.dtype == torch.float32
    assert loss == pytest.approx(float(function(output.float(), target)), rel=1e-6)


def sixteen_bits(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target).bfloat16()


def test_a_loss_of_the_users_own_may_be_in_16_bits(run: Callable[..., Path]) -> None:
    folder = run(loss__name=f"{__name__}:sixteen_bits", train__precision="bf16", train__epochs=1)
    assert all(0.5 < record["loss"] < 2 for record in records(folder, "train"))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_batch_norm(run: Callable[..., Path], precision: str) -> None:
    folder = run(model__arguments={"kind": "batch_norm"}, train__precision=precision)
    assert all(tensor.isfinite().all() for tensor in weights(folder).values())


def never_finite(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target) * float("inf")


def test_a_loss_that_no_scale_helps_ends_the_run(run: Callable[..., Path]) -> None:
    with pytest.raises(MpidpError, match=r"(?s)fp16.*infinite or NaN even with the loss scaled by .*optimizer\.lr"):
        run(loss__name=f"{__name__}:never_finite", train__precision="fp16", train__epochs=9)


def test_fp16_does_not_go_on_from_a_run_without_a_scale(run: Callable[..., Path]) -> None:
    folder = run(train__epochs=1)
    with pytest.raises(CheckpointError, match="scaler"):
        run(resume=folder, train__precision="fp16")
    run(resume=folder, train__precision="bf16")
    assert [record["step"] for record in records(folder, "validation")] == [5, 10]


def test_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    fields = {"reduce": {"comm_dtype": "bf16", "error_feedback": True}}
    validate(from_dict({**fields, "train": {"precision": "bf16"}, "data": {"train": "a"}, "model": {"name": "mlp"}}))
    with pytest.raises(ConfigError, match=r"error_feedback is true, but train\.precision"):
        validate(from_dict({**fields, "train": {"precision": "fp16"}}))
    with pytest.raises(ConfigError, match=r"train\.precision.*bf16"):
        from_dict({"train": {"precision": "half"}})
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: False)
    with pytest.raises(ConfigError, match="this GPU cannot"):
        Precision("bf16", torch.device("cuda"))
    assert Precision(RunConfig().train.precision, CPU).autocast()._enabled is False
