"""Ownership of a run folder: a second job is refused as long as the first one lives.

`owner.json` names job, node and process of rank 0, which touches it regularly. On its own node it is known for certain
whether it is alive. From another node it counts as dead when the file was not touched for `SILENT_S`, or when Slurm has
started the same job again.
"""

import atexit
import logging
import os
import secrets
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mpidp.errors import CheckpointError, RecordError
from mpidp.world.record_file import read_json, write_json
from mpidp.world.system import SILENT_S, Process

FILE = "owner.json"
TOUCH_S = 15.0
log = logging.getLogger("mpidp")


class Owner:
    """This process as the owner of a run folder, or as one that wants to be. Not collective: for rank 0.

    Args:
        folder: the run folder.
        environment: SLURM_JOB_ID and SLURM_RESTART_COUNT are recorded.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str]):
        self.path = folder / FILE
        self._facts: dict[str, Any] = {
            **asdict(Process.this()),
            "slurm_job_id": environment.get("SLURM_JOB_ID"),
            "slurm_restarts": environment.get("SLURM_RESTART_COUNT"),
            "folder": folder.stat().st_ino,  # not that of a copy
        }
        self._ends: threading.Event | None = None

    def claim(self) -> None:
        """Takes the folder.

        Raises:
            CheckpointError: another job has it; the message names the job.
            OSError: the file cannot be written.
        """
        mine = self.path.with_name(f"{FILE}.{secrets.token_hex(4)}")
        write_json(mine, self._facts)
        try:
            while not (_link(mine, self.path) or self._succeed(mine)):
                pass
        finally:
            mine.unlink(missing_ok=True)
        self._keep_touching()

    def take_over(self) -> None:
        """Takes the folder from another process of this job, which is dead."""
        if self._ends is None:
            write_json(self.path, self._facts)
            self._keep_touching()

    def check(self) -> None:
        """Raises CheckpointError if another job has taken the folder meanwhile, as this one seemed dead."""
        found = self._read(self.path)
        if found is not None and found != self._facts:
            raise CheckpointError(
                f"{self.path.parent} now belongs to {_name(found)}, which took this job for dead (it was stopped, or "
                f"cut off from the file system, for more than {SILENT_S:g} s). It writes nothing more there."
            )

    def release(self) -> None:
        """Releases the folder, if this process has it; errors of the file system are ignored."""
        if self._ends is None or self._facts["pid"] != os.getpid():
            return
        self._ends.set()
        self._ends = None
        atexit.unregister(self.release)
        with suppress(OSError):
            if self._read(self.path) == self._facts:
                self.path.unlink(missing_ok=True)

    def _keep_touching(self) -> None:
        self._ends = threading.Event()
        atexit.register(self.release)
        threading.Thread(target=_touch, args=(self.path, self._ends), name="mpidp-owner", daemon=True).start()

    def _read(self, path: Path) -> dict[str, Any] | None:
        """Reads the owner of this folder from a file; None if there is no valid one."""
        try:
            found = read_json(path, dict)
        except (FileNotFoundError, RecordError):
            return None
        return found if _process(found) is not None and found.get("folder") == self._facts["folder"] else None

    def _succeed(self, mine: Path) -> bool:
        """Replaces an owner that is dead. Returns False if another job was faster: then the caller tries again.

        The job that creates `owner.json.next` may take it; the file then becomes `owner.json` by a rename. So there is
        no moment without an owner, in which a third job could take the folder.
        """
        found = self._read(self.path)
        if found == self._facts:
            return True
        self._check_gone(found, self.path, mine)
        successor = self.path.with_name(f"{FILE}.next")
        if not _link(mine, successor):  # another job is doing this, or died in it
            self._check_gone(self._read(successor), successor, mine)
            successor.unlink(missing_ok=True)
            return False
        if not self.path.exists() or self._read(self.path) != found:
            successor.unlink(missing_ok=True)
            return False
        with suppress(FileNotFoundError):  # taken for that of a job that died
            successor.rename(self.path)
        if self._read(self.path) != self._facts:
            return False
        if found is not None:
            log.info("took %s over from %s, which is gone", self.path.parent, _name(found))
        return True

    def _check_gone(self, found: dict[str, Any] | None, path: Path, mine: Path) -> None:
        """Raises CheckpointError if the owner that a file names is alive."""
        if found is None:
            return
        process = _process(found)
        assert process is not None
        if process == Process.this():
            return
        running = process.is_running()
        if running is None:
            job = self._facts["slurm_job_id"]
            is_again = job is not None and job == found.get("slurm_job_id")
            if is_again and self._facts["slurm_restarts"] != found.get("slurm_restarts"):
                return
            with suppress(FileNotFoundError):
                # both by the clock of the file server
                running = mine.stat().st_mtime - path.stat().st_mtime < SILENT_S
        if running:
            raise CheckpointError(
                f"{self.path.parent} is in use by {_name(found)}. Wait until that job ends, or cancel it; if it died, "
                f"a start on {process.host} goes on at once, and one elsewhere or in another container {SILENT_S:g} s "
                f"after its last sign of life."
            )


def _process(found: dict[str, Any]) -> Process | None:
    kinds = {"pid": int, "started": int, "namespace": int, "host": str}
    if any(type(found.get(key)) is not kind for key, kind in kinds.items()):
        return None
    return Process(**{key: found[key] for key in kinds})


def _name(found: dict[str, Any]) -> str:
    job = f"Slurm job {found['slurm_job_id']}, " if found.get("slurm_job_id") else ""
    return f"{job}process {found['pid']} on {found['host']}"


def _link(source: Path, target: Path) -> bool:
    """Gives a file a second name; returns False if that name exists."""
    try:
        os.link(source, target)
    except FileExistsError:
        return False
    except OSError:  # a file system without links
        if target.exists():
            return False
        target.write_bytes(source.read_bytes())
    return True


def _touch(path: Path, ends: threading.Event) -> None:
    while not ends.wait(TOUCH_S):
        with suppress(OSError):  # a file server may be down; tried again later
            os.utime(path)
