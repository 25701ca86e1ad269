"""Facts of this node from Linux: memory, file systems, cores, processes. Needs neither MPI nor torch."""

import os
import re
import socket
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mpidp.printable import listed

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")
# Names of the limit, of what is used, and, in memory.stat, of the cached files that give way when memory is wanted.
_VERSION_2 = ("memory.max", "memory.current", "inactive_file")
_VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def available_memory(proc: Path = PROC, cgroups: Path = CGROUPS) -> int | None:
    """Return the bytes that this process can still have; None where the system does not say.

    That is what the node has available, or less where a control group, as Slurm makes one for a job, limits it.
    """
    left = [left for _, left in _limits(proc, cgroups)]
    return min([*_meminfo(proc, "MemAvailable"), *left], default=None)


def memory_limit(proc: Path = PROC, cgroups: Path = CGROUPS) -> int | None:
    """Return the bytes that this job may use on this node, whatever is in use now; None where nothing is said."""
    most = [most for most, _ in _limits(proc, cgroups)]
    return min([*_meminfo(proc, "MemTotal"), *most], default=None)


def _meminfo(proc: Path, name: str) -> list[int]:
    facts = proc / "meminfo"
    match = re.search(rf"^{name}:\s+(\d+) kB", facts.read_text(), re.MULTILINE) if facts.exists() else None
    return [int(match.group(1)) * 1024] if match else []


def _limits(proc: Path, cgroups: Path) -> Iterator[tuple[int, int]]:
    """Yield the limit of each control group that this process is in, outer groups included, and what it leaves."""
    memberships = proc / "self" / "cgroup"
    if not memberships.exists():
        return
    for line in memberships.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield from _left(cgroups, path, *_VERSION_2)
        elif "memory" in controllers.split(","):
            yield from _left(cgroups / "memory", path, *_VERSION_1)


def _left(root: Path, path: str, limit: str, usage: str, cached: str) -> Iterator[tuple[int, int]]:
    # In a container the path may be one of the host's: then the root of what is mounted is this process's group.
    group = root / path.strip("/")
    groups = [group, *group.parents] if group.is_dir() else [root]
    for folder in groups[: groups.index(root) + 1]:
        files = [folder / limit, folder / usage, folder / "memory.stat"]
        if not all(file.exists() for file in files):
            continue
        most, used, stat = (file.read_text() for file in files)
        if most.strip() == "max":
            continue
        match = re.search(rf"^{cached} (\d+)", stat, re.MULTILINE)
        yield int(most), max(0, int(most) - int(used) + (int(match.group(1)) if match else 0))


MOUNTS = Path("/proc/self/mountinfo")
_SERVED = frozenset(("9p", "afs", "cifs", "nfs", "nfs4", "ocfs2", "smb3", "smbfs", "virtiofs"))
_PARALLEL = frozenset(
    ("beegfs", "ceph", "fhgfs", "glusterfs", "gpfs", "lustre", "orangefs", "panfs", "pvfs2", "wekafs")
)
_IN_USER_SPACE = frozenset(("fuse.beegfs", "fuse.ceph", "fuse.glusterfs", "fuse.juicefs", "fuse.s3fs", "fuse.sshfs"))


@dataclass(frozen=True)
class FileSystem:
    """A mounted file system.

    kind: as the kernel names it, such as "ext4" or "nfs4"; empty where it does not say. device: its number, equal
    for two paths on the same one. free_bytes: what this user can still write.
    """

    kind: str
    device: int
    free_bytes: int

    @property
    def is_network(self) -> bool:
        """Whether its data lies on other machines."""
        return self.kind in _SERVED | _PARALLEL | _IN_USER_SPACE


def file_system(path: str | Path, mounts: Path = MOUNTS) -> FileSystem:
    """Return the file system that an existing path lies on. Files in memory need memory as well as room.

    Raises `OSError` where there is no such path.
    """
    device = os.stat(path).st_dev
    facts = os.statvfs(path)
    kind = _kind(device, mounts)
    free_bytes = facts.f_bavail * facts.f_frsize
    memory = available_memory() if kind in ("tmpfs", "ramfs") else None
    return FileSystem(kind, device, free_bytes if memory is None else min(free_bytes, memory))


def _kind(device: int, mounts: Path) -> str:
    number = f"{os.major(device)}:{os.minor(device)}"
    found = ""
    for line in mounts.read_text(errors="replace").splitlines() if mounts.exists() else ():
        place, separator, what = line.partition(" - ")
        if separator and place.split()[2] == number:
            found = what.split()[0]
    return found


@dataclass(frozen=True)
class Pinned:
    """Where a rank may run: its node, the cores of its mask, and how many threads it computes with."""

    host: str
    cores: frozenset[int]
    threads: int


def too_few_cores(ranks: Sequence[Pinned]) -> str | None:
    """Return a line when ranks have more threads than cores, else None. `ranks` is indexed by rank."""
    slow = [rank for rank, pinned in enumerate(ranks) if pinned.threads > len(pinned.cores)]
    if not slow:
        return None
    first = ranks[slow[0]]
    others = f" (and {len(slow) - 1} more of {len(ranks)})" if len(slow) > 1 else ""
    return (
        f"rank {slow[0]}{others} on {first.host} computes with {first.threads} threads, but may run on "
        f"{len(first.cores)} {'core' if len(first.cores) == 1 else 'cores'} only: threads will wait for each other. "
        f"Set OMP_NUM_THREADS={len(first.cores)}, or give a rank more cores (`--cpus-per-task`, with "
        f"`export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK` before srun; `mpiexec --bind-to none`)."
    )


def crowded(ranks: Sequence[Pinned], node_cores: int) -> str | None:
    """Return a line when ranks of one node are pinned together to fewer cores than there are ranks, else None.

    Ranks that may run on all `node_cores` of their node are not pinned.
    """
    groups: dict[tuple[str, frozenset[int]], list[int]] = defaultdict(list)
    for rank, pinned in enumerate(ranks):
        groups[pinned.host, pinned.cores].append(rank)
    for (host, cores), sharing in groups.items():
        if len(cores) < len(sharing) and len(cores) < node_cores:
            return (
                f"ranks {listed(sharing)} on {host} are all pinned to the same "
                f"{'core' if len(cores) == 1 else f'{len(cores)} cores'} ({listed(sorted(cores))}) of "
                f"{node_cores}: they take turns. Give each its own: `--cpus-per-task=N` with `export "
                f"SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK` before srun, or `mpiexec --bind-to none`."
            )
    return None


RUNS = ("R", "S")  # states in which a process takes signals
STOPPED = ("T", "Z", "X")  # states in which it does nothing, and will not by itself
_STATES = {
    "T": "its process is stopped (SIGSTOP, or the scheduler suspended it)",
    "t": "its process is stopped by a debugger",
    "D": "its process waits in the kernel for a device or a file system",
    "Z": "its process has ended",
    "X": "its process has ended",
    "R": "its process computes in a call that holds Python's lock",
    "S": "its process sleeps in a call that holds Python's lock",
}


def process_state(pid: int) -> tuple[str, str]:
    """The kernel's letter for the state of a process of this node, and what it means, in words."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return "X", _STATES["X"]
    letter = text.rpartition(")")[2].split()[0]
    return letter, _STATES.get(letter, f"its process is in state {letter}")


# A process that cannot be seen from here is taken for dead when its files were not touched for so long. File servers
# may tell of a change a minute late.
SILENT_S = 180.0
_TEXT = re.compile(r"(\d+)\.(\d+)\.(\d+)\.(.+)", re.ASCII)
_START = 19  # of the fields of /proc/PID/stat behind the name


@dataclass(frozen=True)
class Process:
    """A process: its number, which is used again, but not with the same time of start (in ticks since the node did).

    Each container has a namespace of process numbers.
    """

    pid: int
    started: int
    namespace: int
    host: str

    @classmethod
    def this(cls) -> "Process":
        """The one that asks."""
        return cls(os.getpid(), _started(os.getpid()) or 0, _namespace(), socket.gethostname())

    @classmethod
    def parse(cls, text: str) -> "Process | None":
        """The process whose `str` this is; None for another text."""
        match = _TEXT.fullmatch(text)
        return cls(int(match[1]), int(match[2]), int(match[3]), match[4]) if match else None

    def __str__(self) -> str:
        return f"{self.pid}.{self.started}.{self.namespace}.{self.host}"

    def is_running(self) -> bool | None:
        """Whether it runs; None where that cannot be seen: on another node, in another container."""
        if (self.host, self.namespace) != (socket.gethostname(), _namespace()):
            return None
        return _started(self.pid) == self.started and process_state(self.pid)[0] not in STOPPED[1:]


def _started(pid: int) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[_START])
    except (FileNotFoundError, ProcessLookupError):
        return None


def _namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino
