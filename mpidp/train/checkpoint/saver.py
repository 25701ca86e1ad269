"""Saving of checkpoints in the background while training goes on.

Training waits while the state is copied. A thread of each rank then writes that rank's file; when all are done, rank
0's thread publishes the checkpoint. The threads never call MPI: the training threads exchange whether all are done at
the ends of steps, in a message that travels during the next step. So all ranks learn of success or failure after the
same step.
"""

import logging
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpidp.errors import SHARED_MARK, CheckpointError
from mpidp.train.checkpoint.read import (
    ALGORITHM,
    BEST,
    MANIFEST,
    PARTIAL,
    STATE,
    File,
    Manifest,
    folder_name,
    part_name,
)
from mpidp.train.checkpoint.write import (
    OWNED_BY,
    Snapshot,
    as_checkpoint_error,
    complete,
    discard,
    point_to,
    write_parts,
)
from mpidp.world import mpi
from mpidp.world.collectives import DelayedMaximum, share_error
from mpidp.world.mpi import MPI
from mpidp.world.system import Process
from mpidp.world.world import World

log = logging.getLogger("mpidp.rank")

State = Callable[[], dict[str, Any]]
Files = tuple[File, ...]


@dataclass
class _Save:
    """A checkpoint that is being written.

    Attributes:
        step: optimizer steps done.
        partial: the folder the ranks write into.
        start: time of its begin, by `time.perf_counter`.
        stalled_s: how long training has waited for it.
        is_best: whether it stays as the best.
        publishes: whether all files are written and rank 0 publishes it.
        work: the present work of this rank's thread.
    """

    step: int
    partial: Path
    work: "Future[Files]"
    start: float
    stalled_s: float
    is_best: bool
    publishes: bool = False


class Saver:
    """Writes the checkpoints of a run, one at a time. Construction is collective.

    In a loop of your own: `save` when one is due, `poll` after every step, `finish` after the last one.

    Attributes:
        newest: the last complete checkpoint; None before the first.
        failure: why the last one could not be written, or None. Only with "warn", as "stop" raises.

    Args:
        world: the ranks.
        folder: of the checkpoints; it exists, on a file system that all ranks share.
        keep: how many to keep; at least 1.
        background: go on training while files are written; else `save` returns when the checkpoint is complete.
        on_failure: "stop" raises a failure on all ranks; "warn" logs it once, and the run goes on.
        newest: the checkpoint that this run continues.
        relies_on: other files that a checkpoint needs; they are flushed to the disk before it.
    """

    def __init__(
        self,
        world: World,
        folder: Path,
        keep: int,
        *,
        background: bool = True,
        on_failure: str = "stop",
        newest: Path | None = None,
        relies_on: Sequence[Path] = (),
    ):
        self.world = world
        self.folder = folder
        self.keep = keep
        self.background = background
        self.on_failure = on_failure
        self.newest = newest
        self.relies_on = tuple(relies_on)
        self.failure: CheckpointError | None = None
        # Processes of a dead run that still write must not write into a folder of this one.
        self._token: str = world.broadcast(f"{secrets.token_hex(4)}{OWNED_BY}{Process.this()}")
        self._number = 0  # of exchanges that have ended: two for each checkpoint
        self._current: _Save | None = None
        self._agreement = DelayedMaximum(world.comm)
        self._snapshot = Snapshot()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="mpidp-checkpoint")

    def save(self, step: int, shared: State, own: State, is_best: bool = False) -> None:
        """Begins a checkpoint; waits for the one before, if that is still being written. Collective.

        Args:
            step: optimizer steps done; names the checkpoint.
            shared: returns the state that all ranks share; called on rank 0 only. Nested dicts and lists of tensors,
                numbers and strings.
            own: returns the state that only this rank has, likewise.
            is_best: point the link `best` to it, which keeps it until there is a better one.

        Raises:
            CheckpointError: on all ranks, if a checkpoint could not be written and `on_failure` is "stop".
        """
        if self._current is not None:
            log.info("the next checkpoint waits for the one before, of step %d", self._current.step)
            self.finish()
        start = time.perf_counter()
        self._number += 1
        place = self.folder / f"{PARTIAL}{folder_name(step)}-{self._number}-{self._token}"
        try:
            parts = {part_name(self.world.rank): own()}
            if self.world.rank == 0:
                parts[STATE] = shared()
            work = self._thread.submit(write_parts, place, self._snapshot.take(parts))
        except Exception as error:  # the other ranks wait for this one in the exchange
            work = Future()
            work.set_exception(as_checkpoint_error(error, place))
        self._current = _Save(step, place, work, start, stalled_s=time.perf_counter() - start, is_best=is_best)
        if not self.background:
            self.finish()

    @property
    def step_on_its_way(self) -> int:
        """The step of the checkpoint that is being written; -1 for none."""
        return -1 if self._current is None else self._current.step

    @property
    def is_busy(self) -> bool:
        """Whether a checkpoint is being written; the same on every rank."""
        return self._current is not None

    def poll(self) -> None:
        """Checks whether the checkpoint is written; to be called after every step. Collective; never waits.

        Raises:
            CheckpointError: as `save` does.
        """
        if self._current is not None:
            self._ask()

    def finish(self) -> None:
        """Waits until the checkpoint that is being written, if any, is complete. Collective.

        Raises:
            CheckpointError: as `save` does.
        """
        start = time.perf_counter()
        while self._current is not None:
            wait([self._current.work])
            self._current.stalled_s += time.perf_counter() - start
            start = time.perf_counter()
            self._ask()

    def mark_best(self, step: int) -> None:
        """Points the link `best` to the checkpoint of a step that is saved already, if it still exists. Collective.

        One that is still being written is published with the link, without waiting for it.

        Raises:
            CheckpointError: as `save` does; or the link cannot be written, and `on_failure` is "stop".
        """
        current = self._current
        if current is not None and current.step == step and (current.is_best or not current.publishes):
            current.is_best = True
            return
        self.finish()
        try:
            with self.world.raise_on_all_ranks("marking the best checkpoint"):
                if self.world.rank == 0:
                    _link_best(self.folder / folder_name(step))
        except CheckpointError as error:
            if self.on_failure == "stop":
                raise
            self.world.log_once(f"{error}\n  Training goes on without it (checkpoint.on_failure).")

    def leave(self, error: BaseException) -> None:
        """Completes the checkpoint when training ends by an error, if all ranks take part.

        Args:
            error: what ended training; a failure to complete the checkpoint is added as a note.
        """
        if self.world.size > 1 and not getattr(error, SHARED_MARK, False):
            # If others go on without a dead rank, nothing may be written any more when they remove the folder.
            self._thread.shutdown(wait=mpi.is_survived(error), cancel_futures=True)
            return
        try:
            self.finish()
            self.close()
        except CheckpointError as failure:
            error.add_note(str(failure))
        except MPI.Exception as failure:
            if not mpi.is_survived(failure):
                raise
            error.add_note("the checkpoint being written is given up, as ranks were lost")  # and training with it
            self._thread.shutdown(wait=False, cancel_futures=True)

    def close(self) -> None:
        """Ends the thread and frees the memory; no checkpoint may be in progress. Collective."""
        assert self._current is None
        self._thread.shutdown()
        self._agreement.close()
        self._snapshot = Snapshot()

    def _ask(self) -> None:
        """Exchanges whether this rank's work is done, and goes on when all ranks' is. Collective."""
        assert self._current is not None
        pending = not self._current.work.done()
        # The result is that of the last call, which may be about the former work: its number tells.
        if self._agreement.exchange(2 * self._number + pending) == 2 * self._number:
            self._go_on(self._current)

    def _go_on(self, save: _Save) -> None:
        """Shares a failure, or begins the next work, when all ranks' work is done. Collective."""
        error = save.work.exception()
        try:
            self._share(error)
        except CheckpointError as shared:
            self._fail(save, shared)
            return
        if save.publishes:
            self._complete(save)
            return
        files: list[Files] | None = self.world.comm.gather(save.work.result())
        save.publishes = True
        self._number += 1
        save.work = self._publish(save, files) if files is not None else _done()

    def _publish(self, save: _Save, files: list[Files]) -> "Future[Files]":
        manifest = Manifest(
            save.step,
            self.world.size,
            time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            ALGORITHM,
            tuple(sorted((file for of_rank in files for file in of_rank), key=lambda file: file.name)),
        )
        final = self.folder / folder_name(save.step)
        return self._thread.submit(complete, save.partial, final, manifest, self.keep, self.relies_on, save.is_best)

    def _share(self, error: BaseException | None) -> None:
        assert error is None or isinstance(error, CheckpointError)
        if error is not None and not hasattr(error, "__notes__"):
            stays = f"{self.newest.name} stays the newest" if self.newest else "there is none before it"
            error.add_note(f"This checkpoint is given up; {stays}.")
        world = self.world
        share_error(world.comm, error, f"on rank {world.rank} of {world.size} ({world.host}), writing a checkpoint")

    def _fail(self, save: _Save, error: CheckpointError) -> None:
        self._current = None
        self.failure = error
        final = self.folder / folder_name(save.step)
        if save.publishes and (final / MANIFEST).exists():  # what failed came after
            self.newest = final
        if self.world.rank == 0:
            self._thread.submit(discard, save.partial)
        text = "\n  ".join([f"checkpoint of step {save.step:,}: {error}", *error.__notes__])
        log.info("%s", text)
        if self.on_failure == "stop":
            raise error
        self.world.log_once(f"{text}\n  Training goes on without it (checkpoint.on_failure).")

    def _complete(self, save: _Save) -> None:
        self._current = None
        self.failure = None
        self.newest = self.folder / folder_name(save.step)
        elapsed_s = time.perf_counter() - save.start
        log.info("wrote %s; training waited %.3f s, the whole took %.3f s", self.newest, save.stalled_s, elapsed_s)


def settle(world: World, folder: Path, step: int) -> Path | None:
    """The checkpoint that was being written when ranks were lost, if it is complete; else removes it. Collective."""
    final = folder / folder_name(step)

    def is_complete() -> bool:
        if (final / MANIFEST).exists():
            return True
        for partial in folder.glob(f"{PARTIAL}{folder_name(step)}-*"):
            discard(partial)
        return False

    return final if world.call_on_root(is_complete) else None


def _link_best(final: Path) -> None:
    try:
        if (final / MANIFEST).exists():
            point_to(final, BEST)
    except OSError as error:
        raise as_checkpoint_error(error, final) from error


def _done() -> "Future[Files]":
    work: Future[Files] = Future()
    work.set_result(())
    return work
