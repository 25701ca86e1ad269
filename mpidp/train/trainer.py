"""The training loop of `mpidp train`: from a run file to a trained model in a run folder."""

import contextlib
import os
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

import mpidp
from mpidp.config import RunConfig, to_toml
from mpidp.hdf5.batch import Batch
from mpidp.hdf5.loader import HDF5Loader
from mpidp.train.checkpoint.read import folder_name
from mpidp.train.checkpoint.saver import Saver
from mpidp.train.checkpoints import restore
from mpidp.train.components import (
    build_loaders,
    build_loss,
    build_model,
    build_on_end,
    build_optimizer,
    build_scheduler,
    ignored_settings,
    wrap_model,
)
from mpidp.train.elastic import Elastic
from mpidp.train.forward import Forward
from mpidp.train.records.progress import Progress, count, describe_epoch, describe_newest, summarise
from mpidp.train.records.recorder import MetricsFile, Recorder, Tally
from mpidp.train.records.run_folder import RunFolder
from mpidp.train.records.starts import choose_resume, for_array_task
from mpidp.train.records.trace import Trace
from mpidp.train.sharded.optimizer import ShardedOptimizer
from mpidp.train.signature import check_same
from mpidp.train.start import Start
from mpidp.train.state import TrainState
from mpidp.train.stop import StopSignal
from mpidp.train.sync_batch_norm import SyncBatchNorm, sync_layers
from mpidp.world.exit import MEMORY_ADVICE, is_out_of_memory
from mpidp.world.start import init
from mpidp.world.status import BETWEEN
from mpidp.world.topology import warn_of_cores
from mpidp.world.world import World


def train(config: RunConfig, resume: Path | None = None) -> str:
    """Runs `mpidp train`: starts MPI if needed, trains, writes the run folder. Collective.

    A task of a Slurm array has its number behind the run's name, and a job that Slurm started again continues what it
    began (`mpidp.train.records.starts`).

    Args:
        config: the run.
        resume: run folder to continue from its newest usable checkpoint; `auto` for this run's newest, if any.

    Returns:
        Why the run stopped early, its state saved ("SIGTERM", "SIGUSR2", "the file STOP"); "" when it is done.
    """
    world = init(stall_warning_s=config.watch.stall_warning_s, stall_abort_s=config.watch.stall_abort_s)
    config = for_array_task(config, os.environ)
    check_same(world, [f"resume {resume}"], "the configurations")  # before all ranks use what rank 0 finds there
    resume, why = world.call_on_root(lambda: choose_resume(config, resume, os.environ))
    if why:
        world.log_once(why)
    with contextlib.ExitStack() as at_end:
        start = Start(RunFolder.hold(resume, world) if resume else None)
        at_end.callback(start.close)
        if config.train.fault_tolerance != "shrink":
            return Trainer(config, world, start).run()
        elastic = Elastic(world, config.train.min_ranks)
        return elastic.run(lambda world: Trainer(config, world, start, elastic).run())


class Trainer:
    """One training run. Everything that can be wrong with the input is found before the run folder is made.

    Args:
        config: the run.
        world: the ranks.
        start: with the folder of a run to continue; or what one on more ranks has left, of which some died.
        elastic: lets training go on when ranks die.
    """

    def __init__(self, config: RunConfig, world: World, start: Start | None = None, elastic: Elastic | None = None):
        self.config, self.world, self.elastic = config, world, elastic
        self.start = start = start or Start()
        goes_on = elastic is not None and elastic.goes_on
        held = start.folder
        resume = None if held is None else held.path
        check_same(world, [*to_toml(config).splitlines(), f"resume {resume}"], "the configurations")
        torch.set_num_threads(choose_threads(config.train.threads, os.environ, world.cores))
        if config.train.threads:  # `init` warns of other numbers
            warn_of_cores(world.comm, world.host, config.train.threads, stacklevel=2)
        with world.status.during("open the data", is_long=True):  # copying it to a node may take long
            self.loader, self.validation = build_loaders(config, world)
        start.staged = self.loaders() if config.data.mode == "stage" else []
        with world.raise_on_all_ranks("building the model"):
            module = build_model(config).to(world.device)
            loss = build_loss(config.loss)
            self.on_end = build_on_end(config)
        if config.train.sync_batch_norm and not sync_layers(SyncBatchNorm.convert(module, world)):
            world.log_once("train.sync_batch_norm is true, but the model has no batch norm layer")
        self.model = wrap_model(module, world, config)
        self.forward = Forward(config, self.model, loss)
        with world.raise_on_all_ranks("building the optimizer"):
            plain = build_optimizer(config.optimizer, self.model)
        self.optimizer = self._shard(plain) if config.optimizer.sharded else plain
        with world.raise_on_all_ranks("building the scheduler"):
            self.scheduler = build_scheduler(config.scheduler, self.optimizer)
        self.state = TrainState(self.model, self.optimizer, self.loader, self.scheduler, seed=config.run.seed)
        self.state.seed_streams()
        metrics_bytes, newest = (0, None) if held is None or goes_on else self._resume(held)
        if held is not None and not goes_on:
            held.begin(world)
        self.folder = start.folder = held or RunFolder.create(config, world)
        if elastic is not None and elastic.restore(self.state):
            metrics_bytes, newest = start.go_on(world)
        world.guard.last_words = partial(describe_newest, self.folder.path, self.folder.checkpoints)
        self.saver = start.saver = Saver(
            world,
            self.folder.checkpoints,
            config.checkpoint.keep,
            background=config.checkpoint.background,
            on_failure=config.checkpoint.on_failure,
            newest=newest,
            relies_on=(self.folder.config, self.folder.metrics),
        )
        world.status.step = self.step
        is_saved = newest is not None and newest.name == folder_name(self.step)
        self.saved_step = self.step if world.all(is_saved) else -1
        self.first_step = start.first_step = self.step if start.first_step is None else start.first_step
        progress = Progress(world.rank == 0, self.step, self.step + self._steps_left(), config.log.progress_s)
        with world.raise_on_all_ranks("opening the metrics"):
            metrics = MetricsFile(self.folder.metrics, metrics_bytes) if world.rank == 0 else None
        self.recorder = start.recorder = Recorder(
            world,
            progress,
            metrics,
            self.step,
            on_failure=config.checkpoint.on_failure,
            failure=self.folder.take_log_failure,
            before=start.recorder,
        )
        self.folder.note(world, first_step=self.first_step, last_step=self.step + self._steps_left())
        steps = 0 if goes_on else config.log.trace_steps
        self.trace = Trace(world, self.folder.trace, from_step=config.log.trace_from, steps=steps)
        told = start.stop.told if start.stop else ""
        self.stop = start.stop = StopSignal(world, self.folder.path / "STOP", told)
        self.stopped = ""

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.state.step

    def run(self) -> str:
        """Trains to the last epoch, or until the job is asked to stop; returns the reason, or "". Collective."""
        try:
            self._train_epochs()
        except BaseException as error:
            if self.world.size == 1 and is_out_of_memory(error):  # with several ranks the guard adds this advice
                error.add_note(f"Out of memory {self.world.status.where()}. {MEMORY_ADVICE}")
            self.saver.leave(error)
            self.trace.give_up()
            raise
        finally:
            self.recorder.close()
            self._end_reading()
        for loader in self.loaders():
            loader.close()
        if self.stopped:
            self._check_saved()
            self.folder.note(self.world, end=f"stopped by {self.stopped}")
            self.world.log_once(
                f"stopped by {self.stopped} after step {self.step:,} of {self.recorder.progress.last_step:,}; "
                f"the state is saved. Continue with --resume {self.folder.path}"
            )
            return self.stopped
        self.recorder.progress.line(self._summary(time.perf_counter() - self.start.since_s))
        self._end()
        self.folder.note(self.world, end="done")
        return ""

    def _end(self) -> None:
        """Unwraps the model after the last step, and calls `train.on_end`. Collective."""
        self.stop.close()
        self.model.combine_statistics()
        module = SyncBatchNorm.revert(self.model.unwrap())
        if self.world.rank == 0 and self.on_end:
            with self.world.status.during("train.on_end", is_long=True):
                self.on_end(module, self.config)  # on one rank: a plain module, whose backward reduces nothing
        self.world.barrier()
        self._check_saved()

    def _shard(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Shards an optimizer's state, with two copies if training goes on when ranks die. Collective."""
        survives = self.elastic is not None and self.elastic.is_on
        return ShardedOptimizer(optimizer, self.world, copies=2 if survives else 1)

    def loaders(self) -> list[HDF5Loader]:
        """Of all data that the run reads."""
        return [self.loader] if self.validation is None else [self.loader, self.validation]

    def _end_reading(self) -> None:
        """Ends all threads that read. Not collective: after a failure the other ranks may be in any call."""
        for loader in self.loaders():
            loader.stop()

    def _train_epochs(self) -> None:
        """Trains to the last epoch, or until the run is asked to stop, and completes the last checkpoint."""
        if self.elastic is None or self.elastic.lost_ranks is None:
            self.recorder.progress.line(self._introduction())
        else:
            self.recorder.record_lost_ranks(self.step, self.loader.epoch, self.elastic.lost_ranks)
        if not self.start.is_saved:
            self._save(self.loader.epoch)
        for epoch in range(self.loader.epoch, self.config.train.epochs):
            if not self._all_steps_done(epoch):
                self._train_epoch(epoch)
            self._evaluate(epoch)
            if self.stopped:
                break
            result = self.recorder.last_validation
            self.recorder.progress.line(describe_epoch(epoch, self.config.train.epochs, self.step, result))
            self._save_after(epoch)
        if self.elastic is not None:  # raises here if a rank died in the last step, as parameters may be missing
            self.world.barrier()
        self.saver.finish()
        self.saver.close()
        self.trace.close()
        if isinstance(self.optimizer, ShardedOptimizer):
            self.optimizer.close()

    def _check_saved(self) -> None:
        """Raises if the last checkpoint could not be written: then the run has failed."""
        if self.saver.failure is not None:
            raise self.saver.failure

    def _all_steps_done(self, epoch: int) -> bool:
        """Whether the run was resumed from a checkpoint of this epoch's last step, before the evaluation."""
        return self.loader.epoch == epoch and self.loader.remaining_steps == 0

    def _train_epoch(self, epoch: int) -> None:
        """Trains on the samples that are left of the epoch, each once."""
        self.model.train()
        self.world.status.enter(BETWEEN)
        self.recorder.restart(self.step)
        self.trace.restart()
        batches = self.model.batches(self.loader)
        while True:
            with self.recorder.stopwatch("data"):
                batch = next(batches, None)
            if batch is None:
                break
            self._train_step(batch)
            self.saver.poll()
            if _is_due(self.config.log.every_steps, self.step):
                self.recorder.record_training(self.step, epoch, self.optimizer)
            if _is_due(self.config.checkpoint.every_steps, self.step):
                self._save(epoch)
            self.trace.step()
            if self._is_asked_to_stop(epoch):
                break
        self.recorder.record_training(self.step, epoch, self.optimizer)

    def _is_asked_to_stop(self, epoch: int) -> bool:
        """Whether all ranks stop here; the state is saved then. Collective."""
        self.stopped = self.stop.agreed()
        if self.stopped:
            if self.loader.epoch > epoch:  # stopped in the evaluation, which the next start repeats
                place = {"epoch": epoch, "position": self.loader.num_samples}
                self.loader.load_state_dict(self.loader.state_dict() | place)
            self._save(epoch)
        return bool(self.stopped)

    def _train_step(self, batch: Batch) -> None:
        """The five steps of training, on one global batch."""
        stopwatch = self.recorder.stopwatch
        for part in batch.micro_batches(self.config.train.micro_batch or max(1, batch.size)):
            with contextlib.nullcontext() if part.last else self.model.no_sync():
                inputs, target = self.forward.inputs(part)
                with stopwatch("forward"):
                    output, loss = self.forward(part, inputs, target)
                reduce_s = self.model.reduce_s
                with stopwatch("backward"):
                    part.weigh(loss).backward()  # type: ignore[no-untyped-call]
                stopwatch.move("backward", "reduce", self.model.reduce_s - reduce_s)
            self.recorder.tally.add(loss, output, target, part.size)
        if self.elastic is not None:
            self.elastic.agree()  # up to the next collective all living ranks do the same
        with stopwatch("optimizer"):
            if self.config.train.clip_norm:
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.train.clip_norm)
            self.optimizer.step()
            self.optimizer.zero_grad()
            if self.scheduler:
                self.scheduler.step()
        self.state.step += 1
        self.world.status.step = self.step

    def _evaluate(self, epoch: int) -> None:
        """Mean loss and accuracy of the held-out samples, each counted once. Collective.

        When asked to stop meanwhile, it leaves no record: the next start evaluates again.
        """
        if self.validation is None or self.stopped:
            return
        self.model.combine_statistics()
        self.model.eval()
        tally = Tally(self.world.device)
        with torch.no_grad(), self.world.status.during("evaluate"):
            for batch in self.validation:
                if batch.size:
                    inputs, target = self.forward.inputs(batch)
                    output, loss = self.forward(batch, inputs, target)
                    tally.add(loss, output, target, batch.size)
                self.saver.poll()
                if self._is_asked_to_stop(epoch):
                    return
        self.recorder.record_validation(self.step, epoch, tally)

    def _save_after(self, epoch: int) -> None:
        last = epoch + 1 == self.config.train.epochs
        every = self.config.checkpoint.every_epochs
        if every and (last or _is_due(every, epoch + 1)):
            self._save(epoch)

    def _save(self, epoch: int) -> None:
        """Begins a checkpoint of this step, unless there is one already. Collective."""
        if self.saved_step == self.step:
            return
        # The records of an interval must not depend on whether the run was resumed inside it.
        self.recorder.record_training(self.step, epoch, self.optimizer)
        self.model.combine_statistics()
        with self.world.status.during("checkpoint"):
            self.folder.check_owned(self.world)
            self.saver.save(self.step, self._shared_state, self.state.rank_state)
        self.saved_step, self.start.is_saved = self.step, True
        self.recorder.restart(self.step)

    def _introduction(self) -> str:
        """Four lines about the ranks, the model, the data and the settings."""
        world, loader, choice = self.world, self.loader, self.model.choice
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        held_out = f", {self.validation.num_samples:,} held out" if self.validation else ""
        return (
            f"mpidp {mpidp.__version__}: {count(world.size, 'rank')} on {count(world.num_nodes, 'node')}, "
            f"device {world.device.type}, run folder {self.folder.path}\n"
            f"data: {loader.num_samples:,} samples to train{held_out}; {count(len(loader), 'step')} an epoch, "
            f"{loader.order.global_batch} samples a step\n"
            f"reading: {loader.line}\n"
            f"model: {self.config.model.name}, {parameters:,} parameters; reducer {choice.name} ({choice.reason})"
        )

    def _summary(self, elapsed_s: float) -> str:
        steps, recorder = self.step - self.first_step, self.recorder
        if steps == 0:
            return f"Nothing left to train: the run in {self.folder.path} has all its epochs."
        seconds = recorder.stopwatch.seconds
        text = summarise(steps, self.world.size, recorder.num_samples, elapsed_s, seconds, recorder.last_validation)
        return f"{text}\nEverything is in {self.folder.path}."

    def _shared_state(self) -> dict[str, Any]:
        """What rank 0 saves for all ranks."""
        return {
            **self.state.shared_state(),
            "metrics_bytes": self.recorder.num_bytes,
            "config": to_toml(self.config),
        }

    def _resume(self, held: RunFolder) -> tuple[int, Path]:
        """Loads the newest checkpoint; returns the length of the metrics at that time, and its path. Collective."""
        saved, path = restore(self.state, held.checkpoints, accept_changed=self.config.data.accept_changed)
        ignored = ignored_settings(self.config, saved["config"])
        if ignored:
            self.world.log_once(f"changed since, but the checkpoint's values go on: {', '.join(ignored)}")
        return int(saved["metrics_bytes"]), path

    def _steps_left(self) -> int:
        """Optimizer steps from here to the end of the last epoch."""
        epochs_left = self.config.train.epochs - self.loader.epoch
        return self.loader.remaining_steps + (epochs_left - 1) * len(self.loader) if epochs_left > 0 else 0


def _is_due(every: int, count: int) -> bool:
    return every > 0 and count % every == 0


def choose_threads(configured: int, environment: Mapping[str, str], cores_per_rank: int) -> int:
    """CPU threads of one rank: the run file's number, else OMP_NUM_THREADS, else this rank's share of the cores."""
    asked = environment.get("OMP_NUM_THREADS", "")
    return configured or (int(asked) if asked.isdecimal() and int(asked) else cores_per_rank)
