"""A small data set, a run file and a model of a user's own, for trainings of a second."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np

ROWS, CLASSES, VALUES = 200, 5, 8
MODULE = '''
"""A user's own model. It notes which rows it was trained on, and can stop at a step, to be killed there."""

import os
import time
from pathlib import Path

import torch

RANK = os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0"))


class Net(torch.nn.Module):
    def __init__(self, dropout=0.0, norm=False, width=16):
        super().__init__()
        self.first = torch.nn.Linear(8, width)
        self.norm = torch.nn.BatchNorm1d(width) if norm else torch.nn.Identity()
        self.dropout = torch.nn.Dropout(dropout)
        self.last = torch.nn.Linear(width, 5)
        self.step = 0

    def forward(self, x):
        if self.training:
            self.step += 1
            self.note(x)
        return self.last(self.dropout(torch.relu(self.norm(self.first(x[:, 1:])))))

    def note(self, x):
        if self.step == int(os.environ.get("STOP_AT", "0")):
            Path("stopped").touch()
            time.sleep(600)
        if "SEEN" in os.environ:
            with open(f"{os.environ['SEEN']}_{RANK}", "a") as file:
                file.write(" ".join(str(int(row)) for row in x[:, 0]) + "\\n")


def frozen():
    return Net().requires_grad_(False)


def no_module():
    return 7


def no_layers():
    return torch.nn.Flatten()


def sparse():
    return torch.nn.Embedding(4, 4, sparse=True)


def differs():
    return Net(width=16 + int(RANK == "1"))


def one_rank_cannot():
    if RANK == "1":
        raise OSError("the disk of this node is full")
    return Net()
'''


def write_data(path: Path, rows: int = ROWS) -> Path:
    """Write fields x (rows, 1 + 8), whose first value is the row's number, and y (rows,), learnable from x."""
    generator = np.random.default_rng(0)
    values = generator.standard_normal((rows, VALUES)).astype(np.float32)
    labels = (values @ generator.standard_normal((VALUES, CLASSES))).argmax(1)
    with h5py.File(path, "w") as file:
        numbers = np.arange(rows, dtype=np.float32)[:, None]
        file.create_dataset("x", data=np.concatenate([numbers, values], 1), chunks=(16, VALUES + 1))
        file.create_dataset("y", data=labels, chunks=(64,))
    return path


def make_workplace(folder: Path) -> Path:
    """Fill a folder with data.h5, own.py and run.toml, which trains 3 epochs of 6 steps; returns the folder."""
    write_data(folder / "data.h5")
    (folder / "own.py").write_text(MODULE)
    (folder / "run.toml").write_text("""
        data = {train = "data.h5", validation_fraction = 0.2, global_batch = 30}
        model = {name = "own:Net"}
        optimizer = {name = "SGD", lr = 0.05, arguments = {momentum = 0.9}}
        train = {epochs = 3}
        reduce = {reducer = "flat"}  # "auto" may choose another way, with other rounding, for another run
        log = {every_steps = 3}
        """)
    return folder
