"""The blocks of docs/howto/loops.md run, and accumulate as they say (Behaviours 13, 60)."""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from page_commands import ROOT
from torch import nn

import mpidp

PAGE = (ROOT / "docs/howto/loops.md").read_text()
ACCUMULATE, NO_SYNC, SEVERAL, METRICS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def scope() -> Iterator[dict[str, Any]]:
    """What the blocks refer to; the loader takes the digits in file order, 29 steps."""
    torch.manual_seed(0)
    world = mpidp.init()
    loader = mpidp.HDF5Loader(ROOT / "data/digits.h5", ("x", "y"), 64, shuffle="none", world=world)
    model = mpidp.DataParallel(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), world)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    names = {"mpidp": mpidp, "torch": torch, "nn": nn, "F": F, "contextlib": contextlib, "world": world}
    yield {**names, "loader": loader, "model": model, "optimizer": optimizer}
    model.unwrap()
    loader.close()


def plain_steps(model: nn.Module, loader: mpidp.HDF5Loader, batches: int) -> nn.Module:
    """Plain torch, a step of the mean gradient of so many batches."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number, batch in enumerate(loader, 1):
        (F.cross_entropy(model(batch.x), batch.y) / batches).backward()
        if number % batches == 0 or number == len(loader):
            optimizer.step()
            optimizer.zero_grad()
    return model


@pytest.mark.parametrize(("block", "batches"), [(ACCUMULATE, 1), (NO_SYNC, 4)])
def test_accumulation(scope: dict[str, Any], block: str, batches: int) -> None:
    expected = plain_steps(copy.deepcopy(scope["model"].module), scope["loader"], batches)
    exec(block, scope)
    for found, wanted in zip(scope["model"].module.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(found, wanted)


def test_several_models_and_metrics(scope: dict[str, Any]) -> None:
    exec(SEVERAL, scope)
    assert scope["encoder"].module.weight.grad is None and scope["loss"].isfinite()
    scope["encoder"].unwrap()
    scope["head"].unwrap()
    plain_steps(scope["model"].module, scope["loader"], 1)
    exec(METRICS, scope)
    assert 0.5 < scope["accuracy"] < 1 and 0 < scope["loss"] < 2
    assert scope["count"] == 1797
