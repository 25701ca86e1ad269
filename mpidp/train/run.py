"""What the loop of `mpidp train` works with, made from a run file: data, model, optimizer, run folder, records."""

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

import mpidp
from mpidp.config import RunConfig, to_toml
from mpidp.hdf5.loader import HDF5Loader
from mpidp.train.agreement import check_same
from mpidp.train.batch_norm import SyncBatchNorm, sync_layers
from mpidp.train.best import Best
from mpidp.train.callbacks import Callbacks
from mpidp.train.checkpoint.read import MANIFEST, folder_name
from mpidp.train.checkpoint.saver import Saver, settle
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
from mpidp.train.ema import Ema
from mpidp.train.forward import Forward
from mpidp.train.precision import Precision
from mpidp.train.records.progress import Progress, count, describe_newest, summarise
from mpidp.train.records.recorder import MetricsFile, Recorder, whole_lines
from mpidp.train.records.run_folder import RunFolder
from mpidp.train.records.trace import Trace
from mpidp.train.sharded_optimizer import ShardedOptimizer
from mpidp.train.state import Stateful, TrainState
from mpidp.train.stop import StopSignal
from mpidp.world.mpi import MPI, reduced, warn_of_cores
from mpidp.world.world import World


@dataclass
class Kept:
    """What one start of a run keeps when ranks are lost and its `Run` is made anew.

    Attributes:
        folder: the run's; None until a new one is made.
        first_step: optimizer steps done before this start; None until that is known.
        since_s: when training began, by `time.perf_counter`.
        saver: of the last `Run`, as are the stop signal and the recorder.
        callbacks: of the run file; None until they are made.
        best: for the checkpoint that stays; None where none is asked for.
        stopping: for early stopping, likewise.
        is_saved: whether no checkpoint was given up that was on its way when ranks were lost.
        staged: loaders whose copies of files stay on the node until others have been made.
    """

    folder: RunFolder | None = None
    first_step: int | None = None
    since_s: float = field(default_factory=time.perf_counter)
    saver: Saver | None = None
    is_saved: bool = True
    stop: StopSignal | None = None
    recorder: Recorder | None = None
    callbacks: Callbacks | None = None
    best: Best | None = None
    stopping: Best | None = None
    staged: list[HDF5Loader] = field(default_factory=list)

    def go_on(self, world: World) -> tuple[int, Path | None]:
        """Ends what ranks that died took part in. Collective over those that are left.

        Returns:
            The length of the metrics, on rank 0; and the newest checkpoint that this rank knows of.
        """
        assert self.folder is not None
        self.folder.take_over(world)
        newest = None if self.saver is None else self.saver.newest
        step = reduced(world.comm, -1 if self.saver is None else self.saver.step_on_its_way, MPI.MAX)
        if step >= 0:
            complete = settle(world, self.folder.checkpoints, step)
            newest = complete or newest
            self.is_saved = self.is_saved and complete is not None
        self.is_saved = world.all(self.is_saved)
        return whole_lines(self.folder.metrics) if world.rank == 0 else 0, newest

    def close(self) -> None:
        """Releases the run folder. Not collective."""
        if self.folder is not None:
            self.folder.close()
            self.folder.release()


class Run:
    """Everything that one run needs on these ranks. Construction is collective.

    Everything that can be wrong with the input is found before the run folder is made.

    Attributes:
        model: the wrapped model.
        forward: computes the model's output and the loss of a batch.
        loader, validation: samples to train on, and held-out ones, if any.
        saved_step: the step of the newest checkpoint of this state; -1 for none.

    Args:
        config: the run.
        world: the ranks.
        kept: with the folder of a run to continue; or what a `Run` on more ranks has left, of which some died.
        elastic: lets training go on when ranks die.
    """

    def __init__(self, config: RunConfig, world: World, kept: Kept | None = None, elastic: Elastic | None = None):
        self.config, self.world, self.elastic = config, world, elastic
        self.kept = kept = kept or Kept()
        goes_on = elastic is not None and elastic.goes_on
        held = kept.folder
        resume = None if held is None else held.path
        check_same(world, [*to_toml(config).splitlines(), f"resume {resume}"], "the configurations")
        self._set_threads()
        self._build()
        others: dict[str, Stateful] = {} if self.ema is None else {"ema": self.ema}
        if self.precision.scaler.is_enabled():
            others["scaler"] = self.precision.scaler
        self.state = TrainState(
            self.model, self.optimizer, self.loader, self.scheduler, seed=config.run.seed, others=others
        )
        self.state.seed_streams()
        self._follow_metrics()
        metrics_bytes, newest = (0, None) if held is None or goes_on else self._resume(held)
        if held is not None and not goes_on:
            held.begin(world)
        self.folder = kept.folder = held or RunFolder.create(config, world)
        if elastic is not None and elastic.restore(self.state):
            metrics_bytes, newest = kept.go_on(world)
            for follower in self._followers().values():  # ranks may have died while only some had added an evaluation
                follower.load_state_dict(world.broadcast(follower.state_dict()))
        world.guard.last_words = partial(describe_newest, self.folder.path, self.folder.checkpoints)
        world.status.step = self.step
        is_saved = newest is not None and newest.name == folder_name(self.step)
        self.saved_step = self.step if world.all(is_saved) else -1
        self.first_step = kept.first_step = self.step if kept.first_step is None else kept.first_step
        self._record(metrics_bytes, newest, is_traced=not goes_on)
        if kept.best is not None and kept.best.step >= 0:  # a job may have died before it had marked it
            self.saver.mark_best(kept.best.step)

    def _set_threads(self) -> None:
        """Sets torch's number of CPU threads. Collective."""
        world, configured = self.world, self.config.train.threads
        torch.set_num_threads(choose_threads(configured, os.environ, world.cores))
        if configured:  # `init` warns of other numbers
            warn_of_cores(world.comm, world.host, configured, stacklevel=2)

    def _build(self) -> None:
        """Makes data, model and optimizer. Collective."""
        config, world = self.config, self.world
        with world.status.during("open the data", is_long=True):  # copying it to a node may take long
            self.loader, self.validation = build_loaders(config, world)
        self.kept.staged = self.loaders() if config.data.mode == "stage" else []
        with world.raise_on_all_ranks("building the model"):
            self.precision = Precision(config.train.precision, world.device)
            module = build_model(config).to(world.device)
            loss = build_loss(config.loss, self.precision.dtype, world.device)
            self.on_end = build_on_end(config)
        with world.raise_on_all_ranks("making the callbacks"):
            self.callbacks = self.kept.callbacks = self.kept.callbacks or Callbacks(config.train.callbacks)
        if config.train.sync_batch_norm and not sync_layers(SyncBatchNorm.convert(module, world)):
            world.log_once("train.sync_batch_norm is true, but the model has no batch norm layer")
        self.model = wrap_model(module, world, config)
        self.ema = Ema(module, config.train.ema_decay) if config.train.ema_decay else None
        self.forward = Forward(config, self.model, loss, self.precision)
        with world.raise_on_all_ranks("building the optimizer"):
            plain = build_optimizer(config.optimizer, self.model)
        self.optimizer = self._shard(plain) if config.optimizer.sharded else plain
        with world.raise_on_all_ranks("building the scheduler"):
            total_steps = config.train.epochs * len(self.loader)
            self.scheduler = build_scheduler(config.scheduler, self.optimizer, total_steps)

    def _follow_metrics(self) -> None:
        """Makes what follows the evaluations, unless it goes on from before a loss of ranks."""
        best, stopping = self.config.checkpoint.best, self.config.train.early_stopping
        if best and self.kept.best is None:
            self.kept.best = Best(best)
        if stopping.metric and self.kept.stopping is None:
            self.kept.stopping = Best(stopping.metric, stopping.min_delta)

    def _shard(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Shards an optimizer's state, with two copies if training goes on when ranks die. Collective."""
        survives = self.elastic is not None and self.elastic.is_on
        return ShardedOptimizer(optimizer, self.world, copies=2 if survives else 1)

    def _resume(self, held: RunFolder) -> tuple[int, Path]:
        """Loads the newest checkpoint; returns the length of the metrics at that time, and its path. Collective."""
        saved, path = restore(self.state, held.checkpoints, accept_changed=self.config.data.accept_changed)
        ignored = ignored_settings(self.config, saved["config"])
        if ignored:
            self.world.log_once(f"changed since, but the checkpoint's values go on: {', '.join(ignored)}")
        for name, follower in self._followers().items():
            if name in saved["followers"]:
                follower.load_state_dict(saved["followers"][name])
        return int(saved["metrics_bytes"]), path

    def _record(self, metrics_bytes: int, newest: Path | None, is_traced: bool) -> None:
        """Opens what is written while training: checkpoints, metrics, trace; and the file STOP. Collective."""
        config, world, kept, folder = self.config, self.world, self.kept, self.folder
        self.saver = kept.saver = Saver(
            world,
            folder.checkpoints,
            config.checkpoint.keep,
            background=config.checkpoint.background,
            on_failure=config.checkpoint.on_failure,
            newest=newest,
            relies_on=(folder.config, folder.metrics),
        )
        last_step = self.step + self._steps_left()
        progress = Progress(world.rank == 0, self.step, last_step, config.log.progress_s)
        with world.raise_on_all_ranks("opening the metrics"):
            metrics = MetricsFile(folder.metrics, metrics_bytes) if world.rank == 0 else None
        self.recorder = kept.recorder = Recorder(
            world,
            progress,
            metrics,
            self.step,
            on_failure=config.checkpoint.on_failure,
            failure=folder.take_log_failure,
            scaler=self.precision.scaler,
            ignored=self.forward.ignored,
            before=kept.recorder,
        )
        folder.note(world, first_step=self.first_step, last_step=last_step)
        steps = config.log.trace_steps if is_traced else 0
        self.trace = Trace(world, folder.trace, from_step=config.log.trace_from, steps=steps)
        self.stop = kept.stop = StopSignal(world, folder.path / "STOP", kept.stop.told if kept.stop else "")

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.state.step

    def loaders(self) -> list[HDF5Loader]:
        """Of all data that the run reads."""
        return [self.loader] if self.validation is None else [self.loader, self.validation]

    def _followers(self) -> dict[str, Best]:
        """What follows the evaluations, by the name in a checkpoint."""
        found = {"best": self.kept.best, "stopping": self.kept.stopping}
        return {name: follower for name, follower in found.items() if follower is not None}

    def follow(self, epoch: int) -> None:
        """Adds the evaluation of an epoch to what decides on checkpoints and the end. Collective.

        Raises:
            ConfigError: on all ranks: the evaluation has no such metric.
        """
        if not (followers := self._followers()):
            return
        self._forget_unwritten()
        validation = self.world.broadcast(self.recorder.last_validation)
        with self.world.raise_on_all_ranks("looking at the evaluation"):
            for follower in followers.values():
                follower.add(validation, epoch, self.step)
        if self.kept.best is not None and self.kept.best.step == self.step:
            self.save(epoch)

    def _forget_unwritten(self) -> None:
        """Goes back to the best before, if the checkpoint of the best one could not be written. Collective."""
        best = self.kept.best
        if best is None or best.step < 0 or self.saver.step_on_its_way == best.step:
            return
        place = self.folder.checkpoints / folder_name(best.step) / MANIFEST
        if not self.world.call_on_root(place.exists):
            best.forget()

    def why_over(self) -> str:
        """Why training stops before its last epoch, in words; "" if it does not."""
        stopping, patience = self.kept.stopping, self.config.train.early_stopping.patience_epochs
        if stopping is None or stopping.epochs_since < patience:
            return ""
        found = (
            "never a number" if stopping.value is None else f"best, {stopping.value:.6g}, in epoch {stopping.epoch + 1}"
        )
        return f"stopped early: {stopping.metric} was {found}, and not better for {count(patience, 'epoch')} since"

    def save(self, epoch: int) -> None:
        """Begins a checkpoint of this step, unless there is one already. Collective."""
        is_best = self.kept.best is not None and self.kept.best.step == self.step
        if self.saved_step == self.step:
            if is_best:
                self.saver.mark_best(self.step)
            return
        # The records of an interval must not depend on whether the run was resumed inside it.
        self.recorder.record_training(self.step, epoch, self.optimizer)
        self.model.combine_statistics()
        with self.world.status.during("checkpoint"):
            self.folder.check_owned(self.world)
            self.saver.save(self.step, self._shared_state, self.state.rank_state, is_best)
        self.saved_step, self.kept.is_saved = self.step, True
        self.recorder.restart(self.step)

    def check_saved(self) -> None:
        """Raises if the last checkpoint could not be written: then the run has failed."""
        if self.saver.failure is not None:
            raise self.saver.failure

    def _shared_state(self) -> dict[str, Any]:
        """What rank 0 saves for all ranks."""
        return {
            **self.state.shared_state(),
            "metrics_bytes": self.recorder.num_bytes,
            "config": to_toml(self.config),
            "followers": {name: follower.state_dict() for name, follower in self._followers().items()},
        }

    def introduction(self) -> str:
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

    def summary(self) -> str:
        """Some lines about the steps of this start and where their time went."""
        steps, recorder = self.step - self.first_step, self.recorder
        if steps == 0:
            return f"Nothing left to train: the run in {self.folder.path} has all its epochs."
        elapsed_s, seconds = time.perf_counter() - self.kept.since_s, recorder.stopwatch.seconds
        text = summarise(steps, self.world.size, recorder.num_samples, elapsed_s, seconds, recorder.last_validation)
        return f"{text}\nEverything is in {self.folder.path}."

    def _steps_left(self) -> int:
        """Optimizer steps from here to the end of the last epoch."""
        epochs_left = self.config.train.epochs - self.loader.epoch
        return self.loader.remaining_steps + (epochs_left - 1) * len(self.loader) if epochs_left > 0 else 0


def choose_threads(configured: int, environment: Mapping[str, str], cores_per_rank: int) -> int:
    """CPU threads of one rank: the run file's number, else OMP_NUM_THREADS, else this rank's share of the cores."""
    asked = environment.get("OMP_NUM_THREADS", "")
    return configured or (int(asked) if asked.isdecimal() and int(asked) else cores_per_rank)
