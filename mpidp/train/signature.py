"""The check that all ranks have the same model, and the broadcast of rank 0's values."""

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from mpidp.errors import MismatchError, MpidpError
from mpidp.reduce.exchange import pieces
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
