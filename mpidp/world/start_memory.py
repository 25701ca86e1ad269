"""How many ranks start on this node comes in; why /dev/shm is too small for MPICH to start them goes out, or None.

MPICH writes to shared memory that it has not made sure of, and dies of a signal. Starts no MPI. (Open MPI makes sure,
says "not enough space for /dev/shm/sm_segment...", and goes on without.)
"""

import os
from collections.abc import Mapping
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
PAGE_BYTES = 4096

# Measured with MPICH 5.0.2 and UCX 1.20.1: see docs/decisions/0021. Of so much a rank, and a page, MPICH needs all, or
# dies of SIGBUS. Each rank's UCX takes so much if it finds UCX_FREE_BYTES; where some ranks find them and others do
# not any more, they choose different ways to each other, and die of SIGSEGV.
MPICH_BYTES = 1_057_344
UCX_BYTES, UCX_FREE_BYTES = 4_333_568, 16 << 20
CELLS, TRANSPORTS = "MPIR_CVAR_CH4_SHM_POSIX_IQUEUE_NUM_CELLS", "UCX_TLS"
LARGER = "Make it larger (docker run --shm-size=1g; as root: mount -o remount,size=1g /dev/shm)"


def cannot_share(library_text: str, local_size: int | None, environment: Mapping[str, str]) -> str | None:
    """The error text when MPI would die of a signal as it starts, for want of shared memory; else None.

    Args:
        library_text: the MPI library's version text, all of it.
        local_size: ranks that start on this node, as the launcher says; None where it does not.
        environment: all variables of this process.
    """
    room = room_bytes(SHARED_MEMORY) if "MPICH" in library_text else None
    return None if room is None else too_small(room, library_text, local_size or 1, environment)


def too_small(room: int, library_text: str, ranks: int, environment: Mapping[str, str]) -> str | None:
    """The same for so many bytes of shared memory. Pure."""
    mpich = -(-ranks * MPICH_BYTES // PAGE_BYTES) * PAGE_BYTES + PAGE_BYTES
    found = f"/dev/shm has {room:,} bytes, and MPICH needs"
    if room < mpich and CELLS not in environment:
        return (
            f"{found} {mpich:,} to start {ranks} rank(s) here: it would die of SIGBUS. {LARGER}, or set {CELLS}=2, "
            "with which it needs a twentieth and is slower."
        )
    ucx = ranks * UCX_BYTES + max(UCX_FREE_BYTES, mpich)
    if ranks > 1 and UCX_FREE_BYTES <= room < ucx and "ch4:ucx" in library_text and TRANSPORTS not in environment:
        return (
            f"{found} {ucx:,} to start {ranks} ranks here with UCX, or less than {UCX_FREE_BYTES:,}, as then UCX takes "
            f"none: in between it would die of SIGSEGV. {LARGER}, or set {TRANSPORTS}=^posix."
        )
    return None


def room_bytes(folder: Path) -> int | None:
    """Bytes that this node can share; None where there is no limit. Ranks of one job are to find the same.

    So what they have taken already does not count: files of UCX have no name any more, those of MPICH a known one.
    """
    if not folder.is_dir():
        return None
    facts = os.statvfs(folder)
    files = [path for path in folder.glob("*") if not path.name.startswith("mpich_shm_")]
    return facts.f_blocks * facts.f_frsize - sum(map(_taken_bytes, files)) if facts.f_blocks else None


def _taken_bytes(path: Path) -> int:
    try:
        return path.lstat().st_blocks * 512
    except FileNotFoundError:  # it is gone by now
        return 0
