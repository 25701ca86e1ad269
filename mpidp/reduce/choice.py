"""The reducers by name, with the simple ones, and the choice of one.

The choice is a rule on facts, so that every start of a job chooses the same. Of the simple reducers `naive` is the
specification of the others, and `null` reduces nothing, for one rank and for measurements.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mpidp.errors import LaunchError
from mpidp.reduce.buckets import Bucket, Reducer
from mpidp.reduce.node import NodeReducer
from mpidp.reduce.staged import StagedReducer
from mpidp.reduce.transport import COMM_DTYPES, ReducerOptions, Transport
from mpidp.world.world import World


class NaiveReducer(Reducer):
    """Reduces each gradient by a call of its own."""

    def __init__(self, world: World, options: ReducerOptions):
        super().__init__(world, options)
        self._transport = Transport.of_all(world, options)

    def mean(self, bucket: Bucket) -> None:
        """One Allreduce a slot, then one for the flags. Collective."""
        for slot in bucket.layout.slots:
            self._transport.mean(bucket.flat[slot.offset : slot.offset + slot.numel])
        self._transport.mean(bucket.flags)


class FlatReducer(Reducer):
    """Gives each bucket's buffer to MPI without copying it."""

    def __init__(self, world: World, options: ReducerOptions):
        super().__init__(world, options)
        self._transport = Transport.of_all(world, options)

    def mean(self, bucket: Bucket) -> None:
        """One Allreduce (in pieces below MPI's limits). Collective."""
        self._transport.mean(bucket.flat)


class NullReducer(Reducer):
    """Does nothing, which is right for one rank; several ranks then train different models."""

    def mean(self, bucket: Bucket) -> None:
        """Leaves the local gradients as they are. Not collective."""


REDUCERS: dict[str, Callable[[World, ReducerOptions], Reducer]] = {
    "naive": NaiveReducer,
    "flat": FlatReducer,
    "node": NodeReducer,
    "staged": StagedReducer,
    "null": NullReducer,
}
NOT_SHARED = "memory that ranks share does not survive the death of one, messages do"


@dataclass(frozen=True)
class Choice:
    """A reducer, its options, and why it was chosen."""

    name: str
    options: ReducerOptions
    reason: str

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"

    def make(self, world: World) -> Reducer:
        """Makes the reducer. Collective."""
        return REDUCERS[self.name](world, self.options)


@dataclass(frozen=True)
class Facts:
    """What the choice depends on; the same on every rank."""

    size: int
    max_local_size: int
    device_type: str
    cuda_aware: bool
    aware_reason: str

    @staticmethod
    def of(world: World) -> Facts:
        """The facts of a world. Not collective."""
        aware = world.cuda_aware
        return Facts(world.size, world.topology.max_local_size, world.device.type, aware.aware, aware.reason)


def choose(name: str, facts: Facts, options: ReducerOptions) -> Choice:
    """The reducer to use for "auto", or a name in `REDUCERS`. Pure, so the same on every rank.

    Raises:
        LaunchError: an unknown name or comm_dtype, or a reducer that cannot work here.
    """
    if options.comm_dtype not in COMM_DTYPES:
        raise LaunchError(f"comm_dtype {options.comm_dtype!r} is unknown; allowed are {', '.join(COMM_DTYPES)}")
    if name == "auto":
        name, reason = _automatic(facts, options)
    else:
        reason = "as asked"
        _check_possible(name, facts)
        if name == "node" and not options.share_memory:
            name, reason = "flat", NOT_SHARED
    if name == "staged" and options.error_feedback:
        raise LaunchError(
            "error_feedback is not there for reducer 'staged', which rounds on the device: use a CUDA-aware MPI with "
            "reducer 'flat', or leave it out"
        )
    return Choice(name, options, reason)


def wants_overlap(world: World, choice: Choice) -> bool:
    """Whether to reduce while backward runs, when the user leaves it open; the same on every rank. Collective.

    It helps where a reduction waits for a network or a device. On the cores of one node it would compete with
    backward for them.
    """
    waits = world.num_nodes > 1 or world.device.type == "cuda"
    return choice.name != "null" and waits and world.all(world.threads_may_call)


def _automatic(facts: Facts, options: ReducerOptions) -> tuple[str, str]:
    """The name of the reducer for "auto", and the reason."""
    if facts.size == 1:
        return "null", "one rank has nothing to reduce"
    if facts.device_type == "cuda":
        if facts.cuda_aware:
            return "flat", f"MPI takes device memory: {facts.aware_reason}"
        return "staged", f"through host memory: {facts.aware_reason}"
    if not options.share_memory:
        return "flat", NOT_SHARED
    if facts.max_local_size > 1:
        return "node", "ranks of a node share memory"
    return "flat", "no two ranks are on one node"


def _check_possible(name: str, facts: Facts) -> None:
    if name not in REDUCERS:
        raise LaunchError(f"reducer {name!r} is unknown; allowed are auto, {', '.join(REDUCERS)}")
    if name in ("flat", "naive") and facts.device_type == "cuda" and not facts.cuda_aware:
        raise LaunchError(
            f"reducer {name!r} gives device memory to MPI, and this MPI must not get it: {facts.aware_reason}. "
            f"Use reducer 'auto' or 'staged', or a CUDA-aware MPI."
        )
    if name == "node" and facts.device_type == "cuda":
        raise LaunchError("reducer 'node' is for gradients in host memory: use 'auto', or 'staged', which sums there")
