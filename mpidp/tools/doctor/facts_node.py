"""What Linux says of this node enters; cores, memory, and the ways between processes leave. No MPI, not collective."""

import ctypes
import errno
import os
import platform
import resource
import shutil
import socket
from collections.abc import Mapping
from pathlib import Path

from mpidp.tools.doctor.facts import Cores, Memory, System
from mpidp.world.system import CGROUPS, PROC, available_memory, memory_limit

SHM = Path("/dev/shm")
MUNGE = Path("/run/munge/munge.socket.2")
FABRICS = (Path("/sys/class/infiniband"), Path("/sys/class/cxi"))
_UNLIMITED_BYTES = 1 << 62


def cores() -> Cores:
    """This process's mask, as the launcher set it."""
    return Cores(tuple(sorted(os.sched_getaffinity(0))), os.cpu_count() or 1, quota(PROC, CGROUPS))


def quota(proc: Path, cgroups: Path) -> float | None:
    """Cores' worth of time that the control group of this process gets (version 2); None for all."""
    memberships = proc / "self" / "cgroup"
    lines = memberships.read_text().splitlines() if memberships.exists() else []
    path = next((line.split(":", 2)[2] for line in lines if line.startswith("0::")), None)
    for folder in () if path is None else (cgroups / path.strip("/"), cgroups):
        file = folder / "cpu.max"
        if file.exists():
            most, period = file.read_text().split()
            return None if most == "max" else int(most) / int(period)
    return None


def memory() -> Memory:
    """Limits and what is left of them."""
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    shm = os.statvfs(SHM) if SHM.is_dir() else None
    return Memory(
        available_memory(),
        memory_limit(),
        None if locked == resource.RLIM_INFINITY or locked >= _UNLIMITED_BYTES else locked,
        shm.f_bavail * shm.f_frsize if shm else None,
        shm.f_blocks * shm.f_frsize if shm else None,
        resource.getrlimit(resource.RLIMIT_NOFILE)[0],
    )


def system(environment: Mapping[str, str]) -> System:
    """The node, and what a container changes."""
    scope = PROC / "sys" / "kernel" / "yama" / "ptrace_scope"
    return System(
        socket.gethostname(),
        platform.release(),
        container(environment, Path("/")),
        int(scope.read_text()) if scope.exists() else None,
        cross_memory_error(),
        MUNGE.exists(),
        tuple(sorted(entry.name for folder in FABRICS if folder.is_dir() for entry in folder.iterdir())),
        shutil.which("mpiexec") or "",
        site_libraries(environment),
    )


def container(environment: Mapping[str, str], root: Path) -> str:
    """The kind of container that this process is in, or ""."""
    if "APPTAINER_CONTAINER" in environment or "SINGULARITY_CONTAINER" in environment:
        return "apptainer"
    if (root / ".dockerenv").exists():
        return "docker"
    if (root / "run" / ".containerenv").exists():
        return "podman"
    return environment.get("container", "")


def site_libraries(environment: Mapping[str, str]) -> tuple[str, ...]:
    """MPI libraries in the folders of LD_LIBRARY_PATH: those that a site's module brings."""
    folders = [Path(part) for part in environment.get("LD_LIBRARY_PATH", "").split(":") if part]
    names = ("libmpi.so", "libmpi.so.12", "libmpi.so.40", "libmpich.so")
    found = (folder / name for folder in folders for name in names)
    return tuple(dict.fromkeys(str(path.parent) for path in found if path.exists()))


def cross_memory_error() -> str:
    """Copy a byte of this process by `process_vm_readv`, as MPI copies between processes; "" if that is allowed.

    Of its own memory a process may always read: what forbids it is the filter of system calls of a container.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "process_vm_readv"):
        return "not there"
    source, target = ctypes.create_string_buffer(b"x"), ctypes.create_string_buffer(1)
    vectors = [(ctypes.c_size_t * 2)(ctypes.addressof(buffer), 1) for buffer in (target, source)]
    count = ctypes.c_ulong(1)
    copied = libc.process_vm_readv(os.getpid(), vectors[0], count, vectors[1], count, ctypes.c_ulong(0))
    return "" if copied == 1 else errno.errorcode.get(ctypes.get_errno(), str(ctypes.get_errno()))
