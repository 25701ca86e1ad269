"""Losses and counts of this rank in, global means in `metrics.jsonl` out. The schema is docs/metrics.md."""

import json
import math
import os
import resource
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mpidp.train.components.losses import count_right
from mpidp.world.world import World


class Tally:
    """Sums of loss, right answers and samples of this rank, kept on the device: adding never waits for it."""

    def __init__(self, device: torch.device):
        self._sums = torch.zeros(4, dtype=torch.float64, device=device)  # loss, right, classified, samples

    def add(self, loss: Tensor, output: Tensor, target: Tensor, num_samples: int) -> None:
        """One mean loss over `num_samples` samples. Without samples it is NaN, and left out."""
        if num_samples == 0:
            return
        with torch.no_grad():
            right = count_right(output, target)
            self._sums[0] += loss.detach() * num_samples
            if right is not None:
                self._sums[1] += right
                self._sums[2] += num_samples
            self._sums[3] += num_samples

    def total(self, world: World) -> dict[str, float]:
        """Mean loss, and accuracy if there are classes, over the samples of all ranks; starts anew. Collective."""
        loss, right, classified, samples = world.sum(self._sums.tolist())
        self._sums.zero_()
        result = {"samples": int(samples), "loss": loss / samples if samples else float("nan")}
        return result | ({"accuracy": right / classified} if classified else {})


class MetricsFile:
    """One JSON object a line, appended by rank 0."""

    def __init__(self, path: Path, start_bytes: int = 0):
        """Opens the file; what a dead run wrote after its last checkpoint, beyond `start_bytes`, is cut off.

        A file that has lost its end since is gone on with after its last whole line.
        """
        self._path = path
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115  (lives as long as the run)
        if self.num_bytes != start_bytes:
            os.truncate(path, start_bytes if self.num_bytes > start_bytes else whole_lines(path))

    def write(self, record: dict[str, Any]) -> None:
        """Appends a record and hands it to the system at once, so that a reader sees whole lines.

        JSON has no word for a number that is not finite; it becomes null.

        Raises:
            OSError: the file system refuses; names the file, which is as it was.
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
    """How many bytes of the file are whole lines; who wrote it may have died in the middle of one."""
    return path.read_bytes().rfind(b"\n") + 1


def memory_bytes(device: torch.device) -> dict[str, int]:
    """The largest memory this rank has used so far: of the process, and of torch on the GPU."""
    peak = {"host": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    if device.type == "cuda":
        peak["device"] = torch.cuda.max_memory_allocated(device)
    return peak
