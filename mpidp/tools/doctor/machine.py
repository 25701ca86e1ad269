"""Facts of this node and process from Linux, its file systems and GPU drivers. Uses neither MPI nor torch."""

import ctypes
import errno
import fcntl
import os
import platform
import re
import resource
import shutil
import socket
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mpidp.world.system import CGROUPS, PROC, available_memory, file_system, memory_limit

SHM = Path("/dev/shm")
MUNGE = Path("/run/munge/munge.socket.2")
FABRICS = (Path("/sys/class/infiniband"), Path("/sys/class/cxi"))
_UNLIMITED_BYTES = 1 << 62
PCI = Path("/sys/bus/pci/devices")
_LIBRARIES = (("cuda", "cu", "libcuda.so.1"), ("hip", "hip", "libamdhip64.so"))
_NAME_BYTES, _PCI_BYTES, _UUID_BYTES = 128, 32, 16


@dataclass(frozen=True)
class Cores:
    """Where this process may run: numbers of cores, cores of the node, and the limit of its control group."""

    mask: tuple[int, ...]
    node_cores: int
    quota: float | None = None


@dataclass(frozen=True)
class Memory:
    """Limits; None where there is none, or it is not said.

    Attributes:
        available, limit: bytes left to this job, and that it may use in all.
        locked: bytes that a process may lock.
        shm_free, shm_size: bytes of /dev/shm.
        open_files: how many this process may have open.
    """

    available: int | None
    limit: int | None
    locked: int | None
    shm_free: int | None
    shm_size: int | None
    open_files: int = 1 << 20


@dataclass(frozen=True)
class System:
    """The node.

    Attributes:
        host, kernel: its name, and its version of Linux.
        container: its kind, or "".
        ptrace_scope: the kernel's setting, or None.
        cross_memory: "" when a process may copy from another's memory, else the error.
        has_munge: whether munge can be asked.
        fabrics: fast networks.
        path_mpiexec: the mpiexec on PATH, or "".
        site_libraries: folders in LD_LIBRARY_PATH that hold an MPI library.
    """

    host: str
    kernel: str
    container: str
    ptrace_scope: int | None
    cross_memory: str
    has_munge: bool
    fabrics: tuple[str, ...]
    path_mpiexec: str = ""
    site_libraries: tuple[str, ...] = ()


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


@dataclass(frozen=True)
class Gpu:
    """A GPU as this process sees it. `numa_node` is -1 where it is not known; `cores` are those beside it."""

    index: int
    name: str
    uuid: str
    pci: str
    numa_node: int = -1
    cores: tuple[int, ...] = ()


@dataclass(frozen=True)
class Gpus:
    """GPUs: their driver's interface ("cuda", "hip" or ""), those that are seen, and device files of the node.

    `links` says how pairs are connected, as NVML has it; empty without nvidia-ml-py. `error`: what the driver said.
    """

    driver: str = ""
    seen: tuple[Gpu, ...] = ()
    device_files: int = 0
    links: Mapping[str, str] = field(default_factory=dict)
    error: str = ""


def gpus() -> Gpus:
    """Look for GPUs; no driver means none."""
    files = _device_files(Path("/dev"))
    for driver, prefix, name in _LIBRARIES:
        try:
            library = ctypes.CDLL(name)
        except OSError:  # no such driver on this node
            continue
        seen, error = seen_by(library, prefix)
        return Gpus(driver, tuple(seen), files, links(seen) if driver == "cuda" else {}, error)
    return Gpus(device_files=files)


def seen_by(library: ctypes.CDLL, prefix: str) -> tuple[list[Gpu], str]:
    """Ask a driver for the GPUs of this process; also its error, or ""."""

    def call(name: str, *arguments: object) -> int:
        """Call a function of the driver; its error code."""
        return int(getattr(library, prefix + name)(*arguments))

    count = ctypes.c_int(0)
    get_count = "DeviceGetCount" if prefix == "cu" else "GetDeviceCount"
    error = call("Init", 0) or call(get_count, ctypes.byref(count))
    if error:
        return [], f"the driver gave error {error}"
    return [_describe(call, index) for index in range(count.value)], ""


def links(seen: list[Gpu]) -> dict[str, str]:
    """How pairs of GPUs are connected, by NVML; empty without the package nvidia-ml-py or without pairs."""
    if len(seen) < 2:
        return {}
    try:
        import pynvml
    except ImportError:
        return {}
    names = {
        pynvml.NVML_TOPOLOGY_INTERNAL: "same board",
        pynvml.NVML_TOPOLOGY_SINGLE: "one PCIe switch",
        pynvml.NVML_TOPOLOGY_MULTIPLE: "PCIe switches",
        pynvml.NVML_TOPOLOGY_HOSTBRIDGE: "a PCIe host bridge",
        pynvml.NVML_TOPOLOGY_NODE: "the NUMA node",
        pynvml.NVML_TOPOLOGY_SYSTEM: "the link between sockets",
    }
    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByPciBusId(gpu.pci.encode()) for gpu in seen]
        pairs = [(a, b) for b in range(len(handles)) for a in range(b)]
        found = {f"{a}-{b}": pynvml.nvmlDeviceGetTopologyCommonAncestor(handles[a], handles[b]) for a, b in pairs}
        pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        return {"all": f"something that NVML cannot tell ({error})"}
    return {pair: names.get(level, str(level)) for pair, level in found.items()}


def parse_cores(text: str) -> tuple[int, ...]:
    """The numbers in a kernel's list, such as "0-3,8"."""
    found: list[int] = []
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", text):
        found += range(int(first), int(last or first) + 1)
    return tuple(found)


def _describe(call: Callable[..., int], index: int) -> Gpu:
    # cuDeviceGet and hipDeviceGet turn an index into what the other calls want, which is the same number so far.
    device = ctypes.c_int(index)
    call("DeviceGet", ctypes.byref(device), index)
    name, pci = ctypes.create_string_buffer(_NAME_BYTES), ctypes.create_string_buffer(_PCI_BYTES)
    raw = ctypes.create_string_buffer(_UUID_BYTES)
    call("DeviceGetName", name, _NAME_BYTES, device)
    call("DeviceGetPCIBusId", pci, _PCI_BYTES, device)
    call("DeviceGetUuid", raw, device)
    place = pci.value.decode().lower()
    return Gpu(index, name.value.decode(), f"GPU-{uuid.UUID(bytes=raw.raw)}", place, *_beside(PCI / place))


def _beside(device: Path) -> tuple[int, tuple[int, ...]]:
    """The NUMA node of a device and the cores of it, as far as the kernel tells."""
    numa, cores = device / "numa_node", device / "local_cpulist"
    return int(numa.read_text()) if numa.exists() else -1, parse_cores(cores.read_text()) if cores.exists() else ()


def _device_files(folder: Path) -> int:
    nvidia = sum(bool(re.fullmatch(r"nvidia\d+", name)) for name in os.listdir(folder))
    return nvidia or int((folder / "kfd").exists())


@dataclass(frozen=True)
class DataFile:
    """A file to be read: its file system, and what a lock on it gave ("" for a lock)."""

    path: str
    error: str = ""
    num_bytes: int = 0
    kind: str = ""
    is_network: bool = False
    free_bytes: int = 0
    lock_error: str = ""


def data_file(path: str) -> DataFile:
    """Look at a file without reading it."""
    try:
        place, num_bytes = file_system(path), os.stat(path).st_size
        lock_error = _lock_error(path)
    except OSError as error:
        return DataFile(path, error.strerror or str(error))
    return DataFile(path, "", num_bytes, place.kind, place.is_network, place.free_bytes, lock_error)


def _lock_error(path: str) -> str:
    """Take the lock that HDF5 takes for reading, and give it back; what the file system said if it could not."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return f"{errno.errorcode.get(error.errno or 0, 'errno')} {error.errno}: {error.strerror}"
    finally:
        os.close(descriptor)
    return ""
