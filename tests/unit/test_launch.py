"""What launchers' environments, as they are on clusters, and the size of /dev/shm say of how a job starts."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from mpidp.world import launch
from mpidp.world.launch import (
    CELLS,
    TRANSPORTS,
    LaunchFacts,
    cannot_share,
    launch_facts,
    room_bytes,
    size_mismatch,
    too_small,
    without_launcher,
)


def four(*names: str) -> dict[str, str]:
    """Variables of rank, size, local rank and local size."""
    return dict(zip(names, "5814", strict=False))


PMI = four("PMI_RANK", "PMI_SIZE")
OPEN_MPI = four(*(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")))
HYDRA = four("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS") | {"PMI_FD": "9"}
INTEL = HYDRA | {"I_MPI_HYDRA_TOPOLIB": "hwloc"}
PALS = four("PALS_RANKID", "PALS_NRANKS", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE") | PMI
MVAPICH = {key.replace("OMPI", "MV2"): value for key, value in OPEN_MPI.items()} | PMI
MVAPICH_3 = {key.replace("MV2_", "MVP_"): value for key, value in MVAPICH.items()}
JSRUN = {key.replace("OMPI_COMM_WORLD", "JSM_NAMESPACE"): value for key, value in OPEN_MPI.items()} | {"PMIX_RANK": "5"}
FLUX = {"FLUX_TASK_RANK": "5", "FLUX_JOB_SIZE": "8", "FLUX_TASK_LOCAL_ID": "1", "FLUX_JOB_NNODES": "2"}
STEP = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
}
BATCH_SHELL = {"SLURM_JOB_ID": "77", "SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}


# `mpiexec` starts its daemons by a Slurm step, one task a node; they hand its variables on.
DAEMONS = BATCH_SHELL | {"SLURM_STEP_ID": "3", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "0"}
OF_MPI = {"Open MPI": OPEN_MPI, "Hydra": HYDRA, "Intel": INTEL, "PALS": PALS, "jsrun": JSRUN, "MVAPICH": MVAPICH}


@pytest.mark.parametrize("outer", [{}, BATCH_SHELL, DAEMONS, FLUX], ids=["alone", "allocation", "step", "flux"])
@pytest.mark.parametrize("launcher, environment", [*OF_MPI.items(), ("MVAPICH", MVAPICH_3)])
def test_mpi_launcher_tells_all_four_facts(launcher: str, environment: dict[str, str], outer: dict[str, str]) -> None:
    """Behaviour 37: also inside Slurm and Flux, as it is nearer to the process."""
    facts = launch_facts(outer | environment)
    assert launcher in facts.launcher
    assert (facts.rank, facts.size, facts.local_rank, facts.local_size) == (5, 8, 1, 4)
    assert not facts.speaks and launch_facts({name: "0" for name in environment}).speaks


@pytest.mark.parametrize("pmi", [{}, PMI | {"PMI_FD": "9"}], ids=["none", "pmi"])
def test_flux_and_slurm(pmi: dict[str, str]) -> None:
    """Behaviour 37: also where they speak PMI: what the user typed, and has to change, is their command."""
    facts = launch_facts(FLUX | pmi)
    assert facts == LaunchFacts("flux run", 5, 8, 1)
    assert "flux run -o pmi=pmix" in str(size_mismatch(facts, 1, "Open MPI v5.0.8"))
    assert launch_facts(STEP | pmi) == LaunchFacts("Slurm's srun", 5, 8, None if pmi else 1)


@pytest.mark.parametrize(
    "environment",
    [
        {},
        BATCH_SHELL,
        BATCH_SHELL | {"SLURM_STEP_ID": str(0xFFFFFFFB), "SLURM_STEP_NUM_TASKS": "1"},
        BATCH_SHELL | {"SLURM_STEPID": str(0xFFFFFFFA), "SLURM_STEP_NUM_TASKS": "1"},
        {"OMPI_COMM_WORLD_RANK": "", "PMI_RANK": "none"},
        {"OMPI_ALLOW_RUN_AS_ROOT": "1", "PMIX_MCA_gds": "hash"},
    ],
    ids=["plain", "batch shell", "batch step", "interactive step", "unusable values", "settings only"],
)
def test_no_launcher(environment: dict[str, str]) -> None:
    """Behaviour 37: a batch script is one shell, not a parallel step, whatever SLURM_NTASKS says."""
    facts = launch_facts(environment)
    assert facts == LaunchFacts("none")
    assert facts.speaks


@pytest.mark.parametrize(
    "environment, library, advice",
    [
        (STEP, "MPICH Version: 5.0.2", "srun --mpi=pmi2"),
        (STEP, "Open MPI v5.0.8", "srun --mpi=pmix"),
        (OPEN_MPI, "MPICH Version: 5.0.2", "mpiexec that belongs to this library"),
    ],
    ids=["srun-mpich", "srun-openmpi", "openmpi-mpich"],
)
def test_size_mismatch_says_what_was_found_and_what_to_do(
    environment: dict[str, str], library: str, advice: str
) -> None:
    """Behaviour 37: an equal size and an unknown one are none."""
    facts = launch_facts(environment)
    text = str(size_mismatch(facts, 1, library))
    for part in (facts.launcher, "8 processes", "sees 1", library, advice):
        assert part in text
    assert size_mismatch(facts, 8, library) is None
    assert size_mismatch(LaunchFacts("some launcher", rank=3), 4, library) is None


@pytest.mark.parametrize("environment", [*OF_MPI.values(), MVAPICH_3, FLUX, STEP])
def test_child_without_launcher_keeps_the_rest(environment: dict[str, str]) -> None:
    """Behaviour 47: the probe's child must not be taken for a rank of the job."""
    rest = {"PATH": "/bin", "CUDA_VISIBLE_DEVICES": "1", "OMP_NUM_THREADS": "2"}
    assert without_launcher(environment | rest) == rest


UCX = "MPICH Version: 5.0.2\nMPICH Device: ch4:ucx ofi\n"
OFI = "MPICH Version: 4.3.0\nMPICH Device: ch4:ofi\n"
KB, MB = 1 << 10, 1 << 20


@pytest.mark.parametrize("ranks, least", [(2, 2072), (3, 3104)])
def test_what_mpich_maps(ranks: int, least: int) -> None:
    """As it was measured, in kB: with 4 kB less it dies of SIGBUS."""
    text = too_small((least - 4) * KB, UCX, ranks, {})
    assert text and f"{least * KB:,} to start {ranks} rank(s)" in text and "--shm-size" in text
    assert too_small(least * KB, UCX, ranks, {}) is None
    assert too_small((least - 4) * KB, UCX, ranks, {CELLS: "2"}) is None


@pytest.mark.parametrize(
    "room, ranks, fits", [(15, 3, True), (16, 2, False), (24, 3, False), (29, 3, True), (64, 11, True)]
)
def test_ranks_of_which_some_use_shared_memory(room: int, ranks: int, fits: bool) -> None:
    """Where UCX finds enough on some ranks only they cannot talk to each other, and die of SIGSEGV."""
    assert (too_small(room * MB, UCX, ranks, {}) is None) == fits
    assert too_small(room * MB, UCX, ranks, {TRANSPORTS: "^posix"}) is None
    assert too_small(room * MB, OFI, ranks, {}) is None


def test_another_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Open MPI looks before it takes; and one rank alone is at odds with nobody."""
    monkeypatch.setattr(launch, "room_bytes", lambda folder: 0)
    assert cannot_share("Open MPI v5.0.11, package: ...", 4, {}) is None
    assert "0 bytes, and MPICH needs" in str(cannot_share(UCX, None, {}))
    assert too_small(16 * MB, UCX, 1, {}) is None
    assert too_small(1 * MB, UCX, 1, {}) is not None


def test_files_of_this_job_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or ranks that come later would find less, and say something else."""
    assert room_bytes(tmp_path / "missing") is None
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_blocks=100, f_frsize=4096))
    assert room_bytes(tmp_path) == 409_600
    (tmp_path / "mpich_shm_0123abcd_0").write_bytes(bytes(100_000))
    assert room_bytes(tmp_path) == 409_600
    (tmp_path / "another").write_bytes(bytes(100_000))
    assert room_bytes(tmp_path) == 409_600 - (tmp_path / "another").stat().st_blocks * 512
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_blocks=0, f_frsize=4096))
    assert room_bytes(tmp_path) is None  # size=0 is a tmpfs without a limit
