"""The class `Checkpoints`: resumes from the newest, saves during training, and once more before the job is stopped."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType
from typing import Any

from mpidp.errors import CheckpointError
from mpidp.train.agreement import check_same
from mpidp.train.checkpoint.read import STATE, newest_first, newest_readable, part_name, read
from mpidp.train.checkpoint.saver import Saver
from mpidp.train.checkpoint.write import as_checkpoint_error
from mpidp.train.records.owner import Owner
from mpidp.train.state import TrainState
from mpidp.train.stop import StopSignal
from mpidp.world.mpi import is_survived

# Folders that this job owns, known on every rank: after a loss of ranks the new rank 0 goes on with them.
_taken: set[Path] = set()


class Checkpoints:
    """Checkpoints of a training loop of your own: saves, resumes in the middle of an epoch, and stops early.

        state = mpidp.TrainState(model, optimizer, loader)
        with mpidp.Checkpoints("runs/x", state, every_steps=1000) as checkpoints:
            checkpoints.resume()
            for epoch in range(checkpoints.epoch, 5):
                for batch in model.batches(loader):
                    batch.weigh(F.cross_entropy(model(batch.x), batch.y)).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    checkpoints.step()

    Started again with the same folder, the script continues after the last saved step: bit for bit on the same number
    of ranks, with the same samples on another. On SIGTERM, SIGUSR2 or a file `STOP` in the folder all ranks save after
    the same step and end with exit code 75. No other job can use the folder until `close`.

    A resume from the checkpoint of an epoch's last step goes on with the next epoch, and does not repeat what the
    script does in between, such as an evaluation. To repeat it, give `every_epochs=0` and call `save()` after it.

    Construction is collective, and must be in the main thread, as it installs signal handlers.

    Attributes:
        state: the training; `state.step` counts the calls of `step`.
        folder: where the checkpoints are.

    Args:
        folder: of the checkpoints, the same on all ranks; made if it does not exist.
        state: the training that is saved.
        every_steps: save after so many steps; 0 for never.
        every_epochs: save after the last step of so many epochs; 0 for never.
        keep: how many checkpoints to keep, the newest ones; at least 1.
        background: go on training while files are written, instead of waiting for them.
        on_failure: if a checkpoint cannot be written: "stop" raises `CheckpointError` on all ranks, "warn" logs it and
            goes on, and only the last checkpoint of the job raises.

    Raises:
        CheckpointError: on all ranks: the folder cannot be made, or another job uses it.
        RuntimeError: not called in the main thread.
        ValueError: a negative number, `keep` below 1, or an unknown `on_failure`.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        state: TrainState,
        *,
        every_steps: int = 0,
        every_epochs: int = 1,
        keep: int = 3,
        background: bool = True,
        on_failure: str = "stop",
    ):
        if every_steps < 0 or every_epochs < 0 or keep < 1 or on_failure not in ("stop", "warn"):
            raise ValueError(
                f"every_steps={every_steps}, every_epochs={every_epochs}, keep={keep}, on_failure={on_failure!r}: give "
                f'numbers that are not negative, keep at least one, and "stop" or "warn"'
            )
        self.folder = Path(os.path.expanduser(folder))
        self.every_steps, self.every_epochs = every_steps, every_epochs
        self._world = world = state.world
        settings = {"folder": self.folder, "every_steps": every_steps, "every_epochs": every_epochs, "keep": keep}
        check_same(world, [f"{name}={value}" for name, value in settings.items()], "the Checkpoints")
        self.state = state
        self._owner: Owner | None = None
        with world.raise_on_all_ranks("taking the folder of the checkpoints"):
            if world.rank == 0:
                self._owner = _take(self.folder)
        _taken.add(self.folder)
        self._saver = Saver(world, self.folder, keep, background=background, on_failure=on_failure)
        self._stop = StopSignal(world, self.folder / "STOP")
        self._saved_step = -1
        self._has_looked = self._is_closed = False

    @property
    def epoch(self) -> int:
        """The epoch to begin or to go on with, counted from 0: after an epoch's last step it is the next one."""
        loader = self.state.loader
        return loader.epoch + (loader.remaining_steps == 0)

    def resume(self, *, accept_changed: bool = False) -> bool:
        """Loads the newest checkpoint that all ranks can read, if there is one. Collective; call it before the loop.

        A newer one that is damaged is skipped, which is logged. On another number of ranks, and with another global
        batch, exactly the unseen samples of the epoch follow.

        Args:
            accept_changed: begin the epoch anew if the data files have changed, instead of raising.

        Returns:
            Whether there was one.

        Raises:
            CheckpointError: on all ranks: none of the checkpoints is usable, or it is of another model, optimizer or
                scheduler.
            DataError: on all ranks: it is of other data.
        """
        self._has_looked = True
        with self._world.raise_on_all_ranks("looking for checkpoints"):
            found = bool(newest_first(self.folder))
        if not self._world.any(found):
            return False
        _, self._saver.newest = restore(self.state, self.folder, accept_changed=accept_changed)
        self._saved_step = self._world.status.step = self.state.step
        return True

    def step(self) -> None:
        """Counts a step of the optimizer, and saves if one is due. Collective: after each step, on every rank.

        Raises:
            CheckpointError: on all ranks: a checkpoint could not be written, or another job has taken the folder.
            SystemExit: the job was asked to stop; the state is on the disk, and the exit code is 75.
        """
        self._begin()
        state = self.state
        state.step += 1
        self._saver.poll()
        reason = self._stop.agreed()
        ends_epoch = state.loader.remaining_steps == 0
        if (
            reason
            or (self.every_steps and state.step % self.every_steps == 0)
            or (self.every_epochs and ends_epoch and (state.epoch + 1) % self.every_epochs == 0)
        ):
            self.save()
        if reason:
            self._finish()
            self._world.log_once(
                f"stopped by {reason} after step {state.step:,}; the state is saved in {self.folder}, from where "
                f"the next start goes on"
            )
            self._stop.exit()

    def save(self, is_best: bool = False) -> None:
        """Begins a checkpoint of this step, unless there is one; waits for the one before. Collective.

        Args:
            is_best: point the link `best` of the folder to it, which keeps it until there is a better one; the same on
                all ranks.

        Raises:
            CheckpointError: as `step` does.
        """
        self._begin()
        state, world = self.state, self._world
        if self._saved_step == state.step:
            if is_best:
                self._saver.mark_best(state.step)
            return
        with world.raise_on_all_ranks("looking whose the folder of the checkpoints is"):
            if self._owner is not None:
                self._owner.check()
        state.model.combine_statistics()
        with world.status.during("checkpoint"):
            self._saver.save(state.step, state.shared_state, state.rank_state, is_best)
        self._saved_step = state.step

    def close(self) -> None:
        """Saves the last step, waits until it is on the disk, and releases the folder and the signals. Collective.

        Raises:
            CheckpointError: on all ranks: the last checkpoint could not be written.
        """
        if not self._is_closed:
            self.save()
            self._finish()
            self._stop.close()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        elif not self._is_closed:
            self._is_closed = True
            self._saver.leave(error)
            if not is_survived(error):  # else the ranks that are left go on with the folder
                self._release()

    def _begin(self) -> None:
        """Raises if another training has left checkpoints here, which would be counted and removed."""
        if self._has_looked:
            return
        self._has_looked = True
        with self._world.raise_on_all_ranks("looking for checkpoints"):
            if self._world.rank == 0 and self.state.step == 0 and (found := newest_first(self.folder)):
                raise CheckpointError(
                    f"{self.folder} has checkpoints already, the newest {found[0].name}: go on from it by resume(), or "
                    f"give another folder"
                )

    def _finish(self) -> None:
        """Waits for the checkpoint that is being written, and releases the folder. Collective."""
        self._is_closed = True
        self._saver.finish()
        self._saver.close()
        self._release()
        if self._saver.failure is not None:
            raise self._saver.failure

    def _release(self) -> None:
        _taken.discard(self.folder)
        if self._owner is not None:
            self._owner.release()


def _take(folder: Path) -> Owner:
    """Makes a folder and takes ownership of it, also from a rank of this job that died."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        owner = Owner(folder, os.environ)
        if folder in _taken:
            owner.take_over()
        else:
            owner.claim()
    except OSError as error:
        raise as_checkpoint_error(error, folder) from error
    return owner


def restore(state: TrainState, folder: Path, *, accept_changed: bool = False) -> tuple[dict[str, Any], Path]:
    """Loads the newest checkpoint in a folder that all ranks can read, as `Checkpoints.resume` does. Collective.

    Returns:
        What the checkpoint holds for all ranks, and its path.

    Raises:
        CheckpointError: no usable checkpoint; one of another model, optimizer or scheduler.
        DataError: one of other data.
    """
    world = state.world
    path, passed_over = newest_readable(world, folder)
    for line in passed_over:
        world.log_once(f"skipped a newer checkpoint: {line}; the next save renames it")
    with world.raise_on_all_ranks("loading the checkpoint"):
        saved = read(path, STATE)
    state.load_state_dict(
        saved,
        of_rank=lambda rank: read(path, part_name(rank)),
        source=f"checkpoint {path}",
        accept_changed=accept_changed,
    )
    world.log_once(f"resumed from {path}: step {state.step:,}, epoch {state.epoch + 1}")
    return saved, path
