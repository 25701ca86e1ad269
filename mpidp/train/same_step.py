"""The check that all ranks reduce gradients of the same step, and its error."""

from collections.abc import Iterable
from dataclasses import astuple, dataclass

import torch

from mpidp.errors import SHARED_MARK, MismatchError
from mpidp.world.world import World


@dataclass(frozen=True)
class Place:
    """Where a rank is in its training loop when it reduces; must be the same on all ranks.

    Attributes:
        steps: optimizer steps taken with parameters of the model.
        reductions: of gradients, since the last of them.
        dropped: accumulations that were given up, by `zero_grad()` after `backward()` under `no_sync()`.
        epoch, position: of the batch that was weighed since the last reduction; -1 if there was none.
        options: digest of the learning rates and other numbers that the optimizers step with.
    """

    steps: int
    reductions: int
    dropped: int
    epoch: int
    position: int
    options: int

    def numbers(self) -> tuple[int, ...]:
        """Integers to compare over ranks."""
        return astuple(self)


def digest_options(optimizers: Iterable[torch.optim.Optimizer]) -> int:
    """Learning rates and other numbers of all groups, in 63 bits; equal on ranks that have the same."""
    # Python's hashes of numbers are the same in every process, those of words are not.
    groups = [hash(tuple(_numbers(group))) for optimizer in optimizers for group in optimizer.param_groups]
    return sum(groups) % 2**63


def learning_rates(optimizers: Iterable[torch.optim.Optimizer]) -> str:
    """The place as text."""
    rates = [float(group["lr"]) for optimizer in optimizers for group in optimizer.param_groups if "lr" in group]
    return ", ".join(f"{rate:g}" for rate in rates[:8])


def raise_different(world: World, place: Place, rates: str, trouble: str) -> None:
    """Raises an error on all ranks, when all know that their places differ. Collective.

    Args:
        world: the ranks.
        place: of this rank.
        rates: its learning rates, in words.
        trouble: what this rank met in its last forward or backward pass and went on after, if anything.

    Raises:
        MismatchError: names two ranks that differ, and what usually brings it about.
    """
    everyones: list[tuple[Place, str, str]] = world.comm.allgather((place, rates, trouble))
    places = [one for one, _, _ in everyones]
    other = next(rank for rank, one in enumerate(places) if one != places[0])
    told = _difference(places[0], places[other], other, [one[1] for one in everyones])
    troubles = [f"Rank {rank} went on after {text}." for rank, (_, _, text) in enumerate(everyones) if text]
    error = MismatchError(" ".join([told, *troubles[:2]]))
    setattr(error, SHARED_MARK, True)
    raise error


def _difference(first: Place, second: Place, rank: int, rates: list[str]) -> str:
    """The likely error, of the first thing that differs between rank 0 and another rank."""
    if first.options != second.options:
        return (
            f"optimizers differ between ranks after step {first.steps:,}: rank 0 steps with lr {rates[0]}, rank {rank} "
            f"with lr {rates[rank]} (or another number of their param_groups differs). A scheduler or the script "
            f"decided by one rank's own loss, as ReduceLROnPlateau does: give it world.mean(loss.item())."
        )
    if (first.epoch, first.position) != (second.epoch, second.position):
        return (
            f"ranks reduce gradients of different batches after step {first.steps:,}: rank 0 of the one that ends at "
            f"sample {first.position:,} of epoch {first.epoch}, rank {rank} at {second.position:,} of epoch "
            f"{second.epoch}. Some rank skipped a batch: let it count for nothing, "
            f"batch.weigh(loss, count=0 if bad else batch.size), or skip it on all ranks: if world.any(bad)."
        )
    if first.dropped != second.dropped:
        return (
            f"ranks reduce different passes after step {first.steps:,}: rank 0 has given up {first.dropped} "
            f"accumulations by zero_grad(), rank {rank} {second.dropped}. A decision on gradients that are not reduced "
            f"yet differs between ranks: call model.synchronize() before it, or decide together: if world.any(bad)."
        )
    return (
        f"ranks reduce gradients of different steps: rank 0 has taken {first.steps:,} optimizer steps and is in "
        f"backward pass {first.reductions + 1} since, rank {rank} has taken {second.steps:,} and is in pass "
        f"{second.reductions + 1}. Micro-batches need model.no_sync() around all backward passes but the last (or "
        f"Batch.micro_batches with Batch.weigh); backward() and optimizer.step() must be called, or skipped, on all "
        f"ranks alike."
    )


def _numbers(group: dict[str, object]) -> Iterable[float]:
    for name, value in group.items():
        for number in value if isinstance(value, tuple | list) and name != "params" else (value,):
            if isinstance(number, int | float) or (isinstance(number, torch.Tensor) and number.device.type == "cpu"):
                yield float(number)
