"""Buffer sizes and names enter, rows with the time and bandwidth of each reduction leave.

Every rank starts with its own multiple of one pattern of small integers: their sum and mean are exact in float32
whatever the order of summation, so the result of each side is held against arithmetic before it is timed.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from mpidp.errors import LaunchError, MpidpError
from mpidp.reduce.buckets import Buckets
from mpidp.reduce.choice import REDUCERS, Facts, choose
from mpidp.reduce.reducer import Reducer, ReducerOptions
from mpidp.tools.bench.baselines import gloo_sum
from mpidp.tools.bench.options import BUFFER_ITEMSIZE, AllreduceOptions
from mpidp.tools.bench.report import Row
from mpidp.tools.bench.timing import Side, measure
from mpidp.tools.bench.variant import parse_variant
from mpidp.world.mpi import MPI
from mpidp.world.world import World

NAMES = ("auto", *REDUCERS, "mpi", "copy")
COLUMNS = {
    "bytes": ("bytes", 1),
    "median ms": ("median_s", 1e3),
    "min ms": ("min_s", 1e3),
    "max ms": ("max_s", 1e3),
    "GB/s": ("algorithm_bytes_per_s", 1e-9),
    "bus GB/s": ("bus_bytes_per_s", 1e-9),
}

PATTERN_LENGTH = 7  # not a power of two, so that no two slices of a buffer are alike
RELATIVE_TOLERANCE = 1e-6
# A call of microseconds is timed several at a time: as many as move about this much, and no more than so many.
REPEAT_BYTES, MAX_CALLS = 1 << 20, 20


def allreduce_rows(options: AllreduceOptions, world: World) -> list[Row]:
    """Measures every size. Collective; inside `baselines.gloo` when that is asked for.

    Raises:
        MpidpError: a wrong result; a side that cannot work here.
    """
    return [row for num_bytes in options.sizes for row in _rows(options, num_bytes, world)]


def _rows(options: AllreduceOptions, num_bytes: int, world: World) -> list[Row]:
    contest = _Contest(num_bytes, world)
    sides = [contest.side(name) for name in options.reducers]
    if options.against == "gloo":
        sides.append(contest.sum_side("gloo", gloo_sum))
    times = measure(world, sides, options.repeats)
    contest.close()
    return [_row(side, times[side.name].summary(), contest) for side in sides]


def _row(side: Side, summary: dict[str, float], contest: "_Contest") -> Row:
    size = contest.world.size
    chosen = contest.chosen.get(side.name)
    crosses = side.name != "copy" and chosen != "null"
    bytes_per_s = contest.num_bytes / summary["median_s"]
    return {
        "name": side.name,
        "chosen": chosen,
        "bytes": contest.num_bytes,
        "calls": side.calls,
        **summary,
        "algorithm_bytes_per_s": bytes_per_s,
        # Each byte crosses a link 2 (n - 1) / n times in an ideal allreduce.
        "bus_bytes_per_s": bytes_per_s * 2 * (size - 1) / size if crosses else None,
    }


class _Contest:
    """The sides that compete at one buffer size, each with a buffer of its own."""

    def __init__(self, num_bytes: int, world: World):
        self.world = world
        self.num_bytes = num_bytes
        numel = num_bytes // BUFFER_ITEMSIZE
        self.pattern = (torch.arange(numel, device=world.device) % PATTERN_LENGTH + 1).float()
        self.calls = min(MAX_CALLS, max(1, REPEAT_BYTES // num_bytes))
        self.chosen: dict[str, str] = {}
        self._reducers: list[Reducer] = []

    def close(self) -> None:
        """Gives back the buckets' memory, when nobody looks at a side any more. Collective."""
        for reducer in self._reducers:
            reducer.close()

    def side(self, name: str) -> Side:
        """The side that `--reducers` calls `name`. Collective."""
        if name == "copy":
            return self._copy_side()
        if name == "mpi":
            return self.sum_side("mpi", self._mpi_sum())
        return self._reducer_side(name)

    def sum_side(self, name: str, reduce_sum: Callable[[Tensor], None]) -> Side:
        """A plain in-place sum without the division."""
        buffer = torch.empty_like(self.pattern)
        factor = self.world.size * (self.world.size + 1) / 2
        return self._make(name, buffer, partial(self._fill, buffer), partial(reduce_sum, buffer), factor)

    def _reducer_side(self, name: str) -> Side:
        variant = parse_variant(name, NAMES)
        choice = choose(variant.reducer, Facts.of(self.world), ReducerOptions(wire=variant.wire))
        reducer = choice.make(self.world)
        self._reducers.append(reducer)
        parameter = nn.Parameter(torch.zeros_like(self.pattern))
        buckets = Buckets([parameter], self.num_bytes, reducer.allocate)
        (bucket,) = buckets.buckets
        gradient = buckets.view(0)
        self.chosen[name] = choice.name

        def prepare() -> None:
            buckets.expect(0)
            self._fill(gradient)
            buckets.pack(bucket)

        local = choice.name == "null"  # which leaves every rank its own
        factor = self.world.rank + 1 if local else (self.world.size + 1) / 2
        return self._make(name, gradient, prepare, partial(reducer.mean, bucket), factor)

    def _copy_side(self) -> Side:
        source, target = torch.empty_like(self.pattern), torch.empty_like(self.pattern)
        return self._make(
            "copy", target, partial(self._fill, source), partial(target.copy_, source), self.world.rank + 1
        )

    def _mpi_sum(self) -> Callable[[Tensor], None]:
        aware = self.world.cuda_aware
        if self.world.device.type == "cuda" and not aware.aware:
            raise LaunchError(f"--reducers=mpi gives device memory to MPI, which must not get it here: {aware.reason}.")

        def reduce_sum(buffer: Tensor) -> None:
            array = buffer if buffer.is_cuda else buffer.numpy()
            self.world.comm.Allreduce(MPI.IN_PLACE, array, op=MPI.SUM)

        return reduce_sum

    def _make(
        self, name: str, result: Tensor, prepare: Callable[[], None], run: Callable[[], object], factor: float
    ) -> Side:
        """A side whose result must be `factor` times the pattern."""
        return Side(name, prepare, run, partial(self._check, name, result, factor), self.calls)

    def _fill(self, buffer: Tensor) -> None:
        torch.mul(self.pattern, self.world.rank + 1, out=buffer)

    def _check(self, name: str, result: Tensor, factor: float) -> None:
        expected = self.pattern * factor
        wrong = ~torch.isclose(result, expected, rtol=RELATIVE_TOLERANCE, atol=0)
        if wrong.any():
            first = int(wrong.nonzero()[0])
            raise MpidpError(
                f"{name}, {self.num_bytes} bytes: {int(wrong.sum())} of {wrong.numel()} elements are wrong; element "
                f"{first} is {result[first].item()}, expected {expected[first].item()}. Nothing was timed: times of "
                f"wrong results mean nothing. Check this MPI library, or choose another reducer."
            )
