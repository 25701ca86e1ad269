"""Troubles reproduced as facts: what doctor's checks find in them, and that healthy facts give no bad news."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
from doctor_facts import GIB, HDF5, MPICH, OPEN_MPI, PACKAGES, SYSTEM, bad, library, only
from doctor_facts import rank_facts as rank
from hypothesis import given
from hypothesis import strategies as st

from mpidp.tools.doctor.check_machine import check_data, check_shared, ranges
from mpidp.tools.doctor.check_mpi import check_before_start, check_launch, check_mpi
from mpidp.tools.doctor.doctor import check, check_clocks, check_measured
from mpidp.tools.doctor.facts import RankFacts, Versions
from mpidp.tools.doctor.finding import Finding, Level
from mpidp.tools.doctor.machine import Cores, DataFile, Gpu, Gpus, Memory, parse_cores
from mpidp.world.launch import cannot_start, launch_facts
from mpidp.world.library import Mapped, mapped
from mpidp.world.system import Pinned, crowded, too_few_cores

FAIL, WARN = Level.FAIL, Level.WARN
STEP = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
}
HYDRA = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4", "PMI_FD": "9"}
PRTE = {"OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "8", "PMIX_NAMESPACE": "prterun-1", "PMIX_RANK": "5"}
PIP = library(mapped=Mapped(("/home/me/env/lib/libmpi.so.12",), (), False))
CRAY = "/opt/cray/pe/lib64/libmpi_gnu_123.so.12"
CUDA = Versions("3.11", "/home/me/env", PACKAGES, torch_cuda="12.8")
FILE = DataFile("/scratch/a.h5", "", GIB, "lustre", True, 100 * GIB)
LITTLE = Memory(64 * GIB, 64 * GIB, None, 60 << 20, 64 << 20)
ALL = tuple(range(8))


def installed(**packages: str | None) -> Versions:
    """Versions with some that are changed."""
    return Versions("3.11", "/home/me/env", PACKAGES | packages)


def loaded(*mpi: str, ucx: tuple[str, ...] = (), gtl: bool = False, **environment: str) -> RankFacts:
    """A rank with these libraries in memory."""
    return rank(environment, mpi=library(mapped=Mapped(mpi, ucx, gtl)))


def on_cores(*masks: tuple[int, ...], threads: str = "1", hosts: tuple[str, ...] = ()) -> list[RankFacts]:
    """Ranks of nodes with eight cores."""
    places = hosts or ("node1",) * len(masks)
    return [
        rank({"OMP_NUM_THREADS": threads}, cores=Cores(mask, 8), system=replace(SYSTEM, host=host))
        for mask, host in zip(masks, places, strict=True)
    ]


def gpu(index: int, cores: tuple[int, ...] = ()) -> Gpu:
    """A GPU."""
    return Gpu(index, "H100", f"GPU-{index}", f"0000:{index:02x}:00.0", 0, cores)


def with_gpus(*gpus: Gpu, **changes: Any) -> RankFacts:
    """A rank that sees these."""
    return rank(**{"gpus": Gpus("cuda", gpus, len(gpus)), "versions": CUDA} | changes)


HIDDEN = rank({"CUDA_VISIBLE_DEVICES": ""}, gpus=Gpus("cuda", (), 4, {}, "the driver gave error 100"))
NO_FILE = DataFile("/a", "No such file or directory")
REFUSED = replace(HDF5, file_error="bad object header")
MUNGE, STORE = {"PMIX_SECURITY_MODE": "munge,native"}, {"PMIX_GDS_MODULE": "ds21,ds12"}
NO_MUNGE = replace(SYSTEM, has_munge=False)
FABRIC = replace(SYSTEM, fabrics=("mlx5_0",))
CONTAINER = replace(SYSTEM, container="docker")
OTHER = rank(versions=Versions("3.11", "/e", PACKAGES | {"torch": "2.4.0"}), system=replace(SYSTEM, host="b"))
UBUNTU = library("MPICH Version:      4.2.0\nMPICH configure:    --with-pmix=/usr/lib")
NO_MPI = {
    "cannot load an MPI library (x)": "MPI4PY_LIBMPI",
    "cannot load MPI library": "MPI4PY_LIBMPI",
    "No module named 'mpi4py'": "pip install mpi4py",
    "exit code -6: PMI2 init failed: 1": "srun -n 1",
    "no answer within 30 s": "srun -n 1",
}
# Name: facts of a rank or of a job; all bad news; words of their texts and fixes.
TROUBLES: dict[str, tuple[RankFacts | list[RankFacts], dict[str, Level], tuple[str, ...]]] = {
    # Launchers, behaviour 37; MPI libraries, behaviours 39, 40, 46.
    "srun, MPICH": (rank(STEP, mpi=library()), {"launch.size": FAIL}, ("8 processes, but MPI sees 1", "--mpi=pmi2")),
    "srun, Open MPI": (rank(STEP, mpi=library(OPEN_MPI)), {"launch.size": FAIL}, ("srun --mpi=pmix",)),
    "Hydra, Open MPI": (rank(HYDRA, mpi=library(OPEN_MPI)), {"launch.size": FAIL}, ("that belongs to this library",)),
    "PRTE, MPICH": (rank(PRTE, mpi=library()), {"launch.size": FAIL}, ("mpiexec that belongs to this library",)),
    "two launchers": (
        rank(HYDRA | {"PMIX_NAMESPACE": "x"}, mpi=library(size=8)),
        {"launch.two_pmis": WARN},
        ("PMI_SIZE=8", "PMIX_NAMESPACE=x", "unset"),
    ),
    "munge": (rank(MUNGE, system=NO_MUNGE), {"launch.psec": WARN}, ("export PMIX_MCA_psec=native",)),
    "store": (rank(STORE, mpi=library(OPEN_MPI)), {"launch.gds": WARN}, ("export PMIX_MCA_gds=hash",)),
    **{error: (rank(mpi=None, mpi_error=error), {"mpi": FAIL}, (fix,)) for error, fix in NO_MPI.items()},
    "two MPIs": (loaded("/a/libmpi.so.12", "/b/libmpi.so.40"), {"mpi.two": FAIL}, ("/a/libmpi", "/b/libmpi")),
    "two UCXs": (loaded("/a/m", ucx=("/a/u", "/b/u")), {"mpi.two_ucx": WARN}, ("/a/u", "ucm_set_global_opts")),
    "no GTL": (loaded(CRAY, MPICH_GPU_SUPPORT_ENABLED="1"), {"mpi.gtl": FAIL}, ("libmpi_gtl",)),
    "no threads": (rank(mpi=library(thread_level="MPI_THREAD_FUNNELED")), {"mpi.threads": FAIL}, ("SERIALIZED",)),
    "mpiexec": (
        rank(mpi=PIP, system=replace(SYSTEM, path_mpiexec="/usr/bin/mpiexec")),
        {"mpi.mpiexec": WARN},
        ("/home/me/env/bin/mpiexec",),
    ),
    # Packages.
    "Ubuntu's MPICH": (rank(mpi=UBUNTU), {"versions.mpich_pmix": WARN}, ("0 of 1",)),
    "module": (rank({"LOADEDMODULES": "a:openmpi/5"}, mpi=PIP), {"mpi.shadowed": WARN}, ("openmpi/5", "uninstall")),
    "site's library": (
        rank(mpi=PIP, system=replace(SYSTEM, site_libraries=("/opt/lib",)), versions=installed(mpich="5.0.2")),
        {"mpi.shadowed": WARN},
        ("/opt/lib", "pip uninstall mpich"),
    ),
    "missing": (
        rank(versions=installed(torch=None, h5py=None)),
        {"versions.missing": FAIL},
        ("pip install torch h5py",),
    ),
    "two wheels": (rank(versions=installed(mpich="5", openmpi="5")), {"mpi.wheels": WARN}, ("uninstall mpich open",)),
    # Nodes and cores, behaviour 38.
    "copies filtered": (
        rank(system=replace(CONTAINER, cross_memory="EPERM")),
        {"node.copies": WARN},
        ("OMPI_MCA_smsc=^cma", "Read -1, expected"),
    ),
    "ptrace": (rank(system=replace(SYSTEM, ptrace_scope=2)), {"node.copies": WARN}, ("ptrace_scope 2",)),
    "srun's cores": (
        rank(STEP | {"SLURM_CPUS_PER_TASK": "8"}, mpi=library(size=8), cores=Cores((0,), 64)),
        {"cores.srun": WARN},
        ("SRUN_CPUS_PER_TASK",),
    ),
    "quota": (rank(cores=Cores(ALL, 8, 2.5)), {"cores.quota": WARN}, ("OMP_NUM_THREADS=2",)),
    "one core": (on_cores((0,), (0,), (0,), (0,)), {"cores.same": FAIL}, ("SRUN_CPUS_PER_TASK",)),
    "few cores": (on_cores((0,), (1,), threads="4"), {"cores.threads": WARN}, ("OMP_NUM_THREADS",)),
    "overlap": (on_cores((0, 1, 2), (2, 3, 4)), {"cores.overlap": WARN}, ("overlap in cores 2",)),
    "many threads": (on_cores(ALL, ALL, threads="8"), {"cores.oversubscribed": WARN}, ("16 threads", "8 cores")),
    # Memory.
    "little shm": (rank(memory=LITTLE), {"memory.shm": WARN}, ("60.0 MiB left of 64.0 MiB", "remove old files")),
    "container's shm": (rank(memory=LITTLE, system=CONTAINER), {"memory.shm": WARN}, ("--shm-size",)),
    "no shm": (rank(memory=replace(LITTLE, shm_free=None, shm_size=None)), {"memory.shm": WARN}, ("no /dev/shm",)),
    "little locked": (
        rank(memory=Memory(GIB, GIB, 8 << 20, GIB, GIB), system=FABRIC),
        {"memory.locked": WARN},
        ("LimitMEMLOCK=infinity", "ibv_reg_mr"),
    ),
    "few files": (rank(memory=Memory(GIB, GIB, None, GIB, GIB, 256)), {"memory.open_files": WARN}, ("ulimit -n",)),
    # GPUs, behaviour 38.
    "torch for CPUs": (with_gpus(gpu(0), versions=installed()), {"gpus.torch": FAIL}, ("not built for it",)),
    "hidden": (HIDDEN, {"gpus": WARN}, ("4 GPU device files", "CUDA_VISIBLE_DEVICES=", "error 100")),
    "two on one": ([with_gpus(gpu(0), gpu(0))] * 2, {"gpus.shared": FAIL}, ("ranks 0 and 1", "GPU-0")),
    "two allowed": (
        [with_gpus(gpu(0), gpu(0), environment={"MPIDP_SHARE_GPU": "1"})] * 2,
        {"gpus.shared": WARN},
        ("MPIDP_SHARE_GPU=1 allows",),
    ),
    "bound": (
        [with_gpus(gpu(number), environment={"SLURM_GPUS_PER_TASK": "1"}) for number in range(2)],
        {"gpus.bound": WARN},
        ("cuIpcOpenMemHandle", "--gpus-per-node", "SLURM_GPUS_PER_TASK"),
    ),
    "one without": ([with_gpus(gpu(0)), rank(versions=CUDA)], {"gpus.some": FAIL}, ("rank 1 on node1",)),
    "far": (with_gpus(gpu(0, (4, 5)), cores=Cores((0, 1), 8)), {"gpus.far": WARN}, ("cores 0-1", "cores 4-5")),
    # HDF5 and data, behaviour 29; ranks that differ.
    "no file": (rank(file=NO_FILE), {"data": FAIL}, ("No such file",)),
    "refused": (
        rank(file=FILE, hdf5=REFUSED),
        {"data.hdf5": FAIL, "versions.hdf5_2": WARN},
        ("bad object header", "h5py<3.16"),
    ),
    "no h5py": (rank(hdf5=None, hdf5_error="exit code 1: no h5py"), {"hdf5": FAIL}, ("no h5py",)),
    "torch differs": ([rank(), rank(), OTHER], {"job.versions": FAIL}, ("on rank 0 (node1), 2.4.0 on rank 2 (b)",)),
    "MPI differs": ([rank(), rank(mpi=library(OPEN_MPI))], {"job.mpi": FAIL}, ("Open MPI v5.0.8",)),
    "threads differ": ([rank({"OMP_NUM_THREADS": "2"}), rank()], {"job.threads": WARN}, ("2 on rank 0",)),
}


@pytest.mark.parametrize("name", TROUBLES)
def test_a_trouble_is_found_alone_and_has_a_fix(name: str) -> None:
    facts, found, texts = TROUBLES[name]
    findings = check(facts if isinstance(facts, list) else [facts])
    assert bad(findings) == found
    said = ""
    for finding in findings:
        if finding.code in found:
            assert finding.fix and "\n" not in finding.fix
            said += f"{finding.text} {finding.fix} "
    assert all(text in said for text in texts), said


HEALTHY: dict[str, RankFacts | list[RankFacts]] = {
    **{f"launcher {number}": rank(start, mpi=library(size=8)) for number, start in enumerate((STEP, HYDRA, PRTE))},
    "munge there": rank(MUNGE),
    "munge not needed": rank(MUNGE | {"PMIX_MCA_psec": "native"}, system=NO_MUNGE),
    "store set": rank(STORE | {"PMIX_MCA_gds": "hash"}, mpi=library(OPEN_MPI)),
    "store that works": rank({"PMIX_GDS_MODULE": "ds21,hash"}, mpi=library(OPEN_MPI)),
    "GTL": loaded(CRAY, gtl=True, MPICH_GPU_SUPPORT_ENABLED="1"),
    "GTL not needed": loaded(CRAY, MPICH_GPU_SUPPORT_ENABLED="0"),
    "serialized": rank(mpi=library(thread_level="MPI_THREAD_SERIALIZED")),
    "a wheel alone": rank(mpi=PIP),
    "ptrace by parents": rank(system=replace(SYSTEM, ptrace_scope=1)),
    "copies not used": rank({"OMPI_MCA_smsc": "^cma"}, system=replace(SYSTEM, ptrace_scope=2)),
    "cores of srun": rank(STEP | {"SLURM_CPUS_PER_TASK": "4"}, mpi=library(size=8)),
    "pinned": on_cores((0, 1), (2, 3), threads="2"),
    "not pinned": on_cores(ALL, ALL, ALL, ALL, threads="2"),
    "nodes": on_cores((0,), (0,), (0,), hosts=("a", "b", "c")),
    "locked": rank(memory=Memory(GIB, GIB, None, GIB, GIB), system=FABRIC),
    "locked, no network": rank(memory=Memory(GIB, GIB, 1, GIB, GIB)),
    "GPUs": [with_gpus(gpu(0), gpu(1))] * 2,
    "a GPU": with_gpus(gpu(0, (4, 5)), cores=Cores((4, 5, 6), 8)),
    "a file": rank(file=FILE),
    "no locks": rank(file=replace(FILE, lock_error="ENOLCK 37: No locks")),
    "more of HDF5": rank(hdf5=replace(HDF5, has_mpi=True, filters={"zstd": False}, packages={})),
    "a job": [rank({"OMP_NUM_THREADS": "2"})] * 2,
}


@pytest.mark.parametrize("name", HEALTHY)
def test_good_news_only(name: str) -> None:
    facts = HEALTHY[name]
    findings = check(facts if isinstance(facts, list) else [facts], [0.0])
    assert not bad(findings)
    assert len({finding.code for finding in findings}) == len(findings)


@pytest.mark.parametrize(
    "look, facts, code, texts",
    [
        (check_launch, rank(STEP | {"SLURM_RESTART_COUNT": "2"}), "slurm", ("job 77", "step 8", "restarts 2")),
        # Behaviour 47: which way gradients on GPUs go.
        *(
            (check_mpi, with_gpus(gpu(0), mpi=library(says_cuda=says)), "mpi.gpu", (way,))
            for says, way in ((True, "proven by value"), (None, "proven by value"), (False, "host memory"))
        ),
        # Behaviour 38: which rank has which GPU, by UUID and PCI address.
        (
            check_shared,
            [with_gpus(gpu(0), gpu(1))] * 2,
            "gpus.ranks",
            ("rank 0 on node1: 0 GPU-0 0000:00:00.0", "rank 1 on node1: 1 GPU-1"),
        ),
        (check_data, rank(file=FILE), "data", ("1.0 GiB on lustre (network)",)),
        (
            check_data,
            rank(file=replace(FILE, lock_error="ENOLCK")),
            "data.locks",
            ("ENOLCK", "HDF5_USE_FILE_LOCKING=FALSE"),
        ),
        (
            check_data,
            rank(hdf5=replace(HDF5, filters={"zstd": False}, packages={})),
            "hdf5.filters",
            ("zstd", "hdf5plugin"),
        ),
        (check_data, rank(hdf5=replace(HDF5, packages={})), "hdf5.codecs", ("pip install imagecodecs",)),
        (check_data, rank(hdf5=replace(HDF5, has_mpi=True)), "hdf5", ("built with MPI",)),
    ],
)
def test_what_is_said_without_blame(
    look: Callable[[Any], Iterable[Finding]], facts: Any, code: str, texts: tuple[str, ...]
) -> None:
    found = only(look(facts), code)
    assert found.level is Level.OK
    assert all(text in found.text for text in texts), found.text


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


@given(st.lists(st.integers(1, 6), min_size=1, max_size=6), st.integers(1, 6))
def test_ranks_with_cores_of_their_own_are_never_complained_about(sizes: list[int], threads: int) -> None:
    """Behaviour 38: and those with more threads than cores always are."""
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    masks = [frozenset(range(start, start + size)) for start, size in zip(starts, sizes, strict=True)]
    ranks = [Pinned("a", mask, threads) for mask in masks]
    assert crowded(ranks, sum(sizes)) is None
    text = too_few_cores(ranks)
    assert (text is not None) is any(threads > size for size in sizes)
    assert text is None or ("OMP_NUM_THREADS=" in text and f"{threads} threads" in text)


@given(st.frozensets(st.integers(0, 70)))
def test_short_lists_of_cores(cores: frozenset[int]) -> None:
    assert parse_cores(ranges(sorted(cores))) == tuple(sorted(cores))


def test_libraries_in_memory() -> None:
    """Bindings for other languages are no second library; Cray's layer for GPUs is seen."""
    names = ("libmpi.so.40", "libmpi_mpifh.so.40", "libmpi_cxx.so.40", "libmpi_usempif08.so.40", "libucs.so.0")
    paths = (*(f"/opt/lib/{name}" for name in names), "/opt/cray/libmpi_gtl_cuda.so.0", "/usr/lib/libc.so.6")
    lines = [f"7f0000000000-7f0000001000 r--p 00000000 fd:00 1 {path}" for path in (*paths, *paths)]
    assert mapped("\n".join(lines)) == Mapped(("/opt/lib/libmpi.so.40",), ("/opt/lib/libucs.so.0",), True)
    assert mapped("") == Mapped((), (), False)


def test_clocks() -> None:
    assert not list(check_clocks(["a"], [0.0]))
    assert not bad(check_clocks(["a", "b"], [0.0, 0.01]))
    found = only(check_clocks(["a", "b", "c"], [0.0, 0.01, -7.5]), "job.clocks")
    assert found.level is Level.WARN and "the clock of c differs from that of a by -7.500 s" in found.text


MEASURED = {
    **{"ranks": 2, "num_bytes": 1 << 24, "copy_s": 0.002, "allreduce_s": 0.02, "plain_step_s": 0.01, "step_s": 0.011},
    **{"checkpoint_bytes": 1 << 20, "save_s": 0.1, "load_s": 0.01, "device": "cpu"},
    **{"cuda_aware": False, "aware_reason": "no rank has a GPU"},
}


def test_what_was_measured_beside_a_copy() -> None:
    assert not bad(check_measured(MEASURED, 1))
    assert bad(check_measured(MEASURED | {"allreduce_s": 1.0}, 1)) == {"probe.reduction": WARN}
    assert not bad(check_measured(MEASURED | {"allreduce_s": 1.0}, 2))
    assert bad(check_measured(MEASURED | {"step_s": 1.0}, 1)) == {"probe.step": WARN}
    assert bad(check_measured({"error": "wrong values"}, 1)) == {"probe": FAIL}
    on_gpu = check_measured(MEASURED | {"device": "cuda:0", "cuda_aware": True, "aware_reason": "proven"}, 1)
    assert "takes GPU memory: proven" in only(on_gpu, "probe.gpu_memory").text
