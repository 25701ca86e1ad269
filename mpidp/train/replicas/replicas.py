"""A model and its optimizer on every rank in; an error, or a cure, out when some rank's copy differs from the others'.

Memory fails, and so do computations. A copy that has gone astray spoils the gradients of all from then on, and no loss
curve tells. So at each step a part of all parameters and optimizer state is summed up, bit by bit, and the sums are
compared, in messages that travel during the next step.
"""

import logging

import torch
from torch import Tensor

from mpidp.errors import MismatchError
from mpidp.train.bits import Piece, cut, replicated, sum_of_bits
from mpidp.train.parallel.parallel import DataParallel
from mpidp.train.replicas.strays import describe, describe_past, find_strays, heal, some_of
from mpidp.train.sharding.optimizer import ShardedOptimizer
from mpidp.train.signature import check_same
from mpidp.world.equality import DelayedEquality
from mpidp.world.shared_error import share_error

log = logging.getLogger("mpidp")

EVERY_STEPS = 100
# A small model is summed up whole now and then: calls cost more than bytes there.
LEAST_PART_BYTES = 1 << 20
ACTIONS = ("stop", "heal")


class ReplicaCheck:
    """Compares parameters and optimizer state over ranks. Construction is collective.

    In a loop of your own, `check` is called once a step, before the optimizer steps or after. Before, where the
    optimizer is a `ShardedOptimizer`: it gives all ranks the parameters of one, whatever the others have. Its state is
    not compared, as each rank has another part.

    Args:
        model: the wrapped model.
        optimizer: of the same parameters.
        every_steps: in how many steps everything is compared once; 0 for never.
        on_mismatch: "stop" raises on all ranks; "heal" gives the ranks that differ what most others hold, and says so.

    Raises:
        ValueError: another `on_mismatch`, or a negative number of steps.
    """

    def __init__(
        self,
        model: DataParallel,
        optimizer: torch.optim.Optimizer,
        *,
        every_steps: int = EVERY_STEPS,
        on_mismatch: str = "stop",
    ):
        if on_mismatch not in ACTIONS or every_steps < 0:
            raise ValueError(f"on_mismatch={on_mismatch!r}, every_steps={every_steps}; give one of {ACTIONS}, and >= 0")
        self.model, self.optimizer, self.world = model, optimizer, model.world
        self.every_steps, self.on_mismatch = every_steps, on_mismatch
        check_same(self.world, [f"every_steps={every_steps}, on_mismatch={on_mismatch}"], "the replica checks")
        # With the reducer "null" every rank trains a model of its own.
        self.is_on = self.world.size > 1 and every_steps > 0 and model.choice.name != "null"
        self._equality = DelayedEquality(self.world.comm) if self.is_on else None
        self._step = 0
        self._parts: list[list[Piece]] = []
        self._sum: tuple[Tensor, torch.cuda.Event | None] | None = None
        self._summed: list[Piece] = []
        self._given: tuple[int, list[Piece]] = 0, []

    def check(self) -> None:
        """Compares what was summed up at the steps before, and sums up the next part. Collective; seldom waits.

        Raises:
            MismatchError: on all ranks; names the ranks that differ from the others and the first tensor that does.
        """
        if self._equality is None:
            return
        self._compare(self._equality)
        place = self._step % self.every_steps
        if place == 0 or self._step == 1:  # the first step makes the optimizer's state
            self._cut()
        part, before = (len(self._parts) * (place + shift) // self.every_steps for shift in (1, 0))
        if part > before and self._parts[before]:
            self._summed = self._parts[before]
            self._sum = _read_later(sum_of_bits(self._summed))
        self._step += 1

    def close(self) -> None:
        """Compares what is left and gives the communicator back. Collective.

        Raises:
            MismatchError: as `check` does.
        """
        if self._equality is None:
            return
        for _ in range(2):
            self._compare(self._equality)
        self._equality.close()
        self._equality = None

    def rebuild(self) -> None:
        """Goes on after the world lost ranks. Collective."""
        if self._equality is not None:
            self._equality.abandon()
            self._equality = DelayedEquality(self.world.comm) if self.world.size > 1 else None
        self._step, self._sum = 0, None

    def _compare(self, equality: DelayedEquality) -> None:
        """Looks at what was sent before, and sends what was summed up since on its way. Collective."""
        if equality.differ():
            self._look_closely()
        elif self._sum is not None:
            self._given = _read(*self._sum), self._summed
            equality.give(self._given[0])
        self._sum = None

    def _tensors(self) -> dict[str, Tensor]:
        return replicated(list(self.model.named_parameters()), self.optimizer)

    def _cut(self) -> None:
        """What there is may change in the course of training, as optimizers make their state when they need it."""
        tensors = list(self._tensors().values())
        num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        self._parts = cut(tensors, max(1, min(self.every_steps, num_bytes // LEAST_PART_BYTES)))

    def _look_closely(self) -> None:
        """Finds out what differs where, and stops or heals. Collective."""
        tensors = self._tensors()
        lines = [f"{name}: {tuple(tensor.shape)}, {tensor.dtype}" for name, tensor in tensors.items()]
        check_same(self.world, lines, "parameters and optimizer state")
        sums = [int(sum_of_bits([Piece(tensor, 0, tensor.numel())])) for tensor in tensors.values()]
        found = find_strays(list(tensors), self.world.comm.allgather(sums))
        if not found:
            self._look_back()
            return
        text = (
            f"{describe(found[0], tensors[found[0].name], self.world)} ({len(found)} of {len(tensors)} tensors differ)"
        )
        if self.on_mismatch == "stop" or any(strays.root is None for strays in found):
            self._stop(text)
        for strays in found:
            heal(strays, tensors[strays.name], self.world)
        text += ". They now hold what the majority does, and training goes on (on_mismatch = heal)."
        log.info("%s", text)
        self.world.say(text)

    def _look_back(self) -> None:
        """All is equal again: an optimizer in shards gives all ranks what one has, spoilt or not. Collective."""
        value, pieces = self._given
        found = find_strays(
            [_names(pieces, self._tensors())], [[of_rank] for of_rank in self.world.comm.allgather(value)]
        )
        if not found or not isinstance(self.optimizer, ShardedOptimizer):
            self.world.say("parameters differed between ranks a step ago, and do so no more")
            return
        strays = found[0]
        is_spoilt = strays.root is None or any(self.optimizer.owns_any(rank, pieces) for rank in strays.ranks)
        text = f"{describe_past(strays, self.world)}, before the last step of the optimizer"
        if self.on_mismatch == "stop" or is_spoilt:
            self._stop(f"{text}, which has given all ranks what one had")
        self.world.say(f"{text}, which has given them what the others had. Training goes on (on_mismatch = heal).")

    def _stop(self, text: str) -> None:
        advice = "Look for faulty memory there, and continue from a checkpoint made before."
        error = MismatchError(f"{text}. {advice}")
        share_error(self.world.comm, error, "found by comparing parameters and optimizer state over ranks")


def _names(pieces: list[Piece], tensors: dict[str, Tensor]) -> str:
    """What pieces are of, in words."""
    pointers = {piece.tensor.data_ptr() for piece in pieces}
    names = [name for name, tensor in tensors.items() if tensor.data_ptr() in pointers]
    return f"one of {some_of(names)}" if len(names) > 1 else some_of(names)


def _read_later(value: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """A number on its way from a GPU, and when it is here; nobody waits for it."""
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
