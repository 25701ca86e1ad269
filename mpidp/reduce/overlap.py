"""A thread that reduces buckets while the backward pass goes on.

It uses communicators of its own. Non-blocking collectives of the training thread would not help: they progress only
while a thread is in a call of MPI.
"""

import queue
import threading
import weakref
from collections.abc import Callable

import torch

from mpidp.reduce.buckets import Bucket
from mpidp.world.status import status

# A thread inside a collective that another rank has left never ends; the job is being aborted then.
END_TIMEOUT_S = 10.0

Job = tuple[Bucket, torch.cuda.Event | None]


class Overlap:
    """The helper thread. It ends by `close`, or when there is no reference to this object any more.

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


def _end(jobs: "queue.Queue[Job | None]", thread: threading.Thread) -> None:
    """Ends the thread, at the latest when the interpreter ends: a thread that still runs then would crash it."""
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
