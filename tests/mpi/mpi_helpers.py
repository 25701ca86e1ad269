"""What several MPI tests need: the same data everywhere, a rank's share of it, and comparisons over ranks."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

import mpidp

ROWS = 12  # divisible by 1, 2, 3 and 4: the plain mean over ranks is the mean over rows


def share(world: mpidp.World, rows: Tensor) -> Tensor:
    """This rank's rows."""
    return rows[world.rank :: world.size]


def batch(seed: int, inputs: int = 5, outputs: int = 3, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """The same random input and target on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(ROWS, inputs, generator=generator, dtype=torch.float64).to(dtype),
        torch.randn(ROWS, outputs, generator=generator, dtype=torch.float64).to(dtype),
    )


def small_model(seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """Two layers, the same on every rank for the same seed."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).to(dtype)


def gradients(module: nn.Module) -> dict[str, Tensor | None]:
    """Copies of all gradients."""
    return {name: None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()}


def same_bits(world: mpidp.World, tensors: Iterable[Tensor]) -> bool:
    """Whether all ranks hold the same bits. Collective."""
    mine = [tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors]
    return all(theirs == mine for theirs in world.comm.allgather(mine))


class CountedMean:
    """Put around a reducer's `mean`: counts its calls."""

    def __init__(self, model: mpidp.DataParallel) -> None:
        self.calls = 0
        self._mean: Any = model.reducer.mean
        model.reducer.mean = self  # type: ignore[method-assign]

    def __call__(self, bucket: Any) -> None:
        self.calls += 1
        self._mean(bucket)
