"""A job that resumes from checkpoints in a folder and writes new ones, as a training loop would.

Run under mpiexec: FOLDER FIRST_SAVES [--bytes N] [--step-s S]. Prints, from rank 0, `resumed STEP`, and `complete STEP`
once `finish` has returned. KILL_RANK and KILL_AT in the environment end that rank with SIGKILL at its KILL_AT-th
event of the file system below FOLDER: an opening, a write, a flush, a rename, a removal. Write events carry out half
of the write first. VIEW_RANK, VIEW_FROM and VIEW_AT give that rank a view of its own: it finds the folder VIEW_FROM at
the path VIEW_AT, as if it were on a node that sees another state of the file system (needs root). LIMIT_RANK and
LIMIT_BYTES keep the files of that rank smaller.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

import mpidp
from mpidp.train.checkpoint import read as checkpoint
from mpidp.train.checkpoint import write as part
from mpidp.train.checkpoint.read import newest_readable
from mpidp.train.checkpoint.saver import Saver
from mpidp.world.world import World

EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.symlink", "os.listdir", "os.scandir"}


class Killer:
    """Counts events, in whatever thread, and kills this process at one of them."""

    def __init__(self, folder: Path, at: int):
        self.folder = str(folder)
        self.at = at
        self.count = 0

    def install(self) -> None:
        """Listen to what Python tells of file names, and to writes and flushes of checkpoints."""
        sys.addaudithook(self.on_event)
        write, fsync = part._Hashed.write, os.fsync

        def counted_write(hashed: Any, data: memoryview) -> int:
            if self.is_last():
                hashed._file.write(memoryview(data).cast("B")[: len(data) // 2])
                hashed._file.flush()
                self.die("write")
            return write(hashed, data)

        def counted_fsync(descriptor: int) -> None:
            if self.is_last():
                self.die("fsync")
            fsync(descriptor)

        part._Hashed.write = counted_write  # type: ignore[method-assign]
        os.fsync = counted_fsync

    def on_event(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Called by Python before it does something."""
        if event in EVENTS and arguments and str(arguments[0]).startswith(self.folder) and self.is_last():
            self.die(f"{event} {arguments[0]}")

    def is_last(self) -> bool:
        self.count += 1
        return self.count == self.at

    def die(self, what: str) -> None:
        os.write(2, f"killed at event {self.count}: {what}\n".encode())
        os.kill(os.getpid(), signal.SIGKILL)


CLONE_NEWNS, MS_BIND, MS_REC, MS_PRIVATE = 0x20000, 0x1000, 0x4000, 0x40000


def take_own_view(source: str, target: str) -> None:
    """Mount a folder over another, for this process only."""
    libc = ctypes.CDLL(None, use_errno=True)
    for done in (
        libc.unshare(CLONE_NEWNS),
        libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None),
        libc.mount(source.encode(), target.encode(), None, MS_BIND, None),
    ):
        if done != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def weight_of(step: int, num_bytes: int) -> torch.Tensor:
    return torch.full((num_bytes // 4,), float(step))


def own_of(step: int, rank: int, size: int) -> dict[str, Any]:
    return {"rank": rank, "size": size, "values": torch.full((1000,), step + rank / 16)}


def check(path: Path, num_bytes: int) -> int:
    """The step of a checkpoint, all of whose content belongs together."""
    state = checkpoint.load(path)
    step = int(state["step"])
    assert path.name == checkpoint.folder_name(step)
    assert torch.equal(state["weight"], weight_of(step, num_bytes)), f"{path}: a mixture"
    for rank in range(state["ranks"]):
        own = checkpoint.read(path, checkpoint.part_name(rank))
        assert torch.equal(own["values"], own_of(step, rank, state["ranks"])["values"]), f"{path}: a mixture"
    return step


def resume(world: World, folder: Path, num_bytes: int) -> tuple[int, Path | None]:
    if not world.call_on_root(lambda: bool(checkpoint.newest_first(folder))):
        return 0, None
    path, _ = newest_readable(world, folder)
    with world.raise_on_all_ranks("checking"):
        step = check(path, num_bytes)
    say(world, f"resumed {step}")
    return step, path


def say(world: World, text: str) -> None:
    if world.rank == 0:
        print(text, flush=True)


def main() -> None:
    """Resume, save so many times, each for some steps, then end."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("saves", type=int)
    parser.add_argument("--bytes", type=int, default=400_000)
    parser.add_argument("--keep", type=int, default=2)
    parser.add_argument("--on-failure", default="stop")
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    world = mpidp.init()
    if os.environ.get("VIEW_RANK") == str(world.rank):
        take_own_view(os.environ["VIEW_FROM"], os.environ["VIEW_AT"])
    if os.environ.get("LIMIT_RANK") == str(world.rank):
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(os.environ["LIMIT_BYTES"]), resource.RLIM_INFINITY))
    world.barrier()
    step, newest = resume(world, options.folder, options.bytes)
    if os.environ.get("KILL_RANK") == str(world.rank):
        Killer(options.folder, int(os.environ["KILL_AT"])).install()
    saver = Saver(world, options.folder, options.keep, on_failure=options.on_failure, newest=newest)
    for number in range(options.saves):
        step += 1
        weight = weight_of(step, options.bytes)
        saver.save(
            step,
            lambda step=step, weight=weight: {"step": step, "ranks": world.size, "weight": weight},  # type: ignore[misc]
            lambda step=step: own_of(step, world.rank, world.size),  # type: ignore[misc]
        )
        for _ in range(options.steps):
            weight.zero_()  # training goes on
            time.sleep(0.001)
            saver.poll()
        if number % 2:
            saver.finish()
            say(world, f"complete {step}")
    saver.finish()
    saver.close()
    say(world, f"complete {step}")


if __name__ == "__main__":
    main()
