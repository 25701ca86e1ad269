"""The training loop of `mpidp train`: from a run file to a trained model in a run folder."""

import contextlib
import os
from pathlib import Path

import torch
from torch import Tensor

from mpidp.config import RunConfig
from mpidp.errors import ConfigError
from mpidp.hdf5.batch import Batch
from mpidp.train.agreement import check_same
from mpidp.train.batch_norm import SyncBatchNorm
from mpidp.train.elastic import Elastic
from mpidp.train.records.progress import describe_epoch
from mpidp.train.records.recorder import Tally
from mpidp.train.records.run_folder import RunFolder
from mpidp.train.records.starts import choose_resume, for_array_task
from mpidp.train.run import Kept, Run
from mpidp.train.sharded_optimizer import ShardedOptimizer
from mpidp.world.exit import MEMORY_ADVICE, is_out_of_memory
from mpidp.world.start import init
from mpidp.world.status import BETWEEN


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
        kept = Kept(RunFolder.hold(resume, world) if resume else None)
        at_end.callback(kept.close)
        if config.train.fault_tolerance != "shrink":
            return Trainer(Run(config, world, kept)).train()
        elastic = Elastic(world, config.train.min_ranks)
        return elastic.run(lambda world: Trainer(Run(config, world, kept, elastic)).train())


class Trainer:
    """The loop over epochs and steps.

    Args:
        run: what it works with.
    """

    def __init__(self, run: Run):
        self.run, self.config, self.world = run, run.config, run.world
        self.model, self.optimizer, self.loader = run.model, run.optimizer, run.loader
        self.recorder, self.saver = run.recorder, run.saver
        self.stopped = ""  # why, once all ranks are asked to stop

    def train(self) -> str:
        """Trains to the last epoch, or until the job is asked to stop; returns the reason, or "". Collective."""
        try:
            self._train_epochs()
        except BaseException as error:
            if self.world.size == 1 and is_out_of_memory(error):  # with several ranks the guard adds this advice
                error.add_note(f"Out of memory {self.world.status.where()}. {MEMORY_ADVICE}")
            self.saver.leave(error)
            self.run.trace.give_up()
            raise
        finally:
            self.recorder.close()
            self._end_reading()
        for loader in self.run.loaders():
            loader.close()
        self.run.callbacks.on_end(self)
        if self.stopped:
            self.run.check_saved()
            self.run.folder.note(self.world, end=f"stopped by {self.stopped}")
            self.world.log_once(
                f"stopped by {self.stopped} after step {self.run.step:,} of {self.recorder.progress.last_step:,}; "
                f"the state is saved. Continue with --resume {self.run.folder.path}"
            )
            return self.stopped
        self.recorder.progress.line(self.run.summary())
        self._end()
        self.run.folder.note(self.world, end="done")
        return ""

    def _end(self) -> None:
        """Unwraps the model after the last step, and calls `train.on_end`. Collective."""
        self.run.stop.close()
        self.model.combine_statistics()
        module = SyncBatchNorm.revert(self.model.unwrap())
        if self.world.rank == 0 and self.run.on_end:
            with self.world.status.during("train.on_end", is_long=True):
                # On one rank: a plain module, whose backward reduces nothing.
                self.run.on_end(self.run.ema.model() if self.run.ema else module, self.config)
        self.world.barrier()
        self.run.check_saved()

    def _end_reading(self) -> None:
        """Ends all threads that read. Not collective: after a failure the other ranks may be in any call."""
        for loader in self.run.loaders():
            loader.stop()

    def _train_epochs(self) -> None:
        """Trains to the last epoch, or until the run is asked to stop, and completes the last checkpoint."""
        if self.run.elastic is None or self.run.elastic.lost_ranks is None:
            self.recorder.progress.line(self.run.introduction())
            self.run.callbacks.on_start(self)
        else:
            self.recorder.record_lost_ranks(self.run.step, self.loader.epoch, self.run.elastic.lost_ranks)
        if not self.run.kept.is_saved:
            self.run.save(self.loader.epoch)
        for epoch in range(self.loader.epoch, self.config.train.epochs):
            if self.run.why_over():
                break
            if not self._all_steps_done(epoch):
                self._train_epoch(epoch)
            self._evaluate(epoch)
            if self.stopped:
                break
            result = self.recorder.last_validation
            self.recorder.progress.line(describe_epoch(epoch, self.config.train.epochs, self.run.step, result))
            self.run.callbacks.on_epoch(self, epoch, self.recorder.newest())
            try:
                self.run.follow(epoch)
            except ConfigError:  # on all ranks: what the epoch has learnt stays
                self.run.save(epoch)
                raise
            self._save_after(epoch)
        if (why := self.run.why_over()) and not self.stopped:
            self.world.log_once(f"{why} (train.early_stopping)")
        if self.run.elastic is not None:  # raises here if a rank died in the last step, as parameters may be missing
            self.world.barrier()
        self.saver.finish()
        self.saver.close()
        self.run.trace.close()
        if isinstance(self.optimizer, ShardedOptimizer):
            self.optimizer.close()

    def _all_steps_done(self, epoch: int) -> bool:
        """Whether the run was resumed from a checkpoint of this epoch's last step, before the evaluation."""
        return self.loader.epoch == epoch and self.loader.remaining_steps == 0

    def _train_epoch(self, epoch: int) -> None:
        """Trains on the samples that are left of the epoch, each once."""
        self.model.train()
        self.world.status.enter(BETWEEN)
        self.recorder.restart(self.run.step)
        self.run.trace.restart()
        batches = self.model.batches(self.loader)
        while True:
            with self.recorder.stopwatch("data"):
                batch = next(batches, None)
            if batch is None:
                break
            self._train_step(batch)
            self.saver.poll()
            if _is_due(self.config.log.every_steps, self.run.step):
                self.recorder.record_training(self.run.step, epoch, self.optimizer)
            self.run.callbacks.on_step(self, self.run.step, self.recorder.last_training)
            if _is_due(self.config.checkpoint.every_steps, self.run.step):
                self.run.save(epoch)
            self.run.trace.step()
            if self._is_asked_to_stop(epoch):
                break
        self.recorder.record_training(self.run.step, epoch, self.optimizer)

    def _is_asked_to_stop(self, epoch: int) -> bool:
        """Whether all ranks stop here; the state is saved then. Collective."""
        self.stopped = self.run.stop.agreed()
        if self.stopped:
            if self.loader.epoch > epoch:  # stopped in the evaluation, which the next start repeats
                place = {"epoch": epoch, "position": self.loader.num_samples}
                self.loader.load_state_dict(self.loader.state_dict() | place)
            self.run.save(epoch)
        return bool(self.stopped)

    def _train_step(self, batch: Batch) -> None:
        """The five steps of training, on one global batch."""
        weights: list[Tensor] = []
        stopwatch, scaler = self.recorder.stopwatch, self.run.precision.scaler
        for part in batch.micro_batches(self.config.train.micro_batch or max(1, batch.size)):
            with contextlib.nullcontext() if part.last else self.model.no_sync():
                inputs, target = self.run.forward.inputs(part)
                with stopwatch("forward"):
                    output, loss = self.run.forward(part, inputs, target)
                reduce_s = self.model.reduce_s
                with stopwatch("backward"):
                    scaler.scale(part.weigh(loss)).backward()  # type: ignore[no-untyped-call]
                stopwatch.move("backward", "reduce", self.model.reduce_s - reduce_s)
            weight = self.run.forward.weight(target)
            weights += [] if weight is None else [weight]
            self.recorder.tally.add(loss, output, target, part.size, weight)
        if weights:
            with stopwatch("reduce"):
                self._divide_by(float(sum(weights)), batch.global_size)
        if self.run.elastic is not None:
            self.run.elastic.agree()  # up to the next collective all living ranks do the same
        with stopwatch("optimizer"):
            self._step_optimizer()
        self.run.state.step += 1
        self.world.status.step = self.run.step

    def _divide_by(self, weight: float, num_samples: int) -> None:
        """Divides gradients by the weights of all ranks instead of the number of samples. Collective."""
        total = sum(self.world.comm.allgather(weight))  # the same bits on all ranks
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(num_samples / total if total else 0.0)

    def _step_optimizer(self) -> None:
        """Clips, steps, and sets the next learning rate. In fp16 gradients that overflowed leave all as it is.

        The norm is taken where it is needed: reading all gradients once more costs a few per cent of a small step.
        """
        precision, clip_norm = self.run.precision, self.config.train.clip_norm
        precision.scaler.unscale_(self.optimizer)
        steps = (self.config.log.every_steps, self.config.checkpoint.every_steps)
        is_recorded = self.loader.remaining_steps == 0 or any(_is_due(every, self.run.step + 1) for every in steps)
        norm = None
        if clip_norm or is_recorded:
            gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
            norm = torch.nn.utils.get_total_norm(gradients)
            if clip_norm:
                torch.nn.utils.clip_grads_with_norm_(self.model.parameters(), clip_norm, norm)
        is_stepped = precision.step(self.optimizer)
        self.recorder.add_step(is_stepped, norm if is_recorded else None)
        self.optimizer.zero_grad()
        if is_stepped and self.run.scheduler:
            self.run.scheduler.step()
        if is_stepped and self.run.ema:
            self.run.ema.update()

    def _evaluate(self, epoch: int) -> None:
        """Mean loss and accuracy of the held-out samples, each counted once, with averaged weights if any. Collective.

        When asked to stop meanwhile, it leaves no record: the next start evaluates again.
        """
        if self.run.validation is None or self.stopped:
            return
        self.model.combine_statistics()
        self.model.eval()
        averaged = self.run.ema.model() if self.run.ema else None
        tally = Tally(self.world.device, self.run.forward.ignored)
        with torch.no_grad(), self.world.status.during("evaluate"):
            for batch in self.run.validation:
                if batch.size:
                    inputs, target = self.run.forward.inputs(batch)
                    output, loss = self.run.forward(batch, inputs, target, averaged)
                    tally.add(loss, output, target, batch.size, self.run.forward.weight(target))
                self.saver.poll()
                if self._is_asked_to_stop(epoch):
                    return
        self.recorder.record_validation(self.run.step, epoch, tally)

    def _save_after(self, epoch: int) -> None:
        last = epoch + 1 == self.config.train.epochs or bool(self.run.why_over())
        every = self.config.checkpoint.every_epochs
        if every and (last or _is_due(every, epoch + 1)):
            self.run.save(epoch)


def _is_due(every: int, count: int) -> bool:
    return every > 0 and count % every == 0
