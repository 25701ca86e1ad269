"""The reduction of a model's gradients to their mean: autograd's hooks, buckets and a reducer."""

from __future__ import annotations

import logging
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import nn

from mpidp.errors import LaunchError, MpidpError
from mpidp.reduce.buckets import Bucket, Buckets, Reducer
from mpidp.reduce.choice import Choice
from mpidp.reduce.hooks import Hooks
from mpidp.reduce.transport import SIXTEEN_BITS, Residuals, as_real
from mpidp.world.collectives import share_error
from mpidp.world.mpi import Topology, keep_at_loss, make_topology
from mpidp.world.status import status
from mpidp.world.world import World

# A thread inside a collective that another rank has left never ends; the job is being aborted then.
END_TIMEOUT_S = 10.0

Job = tuple[Bucket, torch.cuda.Event | None]


class Overlap:
    """A thread that reduces buckets while the backward pass goes on.

    It uses communicators of its own. Non-blocking collectives of the training thread would not help: they progress only
    while a thread is in a call of MPI. It ends by `close`, or when there is no reference to this object any more.

    Args:
        reduce: a method that packs, reduces and unpacks one bucket; called in the thread; its object is referred to
            weakly.
        device: where the buckets are.
    """

    def __init__(self, reduce: Callable[[Bucket], None], device: torch.device):
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._jobs: queue.Queue[Job | None] = queue.Queue()
        # The running thread must refer neither to this object nor to the one whose method it calls: both would stay.
        self._errors: list[BaseException] = []
        given = (self._jobs, self._errors, weakref.WeakMethod(reduce), device, self._stream)
        self._thread = threading.Thread(target=_run, args=given, name="mpidp-reduce", daemon=True)
        self._thread.start()
        self._end = weakref.finalize(self, _end, self._jobs, self._thread)

    def submit(self, bucket: Bucket) -> None:
        """Hands over a bucket whose gradients are complete, or queued on the current stream."""
        ready: torch.cuda.Event | None = None
        if self._stream is not None:
            ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ready.record(torch.cuda.current_stream(self._device))
        self._jobs.put((bucket, ready))

    def wait(self) -> None:
        """Returns when everything handed over is reduced; the current stream goes on after it.

        Raises:
            BaseException: what the thread raised.
        """
        self._jobs.join()
        if self._errors:
            # The other ranks wait in a collective that the thread left: uncaught, this ends the job.
            raise self._errors.pop()
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def close(self) -> None:
        """Ends the thread."""
        self._end()


def _end(jobs: queue.Queue[Job | None], thread: threading.Thread) -> None:
    """Ends the thread, at the latest when the interpreter ends: a thread that still runs then would crash it."""
    jobs.put(None)
    # The collector may run this in any thread, also in the one that is to end.
    if thread is not threading.current_thread():
        thread.join(END_TIMEOUT_S)


def _run(
    jobs: queue.Queue[Job | None],
    errors: list[BaseException],
    reduce: weakref.WeakMethod[Callable[[Bucket], None]],
    device: torch.device,
    stream: torch.cuda.Stream | None,
) -> None:
    if stream is not None:
        torch.cuda.set_device(device)
    with torch.no_grad(), torch.cuda.stream(stream):
        while (job := jobs.get()) is not None:
            bucket, ready = job
            if ready is not None:
                ready.wait()  # this thread's stream waits, not the thread
            method = reduce()
            try:
                if method is not None and not errors:
                    with status.working("reduce a bucket"):
                        method(bucket)
            except BaseException as error:
                errors.append(error)
            del method
            jobs.task_done()


log = logging.getLogger("mpidp")

# Ten times what a thread switch costs; with a longest pause of a millisecond, large buckets arrive a fifth later.
PAUSE_S = 1e-4


class Reduction:
    """Reduces gradients when a backward pass ends, or bucket by bucket while it runs. Construction is collective.

    In both cases the buckets are reduced one after the other, in one order on all ranks, by the same calls, so the
    results are equal bit for bit.

    Attributes:
        world: the ranks.
        buckets: the gradients; set by `start`, as are `reducer`, `hooks` and `residuals`.
        reducer: averages the buckets.
        hooks: autograd hooks that call this object.
        residuals: rounding errors of 16-bit communication.
        reduces: whether a backward pass that ends now is reduced, or only accumulates.
        pending: whether there are accumulated gradients that are not reduced yet.
        dropped: how often such gradients were dropped by `zero_grad()`, since the ranks last compared it.
        seconds: the time that the training thread has spent in `finish` so far, packing, reducing or waiting.

    Args:
        world: the ranks.
        choice: the reducer.
        bucket_bytes: intended size of one bucket.
        overlap: reduce buckets in a helper thread while backward goes on.
        check_finite: raise, on all ranks, when a gradient is infinite or NaN before it is summed.
    """

    buckets: Buckets
    reducer: Reducer
    hooks: Hooks
    residuals: Residuals

    def __init__(self, world: World, choice: Choice, bucket_bytes: int, overlap: bool, check_finite: bool):
        self.world, self._choice, self._bucket_bytes = world, choice, bucket_bytes
        self._overlaps, self._check_finite = overlap, check_finite
        self.reduces, self.pending = True, False
        self.dropped = 0
        self.seconds = 0.0
        self._has_gradients = False  # in what is pending
        self._error: Exception | None = None
        self._make_topology()

    def start(self, named: Sequence[tuple[str, nn.Parameter]]) -> None:
        """Makes buckets for gradients and installs the hooks. Collective.

        Args:
            named: name and parameter, in the order in which backward finishes them.
        """
        self._names = [name for name, _ in named]
        self.residuals = Residuals()
        # A helper thread that waits for the network must leave the core to backward.
        pause_s = PAUSE_S if self._overlaps and self.world.device.type == "cpu" else 0.0
        options = replace(self._choice.options, pause_s=pause_s, residuals=self.residuals)
        self.reducer = replace(self._choice, options=options).make(self._reducing_world)
        self.buckets = Buckets([parameter for _, parameter in named], self._bucket_bytes, self.reducer.allocate)
        keep_at_loss(self.reducer, *self.buckets.buckets)
        self._bucket_of = {
            slot.parameter: number for number, bucket in enumerate(self.buckets.buckets) for slot in bucket.layout.slots
        }
        self._overlap = Overlap(self._reduce, self.world.device) if self._overlaps else None
        self._await_all()
        self.hooks = Hooks(self.buckets.parameters, self, tell_ready=self._overlaps)

    def stop(self) -> None:
        """Removes hooks, thread and buckets; the parameters keep gradients of their own. Not collective."""
        self.hooks.remove()
        if self._overlap is not None:
            self._overlap.close()
        self.buckets.release()
        self.reducer.close()

    @property
    def is_complete(self) -> bool:
        """Whether all gradients are in the buckets and are the mean over ranks."""
        return not self.pending and all(map(self.buckets.is_in_bucket, range(len(self.buckets.parameters))))

    def begin_pass(self) -> None:
        """Called when a backward pass reaches its first parameter."""
        if self._has_gradients and all(parameter.grad is None for parameter in self.buckets.parameters):
            self.dropped += 1
            self._has_gradients = False

    def expect(self, index: int) -> None:
        """Called when a gradient of parameter `index` is about to be accumulated.

        Raises:
            RuntimeError: its bucket was sent already: the parameter gets gradients twice in one backward pass.
        """
        if self._bucket_of[index] < self._sent:
            raise RuntimeError(
                f"a parameter of shape {tuple(self.buckets.parameters[index].shape)} got a second gradient in one "
                f"backward pass, after its bucket had been sent (nested backward passes do this, as in reentrant "
                f"activation checkpointing): use overlap=False, or checkpoint with use_reentrant=False."
            )
        self._has_gradients = True
        self.buckets.expect(index)

    def ready(self, index: int, task: int) -> None:
        """Called when pass `task` has accumulated the gradient of parameter `index`, if any. Only with overlap."""
        if not self._will_reduce(task):
            return
        self._missing[self._bucket_of[index]].discard(index)
        while self._sent < len(self._missing) and not self._missing[self._sent]:
            self._send()

    def end_pass(self, task: int) -> None:
        """Called at the end of backward pass `task`. Collective, if it is reduced."""
        self.pending = True
        if self._will_reduce(task):
            self.reduce()

    def fail_pass(self) -> None:
        """Called when a backward pass fails; the program may catch the exception."""
        if not self._sent:
            return
        try:  # the other ranks wait for all buckets of this pass
            self.reduce(MpidpError("a backward pass failed after some of its gradients had been sent"))
        except Exception as error:  # the program gets its own exception
            log.info("%s", error)

    def reduce(self, failure: Exception | None = None) -> None:
        """Reduces the accumulated gradients. Collective."""
        self.finish(failure)

    def finish(self, failure: Exception | None = None, place: Sequence[int] = ()) -> bool:
        """Reduces all gradients that are not reduced yet; returns when they are the mean over ranks. Collective.

        Args:
            failure: why this rank brings no gradients, or not all.
            place: integers that identify what is reduced, equally many on all ranks.

        Returns:
            Whether `place` is the same on all ranks; if not, the gradients are useless.

        Raises:
            Exception: on all ranks, the failure of the lowest rank that has one.
        """
        start = time.perf_counter()
        with status.during("reduce"):
            self.pending = self._has_gradients = False
            if self._overlap is None:
                with torch.no_grad():
                    for bucket in self.buckets.buckets:
                        self._reduce(bucket)
            else:
                while self._sent < len(self._missing):
                    self._send()
                self._overlap.wait()
                self._await_all()
            # Neither a helper thread nor a rank that has no gradients can raise here by itself.
            error, self._error = failure or self._error, None
            world = self.world
            note = f"on rank {world.rank} of {world.size} ({world.host}), after step {status.step:,}"
            are_same = share_error(self._reducing_world.topology.comm, error, note, place)
        self.seconds += time.perf_counter() - start
        return are_same

    def _will_reduce(self, task: int) -> bool:
        return self.reduces and status.accumulating_pass != task

    def _await_all(self) -> None:
        """Resets the state of a pass: no bucket is sent, and the gradients of all parameters are missing."""
        self._sent = 0  # buckets handed to the helper thread in this pass
        self._missing = [{slot.parameter for slot in bucket.layout.slots} for bucket in self.buckets.buckets]

    def _send(self) -> None:
        assert self._overlap is not None
        self._overlap.submit(self.buckets.buckets[self._sent])
        self._sent += 1

    def _reduce(self, bucket: Bucket) -> None:
        try:
            self.buckets.pack(bucket)
            if self._check_finite:
                self._check(bucket)
        except Exception as error:
            if self._overlap is None and not self._check_finite:
                raise
            # The other ranks will call this bucket's collective: take part in it, and raise in `finish`.
            self._error = self._error or error
        self.reducer.mean(bucket)
        self.buckets.unpack(bucket)

    def _check(self, bucket: Bucket) -> None:
        """Raises FloatingPointError for the first gradient of this rank that is infinite or NaN."""
        # One pass over the bucket: a sum with a NaN or an infinity is never finite, any other nearly always is.
        real = as_real(bucket.flat)
        if bool(torch.isfinite(real.sum(dtype=torch.float32 if real.dtype in SIXTEEN_BITS else None))):
            return
        for slot in bucket.layout.slots:
            view = self.buckets.view(slot.parameter)
            wrong = int((~torch.isfinite(view)).sum())
            if wrong:
                raise FloatingPointError(
                    f"the gradient of {self._names[slot.parameter]} is infinite or NaN in {wrong:,} of "
                    f"{view.numel():,} elements on rank {self.world.rank} ({self.world.host}), before it was summed "
                    f"with the other ranks'. Look at this rank's samples and at the learning rate."
                )

    def _make_topology(self) -> None:
        """Makes communicators for the helper thread, which nothing else uses, not even another wrapper. Collective."""
        self._own_topology: Topology | None = None
        self._reducing_world = self.world
        if self._overlaps:
            if not self.world.all(self.world.threads_may_call):
                raise LaunchError(
                    "overlap=True needs MPI_THREAD_MULTIPLE, which this MPI was not started with: call mpidp.init() "
                    "before anything else starts MPI, or use overlap=False"
                )
            self._own_topology = make_topology(self.world.comm)
            self._reducing_world = replace(self.world, topology=self._own_topology)

    def _free_topology(self) -> None:
        if self._own_topology is not None:
            self._own_topology.free()
