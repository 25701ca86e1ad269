"""The proof of semantics: training on ranks is the training of one process, told by losses and parameters."""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from mpi_helpers import same_bits
from torch import nn
from torch.nn import functional as F  # noqa: N812  # the name every PyTorch program gives it

import mpidp
from mpidp.models.cnn import cnn
from mpidp.models.mlp import mlp

DIGITS = Path(__file__).parents[2] / "data" / "digits.h5"
# 1797 samples in steps of 61: 61 is no multiple of 2, 3 or 4, and the 30th step, the epoch's last, has 28 samples.
GLOBAL_BATCH = 61
STEPS = 33
OPTIMIZERS: dict[str, Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
}
MODELS: dict[str, Callable[[], nn.Module]] = {"mlp": lambda: mlp(hidden=32), "cnn": lambda: cnn(width=2)}


def forever(loader: mpidp.HDF5Loader) -> Iterator[mpidp.Batch]:
    """The batches of one epoch after the other."""
    while True:
        yield from loader


def train(
    world: mpidp.World | None, name: str, optimizer_name: str, dtype: torch.dtype
) -> tuple[list[float], nn.Module]:
    """The losses of the global batches and the trained model; without `world` in plain torch."""
    torch.manual_seed(0)
    model = MODELS[name]().to(dtype)
    if world is not None:
        model = mpidp.DataParallel(model, world)
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    loader = mpidp.HDF5Loader(DIGITS, ["x", "y"], GLOBAL_BATCH, seed=3, world=world or mpidp.World.alone())
    losses = []
    for batch in itertools.islice(forever(loader), STEPS):
        loss = F.cross_entropy(model(batch.x.to(dtype)), batch.y)
        (loss if world is None else batch.weigh(loss)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item() if world is None else world.mean(loss.item(), batch.size))
    loader.close()
    assert loader.epoch == 1
    return losses, model


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-5)], ids=str)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", MODELS)
def test_training_equals_that_of_one_process(
    world: mpidp.World, name: str, optimizer: str, dtype: torch.dtype, tolerance: float
) -> None:
    """Behaviours 6, 7, 8, 16 and 24: bit for bit on one rank; to rounding on several, where all have the same bits."""
    expected_losses, plain = train(None, name, optimizer, dtype)
    losses, model = train(world, name, optimizer, dtype)
    assert expected_losses[-1] < 0.8 * expected_losses[0], "nothing was learnt, so nothing would be proven"
    pairs = list(zip(plain.parameters(), model.parameters(), strict=True))
    if world.size == 1:
        assert losses == expected_losses
        assert all(torch.equal(expected, found) for expected, found in pairs)
    else:
        assert losses == pytest.approx(expected_losses, rel=tolerance)
        for expected, found in pairs:
            assert torch.linalg.vector_norm(found - expected) <= tolerance * torch.linalg.vector_norm(expected)
    assert same_bits(world, model.parameters())
