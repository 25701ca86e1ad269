"""`mpidp bench allreduce`: time and bandwidth of reductions, compared with MPI's Allreduce and Gloo.

Every rank starts with its own multiple of one pattern of small integers: their sum and mean are exact in float32
whatever the order of summation, so the result of each side is held against arithmetic before it is timed.
"""

import os
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from ipaddress import ip_address

import torch
import torch.distributed
from torch import Tensor, nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but torch's types leave it out
from torch.nn.parallel import DistributedDataParallel

from mpidp.errors import LaunchError, MpidpError
from mpidp.reduce.buckets import Buckets, Reducer
from mpidp.reduce.choice import REDUCERS, Facts, choose
from mpidp.reduce.transport import ReducerOptions
from mpidp.tools.bench.options import BUFFER_ITEMSIZE, AllreduceOptions, parse_variant
from mpidp.tools.bench.timing import Row, Side, Times, measure, report
from mpidp.world.mpi import MPI
from mpidp.world.start import init
from mpidp.world.world import World

TIMEOUT = timedelta(seconds=300)
LOOPBACK = "127.0.0.1"
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


@contextmanager
def gloo(world: World) -> Iterator[None]:
    """A block in which torch.distributed's default group is Gloo over all ranks. Entering is collective.

    Gloo chooses its network interface itself; GLOO_SOCKET_IFNAME overrides it.

    Raises:
        LaunchError: several nodes, and rank 0's address cannot be told.
    """
    address = world.call_on_root(lambda: LOOPBACK if world.num_nodes == 1 else root_address(world.host, os.environ))
    torch.distributed.init_process_group(
        "gloo", store=_store(world, address), rank=world.rank, world_size=world.size, timeout=TIMEOUT
    )
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def ddp(module: nn.Module, world: World) -> nn.Module:
    """The module in torch's DistributedDataParallel with its defaults. Collective, inside `gloo`."""
    return DistributedDataParallel(module, device_ids=[world.device] if world.device.type == "cuda" else None)


def root_address(host: str, environment: Mapping[str, str]) -> str:
    """Where other nodes reach this host, which is rank 0's: MASTER_ADDR, else what its name stands for.

    Raises:
        LaunchError: the name stands for nothing, or for the host's own loopback as some distributions have it.
    """
    if "MASTER_ADDR" in environment:
        return environment["MASTER_ADDR"]
    try:
        address = socket.gethostbyname(host)
    except OSError as error:
        found = f"its name cannot be resolved ({error})"
    else:
        if not ip_address(address).is_loopback:
            return address
        found = f"there its name stands for {address}"
    raise LaunchError(
        f"torch.distributed on several nodes needs the address of rank 0's node {host}, and {found}: "
        f"set MASTER_ADDR to an address of {host} that all nodes reach."
    )


def _store(world: World, address: str) -> TCPStore:
    """The key-value store through which Gloo's ranks find each other, served by rank 0 on a free port."""

    def connect(port: int) -> TCPStore:
        is_master = world.rank == 0
        return TCPStore(address, port, world.size, is_master, TIMEOUT, wait_for_workers=False)

    store = connect(0) if world.rank == 0 else None
    port = world.broadcast(None if store is None else store.port)
    return connect(port) if store is None else store


def bench_allreduce(options: AllreduceOptions) -> str:
    """Time reductions on all ranks and return the report: JSON in one line, or a table. Collective.

    Raises:
        ConfigError: an unknown name, before MPI is started.
        MpidpError: a side whose results are wrong, or that cannot work here.
    """
    for name in options.reducers:
        parse_variant(name, NAMES)
    world = init()
    with nullcontext() if options.against == "none" else gloo(world):
        rows = allreduce_rows(options, world)
    return report("allreduce", options, world, rows, COLUMNS)


def allreduce_rows(options: AllreduceOptions, world: World, device: torch.device | None = None) -> list[Row]:
    """Measure every size. Collective; inside `gloo` when that is asked for.

    Args:
        options: what to measure.
        world: the ranks.
        device: where the buffers are; None for each rank's own device.

    Raises:
        MpidpError: a wrong result; a side that cannot work here.
    """
    names = [*options.reducers, *(["gloo"] if options.against == "gloo" else [])]
    rows = []
    for num_bytes in options.sizes:
        contest = _Contest(num_bytes, world, device or world.device)
        sides = [contest.side(name) for name in names]
        times = measure(world, sides, options.repeats)
        contest.close()
        rows += [contest.row(side, times[side.name]) for side in sides]
    return rows


class _Contest:
    """The sides that compete at one buffer size, each with a buffer of its own."""

    def __init__(self, num_bytes: int, world: World, device: torch.device):
        self._world, self._num_bytes = world, num_bytes
        self._pattern = (torch.arange(num_bytes // BUFFER_ITEMSIZE, device=device) % PATTERN_LENGTH + 1).float()
        self._reducers: dict[str, Reducer] = {}
        self._chosen: dict[str, str] = {}

    def close(self) -> None:
        """Free the memory of the buckets; no side may be used afterwards. Collective."""
        for reducer in self._reducers.values():
            reducer.close()

    def side(self, name: str) -> Side:
        """The side that `--reducers` or `--against` calls `name`. Collective."""
        world, buffer = self._world, torch.empty_like(self._pattern)
        own, total = world.rank + 1, world.size * (world.size + 1) / 2
        if name == "copy":
            source = torch.empty_like(buffer)
            return self._side(name, buffer, partial(self._fill, source), partial(buffer.copy_, source), own)
        if name not in ("mpi", "gloo"):
            return self._reducer_side(name)
        if name == "mpi" and buffer.is_cuda and not world.cuda_aware.aware:
            reason = world.cuda_aware.reason
            raise LaunchError(f"--reducers=mpi gives device memory to MPI, which must not get it here: {reason}.")
        reduce_sum = self._mpi_sum if name == "mpi" else torch.distributed.all_reduce
        return self._side(name, buffer, partial(self._fill, buffer), partial(reduce_sum, buffer), total)

    def row(self, side: Side, times: Times) -> Row:
        """What was measured of a side."""
        summary, size, chosen = times.summary(), self._world.size, self._chosen.get(side.name)
        crosses = side.name != "copy" and chosen != "null"
        bytes_per_s = self._num_bytes / summary["median_s"]
        return {
            "name": side.name,
            "chosen": chosen,
            "bytes": self._num_bytes,
            "calls": side.calls,
            **summary,
            "algorithm_bytes_per_s": bytes_per_s,
            # Each byte crosses a link 2 (n - 1) / n times in an ideal allreduce.
            "bus_bytes_per_s": bytes_per_s * 2 * (size - 1) / size if crosses else None,
        }

    def _reducer_side(self, name: str) -> Side:
        variant = parse_variant(name, NAMES)
        choice = choose(variant.reducer, Facts.of(self._world), ReducerOptions(comm_dtype=variant.comm_dtype))
        self._chosen[name] = choice.name
        self._reducers[name] = reducer = choice.make(self._world)
        buckets = Buckets([nn.Parameter(torch.zeros_like(self._pattern))], self._num_bytes, reducer.allocate)
        (bucket,) = buckets.buckets
        gradient = buckets.view(0)

        def prepare() -> None:
            buckets.expect(0)
            self._fill(gradient)
            buckets.pack(bucket)

        local = choice.name == "null"  # which leaves every rank its own
        factor = self._world.rank + 1 if local else (self._world.size + 1) / 2
        return self._side(name, gradient, prepare, partial(reducer.mean, bucket), factor)

    def _side(
        self, name: str, result: Tensor, prepare: Callable[[], None], run: Callable[[], object], factor: float
    ) -> Side:
        """A side whose result must be `factor` times the pattern."""
        calls = min(MAX_CALLS, max(1, REPEAT_BYTES // self._num_bytes))
        return Side(name, prepare, run, partial(self._check, name, result, factor), calls)

    def _mpi_sum(self, buffer: Tensor) -> None:
        self._world.comm.Allreduce(MPI.IN_PLACE, buffer if buffer.is_cuda else buffer.numpy(), op=MPI.SUM)

    def _fill(self, buffer: Tensor) -> None:
        torch.mul(self._pattern, self._world.rank + 1, out=buffer)

    def _check(self, name: str, result: Tensor, factor: float) -> None:
        expected = self._pattern * factor
        wrong = ~torch.isclose(result, expected, rtol=RELATIVE_TOLERANCE, atol=0)
        if wrong.any():
            first = int(wrong.nonzero()[0])
            raise MpidpError(
                f"{name}, {self._num_bytes} bytes: {int(wrong.sum())} of {wrong.numel()} elements are wrong; element "
                f"{first} is {result[first].item()}, expected {expected[first].item()}. Nothing was timed: times of "
                f"wrong results mean nothing. Check this MPI library, or choose another reducer."
            )
