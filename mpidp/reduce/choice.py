"""Which reducer is used, and why. `auto` measures at start, shortly.

What matters is which of a few ways is several times faster than another, not the last percent.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from mpidp.errors import LaunchError
from mpidp.reduce.buckets import Buckets
from mpidp.reduce.exchange import WIRES
from mpidp.reduce.node import NodeReducer
from mpidp.reduce.reducer import PIECE_BYTES, Reducer, ReducerOptions
from mpidp.reduce.simple import FlatReducer, NaiveReducer, NullReducer
from mpidp.reduce.staged import StagedReducer
from mpidp.world.world import World

# 4 MiB take about 50 ms over 1 Gbit/s and are well beyond every cache-line effect of small messages.
SAMPLE_BYTES = 4 << 20
BUDGET_S = 0.4
MOST_REPEATS = 8
PIECES = (PIECE_BYTES, 4 * PIECE_BYTES, PIECE_BYTES // 4)

REDUCERS: dict[str, Callable[[World, ReducerOptions], Reducer]] = {
    "naive": NaiveReducer,
    "flat": FlatReducer,
    "node": NodeReducer,
    "staged": StagedReducer,
    "null": NullReducer,
}


@dataclass(frozen=True)
class Candidate:
    """One way to reduce."""

    name: str
    options: ReducerOptions

    def __str__(self) -> str:
        piece_bytes = self.options.piece_bytes
        return f"{self.name} ({piece_bytes >> 10:,} KiB a call)" if piece_bytes else self.name


@dataclass(frozen=True)
class Timing:
    """How long a candidate took for the sample, on the slowest rank."""

    candidate: Candidate
    seconds: float


def candidates(num_nodes: int, max_local_size: int, options: ReducerOptions) -> list[Candidate]:
    """What is worth trying for gradients in host memory, the likeliest first; pure.

    The size of pieces is varied where they cross a network, unless the user has set it.
    """
    names = ["node", "flat"] if max_local_size > 1 else ["flat"]
    sizes = PIECES if num_nodes > 1 and not options.piece_bytes else (options.piece_bytes,)
    return [Candidate(name, replace(options, piece_bytes=size)) for name in names for size in sizes]


def measure(world: World, tried: Sequence[Candidate], num_bytes: int, budget_s: float = BUDGET_S) -> list[Timing]:
    """Times the candidates in order until the budget is spent; the same list on every rank. Collective.

    Args:
        world: the ranks.
        tried: at least one candidate.
        num_bytes: bytes of the model's gradients; the sample is no larger.
        budget_s: after this many seconds no further candidate is begun.
    """
    numel = max(1, min(num_bytes, SAMPLE_BYTES) // 4)
    timings: list[Timing] = []
    start = time.perf_counter()
    for candidate in tried:
        timings.append(Timing(candidate, _time(world, candidate, numel, budget_s / len(tried))))
        if world.any(time.perf_counter() - start > budget_s):
            break
    return timings


def _time(world: World, candidate: Candidate, numel: int, share_s: float) -> float:
    """Seconds of the fastest of a few reductions, each as slow as its slowest rank; the first one warms up."""
    reducer = REDUCERS[candidate.name](world, candidate.options)
    buckets = Buckets([nn.Parameter(torch.zeros(numel))], 4 * numel, reducer.allocate)
    buckets.expect(0)
    bucket = buckets.buckets[0]
    buckets.pack(bucket)
    seconds: list[float] = []
    # What all ranks know decides when to stop: the times of the slowest.
    while len(seconds) < 2 or (len(seconds) < MOST_REPEATS and sum(seconds) < share_s):
        world.comm.Barrier()
        begin = time.perf_counter()
        reducer.mean(bucket)
        seconds.append(max(world.comm.allgather(time.perf_counter() - begin)))
    del bucket, buckets
    reducer.close()
    return min(seconds[1:])


# How many times slower than the fastest the first candidate must be to lose its place.
CLEARLY = 1.5


@dataclass(frozen=True)
class Choice:
    """A reducer, how it is to work, and why it was taken."""

    name: str
    options: ReducerOptions
    reason: str

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


@dataclass(frozen=True)
class Facts:
    """What the choice depends on."""

    size: int
    num_nodes: int
    max_local_size: int
    device_type: str
    cuda_aware: bool
    aware_reason: str


def facts_of(world: World) -> Facts:
    """The facts of a world; the same on every rank."""
    topology, aware = world.topology, world.cuda_aware
    return Facts(world.size, topology.num_nodes, topology.max_local_size, world.device.type, aware.aware, aware.reason)


def choose(name: str, facts: Facts, options: ReducerOptions) -> Choice | None:
    """The choice where the facts decide it; None where "auto" has to measure. Pure.

    Raises:
        LaunchError: an unknown name or wire, or a reducer that cannot work here.
    """
    if options.wire not in WIRES:
        raise LaunchError(f"wire {options.wire!r} is unknown; allowed are {', '.join(WIRES)}")
    if name == "auto":
        choice = _choose_automatically(facts, options)
        if choice is not None:
            _check_feedback(choice)
        return choice
    if name not in REDUCERS:
        raise LaunchError(f"reducer {name!r} is unknown; allowed are auto, {', '.join(REDUCERS)}")
    if name in ("flat", "naive") and facts.device_type == "cuda" and not facts.cuda_aware:
        raise LaunchError(
            f"reducer {name!r} gives device memory to MPI, and this MPI must not get it: {facts.aware_reason}. "
            f"Use reducer 'auto' or 'staged', or a CUDA-aware MPI."
        )
    if name == "node" and facts.device_type == "cuda":
        raise LaunchError("reducer 'node' is for gradients in host memory: use 'auto', or 'staged', which sums there")
    if name == "node" and not options.share_memory:
        return _without_windows(options)
    choice = Choice(name, options, "as asked")
    _check_feedback(choice)
    return choice


def _without_windows(options: ReducerOptions) -> Choice:
    return Choice("flat", options, "memory that ranks share does not survive the death of one, messages do")


def _check_feedback(choice: Choice) -> None:
    if choice.name == "staged" and choice.options.error_feedback:
        raise LaunchError(
            "error_feedback is not there for reducer 'staged', which rounds on the device: use a CUDA-aware MPI with "
            "reducer 'flat', or leave it out"
        )


def decide(world: World, name: str, options: ReducerOptions, num_bytes: int) -> Choice:
    """The choice, measured if need be; the same on every rank. Collective.

    Args:
        world: the ranks.
        name: what the user asked for.
        options: how the reducer is to work.
        num_bytes: bytes of the model's gradients.
    """
    facts = facts_of(world)
    choice = choose(name, facts, options)
    if choice is not None:
        return choice
    tried = candidates(facts.num_nodes, facts.max_local_size, options)
    return pick(measure(world, tried, num_bytes))


def pick(timings: list[Timing]) -> Choice:
    """The first candidate, unless another is clearly faster; with the measurement as its reason. Pure.

    Ways of reducing add in different orders. Runs on equal machines should add in the same order, and not in that
    which the noise of a short measurement happened to favour.
    """
    best = min(timings, key=lambda timing: timing.seconds)
    if timings[0].seconds < CLEARLY * best.seconds:
        best = timings[0]
    others = [f"{timing.seconds * 1e3:.1f} ms {timing.candidate}" for timing in timings if timing is not best]
    against = f", against {', '.join(others)}" if others else ""
    reason = f"{best.seconds * 1e3:.1f} ms for a sample{against}"
    return Choice(best.candidate.name, best.candidate.options, reason)


def wants_overlap(world: World, choice: Choice) -> bool:
    """Whether to reduce while backward runs, when the user leaves it open; the same on every rank. Collective.

    It helps where a reduction waits for a network or a device. On the cores of one node it would compete with
    backward for them.
    """
    waits = world.num_nodes > 1 or world.device.type == "cuda"
    return choice.name != "null" and waits and world.all(world.threads_may_call)


def make_reducer(world: World, choice: Choice) -> Reducer:
    """The reducer chosen. Collective."""
    return REDUCERS[choice.name](world, choice.options)


def _choose_automatically(facts: Facts, options: ReducerOptions) -> Choice | None:
    if facts.size == 1:
        return Choice("null", options, "one rank has nothing to reduce")
    if facts.device_type == "cpu" and not options.share_memory:
        return _without_windows(options)
    if facts.device_type == "cpu":
        return None
    if facts.cuda_aware:
        return Choice("flat", options, f"MPI takes device memory: {facts.aware_reason}")
    return Choice("staged", options, f"through host memory: {facts.aware_reason}")
