"""Comparison of parameters, buffers and optimizer state between ranks, a part of them at each step.

Errors of a script make the copies of a model diverge, and so do faults of memory; a copy that differs makes the
gradients of all ranks wrong from then on, which no loss curve shows. So at each step checksums of a part of everything
are compared, in messages that travel during the next step.

A checksum is equal for equal bits, and different after any single bit flip. A sum of 64-bit words costs one reading of
the memory, on a CPU or a GPU, and no wait for a GPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from mpidp.errors import SHARED_MARK, MismatchError
from mpidp.printable import listed
from mpidp.train.agreement import broadcast_tensor, check_same
from mpidp.train.sharded_state import flat
from mpidp.world.collectives import DelayedEquality
from mpidp.world.world import World

WORD_BYTES = 8


@dataclass(frozen=True)
class Piece:
    """Elements [start, stop) of a tensor, laid flat as they lie in memory."""

    tensor: Tensor
    start: int
    stop: int


def replicated(module: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> dict[str, Tensor]:
    """All tensors of a model in training that must be equal on all ranks, by name.

    These are parameters, the optimizers' state of each, and persistent buffers; not running statistics of batch norm,
    as each rank has those of its own samples.
    """
    tensors: dict[str, Tensor] = {}
    states = [optimizer.state for optimizer in optimizers]
    for name, parameter in module.named_parameters():
        tensors[f"parameter {name}"] = parameter.detach()
        for state in states:
            for key, value in state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    tensors[f"optimizer state {key} of {name}"] = value
    for prefix, layer in module.named_modules():
        if isinstance(layer, nn.modules.batchnorm._NormBase):
            continue
        for name, buffer in layer.named_buffers(prefix, recurse=False):
            if name.rpartition(".")[2] not in layer._non_persistent_buffers_set:
                tensors[f"buffer {name}"] = buffer
    return {name: tensor for name, tensor in tensors.items() if tensor.numel()}


def cut(tensors: Sequence[Tensor], parts: int) -> list[list[Piece]]:
    """Lists of pieces of all tensors, with about equally many bytes each."""
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    size = max(1, -(-total // parts))
    lists: list[list[Piece]] = [[] for _ in range(parts)]
    offset = 0  # in bytes, of this tensor in all of them
    for tensor in tensors:
        item, start = tensor.element_size(), 0
        while start < tensor.numel():
            part = (offset + start * item) // size
            stop = min(tensor.numel(), -(-((part + 1) * size - offset) // item))
            lists[part].append(Piece(tensor, start, stop))
            start = stop
        offset += tensor.numel() * item
    return lists


def checksum(pieces: Sequence[Piece]) -> Tensor:
    """One int64, on the device of the first tensor, weighted by position, so that swapped pieces are found."""
    sums = [part for piece in pieces for part in _sums(flat(piece.tensor)[piece.start : piece.stop])]
    device = sums[0].device
    total = torch.zeros((), dtype=torch.int64, device=device)
    for position, part in enumerate(sums):
        total += part.to(device, non_blocking=True) * (2 * position + 1)  # odd: multiplying loses no bit
    return total


def _sums(elements: Tensor) -> Iterator[Tensor]:
    """Of whole words, and of the bytes that are left over."""
    item = elements.element_size()
    if item > WORD_BYTES or WORD_BYTES % item:
        yield elements.view(torch.uint8).sum(dtype=torch.int64)
        return
    words = elements.numel() // (WORD_BYTES // item) * (WORD_BYTES // item)
    if words:
        # A view of words must begin where a word does; and ranks may differ in where that is.
        head = elements[:words]
        aligned = head if head.storage_offset() * item % WORD_BYTES == 0 else head.clone()
        yield aligned.view(torch.int64).sum()
    if words < elements.numel():
        yield elements[words:].view(torch.uint8).sum(dtype=torch.int64)


EVERY_STEPS = 100
# Less data than this a step is not worth a call: then everything is compared more often than asked for.
LEAST_PART_BYTES = 1 << 20
SMALL_EVERY_STEPS = 10
CAUSES = (
    "Usual causes: a state that was loaded, or values that were set, on some ranks only; layers made after wrapping "
    "from another random seed on each rank; gradients or parameters that were changed by something that one rank "
    "computed alone; a buffer that is filled from each rank's own samples (register it with persistent=False if it "
    "may differ). If it is none of these, look for faulty memory there. Continue from a checkpoint made before."
)


class ReplicaCheck:
    """Compares tensors over ranks. Construction is collective.

    Args:
        world: the ranks.
        tensors: returns the tensors that must be equal, by name; called repeatedly, as optimizers make their state
            late.
        every_steps: number of steps in which everything is compared once; 0 for never.
    """

    def __init__(self, world: World, tensors: Callable[[], dict[str, Tensor]], every_steps: int):
        self.world, self.every_steps = world, every_steps
        self._tensors = tensors
        self._equality = DelayedEquality(world.comm) if world.size > 1 and every_steps > 0 else None
        self._step = 0
        self._interval = every_steps
        self._parts: list[list[Piece]] = []
        self._sum: tuple[Tensor, torch.cuda.Event | None] | None = None
        self._summed: list[Piece] = []
        self._given: tuple[int, list[Piece]] = 0, []

    def check(self) -> None:
        """Compares the checksums of the steps before, and computes those of the next part. Collective; rarely waits.

        Raises:
            MismatchError: on all ranks; names the ranks that differ from the others and the first tensor that does.
        """
        if self._equality is None:
            return
        self._compare(self._equality)
        place = self._step % self._interval
        if place == 0 or self._step == 1:  # the first step makes the optimizer's state
            self._cut()
        # The first part at the first step: so what differs from the start is reported at once.
        first, last = (-(-len(self._parts) * (place + shift) // self._interval) - 1 for shift in (0, 1))
        if last > first and self._parts[last]:
            self._summed = self._parts[last]
            with torch.no_grad():
                self._sum = _read_later(checksum(self._summed))
        self._step += 1

    def restart(self) -> None:
        """Begins with the first part at the next step, after a change of everything. Not collective."""
        self._step = 0

    def close(self) -> None:
        """Compares what is left and frees the communicator. Collective.

        Raises:
            MismatchError: as `check` does.
        """
        equality, self._equality = self._equality, None
        if equality is not None:
            for _ in range(2):
                self._compare(equality)
            equality.close()

    def _compare(self, equality: DelayedEquality) -> None:
        """Checks the result of the last message, and sends the checksums since. Collective."""
        if equality.differ():
            self._look_closely()
        elif self._sum is not None:
            self._given = _read(*self._sum), self._summed
            equality.give(self._given[0])
        self._sum = None

    def _cut(self) -> None:
        tensors = list(self._tensors().values())
        num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        is_small = num_bytes < LEAST_PART_BYTES
        self._interval = min(self.every_steps, SMALL_EVERY_STEPS) if is_small else self.every_steps
        self._parts = cut(tensors, max(1, min(self._interval, num_bytes // LEAST_PART_BYTES)))

    def _look_closely(self) -> None:
        """Finds out which tensors differ on which ranks, and raises. Collective."""
        tensors = self._tensors()
        lines = [f"{name}: {tuple(tensor.shape)}, {tensor.dtype}" for name, tensor in tensors.items()]
        check_same(self.world, lines, "parameters, buffers and optimizer state")
        sums = [int(checksum([Piece(tensor, 0, tensor.numel())])) for tensor in tensors.values()]
        found = find_diverged(list(tensors), self.world.comm.allgather(sums))
        if found:
            text = describe(found[0], tensors[found[0].name], self.world)
            text += f" ({len(found)} of {len(tensors)} tensors differ)"
        else:  # equal again: a sharded optimizer, or the script, has copied one rank's values to all
            value, pieces = self._given
            gathered = [[of_rank] for of_rank in self.world.comm.allgather(value)]
            found = find_diverged([_names(pieces, tensors)], gathered)
            text = f"{describe_past(found[0], self.world)}, before all ranks were given what one had"
        error = MismatchError(f"{text}. {CAUSES}")
        error.add_note("found by comparing parameters, buffers and optimizer state over ranks")
        setattr(error, SHARED_MARK, True)
        raise error


@dataclass(frozen=True)
class Diverged:
    """A tensor that is not the same on all ranks.

    Attributes:
        name: which.
        root: the lowest rank that holds what most ranks do; None if no majority holds the same.
        ranks: those that hold something else than the majority, or all.
    """

    name: str
    root: int | None
    ranks: tuple[int, ...]


def find_diverged(names: Sequence[str], sums: Sequence[Sequence[int]]) -> list[Diverged]:
    """The tensors whose sums are not equal, in order; `sums` has a list for each rank, with a number for each name."""
    found: list[Diverged] = []
    ranks = range(len(sums))
    for index, name in enumerate(names):
        column = [of_rank[index] for of_rank in sums]
        value, count = Counter(column).most_common(1)[0]
        if 2 * count <= len(column):
            found.append(Diverged(name, None, tuple(ranks)))
        elif count < len(column):
            found.append(Diverged(name, column.index(value), tuple(rank for rank in ranks if column[rank] != value)))
    return found


def describe(diverged: Diverged, tensor: Tensor, world: World) -> str:
    """The message that says which ranks differ, and in which tensor. Collective."""
    who = _who(diverged, world)
    if diverged.root is None:
        return f"ranks {who} hold different values, and none of them a majority, first in {diverged.name}"
    theirs = flat(tensor).clone()
    broadcast_tensor(theirs, world, diverged.root)
    own = _first_difference(flat(tensor).cpu(), theirs.cpu()) if world.rank in diverged.ranks else ""
    first = world.comm.allgather(own)[diverged.ranks[0]]
    verb = "ranks {} hold" if len(diverged.ranks) > 1 else "rank {} holds"
    return f"{verb.format(who)} other values than most ranks, first in {diverged.name}: {first}"


def describe_past(diverged: Diverged, world: World) -> str:
    """The message for ranks that differed and do no longer. Collective."""
    who = _who(diverged, world)
    if diverged.root is None:
        return f"ranks {who} held different values, and none of them a majority, in {diverged.name}"
    return f"rank{'s' * (len(diverged.ranks) > 1)} {who} held other values than most ranks, in {diverged.name}"


def _who(diverged: Diverged, world: World) -> str:
    hosts = world.comm.allgather(world.host)
    return listed([f"{rank} ({hosts[rank]})" for rank in diverged.ranks])


def _names(pieces: list[Piece], tensors: dict[str, Tensor]) -> str:
    """The names of the tensors that the pieces belong to, in words."""
    pointers = {piece.tensor.data_ptr() for piece in pieces}
    names = [name for name, tensor in tensors.items() if tensor.data_ptr() in pointers]
    return f"one of {listed(names)}" if len(names) > 1 else listed(names)


def _first_difference(own: Tensor, theirs: Tensor) -> str:
    """How many elements differ in their bits, and the first of them."""
    size = own.element_size()
    differs = (own.view(torch.uint8) != theirs.view(torch.uint8)).view(-1, size).any(1).numpy()
    first = int(np.flatnonzero(differs)[0])
    return (
        f"{int(differs.sum()):,} of {own.numel():,} elements, the first {own[first].item():g} instead of "
        f"{theirs[first].item():g}"
    )


def _read_later(value: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """A number that is being copied from a GPU, and the event after the copy, without waiting."""
    if value.device.type != "cuda":
        return value, None
    host = torch.empty((), dtype=value.dtype, pin_memory=True)
    host.copy_(value, non_blocking=True)
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(value.device))
    return host, event


def _read(value: Tensor, is_here: torch.cuda.Event | None) -> int:
    if is_here is not None:
        is_here.synchronize()
    return int(value)
