"""A name and the facts of this world in, a reducer out.

A reducer replaces each bucket by its mean over the ranks. The strategies differ only in how; `naive` is the
specification that the others are tested against.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from mpidp.errors import LaunchError
from mpidp.reduce.buckets import Bucket
from mpidp.reduce.buffers import Allocate
from mpidp.reduce.flat import FlatReducer
from mpidp.reduce.naive import NaiveReducer
from mpidp.reduce.node import NodeReducer
from mpidp.reduce.null import NullReducer
from mpidp.reduce.options import DEFAULT_OPTIONS, ReducerOptions
from mpidp.reduce.staged import StagedReducer
from mpidp.world.world import World


class Reducer(Protocol):
    """The strategy that sums buckets over ranks."""

    @property
    def name(self) -> str:
        """The name by which users choose it."""

    @property
    def allocate(self) -> Allocate:
        """Where the memory of the buckets comes from, of the kind that this strategy likes. May be collective."""

    def mean(self, bucket: Bucket) -> None:
        """Replaces `bucket.flat` by its mean over the ranks, in place. Collective, in the same order on every rank.

        When it returns, work queued on the current stream afterwards sees the mean.
        """


@dataclass(frozen=True)
class Choice:
    """A reducer's name and why it was taken."""

    name: str
    reason: str


REDUCERS: dict[str, Callable[[World, ReducerOptions], Reducer]] = {
    "naive": NaiveReducer,
    "flat": FlatReducer,
    "node": NodeReducer,
    "staged": StagedReducer,
    "null": NullReducer,
}


def choose(name: str, size: int, device_type: str, cuda_aware: bool, aware_reason: str) -> Choice:
    """Which reducer to use; pure.

    Args:
        name: what the user asked for; "auto" leaves it to the facts.
        size: number of ranks.
        device_type: "cpu" or "cuda", where the gradients are.
        cuda_aware: whether MPI may be given device memory.
        aware_reason: why, for the message.

    Raises:
        LaunchError: an unknown name, or one that cannot work here.
    """
    if name == "auto":
        if size == 1:
            return Choice("null", "one rank has nothing to reduce")
        if device_type == "cpu":
            return Choice("flat", "gradients are in host memory")
        if cuda_aware:
            return Choice("flat", f"MPI takes device memory: {aware_reason}")
        return Choice("staged", f"through host memory, {aware_reason}")
    if name not in REDUCERS:
        raise LaunchError(f"reducer {name!r} is unknown; allowed are auto, {', '.join(REDUCERS)}")
    if name in ("flat", "naive") and device_type == "cuda" and not cuda_aware:
        raise LaunchError(
            f"reducer {name!r} gives device memory to MPI, and this MPI must not get it: {aware_reason}. "
            f"Use reducer 'auto' or 'staged', or a CUDA-aware MPI."
        )
    return Choice(name, "as asked")


def make_reducer(name: str, world: World, options: ReducerOptions = DEFAULT_OPTIONS) -> tuple[Reducer, Choice]:
    """The reducer of that name for this world, and why it was taken. Collective."""
    choice = choose(name, world.size, world.device.type, world.cuda_aware.aware, world.cuda_aware.reason)
    return REDUCERS[choice.name](world, options), choice
