"""Losses, counts and seconds of the steps, and their records in `metrics.jsonl`. Schema: docs/reference/metrics.md."""

import json
import math
import os
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from mpidp.errors import CheckpointError
from mpidp.train.checkpoint.write import as_checkpoint_error
from mpidp.train.losses import count_right
from mpidp.train.records.progress import Progress
from mpidp.world.collectives import share_error
from mpidp.world.elastic import LostRanks, Member
from mpidp.world.status import status
from mpidp.world.world import World

PHASES = ("data", "forward", "backward", "reduce", "optimizer")


class Stopwatch:
    """Adds up wall-clock seconds by phase; on a GPU they are the seconds in which the host was busy or waiting."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """A context manager that times a block as a phase, and sets it as the phase of this rank."""
        start = time.perf_counter()
        try:
            with status.during(phase):
                yield
        finally:
            self.seconds[phase] += time.perf_counter() - start

    def move(self, source: str, target: str, seconds: float) -> None:
        """Moves seconds from one phase to another, as the reduction runs inside backward."""
        self.seconds[source] -= seconds
        self.seconds[target] += seconds

    def since(self, earlier: dict[str, float]) -> dict[str, float]:
        """Seconds by phase since an earlier copy of `seconds`."""
        return {phase: self.seconds[phase] - earlier.get(phase, 0.0) for phase in PHASES}


class Tally:
    """Sums of loss, right answers and samples of this rank, kept on the device, so adding never waits for it."""

    def __init__(self, device: torch.device, ignored: int | None = None):
        self._ignored = ignored
        # loss, what it is divided by, right, classified, samples
        self._sums = torch.zeros(5, dtype=torch.float64, device=device)

    def add(self, loss: Tensor, output: Tensor, target: Tensor, num_samples: int, weight: Tensor | None = None) -> None:
        """Adds the losses of some samples. Without samples the loss is NaN, and is left out.

        Args:
            loss: their sum divided by `num_samples`.
            output: of the model.
            target: with which right answers are counted.
            num_samples: how many.
            weight: what the sum is to be divided by instead of the number of samples.
        """
        if num_samples == 0:
            return
        with torch.no_grad():
            right = count_right(output, target, self._ignored)
            self._sums[0] += loss.detach() * num_samples
            self._sums[1] += num_samples if weight is None else weight
            if right is not None:
                self._sums[2] += right[0]
                self._sums[3] += right[1]
            self._sums[4] += num_samples

    def total(self, world: World) -> dict[str, float]:
        """Mean loss, and accuracy if there are classes, over the samples of all ranks; starts anew. Collective."""
        loss, weight, right, classified, samples = world.sum(self._sums.tolist())
        self._sums.zero_()
        result = {"samples": int(samples), "loss": loss / weight if weight else float("nan")}
        return result | ({"accuracy": right / classified} if classified else {})


class MetricsFile:
    """One JSON object a line, appended by rank 0."""

    def __init__(self, path: Path, start_bytes: int = 0):
        """Opens the file, and cuts off what a dead run wrote after its last checkpoint, beyond `start_bytes`.

        A file that has become shorter is continued after its last whole line.
        """
        self._path = path
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115  (lives as long as the run)
        if self.num_bytes != start_bytes:
            os.truncate(path, start_bytes if self.num_bytes > start_bytes else whole_lines(path))

    def write(self, record: dict[str, Any]) -> None:
        """Appends a record in one write, so that a reader sees whole lines.

        A number that is not finite becomes null, as JSON has no word for it.

        Raises:
            OSError: the file cannot be written; it is unchanged, and the error names it.
        """
        finite = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in record.items()
        }
        left, start_bytes = (json.dumps(finite, allow_nan=False) + "\n").encode(), self.num_bytes
        try:
            while left:  # a disk that is nearly full takes a part
                left = left[self._file.write(left) :]
        except OSError as error:
            os.truncate(self._path, start_bytes)
            raise OSError(error.errno, error.strerror, str(self._path)) from error

    @property
    def num_bytes(self) -> int:
        """Length of the file so far."""
        return os.fstat(self._file.fileno()).st_size

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def whole_lines(path: Path) -> int:
    """How many bytes of the file are whole lines; its writer may have died in the middle of one."""
    return path.read_bytes().rfind(b"\n") + 1


def memory_bytes(device: torch.device) -> dict[str, int]:
    """The largest memory this rank has used so far: of the process, and of torch on the GPU."""
    peak = {"host": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    if device.type == "cuda":
        peak["device"] = torch.cuda.max_memory_allocated(device)
    return peak


class Recorder:
    """Collects the measurements of a run, and records them in intervals of steps.

    Args:
        world: the ranks.
        progress: the console.
        file: of the records; None on all ranks but 0.
        step: optimizer steps done before this start.
        on_failure: if a file of the run cannot be written: "stop" raises it on all ranks, "warn" logs it once.
        failure: returns the failure of this rank's log, if any.
        scaler: of losses; what it does is recorded if it is enabled.
        ignored: the class whose targets are left out of the accuracy; None for none.
        before: the former recorder, after some ranks have died; its counts are continued.
    """

    def __init__(
        self,
        world: World,
        progress: Progress,
        file: MetricsFile | None,
        step: int,
        *,
        on_failure: str = "stop",
        failure: Callable[[], Exception | None] = lambda: None,
        scaler: GradScaler | None = None,
        ignored: int | None = None,
        before: "Recorder | None" = None,
    ):
        self.world = world
        self.progress = progress
        self.file = file
        self.on_failure = on_failure
        self._failure = failure
        self._has_failed, self._unsaid = False, list[Exception]()
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self.tally = Tally(world.device, ignored)
        self._norm: Tensor | None = None  # of the gradient of this interval's last step
        self._skipped_steps = 0
        self.stopwatch = Stopwatch()
        self.num_samples = 0  # over all ranks, since this start
        self.last_training: dict[str, Any] = {}  # the newest record; empty before the first of this start
        self.last_validation: dict[str, float] | None = None
        self._lost: tuple[Member, ...] = ()  # ranks that died and are recorded
        self._last_epoch = -1  # the last epoch with a recorded evaluation
        if before is not None:
            self.stopwatch, self.num_samples, self.last_validation = (
                before.stopwatch,
                before.num_samples,
                before.last_validation,
            )
            self._has_failed, self._unsaid = before._has_failed, before._unsaid
            self._lost, self._last_epoch = before._lost, before._last_epoch
        self._start = (step, time.perf_counter(), dict(self.stopwatch.seconds))

    def restart(self, step: int) -> None:
        """Begins the next interval after a pause, such as an evaluation or a checkpoint, that belongs to none."""
        self._start = (step, time.perf_counter(), dict(self.stopwatch.seconds))

    def add_step(self, is_stepped: bool, norm: Tensor | None) -> None:
        """Adds a step, which was left out if gradients overflowed; the norm of its gradient if it ends an interval."""
        self._skipped_steps += not is_stepped
        self._norm = norm if is_stepped else None

    def record_training(self, step: int, epoch: int, optimizer: torch.optim.Optimizer) -> None:
        """Records the steps since the last record, if there are any. Collective.

        Raises:
            CheckpointError: on all ranks, a file of the run cannot be written, and `on_failure` is "stop".
        """
        first_step, start, seconds_before = self._start
        if step == first_step:
            return
        elapsed_s = time.perf_counter() - start
        totals = self.tally.total(self.world)
        self.num_samples += int(totals["samples"])
        rate = totals["samples"] / elapsed_s
        seconds = self.stopwatch.since(seconds_before)
        self.last_training = {
            "kind": "train",
            "step": step,
            "epoch": epoch,
            **totals,
            "lr": optimizer.param_groups[0]["lr"],
            **self._gradient_facts(),
            "samples_per_s": round(rate, 1),
            "seconds": {phase: round(value, 6) for phase, value in seconds.items()},
            "memory_bytes": memory_bytes(self.world.device),
        }
        self._write(self.last_training)
        self._tell_failures()
        self.progress.update(step, f"epoch {epoch + 1}  loss {totals['loss']:.4f}  {rate:,.0f} samples/s")
        self.restart(step)

    def _gradient_facts(self) -> dict[str, float | None]:
        """The norm of the last step's gradient, and what scaling did since the last record; starts anew."""
        facts: dict[str, float | None] = {"grad_norm": None if self._norm is None else float(self._norm)}
        if self._scaler is not None:
            facts |= {"loss_scale": self._scaler.get_scale(), "skipped_steps": self._skipped_steps}
        self._norm, self._skipped_steps = None, 0
        return facts

    def record_validation(self, step: int, epoch: int, tally: Tally) -> None:
        """Records an evaluation. Collective; raises as `record_training` does."""
        self.last_validation = tally.total(self.world)
        if epoch != self._last_epoch:  # else evaluated once more, as ranks were lost in the first evaluation
            self._last_epoch = epoch
            self._write({"kind": "validation", "step": step, "epoch": epoch, **self.last_validation})
        self._tell_failures()  # on all ranks, as not all may know of the first evaluation

    def record_lost_ranks(self, step: int, epoch: int, lost: LostRanks) -> None:
        """Records ranks that died, each of them once. Not collective."""
        new = tuple(member for member in lost.members if member not in self._lost)
        if new:
            self._lost += new
            members = [{"rank": member.rank, "host": member.host} for member in new]
            facts = {"lost": members, "ranks": lost.num_left, "lost_s": round(lost.seconds, 6)}
            self._write({"kind": "loss_of_ranks", "step": step, "epoch": epoch, **facts})

    def newest(self) -> dict[str, Any]:
        """Return the newest record of training, and results of the newest evaluation as `validation_...`."""
        validation = self.last_validation or {}
        return {**self.last_training, **{f"validation_{name}": value for name, value in validation.items()}}

    @property
    def num_bytes(self) -> int:
        """Length of the metrics so far; 0 on all ranks but 0."""
        return self.file.num_bytes if self.file else 0

    def close(self) -> None:
        """Removes the progress bar and closes the file."""
        self.progress.close()
        if self.file:
            self.file.close()

    def _write(self, record: dict[str, Any]) -> None:
        if self.file is None:
            return
        try:
            self.file.write(record)
        except OSError as error:
            if not self._has_failed:
                self._unsaid.append(error)
            self._has_failed = True

    def _tell_failures(self) -> None:
        """Raises, or logs once, that a file of the run could not be written. Collective."""
        failure = self._failure()
        if failure is not None:
            self._unsaid.append(failure)
        world, error = self.world, None
        if self._unsaid:
            error = as_checkpoint_error(self._unsaid[0], Path(getattr(self._unsaid[0], "filename", None) or ""))
            self._unsaid.clear()
        try:
            share_error(world.comm, error, f"on rank {world.rank} of {world.size} ({world.host}), recording the run")
        except CheckpointError as shared:
            if self.on_failure == "stop":
                raise
            left_out = "Training goes on, and what cannot be written is left out (checkpoint.on_failure)."
            world.log_once(f"{shared} {left_out}")
