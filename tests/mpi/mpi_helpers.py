"""What several MPI tests need: the same data everywhere, a rank's share of it, and comparisons over ranks."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import mpidp
from mpidp.reduce.buckets import Buckets
from mpidp.reduce.choice import REDUCERS
from mpidp.reduce.transport import ReducerOptions

SUMMING = [name for name in REDUCERS if name != "null"]

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


class Means:
    """Gradients of this rank go in, their means by a reducer come out, step by step in the same buckets."""

    def __init__(
        self,
        world: mpidp.World,
        name: str,
        like: Sequence[Tensor],
        options: ReducerOptions | None = None,
        bucket_bytes: int = 2000,
    ) -> None:
        self.reducer = REDUCERS[name](world, options or ReducerOptions())
        parameters = [nn.Parameter(torch.zeros_like(each)) for each in like]
        self.buckets = Buckets(parameters, bucket_bytes, self.reducer.allocate)

    def __call__(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """As autograd and the wrapper do it. Collective."""
        parameters = self.buckets.parameters
        for index, (parameter, gradient) in enumerate(zip(parameters, gradients, strict=True)):
            parameter.grad = None
            self.buckets.expect(index)
            parameter.grad.add_(gradient)  # type: ignore[attr-defined]
        self.reduce()
        return [parameter.grad.clone() for parameter in parameters if parameter.grad is not None]

    def reduce(self) -> None:
        """Whatever gradients there are. Collective."""
        for bucket in self.buckets.buckets:
            self.buckets.pack(bucket)
            self.reducer.mean(bucket)
            self.buckets.unpack(bucket)


class CountedMean:
    """Put around a reducer's `mean`: counts its calls."""

    def __init__(self, model: mpidp.DataParallel) -> None:
        self.calls = 0
        self._mean: Any = model.reducer.mean
        model.reducer.mean = self  # type: ignore[method-assign]

    def __call__(self, bucket: Any) -> None:
        self.calls += 1
        self._mean(bucket)
