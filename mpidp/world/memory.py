"""Enters: what Linux says of this node's memory and of the job's limits. Leaves: how many bytes can still be had.

Not collective, and no MPI.
"""

import re
from collections.abc import Iterator
from pathlib import Path

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
