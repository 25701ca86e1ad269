"""Facts of the launch: which launcher, which rank of how many, what will keep MPI from starting; and the current World.

From environment variables and the size of /dev/shm alone: a login node, `--help` and the error for a wrong launch can
use it, as it starts no MPI.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpidp.world.world import World

SHARED_MEMORY = Path("/dev/shm")
PAGE_BYTES = 4096

# Measured with MPICH 5.0.2 and UCX 1.20.1: see docs/decisions/0021. Of so much a rank, and a page, MPICH needs all, or
# dies of SIGBUS. Each rank's UCX takes so much if it finds UCX_FREE_BYTES; where some ranks find them and others do
# not any more, they choose different ways to each other, and die of SIGSEGV.
MPICH_BYTES = 1_057_344
UCX_BYTES, UCX_FREE_BYTES = 4_333_568, 16 << 20
CELLS, TRANSPORTS = "MPIR_CVAR_CH4_SHM_POSIX_IQUEUE_NUM_CELLS", "UCX_TLS"
LARGER = "Make it larger (docker run --shm-size=1g; as root: mount -o remount,size=1g /dev/shm)"
# Variables by which launchers talk to the processes that they start.
_BY_LAUNCHER = re.compile("OMPI_|PMIX_|PRTE_|PMI2?_|HYD(I|RA)_|MPI_LOCAL|I_MPI_HYDRA|PALS_|MV2_|MVP_|JSM_|FLUX_|SLURM_")


@dataclass(frozen=True)
class LaunchFacts:
    """What the launcher's variables say, None where they do not; `launcher` is "none" for `python script.py`."""

    launcher: str
    rank: int | None = None
    size: int | None = None
    local_rank: int | None = None
    local_size: int | None = None

    @property
    def speaks(self) -> bool:
        """Whether this process is the one of its job that prints."""
        return self.rank in (None, 0)


_HYDRA = "Hydra's mpiexec"
# By launcher, the variables of rank, size, local rank and local size; of several the first that is set counts. In this
# order: a launcher's own variables are nearer to the process than the PMI ones it may also set.
_LAUNCHERS = {
    "Open MPI's mpiexec": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "MVAPICH's launcher": (
        "MV2_COMM_WORLD_RANK MVP_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE MVP_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_LOCAL_RANK MVP_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE MVP_COMM_WORLD_LOCAL_SIZE",
    ),
    "PALS": ("PALS_RANKID", "PALS_NRANKS PMI_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE PMI_LOCAL_SIZE"),
    "LSF's jsrun": (
        "JSM_NAMESPACE_RANK",
        "JSM_NAMESPACE_SIZE",
        "JSM_NAMESPACE_LOCAL_RANK",
        "JSM_NAMESPACE_LOCAL_SIZE",
    ),
    _HYDRA: ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID PMI_LOCAL_RANK", "MPI_LOCALNRANKS PMI_LOCAL_SIZE"),
}
_FLUX = ("FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID", "")
_SRUN = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "")


def launch_facts(environment: Mapping[str, str]) -> LaunchFacts:
    """Reads the launcher's variables; those of Slurm's step count only if no MPI launcher is in between.

    (`mpiexec` inside an allocation starts its own processes through a Slurm step, whose task count is that of the
    launcher's daemons.)
    """
    name = next((name for name, names in _LAUNCHERS.items() if _first(environment, names[0]) is not None), "")
    names = _LAUNCHERS.get(name, ())
    by_pmi, in_step = name == _HYDRA, _is_slurm_step(environment)
    by_hydra = "MPI_LOCALRANKID" in environment  # it knows more than the `flux run` or Slurm step of its daemons
    if "FLUX_TASK_RANK" in environment and not by_hydra and (by_pmi or not name):
        name, names = "flux run", _FLUX
    elif by_pmi and in_step and not by_hydra:  # `srun --mpi=pmi2`: what the user typed, and must change, is srun
        name = "Slurm's srun"
    elif by_pmi and "I_MPI_HYDRA_TOPOLIB" in environment:
        name = "Intel MPI's mpiexec"
    elif not name and in_step:
        name, names = "Slurm's srun", _SRUN
    return LaunchFacts(name or "none", *(_first(environment, each) for each in names))


def size_mismatch(facts: LaunchFacts, mpi_size: int, library: str) -> str | None:
    """The error text when MPI has another size than the launcher meant, else None.

    `library` is the first line of the MPI library's version text.
    """
    if facts.size is None or facts.size == mpi_size:
        return None
    return (
        f"{facts.launcher} started {facts.size} processes, but MPI sees {mpi_size}: every process would train alone. "
        f"The MPI library loaded here is {library}; it does not understand this launcher. {_advice(facts, library)}"
    )


def cannot_start(facts: LaunchFacts, environment: Mapping[str, str], library_text: str) -> str | None:
    """The error text when this library is certain not to understand its launcher, before it is started; else None.

    Some libraries then stop with a text of their own, which nobody can catch.
    """
    if (facts.size or 1) == 1:
        return None
    library = library_text.splitlines()[0] if library_text else ""
    has_pmix = "PMIX_NAMESPACE" in environment or "PMIX_RANK" in environment
    if "Open MPI v5" in library and not has_pmix:  # it speaks nothing else
        return size_mismatch(facts, 1, library)
    only_pmix = "PMIX_NAMESPACE" in environment and "PMI_RANK" not in environment and "PMI_FD" not in environment
    if facts.launcher == "Open MPI's mpiexec" and only_pmix and "MPICH" in library and "pmix" not in library_text:
        return (
            f"{facts.launcher} started {facts.size} processes and speaks PMIx with them, which the MPI library loaded "
            f"here, {library}, does not understand: it would stop. {_advice(facts, library)}"
        )
    return None


def without_launcher(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment for a child process that starts MPI on its own and must not be taken for a rank of this job."""
    return {key: value for key, value in environment.items() if not _BY_LAUNCHER.match(key)}


def _advice(facts: LaunchFacts, library: str) -> str:
    pmi = "pmix" if "Open MPI" in library else "pmi2"
    if facts.launcher == "Slurm's srun":
        return f"Start it with `srun --mpi={pmi} ...` (see `srun --mpi=list`), or with that library's own mpiexec."
    if facts.launcher == "flux run":
        flux_pmi = "pmix" if "Open MPI" in library else "simple"
        return f"Start it with `flux run -o pmi={flux_pmi} ...`, or with that library's own mpiexec."
    return "Start it with the mpiexec that belongs to this library (same folder or same module), or load the other one."


def _is_slurm_step(environment: Mapping[str, str]) -> bool:
    """Whether srun started this process. Slurm numbers steps that are shells, as of batch scripts, from 0xFFFFFFF0."""
    step = _first(environment, "SLURM_STEP_ID SLURM_STEPID")
    return step is not None and step < 0xFFFFFFF0 and "SLURM_STEP_NUM_TASKS" in environment


def _first(environment: Mapping[str, str], names: str) -> int | None:
    """The first of some variables that holds a number."""
    return next((int(text) for name in names.split() if (text := environment.get(name, "")).isdecimal()), None)


def cannot_share(library_text: str, local_size: int | None, environment: Mapping[str, str]) -> str | None:
    """The error text when MPI would die of a signal as it starts, for want of shared memory; else None."""
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


_world: World | None = None


def current_world() -> World | None:
    """Return the World that `mpidp.init` made in this process, or None. Starts nothing."""
    return _world


def set_current_world(world: World) -> None:
    """Make `world` the one of this process; `mpidp.init` does."""
    global _world
    _world = world
