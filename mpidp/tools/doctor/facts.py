"""What doctor knows of a rank, as plain values: they travel between ranks, and become JSON."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from mpidp.hdf5.files.library import HDF5Library
from mpidp.world.launch import LaunchFacts
from mpidp.world.library import Library


@dataclass(frozen=True)
class Versions:
    """What is installed. `packages` maps a name to its version, or to None where it is not there."""

    python: str
    prefix: str
    packages: Mapping[str, str | None]
    torch_cuda: str | None = None
    torch_hip: str | None = None


@dataclass(frozen=True)
class Cores:
    """Where this process may run: numbers of cores, cores of the node, and cores that its control group pays for."""

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


@dataclass(frozen=True)
class RankFacts:
    """All of it. `mpi_error` and `hdf5_error` say why there is no `mpi` or `hdf5`."""

    launch: LaunchFacts
    environment: Mapping[str, str]
    versions: Versions
    cores: Cores
    memory: Memory
    gpus: Gpus
    system: System
    mpi: Library | None = None
    mpi_error: str = ""
    hdf5: HDF5Library | None = None
    hdf5_error: str = ""
    file: DataFile | None = None
