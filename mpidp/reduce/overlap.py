"""Buckets in, in one order on all ranks, as backward completes them; the same buckets reduced out, meanwhile.

A helper thread makes blocking calls on communicators of its own. Non-blocking collectives would not help: they
progress only when somebody calls MPI, and are not safe on device memory.
"""

import queue
import threading
from collections.abc import Callable

import torch

from mpidp.reduce.buckets import Bucket


class Overlap:
    """The helper thread, and the way back of its errors.

    Args:
        reduce: packs, reduces and unpacks one bucket; called in the thread.
        device: where the buckets are.
    """

    def __init__(self, reduce: Callable[[Bucket], None], device: torch.device):
        self._reduce = reduce
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._jobs: queue.Queue[tuple[Bucket, torch.cuda.Event | None] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._run, name="mpidp-reduce", daemon=True)
        self._thread.start()

    def submit(self, bucket: Bucket) -> None:
        """Hands over a bucket whose gradients are complete, or queued on the current stream."""
        ready: torch.cuda.Event | None = None
        if self._stream is not None:
            ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ready.record(torch.cuda.current_stream(self._device))
        self._jobs.put((bucket, ready))

    def wait(self) -> None:
        """Returns when everything handed over is reduced; the current stream goes on after it."""
        self._jobs.join()
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def close(self) -> None:
        """Ends the thread."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        if self._stream is not None:
            torch.cuda.set_device(self._device)
        with torch.no_grad(), torch.cuda.stream(self._stream):
            while (job := self._jobs.get()) is not None:
                bucket, ready = job
                if ready is not None:
                    ready.wait()  # this thread's stream waits, not the thread
                # An error here leaves the other ranks inside a collective that this one will never join: it goes to
                # threading.excepthook, which ends the job with this traceback.
                self._reduce(bucket)
                self._jobs.task_done()
