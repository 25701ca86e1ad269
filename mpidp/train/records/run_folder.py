"""The folder of a run, with `config.toml`, `env.json`, `checkpoints/` and `logs/`. It is never overwritten."""

import contextlib
import itertools
import logging
import os
import platform
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import mpidp
from mpidp.config import RunConfig, to_toml
from mpidp.errors import CheckpointError, ConfigError
from mpidp.train.checkpoint.write import as_checkpoint_error
from mpidp.train.records import starts
from mpidp.train.records.owner import Owner
from mpidp.train.records.starts import without_secrets
from mpidp.world.launch import launch_facts
from mpidp.world.mpi import MPI
from mpidp.world.record_file import flush_folder, write_text
from mpidp.world.world import World

log = logging.getLogger("mpidp.rank")
job_log = logging.getLogger("mpidp")


class RankLog(logging.FileHandler):
    """A rank's log. Lines that cannot be written are left out, and the first failure is kept."""

    def __init__(self, path: Path):
        super().__init__(path)
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        self.failure: Exception | None = None
        self._path = str(path)
        self._has_failed = False

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  (the name that logging gives it)
        """Keeps the first failure to write; an error of the caller, such as a wrong format, is printed as usual."""
        error = sys.exception()
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._has_failed:
            self._has_failed, self.failure = True, OSError(error.errno, error.strerror, self._path)

    def close(self) -> None:
        """Closes the file; lines that do not fit on the disk are lost."""
        with contextlib.suppress(OSError):
            super().close()


class RunFolder:
    """Paths of one run."""

    def __init__(self, path: Path):
        self.path = path
        self.config = path / "config.toml"
        self.metrics = path / "metrics.jsonl"
        self.trace = path / "trace.json"
        self.checkpoints = path / "checkpoints"
        self.logs = path / "logs"
        self._log_handler: RankLog | None = None
        self._owner: Owner | None = None

    @classmethod
    def create(cls, config: RunConfig, world: World) -> "RunFolder":
        """Makes a new folder `runs/<name>`, or `runs/<name>-2` and so on if that exists. Collective."""
        folder = cls(_as_all_find_it(world.call_on_root(lambda: _make_new(config.run.parent, config.run.name)), world))
        folder._claim(world)
        with world.raise_on_all_ranks("writing the run folder"):
            if world.rank == 0:
                folder.checkpoints.mkdir()
                folder.logs.mkdir()
                write_text(folder.config, to_toml(config))
        folder.begin(world)
        return folder

    @classmethod
    def hold(cls, path: Path, world: World) -> "RunFolder":
        """Takes the folder of a run to continue; nothing in it is changed yet. Collective.

        Raises:
            CheckpointError: there is no run folder, or another job has it.
        """
        folder = cls(_as_all_find_it(path, world))
        with world.raise_on_all_ranks("opening the run folder"):
            folder.check()
        folder._claim(world)
        return folder

    def _claim(self, world: World) -> None:
        with world.raise_on_all_ranks("taking the run folder"):
            if world.rank == 0:
                try:
                    self._owner = Owner(self.path, os.environ)
                    self._owner.claim()
                except OSError as error:
                    raise as_checkpoint_error(error, self.path) from error

    def check_owned(self, world: World) -> None:
        """Raises CheckpointError on all ranks if another job has taken the folder meanwhile. Collective."""
        with world.raise_on_all_ranks("looking whose the run folder is"):
            if self._owner is not None:
                self._owner.check()

    def take_over(self, world: World) -> None:
        """Goes on after ranks have died, perhaps the one that owned the folder. Not collective."""
        if world.rank == 0 and self._owner is None:
            self._owner = Owner(self.path, os.environ)
            self._owner.take_over()

    def release(self) -> None:
        """Releases the folder, so that another job may continue the run. Not collective."""
        if self._owner is not None:
            self._owner.release()

    def check(self) -> None:
        """Raises CheckpointError unless this is the folder of a run. Not collective."""
        if not self.checkpoints.is_dir():
            raise CheckpointError(
                f"--resume {self.path}: no run folder there (no {self.checkpoints}). Give the folder that the first "
                f"run printed, for example runs/digits."
            )

    def take_log_failure(self) -> Exception | None:
        """Why this rank's log could not be written, at the first call after the failure; else None."""
        if self._log_handler is None:
            return None
        failure, self._log_handler.failure = self._log_handler.failure, None
        return failure

    def close(self) -> None:
        """Ends this rank's log: another run in this process has its own."""
        if self._log_handler is not None:
            job_log.removeHandler(self._log_handler)
            self._log_handler.close()
            self._log_handler = None

    def note(self, world: World, **facts: Any) -> None:
        """Adds facts to this start's entry in `env.json`, for `mpidp status`. Rank 0 writes; not collective."""
        if world.rank == 0:
            starts.note(self.path, **facts)

    def begin(self, world: World) -> None:
        """Adds this start to `env.json` and opens this rank's log. Collective."""
        hosts = world.comm.gather(world.host)
        with world.raise_on_all_ranks("writing the run folder"):
            self.logs.mkdir(exist_ok=True)
            self._log_handler = RankLog(self.logs / f"rank_{world.rank:04d}.log")
            job_log.addHandler(self._log_handler)
            job_log.setLevel(logging.INFO)
            if world.rank == 0:
                starts.add(self.path, environment(world, hosts))
        log.info(
            "rank %d of %d on %s, device %s, pid %d",
            world.rank,
            world.size,
            world.host,
            world.device,
            os.getpid(),
        )


def environment(world: World, hosts: list[str] | None) -> dict[str, Any]:
    """Facts about the job and its environment, for `env.json`."""
    packages = ("torch", "mpi4py", "numpy", "h5py")
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": without_secrets(sys.argv),
        "mpidp": mpidp.__version__,
        "python": platform.python_version(),
        "packages": {name: metadata.version(name) for name in packages},
        "mpi": MPI.Get_library_version().splitlines()[0].strip("\0 "),
        "launcher": launch_facts(os.environ).launcher,
        "ranks": world.size,
        "nodes": world.num_nodes,
        "hosts": hosts,
        "device": torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else platform.machine(),
        "threads": torch.get_num_threads(),
        "slurm_job_id": os.environ.get("SLURM_JOB_ID"),
    }


def _as_all_find_it(path: Path, world: World) -> Path:
    """Rank 0's path; absolute if some rank has another current folder. Collective."""
    at_root = world.broadcast(os.getcwd())
    return path if world.all(os.getcwd() == at_root) else Path(at_root) / path


def _make_new(parent: Path, name: str) -> Path:
    new = [folder for folder in (parent, *parent.parents) if not folder.exists()]
    try:
        parent.mkdir(parents=True, exist_ok=True)
        for number in itertools.count(1):
            path = parent / (name if number == 1 else f"{name}-{number}")
            if _make(path):
                break
    except OSError as error:
        raise ConfigError(
            f"run.folder = {str(parent)!r}: no folder can be made there ({error.strerror}: {error.filename}). "
            f"Give one that you may write to."
        ) from error
    for folder in (path, *new):
        _make_durable(folder)
    return path


def _make_durable(folder: Path) -> None:
    """Flushes the name of a new folder to the disk, so that its checkpoints are found after a power cut."""
    try:
        flush_folder(folder.parent)
    except OSError as error:  # flushing needs the right to list the parent folder, which making one does not
        log.warning("cannot flush %s, which now has %s: %s", folder.parent, folder.name, error)


def _make(path: Path) -> bool:
    """Makes a folder; returns False if it exists, as when two runs start at once."""
    try:
        path.mkdir()
    except FileExistsError:
        return False
    return True
