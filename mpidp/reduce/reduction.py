"""The reduction of a model's gradients: its buckets and its reducer, after backward or while it runs.

While backward runs, a helper thread makes the calls, on communicators of its own. Non-blocking collectives of the
training thread would not help: they progress only when somebody calls MPI.
"""

import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence

import torch
from torch import nn

from mpidp.reduce.buckets import Bucket, Buckets
from mpidp.reduce.exchange import SIXTEEN_BITS
from mpidp.reduce.reducer import Reducer
from mpidp.reduce.transport import as_real
from mpidp.world.collectives import share_error
from mpidp.world.status import status
from mpidp.world.world import World

# A thread inside a collective that another rank has left never ends; the job is being aborted then.
END_TIMEOUT_S = 10.0

Job = tuple[Bucket, torch.cuda.Event | None]


class Overlap:
    """The helper thread. It ends by `close`, or when nobody holds this object any more.

    Args:
        reduce: a method that packs, reduces and unpacks one bucket; called in the thread, its object held weakly.
        device: where the buckets are.
    """

    def __init__(self, reduce: Callable[[Bucket], None], device: torch.device):
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._jobs: queue.Queue[Job | None] = queue.Queue()
        # A running thread keeps what it holds: it must not hold this object, nor the one whose method it calls.
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
            BaseException: what the thread met.
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


def _end(jobs: "queue.Queue[Job | None]", thread: threading.Thread) -> None:
    """Ends the thread, at the latest when the interpreter goes: one that still runs then would crash it."""
    jobs.put(None)
    # The collector may run this in any thread, also in the one that is to end.
    if thread is not threading.current_thread():
        thread.join(END_TIMEOUT_S)


def _run(
    jobs: "queue.Queue[Job | None]",
    errors: list[BaseException],
    reduce: "weakref.WeakMethod[Callable[[Bucket], None]]",
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


class Reduction:
    """The buckets of a model on their way through a reducer, after backward or while it runs.

    Either way the buckets are reduced one after the other, in one order on all ranks, by the same calls, so that
    overlap changes no bit of the result.

    Attributes:
        buckets: the gradients.
        seconds: how long the training thread has been in `finish` so far, packing, reducing or waiting.

    Args:
        world: the ranks.
        named: what to reduce, name and parameter, in the order in which backward finishes them.
        reducer: the strategy.
        bucket_bytes: size aimed at for one bucket.
        overlap: reduce buckets in a helper thread while backward goes on.
        check_finite: raise, on all ranks, when a gradient is infinite or NaN before it is summed.
    """

    def __init__(
        self,
        world: World,
        named: Sequence[tuple[str, nn.Parameter]],
        reducer: Reducer,
        bucket_bytes: int,
        overlap: bool,
        check_finite: bool,
    ):
        self._world = world
        self._names = [name for name, _ in named]
        self._check_finite = check_finite
        self.reducer = reducer
        self.buckets = Buckets([parameter for _, parameter in named], bucket_bytes, reducer.allocate)
        self.seconds = 0.0
        self._error: Exception | None = None
        self._bucket_of = {
            slot.parameter: number for number, bucket in enumerate(self.buckets.buckets) for slot in bucket.layout.slots
        }
        self._sent = 0  # buckets handed to the helper thread in this pass
        self._missing: list[set[int]] = []  # of each bucket, the parameters it waits for
        self._overlap = Overlap(self._reduce, world.device) if overlap else None
        if overlap:
            self._begin()

    def expect(self, index: int) -> None:
        """A gradient of parameter `index` is about to be accumulated.

        Raises:
            RuntimeError: its bucket was sent already: the parameter gets gradients twice in one backward pass.
        """
        if self._bucket_of[index] < self._sent:
            raise RuntimeError(
                f"a parameter of shape {tuple(self.buckets.parameters[index].shape)} got a second gradient in one "
                f"backward pass, after its bucket had been sent (nested backward passes do this, as in reentrant "
                f"activation checkpointing): use overlap=False, or checkpoint with use_reentrant=False."
            )
        self.buckets.expect(index)

    def ready(self, index: int) -> None:
        """Parameter `index` is complete in a pass that will reduce: hands over what is now complete. Overlap only."""
        self._missing[self._bucket_of[index]].discard(index)
        while self._sent < len(self._missing) and not self._missing[self._sent]:
            self._send()

    def finish(self, failure: Exception | None = None, place: Sequence[int] = ()) -> bool:
        """All gradients are there: returns when they are the mean over ranks. Collective.

        Args:
            failure: why this rank brings no gradients, or not all.
            place: integers that tell what is reduced, equally many on all ranks.

        Returns:
            Whether all ranks have reduced the same, by `place`; else the gradients are of no use.

        Raises:
            Exception: on all ranks, the failure of the lowest rank that has one.
        """
        with status.during("reduce"):
            return self._finish(failure, place)

    def _finish(self, failure: Exception | None, place: Sequence[int]) -> bool:
        start = time.perf_counter()
        if self._overlap is None:
            with torch.no_grad():
                for bucket in self.buckets.buckets:
                    self._reduce(bucket)
        else:
            while self._sent < len(self._missing):
                self._send()
            self._overlap.wait()
            self._begin()
        # Neither a helper thread nor a rank that has no gradients can raise here by itself.
        error, self._error = failure or self._error, None
        note = f"on rank {self._world.rank} of {self._world.size} ({self._world.host}), after step {status.step:,}"
        are_same = share_error(self._world.topology.comm, error, note, place)
        self.seconds += time.perf_counter() - start
        return are_same

    @property
    def has_begun(self) -> bool:
        """Whether some bucket of this pass is on its way, so that the other ranks wait for all of them."""
        return self._sent > 0

    def abandon(self) -> None:
        """Ends the helper thread when a rank has died; its communicator was revoked, so it waits for nothing."""
        if self._overlap is not None:
            self._overlap.close()

    def close(self) -> None:
        """Ends the helper thread and gives the parameters gradients of their own. Not collective."""
        if self._overlap is not None:
            self._overlap.close()
        self.buckets.release()
        self.reducer.close()

    def _begin(self) -> None:
        """No bucket of the next pass is sent, and all parameters are missing."""
        self._sent = 0
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
            # The other ranks are on their way into this bucket's collective: take part in it, and raise in `finish`.
            self._error = self._error or error
        self.reducer.mean(bucket)
        self.buckets.unpack(bucket)

    def _check(self, bucket: Bucket) -> None:
        """Raises FloatingPointError for the first gradient of this rank that is infinite or NaN."""
        # One pass over the bucket: a sum with a NaN or an infinity is never finite, others nearly always are.
        real = as_real(bucket.flat)
        if bool(torch.isfinite(real.sum(dtype=torch.float32 if real.dtype in SIXTEEN_BITS else None))):
            return
        for slot in bucket.layout.slots:
            view = self.buckets.view(slot.parameter)
            wrong = int((~torch.isfinite(view)).sum())
            if wrong:
                raise FloatingPointError(
                    f"the gradient of {self._names[slot.parameter]} is infinite or NaN in {wrong:,} of "
                    f"{view.numel():,} elements on rank {self._world.rank} ({self._world.host}), before it was summed "
                    f"with the other ranks'. Look at this rank's samples and at the learning rate."
                )
