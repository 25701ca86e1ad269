"""Local batches of unequal size, down to none: the gradient is the mean over samples, or over tokens."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from mpi_helpers import gradients
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # the name every PyTorch program gives it

import mpidp
from mpidp.models.cnn import cnn
from mpidp.models.gpt import gpt
from mpidp.models.mlp import mlp

pytestmark = pytest.mark.sizes

ROWS = 10
TOKENS = 6


def images() -> tuple[Tensor, Tensor]:
    return torch.randn(ROWS, 2, 8, 8, dtype=torch.float64), torch.randint(4, (ROWS,))


def features() -> tuple[Tensor, Tensor]:
    return torch.randn(ROWS, 7, dtype=torch.float64), torch.randint(4, (ROWS,))


def texts() -> tuple[Tensor, Tensor]:
    return torch.randint(11, (ROWS, TOKENS)), torch.randint(11, (ROWS, TOKENS))


def class_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def token_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, Tensor]], Callable[..., Tensor]]] = {
    "cnn": (lambda: cnn(classes=4, channels=2, width=2), images, class_loss),
    "mlp": (lambda: mlp(inputs=7, hidden=[5, 6], classes=4), features, class_loss),
    "gpt": (lambda: gpt(vocabulary=11, context=8, layers=2, heads=2, width=8), texts, token_loss),
}


def edges(world: mpidp.World, shares: str) -> list[int]:
    """Where each rank's rows begin and end: rank 0 has none, all but rank 0 have none, or all have some."""
    if world.size == 1:
        return [0, ROWS]
    if shares == "first has none":
        return [0, *(ROWS * rank // (world.size - 1) for rank in range(world.size))]
    if shares == "only first has any":
        return [0, *([ROWS] * world.size)]
    return [*(rank * (rank + 1) // 2 for rank in range(world.size)), ROWS]


def local_batch(world: mpidp.World, x: Tensor, y: Tensor, shares: str) -> mpidp.Batch:
    start, stop = edges(world, shares)[world.rank : world.rank + 2]
    return mpidp.Batch({"x": x[start:stop], "y": y[start:stop]}, np.arange(start, stop), ROWS, world)


@pytest.mark.parametrize("shares", ["first has none", "only first has any", "all have some"])
@pytest.mark.parametrize("name", MODELS)
def test_mean_over_samples(world: mpidp.World, name: str, shares: str) -> None:
    """Behaviour 16: a rank without samples takes part though its loss is NaN; on the second step, too."""
    make, draw, loss_of = MODELS[name]
    torch.manual_seed(2)
    plain = make().double()
    model = mpidp.DataParallel(make().double(), world)
    model.load_state_dict(plain.state_dict())
    for _ in range(2):
        x, y = draw()
        batch = local_batch(world, x, y, shares)
        plain.zero_grad()
        model.zero_grad()
        loss_of(plain, x, y).backward()  # type: ignore[no-untyped-call]
        loss = loss_of(model, batch.x, batch.y)
        assert bool(loss.isnan()) == (batch.size == 0)
        batch.weigh(loss).backward()  # type: ignore[no-untyped-call]
        assert_same(model, plain)
        mean = world.mean(loss.item(), batch.size)
        assert mean == pytest.approx(loss_of(plain, x, y).item(), rel=1e-12)


def assert_same(model: nn.Module, plain: nn.Module) -> None:
    for name, expected in gradients(plain).items():
        torch.testing.assert_close(
            gradients(model)[name], expected, rtol=1e-9, atol=1e-14, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("shares", ["first has none", "all have some"])
def test_mean_over_tokens(world: mpidp.World, shares: str) -> None:
    """Behaviour 16: sequences of unequal length; padding counts nowhere."""
    make, draw, _ = MODELS["gpt"]
    torch.manual_seed(2)
    plain = make().double()
    model = mpidp.DataParallel(make().double(), world)
    model.load_state_dict(plain.state_dict())
    x, y = draw()
    y[torch.rand(y.shape) < 0.6] = -100
    y[0] = -100  # a rank that holds this row alone has samples, but no token

    def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=-100)

    loss_of(plain, x, y).backward()  # type: ignore[no-untyped-call]
    batch = local_batch(world, x, y, shares)
    batch.weigh(loss_of(model, batch.x, batch.y), int((batch.y != -100).sum())).backward()  # type: ignore
    assert_same(model, plain)


@pytest.mark.parametrize("shares", ["first has none", "all have some"])
def test_micro_batches(world: mpidp.World, shares: str) -> None:
    """Behaviours 13 and 16: ranks take different numbers of micro-batches to one step."""
    make, draw, loss_of = MODELS["mlp"]
    torch.manual_seed(2)
    plain = make().double()
    model = mpidp.DataParallel(make().double(), world)
    model.load_state_dict(plain.state_dict())
    x, y = draw()
    loss_of(plain, x, y).backward()  # type: ignore[no-untyped-call]
    for part in local_batch(world, x, y, shares).micro_batches(2):
        loss: Any = part.weigh(loss_of(model, part.x, part.y))
        if part.last:
            loss.backward()
        else:
            with model.no_sync():
                loss.backward()
    assert_same(model, plain)
