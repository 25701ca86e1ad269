"""The class `World`: the ranks of a job seen from one of them, with a few collective helpers.

Every method that says "collective" must be called by all ranks, in the same order. MPI is imported where several ranks
call it, so that a process that is alone needs none.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor

from mpidp.errors import DataError, LaunchError, marked
from mpidp.world.launch import current_world, launch_facts
from mpidp.world.log import job_log
from mpidp.world.status import Status, status

if TYPE_CHECKING:
    from mpidp.world.collectives import Rows
    from mpidp.world.device import Awareness
    from mpidp.world.exit import AbortGuard
    from mpidp.world.mpi import MPI, Topology
    from mpidp.world.watchdog import Watchdog

T = TypeVar("T")

POLL_S = 0.0005


class _OneRank:
    """The communicator of `World.alone()`, in place of MPI's: collectives return this process's own value."""

    rank, size = 0, 1

    def __repr__(self) -> str:
        return "no MPI"

    def allgather(self, obj: T) -> list[T]:
        return [obj]

    def gather(self, obj: T, root: int = 0) -> list[T]:
        return [obj]

    def bcast(self, obj: T, root: int = 0) -> T:
        return obj

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what Python's own protocols look for
            raise AttributeError(name)
        raise LaunchError(
            f"World.alone() has no MPI, so it has no {name}: it is for loaders and their batches. Call "
            f"world = mpidp.init() for one that trains."
        )


@dataclass(frozen=True)
class World:
    """The ranks of this job, seen from one of them: `mpidp.init()` makes it, or `World.alone()` for one process.

        world = mpidp.init()
        loader = mpidp.HDF5Loader("train.h5", ("x", "y"), global_batch=64)
        everywhere = world.mean(loss.item(), batch.size)

    Attributes:
        rank: number of this process, 0 to `size` - 1.
        size: how many processes there are.
        local_rank: number of this process among those on its node.
        local_size: how many there are on this node.
        node: number of this node; nodes are numbered by their lowest rank.
        num_nodes: how many nodes there are.
        host: name of this node.
        device: where this rank computes.
        cores: this rank's share of the cores it may run on.
        cuda_aware: whether MPI may be given this device's memory, and why.
        comm: mpidp's own duplicate of MPI.COMM_WORLD, or of what `init` was given; its traffic never mixes with the
            user's.
        node_comm: the ranks of this node.
        topology: the communicators that gradients are reduced on.
        guard: ends the job when this rank fails.
        watchdog: reports ranks that keep the others waiting; None where there is one rank.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    node: int
    num_nodes: int
    host: str
    device: torch.device
    cores: int
    cuda_aware: Awareness
    comm: MPI.Intracomm = field(repr=False)
    node_comm: MPI.Intracomm = field(repr=False)
    topology: Topology = field(repr=False)
    guard: AbortGuard = field(repr=False)
    watchdog: Watchdog | None = field(default=None, repr=False)

    @classmethod
    def alone(cls, device: torch.device | str = "cpu") -> World:
        """Return a world of this process alone, however it was started. Needs no MPI; not collective.

        For a loader of one process in a job of several, such as an evaluation by rank 0:

            loader = mpidp.HDF5Loader("validation.h5", ("x", "y"), 64, world=mpidp.World.alone())

        Args:
            device: the device of its batches.
        """
        none: Any = _OneRank()
        return cls(
            rank=0,
            size=1,
            local_rank=0,
            local_size=1,
            node=0,
            num_nodes=1,
            host=socket.gethostname(),
            device=torch.device(device),
            cores=len(os.sched_getaffinity(0)),
            cuda_aware=none,
            comm=none,
            node_comm=none,
            topology=none,
            guard=none,
        )

    @property
    def status(self) -> Status:
        """What this process is doing: step and phase, for messages and for the watchdog."""
        return status

    @property
    def threads_may_call(self) -> bool:
        """Whether MPI takes calls from several threads at once (MPI_THREAD_MULTIPLE)."""
        from mpidp.world.mpi import MPI

        return bool(MPI.Query_thread() == MPI.THREAD_MULTIPLE)

    def any(self, flag: bool) -> bool:
        """Return whether the flag is set on some rank; the same answer on all. Collective."""
        return bool(self._reduced(self.comm, bool(flag), "LOR"))

    def all(self, flag: bool) -> bool:
        """Return whether the flag is set on every rank; the same answer on all. Collective."""
        return bool(self._reduced(self.comm, bool(flag), "LAND"))

    def sum(self, values: Sequence[float]) -> list[float]:
        """Return the sums over ranks, element by element, in float64. Collective.

        Args:
            values: numbers, equally many on every rank.
        """
        sums = torch.tensor(list(values), dtype=torch.float64)
        if self.size > 1:
            from mpidp.world.mpi import MPI

            self.comm.Allreduce(MPI.IN_PLACE, sums.numpy(), op=MPI.SUM)
        return cast(list[float], sums.tolist())

    def sum_on_node(self, value: int) -> int:
        """Return the sum of an integer over the ranks of this node. Collective on the node."""
        return self._reduced(self.node_comm, value, "SUM")

    def _reduced(self, comm: MPI.Intracomm, value: int, operation: str) -> int:
        if comm.size == 1:
            return value
        from mpidp.world.mpi import MPI, reduced

        return reduced(comm, value, getattr(MPI, operation))

    def mean(self, value: float, weight: float = 1.0) -> float:
        """Return the weighted mean over ranks, in float64. Collective.

        Args:
            value: of this rank.
            weight: of this value, such as `batch.size`; with 0 it adds nothing, even if it is NaN.

        Raises:
            ValueError: the weights of all ranks sum to 0.
        """
        total, weights = self.sum([value * weight if weight else 0.0, weight])
        if weights == 0:
            raise ValueError("mean over ranks whose weights sum to 0: no rank has anything to average")
        return total / weights

    def weigh(self, loss: Tensor, count: int) -> Tensor:
        """Return `loss` scaled so that its plain mean over ranks is the mean over the `count`s of all ranks.

        Then gradients, which `DataParallel` averages over ranks, are those of the mean over the global batch.
        Collective: all ranks call it, once for each backward pass.

        Args:
            loss: scalar, the mean over `count` things here: samples, tokens, ...
            count: how many there are on this rank. Where it is 0 the loss may be NaN, or that of any other batch; the
                result is then 0 and gives parameters no gradient, though `backward` still passes all of them.

        Raises:
            DataError: a loss that is no scalar, or a negative count.
        """
        check_loss(loss)
        check_count(count)
        return weighed(loss, count, round(self.sum([count])[0]), self.size)

    def gather_rows(self, values: Tensor, rows: Rows, num_rows: int | None = None) -> Tensor:
        """Return what all ranks hold for rows of a data set, in the order of the rows, on every rank. Collective.

        With predictions of a whole pass, concatenated over its batches, this is what one process would have computed:

            outputs = world.gather_rows(torch.cat(outputs), np.concatenate(rows), len(loader.dataset))

        It takes the memory of the whole result on each rank: gather predicted classes rather than all scores.

        Args:
            values: shape (n, ...), any device and dtype; n may differ between ranks. Where n is 0, any empty tensor.
            rows: the n row numbers, such as `batch.indices`; each row on one rank, once.
            num_rows: how many rows must come in all; None for no such check.

        Returns:
            Shape (N, ...) on the CPU, without autograd: row i belongs to the i-th smallest row number.

        Raises:
            DataError: on every rank: rows that came twice or, of `num_rows`, not at all; values of unequal dtype or
                shape; n values for another number of rows.
        """
        from mpidp.world.collectives import gather_rows

        return gather_rows(self.comm, values, rows, num_rows)

    def broadcast(self, obj: T | None) -> T:
        """Return rank 0's object on every rank. Collective; for small objects, as it is pickled.

        Args:
            obj: what to send; read on rank 0 only.
        """
        return cast(T, self.comm.bcast(obj, root=0))

    def barrier(self, timeout_s: float | None = None) -> None:
        """Waits until every rank is here. Collective.

        It polls with short sleeps, so that waiting ranks leave the cores to the working ones.

        Args:
            timeout_s: how many seconds to wait at most; None for no limit.

        Raises:
            TimeoutError: after `timeout_s` seconds some rank was not here; the job should end then.
        """
        if self.size == 1:
            return
        request = self.comm.Ibarrier()
        start = time.monotonic()
        with status.waiting("barrier", self.size):
            while not request.Test():
                if timeout_s is not None and time.monotonic() - start > timeout_s:
                    raise TimeoutError(
                        f"barrier: rank {self.rank} on {self.host} waited {timeout_s} s for a rank that is not there"
                    )
                time.sleep(POLL_S)

    @contextmanager
    def raise_on_all_ranks(self, what: str) -> Iterator[None]:
        """A context manager: an exception in its block on any rank is raised on every rank. Collective, at its end.

        The block must not hold collectives that a failing rank would miss. All ranks raise the exception of the
        lowest failing rank, with a note that names that rank.

        Args:
            what: what the block does, for the note, e.g. "opening the data".
        """
        error: Exception | None = None
        try:
            yield
        except Exception as caught:
            error = caught
        note = f"on rank {self.rank} of {self.size} ({self.host}), {what}"
        if self.size > 1:
            from mpidp.world.collectives import share_error

            share_error(self.comm, error, note)
        elif error is not None:
            raise marked(error, note)

    def call_on_root(self, function: Callable[[], T]) -> T:
        """Calls a function on rank 0 and returns its result on every rank. Collective.

        Args:
            function: called on rank 0 only; its result is pickled.

        Raises:
            Exception: on all ranks, what the function raised.
        """
        result: T | None = None
        with self.raise_on_all_ranks("for all ranks"):
            if self.rank == 0:
                result = function()
        return self.broadcast(result)

    def log_once(self, text: str) -> None:
        """Logs a line once for the job: on rank 0, by the logger `mpidp`, at level INFO. Not collective."""
        if self.rank == 0:
            job_log.info("%s", text)


def resolve_world(world: World | None, what: str) -> World:
    """Return the world that `what` was given, else the one that `mpidp.init` made, else that of this process alone.

    Raises:
        LaunchError: none was given, the launcher started several processes, and `mpidp.init` was not called.
    """
    if world is not None:
        return world
    current = current_world()
    if current is not None:
        return current
    facts = launch_facts(os.environ)
    if (facts.size or 1) > 1:
        raise LaunchError(
            f"{what} was made before mpidp.init() in a job of {facts.size} processes ({facts.launcher}): each would "
            f"take all samples. Call world = mpidp.init() first, or give world=mpidp.World.alone() if each is to work "
            f"alone."
        )
    return World.alone()


def weighed(loss: Tensor, here: int, everywhere: int, size: int) -> Tensor:
    """Return `loss`, the mean over `here` things, scaled by its share; 0 without gradient where nothing is here."""
    if here == 0:
        return cast(Tensor, _NoGradient.apply(loss))  # type: ignore[no-untyped-call]
    # Bit for bit the user's own loss where there is nothing to scale.
    return loss if here * size == everywhere else loss * (here * size / everywhere)


def accumulate_only(loss: Tensor) -> Tensor:
    """Return `loss`, whose backward pass `DataParallel` then does not reduce: more is to come of the same sum."""
    return cast(Tensor, _Accumulate.apply(loss))  # type: ignore[no-untyped-call]


def check_loss(loss: Tensor) -> None:
    """Raise DataError for a loss that is no scalar."""
    if loss.dim() != 0:
        raise DataError(
            f"weigh was given a loss of shape {tuple(loss.shape)}; give the mean over the local samples, a scalar"
        )


def check_count(count: int) -> None:
    """Raise `DataError` for a negative count."""
    if count < 0:
        raise DataError(f"weigh was given a count of {count}; give the number of things the loss is a mean of")


class _NoGradient(torch.autograd.Function):
    """Zero, with a backward pass through the graph that leaves every gradient undefined.

    Multiplying by 0 instead would turn the NaN of a mean over nothing into NaN gradients.
    """

    @staticmethod
    def forward(ctx: Any, loss: Tensor) -> Tensor:
        return loss.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> None:
        return None


class _Accumulate(torch.autograd.Function):
    """The identity, whose backward pass says that it belongs to a sum which is not complete."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor) -> Tensor:
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        status.accumulating_pass = torch._C._current_graph_task_id()
        return gradients
