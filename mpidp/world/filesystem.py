"""Enters: a path. Leaves: the file system it lies on: its kind, whether others share it, and how much room it has.

Not collective, and no MPI.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from mpidp.world.memory import available_memory

MOUNTS = Path("/proc/self/mountinfo")
SERVED = frozenset(("9p", "afs", "cifs", "nfs", "nfs4", "ocfs2", "smb3", "smbfs", "virtiofs"))
PARALLEL = frozenset(("beegfs", "ceph", "fhgfs", "glusterfs", "gpfs", "lustre", "orangefs", "panfs", "pvfs2", "wekafs"))
IN_USER_SPACE = frozenset(("fuse.beegfs", "fuse.ceph", "fuse.glusterfs", "fuse.juicefs", "fuse.s3fs", "fuse.sshfs"))
NETWORK = SERVED | PARALLEL | IN_USER_SPACE
MEMORY = frozenset(("tmpfs", "ramfs"))


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
        return self.kind in NETWORK


def file_system(path: str | Path, mounts: Path = MOUNTS) -> FileSystem:
    """Return the file system that an existing path lies on. Files in memory need memory as well as room.

    Raises `OSError` where there is no such path.
    """
    device = os.stat(path).st_dev
    facts = os.statvfs(path)
    kind = _kind(device, mounts)
    free_bytes = facts.f_bavail * facts.f_frsize
    memory = available_memory() if kind in MEMORY else None
    return FileSystem(kind, device, free_bytes if memory is None else min(free_bytes, memory))


def _kind(device: int, mounts: Path) -> str:
    number = f"{os.major(device)}:{os.minor(device)}"
    found = ""
    for line in mounts.read_text(errors="replace").splitlines() if mounts.exists() else ():
        place, separator, what = line.partition(" - ")
        if separator and place.split()[2] == number:
            found = what.split()[0]
    return found
