"""A training whose ranks die at given points, such as "1:reduce:5", and a record of what it did.

A word is the number of a rank at start, a point in a step, how many steps that rank has taken by then, and the how
many-eth time that it comes there, if not the first.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from tiny import write_data

from jobs import Result, finish, launch, mpiexec

STEPS_AN_EPOCH, EPOCHS, TRAINED = 6, 3, 160
TIMEOUT_S = 120.0  # to start Python on more ranks than cores takes most of it
POINTS = ("forward", "backward", "reduce", "agree", "optimizer", "after", "evaluate", "checkpoint")
RECOVERY_POINTS = ("shrink", "world", "restore")
# With shards of the optimizer's state: before a message of several, before dealing anew, when this rank has done so.
SHARDED_POINTS = ("gather", "deal", "dealt")
# The user's own code: the places to die are put into the package from here.
MODULE = '''
"""Notes which rows were trained on and which steps were taken, and dies where KILLS says."""

import collections
import os
import signal

import torch

import mpidp.reduce.choice
import mpidp.train.checkpoint.saver
import mpidp.train.sharded_gather
import mpidp.train.sharded_optimizer
import mpidp.train.sharded_optimizer
import mpidp.train.elastic
import mpidp.world.elastic
from mpidp.world.launch import current_world

RANK = os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK", "0"))
KILLS = [kill.split(":") for kill in os.environ.get("KILLS", "").split()]
done = 0
times = collections.Counter()


def here(point):
    times[point, done] += 1
    if any(kill in KILLS for kill in ([RANK, point, str(done)], [RANK, point, str(done), str(times[point, done])])):
        os.kill(os.getpid(), signal.SIGKILL)


def note(*words):
    with open(f"notes_{RANK}", "a") as file:
        file.write(" ".join(map(str, words)) + "\\n")


with open(f"pid_{RANK}", "w") as file:
    print(os.getpid(), file=file)


def dies_at(point, holder, name, afterwards=False):
    call = getattr(holder, name)

    def wrapped(*args, **kwargs):
        if not afterwards:
            here(point)
        result = call(*args, **kwargs)
        if afterwards:
            here(point)
        return result

    setattr(holder, name, wrapped)


dies_at("reduce", mpidp.reduce.choice.FlatReducer, "mean")
dies_at("agree", mpidp.train.elastic.Elastic, "agree")
dies_at("checkpoint", mpidp.train.checkpoint.saver, "write_parts")
dies_at("shrink", mpidp.world.elastic.ElasticWorld, "shrink")
dies_at("world", mpidp.world.elastic, "_make_world")
dies_at("restore", mpidp.train.elastic.Elastic, "_tell")
dies_at("gather", mpidp.train.sharded_gather.Messages, "exchange")
dies_at("deal", mpidp.train.sharded_optimizer, "collect")
dies_at("dealt", mpidp.train.sharded_optimizer.Shard, "hold", afterwards=True)


class Net(torch.nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.first = torch.nn.Linear(8, width)
        self.last = torch.nn.Linear(width, 5)
        self.last.weight.register_hook(lambda gradient: here("backward"))

    def forward(self, x):
        if self.training:
            note("tried", done, current_world().size, *(int(row) for row in x[:, 0]))
        here("forward" if self.training else "evaluate")
        return self.last(torch.relu(self.first(x[:, 1:])))


def fails(fields):
    return 1 // 0 if RANK == "1" else fields


class SGD(torch.optim.SGD):
    elementwise = True

    def step(self, closure=None):
        global done
        here("optimizer")
        super().step(closure)
        note("taken", done, current_world().size)
        done += 1
        here("after")
'''


@dataclass(frozen=True)
class Trained:
    """A training that has ended.

    Attributes:
        result: its exit code and output.
        records: of its metrics file.
        rows: of each epoch, how often each row was trained on, in steps that were taken.
    """

    result: Result
    records: list[dict[str, Any]]
    rows: list[Counter[int]]

    @property
    def losses(self) -> dict[int, float]:
        """The training loss of each step that has a record of its own."""
        return {record["step"]: record["loss"] for record in self.records if record["kind"] == "train"}

    @property
    def validations(self) -> list[dict[str, Any]]:
        """The records of evaluations."""
        return [record for record in self.records if record["kind"] == "validation"]

    @property
    def lost(self) -> list[list[int]]:
        """The ranks that died, loss by loss."""
        return [[one["rank"] for one in record["lost"]] for record in self.of_losses]

    @property
    def of_losses(self) -> list[dict[str, Any]]:
        """The records of losses of ranks."""
        return [record for record in self.records if record["kind"] == "loss_of_ranks"]


def trained_once(trained: Trained, epochs: int = EPOCHS) -> bool:
    """Whether every epoch trained on every one of its rows, each once."""
    return len(trained.rows) == epochs and all(
        len(rows) == TRAINED and set(rows.values()) == {1} for rows in trained.rows
    )


def has_ulfm() -> bool:
    """Whether the launcher is Open MPI's."""
    words = mpiexec(1)[:1]
    return "Open MPI" in subprocess.run([*words, "--version"], capture_output=True, text=True, check=False).stdout


def make_place(folder: Path) -> Path:
    """Fill a folder with data.h5, own.py and run.toml, which trains 3 epochs of 6 steps; returns the folder."""
    folder.mkdir(exist_ok=True)
    write_data(folder / "data.h5")
    (folder / "own.py").write_text(MODULE)
    (folder / "run.toml").write_text("""
        data = {train = "data.h5", validation_fraction = 0.2, global_batch = 30}
        model = {name = "own:Net"}
        optimizer = {name = "own:SGD", lr = 0.05, arguments = {momentum = 0.9}}
        train = {epochs = 3, fault_tolerance = "shrink"}
        reduce = {reducer = "flat"}
        log = {every_steps = 1}
        """)
    return folder


def train(
    place: Path,
    ranks: int,
    kills: str = "",
    words: tuple[str, ...] = (),
    *,
    ulfm: bool = True,
    killer: Callable[[], None] = lambda: None,
) -> Trained:
    """Run the training of a place to its end; what a former one noted there is removed.

    `words` are added to the command, `ulfm` starts it with fault tolerance, and `killer` is called meanwhile.
    """
    for old in (*place.glob("notes_*"), *place.glob("pid_*")):
        old.unlink()
    environment = {"KILLS": kills}
    if ulfm:
        environment["MPIEXEC"] = shlex.join([*mpiexec(ranks)[:-2], "--with-ft", "ulfm"])
    with mock.patch.dict(os.environ, environment):
        job = launch(["-m", "mpidp", "train", "run.toml", *words], ranks, cwd=place)
        thread = threading.Thread(target=killer)
        thread.start()
        result = finish(job, TIMEOUT_S)
        thread.join()
    run = re.search(r"run folder (\S+)", result.stdout)
    path = Path(words[words.index("--resume") + 1]) if "--resume" in words else Path(run.group(1) if run else "none")
    metrics = place / path / "metrics.jsonl"
    records = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    return Trained(result, records, _rows(place))


def _rows(place: Path) -> list[Counter[int]]:
    """Of each epoch, the rows of the steps that were taken; of those that were tried only, none."""
    tried: dict[tuple[str, str], list[int]] = {}
    taken: set[tuple[str, str]] = set()
    for notes in place.glob("notes_*"):
        for line in notes.read_text().splitlines():
            what, step, size, *rows = line.split()
            if what == "taken":
                taken.add((step, size))
            else:
                tried.setdefault((step, size), []).extend(map(int, rows))
    epochs = [Counter[int]() for _ in range(1 + max((int(step) // STEPS_AN_EPOCH for step, _ in taken), default=-1))]
    for step, size in taken:
        epochs[int(step) // STEPS_AN_EPOCH].update(tried[step, size])
    return epochs
