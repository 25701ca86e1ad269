"""Checks that all ranks have the same model and reduce the same step, and the broadcast of rank 0's values."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mpidp.errors import SHARED_MARK, MismatchError, MpidpError
from mpidp.reduce.transport import pieces
from mpidp.world.world import World

# By the names of classes: importing them would load modules that few runs need.
_WRAPPERS = ("DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule")


def module_signature(module: nn.Module) -> list[str]:
    """One line a parameter and buffer: everything that must be equal on all ranks, but not the values."""
    lines = [
        f"parameter {name}: shape {tuple(p.shape)}, {p.dtype}, strides {p.stride()}, requires_grad={p.requires_grad}"
        for name, p in module.named_parameters()
    ]
    lines += [f"buffer {name}: shape {tuple(b.shape)}, {b.dtype}" for name, b in module.named_buffers()]
    return lines


def check_supported(module: nn.Module, world: World) -> None:
    """Raises MpidpError for a module whose gradients cannot be reduced, naming the parameter."""
    check_not_wrapped(module)
    named = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    if not named:
        raise MpidpError(
            f"the model {type(module).__name__} has no trainable parameter: nothing to train. "
            f"Check requires_grad, and that layers are attributes of the module."
        )
    for name, parameter in named:
        if parameter.device != world.device:
            raise MpidpError(
                f"parameter {name} is on {parameter.device}, this rank's device is {world.device}: "
                f"move the model with .to(world.device) before wrapping it."
            )
    for name, layer in module.named_modules():
        if isinstance(layer, nn.SyncBatchNorm) and world.size > 1:
            raise MpidpError(
                f"layer {name or type(layer).__name__} is torch.nn.SyncBatchNorm, which without torch.distributed "
                f"normalises each rank's samples by themselves: use mpidp.SyncBatchNorm.convert(model, world) instead."
            )
        if getattr(layer, "sparse", False) and isinstance(layer, nn.Embedding | nn.EmbeddingBag):
            raise MpidpError(
                f"layer {name or type(layer).__name__} has sparse=True: sparse gradients are not reduced. "
                f"Use sparse=False."
            )


def check_not_wrapped(module: nn.Module) -> None:
    """Raises MpidpError for a module that is, or holds, a wrapper which reduces gradients by itself."""
    for name, layer in module.named_modules():
        for kind in type(layer).__mro__:
            package = kind.__module__.partition(".")[0]
            if kind.__name__ in _WRAPPERS and package in ("mpidp", "torch"):
                where = f"layer {name} of the model" if name else "the model"
                raise MpidpError(
                    f"{where} is wrapped in {package}'s {kind.__name__} already, which reduces gradients by itself: "
                    f"they would be reduced twice. Give mpidp.DataParallel the plain module (wrapper.module)."
                )


def check_same(world: World, lines: Sequence[str], what: str) -> None:
    """Raises on every rank unless all ranks give the same lines. Collective.

    Only a digest travels when all is well.

    Args:
        world: the ranks.
        lines: what should be equal, in readable form.
        what: name of the thing for the message, e.g. "the models".

    Raises:
        MismatchError: names the first line that differs, on rank 0 and on the lowest rank that differs from it.
    """
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    same = world.broadcast(digest) == digest
    if world.all(same):
        return
    reference = world.broadcast(list(lines))
    with world.raise_on_all_ranks(f"comparing {what}"):
        if not same:
            raise MismatchError(_difference(what, reference, lines, world))


def _difference(what: str, reference: Sequence[str], lines: Sequence[str], world: World) -> str:
    here = f"rank {world.rank} ({world.host})"
    for index, (theirs, ours) in enumerate(zip(reference, lines, strict=False)):
        if theirs != ours:
            return (
                f"{what} differ between ranks, first at entry {index}. Rank 0 has: {theirs}. {here} has: {ours}. "
                f"Build them from the same code, configuration and options on every rank."
            )
    longer, extra = ("rank 0", reference) if len(reference) > len(lines) else (here, lines)
    return (
        f"{what} differ between ranks: rank 0 has {len(reference)} entries, {here} has {len(lines)}; only {longer} "
        f"has: {extra[min(len(reference), len(lines))]}. Build them from the same code on every rank."
    )


def broadcast_module(module: nn.Module, world: World) -> None:
    """Copies rank 0's parameters and buffers to every rank, bit for bit, in place. Collective."""
    with torch.no_grad():
        for tensor in [*module.parameters(), *module.buffers()]:
            broadcast_tensor(tensor, world)


def broadcast_tensor(tensor: Tensor, world: World, root: int = 0) -> None:
    """Broadcasts the root's values of a tensor of any dtype and device, bit for bit, in place. Collective.

    It goes through host memory: it happens once, and works with every MPI library.
    """
    host = tensor.detach().to("cpu", copy=True).contiguous()
    flat = host.view(-1).view(torch.uint8) if host.numel() else host.view(torch.uint8)
    for piece in pieces(flat.numel(), 1):
        world.comm.Bcast(flat[piece].numpy(), root=root)
    if world.rank != root:
        tensor.copy_(host)


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


def digest_options(optimizers: Iterable[torch.optim.Optimizer]) -> int:
    """Learning rates and other numbers of all groups, in 63 bits; equal on ranks that have the same."""
    # Python's hashes of numbers are the same in every process, those of words are not.
    groups = [hash(tuple(_numbers(group))) for optimizer in optimizers for group in optimizer.param_groups]
    return sum(groups) % 2**63


def learning_rates(optimizers: Iterable[torch.optim.Optimizer]) -> str:
    """The learning rates of all groups, as text."""
    rates = [float(group["lr"]) for optimizer in optimizers for group in optimizer.param_groups if "lr" in group]
    return ", ".join(f"{rate:g}" for rate in rates[:8])


def raise_different(world: World, place: Place, rates: str, trouble: str) -> None:
    """Raises an error on all ranks, when all know that their places differ. Collective.

    Args:
        world: the ranks.
        place: of this rank.
        rates: its learning rates, as text.
        trouble: the error of its last forward or backward pass that the program caught, if any.

    Raises:
        MismatchError: names two ranks that differ, and what usually brings it about.
    """
    everyones: list[tuple[Place, str, str]] = world.comm.allgather((place, rates, trouble))
    places = [one for one, _, _ in everyones]
    other = next(rank for rank, one in enumerate(places) if one != places[0])
    told = _step_difference(places[0], places[other], other, [one[1] for one in everyones])
    troubles = [f"Rank {rank} went on after {text}." for rank, (_, _, text) in enumerate(everyones) if text]
    error = MismatchError(" ".join([told, *troubles[:2]]))
    setattr(error, SHARED_MARK, True)
    raise error


def _step_difference(first: Place, second: Place, rank: int, rates: list[str]) -> str:
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
