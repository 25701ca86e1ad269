"""The end of a rank: its last message is waited for where it is in a pipe; what counts as no memory left."""

import io
import os
import threading

import numpy as np
import pytest
import torch

from mpidp.world import exit as leaving


@pytest.mark.parametrize("is_read", [True, False])
def test_waits_until_the_pipe_is_read(is_read: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behaviour 30: a launcher told to abort would leave the traceback in the pipe; a reader may never come."""
    monkeypatch.setattr(leaving, "READ_TIMEOUT_S", 60.0 if is_read else 0.05)
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as stream:
        stream.write("the cause")
        stream.flush()
        read: list[bytes] = []
        reader = threading.Timer(0.05, lambda: read.append(os.read(reading, 100)))
        if is_read:
            reader.start()
        leaving.wait_until_read(stream)
        assert read == [b"the cause"] * is_read
    os.close(reading)


def test_memory_and_files_are_not_waited_for(tmp_path: os.PathLike[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def no_question(*_: object) -> bytes:
        raise AssertionError("asked how much is unread where there is no pipe")

    monkeypatch.setattr(leaving.fcntl, "ioctl", no_question)
    leaving.wait_until_read(io.StringIO())
    with open(os.path.join(tmp_path, "log"), "w") as stream:
        leaving.wait_until_read(stream)
        assert stream.tell() == 0


def test_every_way_of_running_out_of_memory() -> None:
    with pytest.raises(RuntimeError) as of_torch:
        torch.empty(1 << 60, dtype=torch.uint8)
    with pytest.raises(MemoryError) as of_numpy:
        np.empty(1 << 60, dtype=np.uint8)
    of_gpu = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
    of_kernel = OSError(12, "Cannot allocate memory")
    assert all(map(leaving.is_out_of_memory, (of_torch.value, of_numpy.value, of_gpu, of_kernel)))
    others = ValueError("out of memory"), OSError(28, "No space left on device"), RuntimeError("shapes differ")
    assert not any(map(leaving.is_out_of_memory, others))
