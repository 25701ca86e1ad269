"""Candidates in, the fastest of them here out, by trying each on a small bucket at start. Collective throughout.

Short on purpose: what matters is which of a few ways is several times faster than another, not the last percent.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from mpidp.reduce.buckets import Buckets
from mpidp.reduce.options import PIECE_BYTES, ReducerOptions
from mpidp.reduce.reducer import REDUCERS
from mpidp.world.world import World

# 4 MiB take about 50 ms over 1 Gbit/s and are well beyond every cache-line effect of small messages.
SAMPLE_BYTES = 4 << 20
BUDGET_S = 0.4
MOST_REPEATS = 8
PIECES = (PIECE_BYTES, 4 * PIECE_BYTES, PIECE_BYTES // 4)


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
