"""Enters: selected rows, the plan of an epoch, a rank. Leaves: the rank's samples of each step, as tensors.

Runs in the prefetch thread; calls no MPI.
"""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass

import torch
from torch import Tensor

from mpidp.hdf5.dataset import Rows
from mpidp.hdf5.gather import gatherer
from mpidp.hdf5.keyed import IntArray
from mpidp.hdf5.pieces import PieceReader, Selection
from mpidp.hdf5.plan import EpochPlan


@dataclass(frozen=True)
class Assembled:
    """A rank's samples of the step [start, stop): tensors in host memory and row numbers over all files."""

    start: int
    stop: int
    tensors: dict[str, Tensor]
    indices: IntArray


def assemble(
    selection: Selection, plan: EpochPlan, position: int, size: int, rank: int, device: torch.device
) -> Iterator[Assembled]:
    """Yield the steps from `position` to the end of the epoch; pinned memory if `device` is a GPU."""
    with closing(PieceReader(selection)) as reader:
        gather = gatherer(plan, reader, size, rank).gather
        while position < plan.num_samples:
            start, stop = plan.step(position)
            rows = gather(plan.local_indices(position, size, rank))
            yield Assembled(start, stop, _tensors(rows, device), rows.numbers)
            position = stop


def _tensors(rows: Rows, device: torch.device) -> dict[str, Tensor]:
    tensors = {name: torch.from_numpy(array) for name, array in rows.fields.items()}
    if device.type != "cuda":
        return tensors
    # A thread starts on GPU 0, and pinning there would open a context on it in every rank.
    with torch.cuda.device(device):
        return {name: tensor.pin_memory() for name, tensor in tensors.items()}
