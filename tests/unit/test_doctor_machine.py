"""Cores, memory, GPUs, data and nodes, healthy and not, come in; what doctor says of them is looked at."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from doctor_facts import GIB, HDF5, PACKAGES, SYSTEM, bad, only, rank_facts
from hypothesis import given
from hypothesis import strategies as st

from mpidp.tools.doctor.check_machine import (
    check_cores,
    check_data,
    check_gpus,
    check_memory,
    check_shared,
    check_sharing,
    ranges,
)
from mpidp.tools.doctor.check_mpi import check_versions
from mpidp.tools.doctor.checks import check_clocks, check_measured, check_same
from mpidp.tools.doctor.facts import Cores, DataFile, Gpu, Gpus, Memory, RankFacts, Versions
from mpidp.tools.doctor.finding import Level
from mpidp.tools.doctor.machine import parse_cores
from mpidp.world.system import Pinned, crowded, too_few_cores

STEP = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "0"}
CUDA = Versions("3.11", "/e", PACKAGES, torch_cuda="12.8")


def on_cores(mask: tuple[int, ...], threads: str = "1", host: str = "node1", **changes: Any) -> RankFacts:
    """Return a rank of a node with eight cores."""
    return rank_facts({"OMP_NUM_THREADS": threads}, cores=Cores(mask, 8), system=replace(SYSTEM, host=host), **changes)


@pytest.mark.parametrize(
    "masks, threads, code, level",
    [
        ([(0, 1), (2, 3)], "2", None, None),
        ([(0, 1, 2, 3, 4, 5, 6, 7)] * 4, "2", None, None),
        ([(0,), (0,), (0,), (0,)], "1", "cores.same", Level.FAIL),
        ([(0,), (1,)], "4", "cores.threads", Level.WARN),
        ([(0, 1, 2), (2, 3, 4)], "1", "cores.overlap", Level.WARN),
        ([(0, 1, 2, 3, 4, 5, 6, 7)] * 4, "8", "cores.oversubscribed", Level.WARN),
    ],
    ids=["pinned", "not pinned", "all on one core", "fewer cores than threads", "overlap", "too many threads"],
)
def test_masks_and_threads(masks: list[tuple[int, ...]], threads: str, code: str | None, level: Level | None) -> None:
    """Behaviour 38: said once, with the fix."""
    findings = check_sharing([on_cores(mask, threads) for mask in masks])
    assert bad(findings) == ({code: level} if code else {})
    assert all(finding.fix for finding in findings)


def test_the_same_core_of_different_nodes_is_not_shared() -> None:
    assert not check_sharing([on_cores((0,), host=host) for host in ("node1", "node2", "node3")])


@given(st.lists(st.integers(1, 6), min_size=1, max_size=6), st.integers(1, 6))
def test_ranks_with_cores_of_their_own_are_never_complained_about(sizes: list[int], threads: int) -> None:
    """Behaviour 38: and those with more threads than cores always are."""
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    ranks = [
        Pinned("a", frozenset(range(start, start + size)), threads) for start, size in zip(starts, sizes, strict=True)
    ]
    assert crowded(ranks, sum(sizes)) is None
    text = too_few_cores(ranks)
    assert (text is not None) is any(threads > size for size in sizes)
    if text is not None:
        assert "OMP_NUM_THREADS=" in text and f"{threads} threads" in text


@given(st.frozensets(st.integers(0, 70)))
def test_short_lists_of_cores(cores: frozenset[int]) -> None:
    assert parse_cores(ranges(sorted(cores))) == tuple(sorted(cores))


def test_cores_that_srun_did_not_take_over() -> None:
    """Slurm >= 22.05: --cpus-per-task of the job is not that of the step."""
    facts = rank_facts(STEP | {"SLURM_CPUS_PER_TASK": "8"}, cores=Cores((0,), 64))
    assert "SRUN_CPUS_PER_TASK" in only(check_cores(facts), "cores.srun").fix
    assert not bad(check_cores(rank_facts(STEP | {"SLURM_CPUS_PER_TASK": "4"}, cores=Cores((0, 1, 2, 3), 64))))


def test_a_container_that_pays_for_fewer_cores() -> None:
    assert "OMP_NUM_THREADS=2" in only(check_cores(rank_facts(cores=Cores((0, 1, 2, 3), 8, 2.5))), "cores.quota").fix


@pytest.mark.parametrize("container, fix", [("docker", "--shm-size"), ("", "remove old files")])
def test_little_shared_memory(container: str, fix: str) -> None:
    """'not enough space for the shared-memory backing file', SIGBUS."""
    system = replace(SYSTEM, container=container)
    memory = Memory(64 * GIB, 64 * GIB, None, 60 << 20, 64 << 20)
    found = only(check_memory(rank_facts(memory=memory, system=system)), "memory.shm")
    assert found.level is Level.WARN and fix in found.fix and "60.0 MiB left of 64.0 MiB" in found.text
    assert "memory.shm" in bad(check_memory(rank_facts(memory=replace(memory, shm_free=None, shm_size=None))))


@pytest.mark.parametrize(
    "fabrics, locked, is_bad", [(("mlx5_0",), 8 << 20, True), (("mlx5_0",), None, False), ((), 1, False)]
)
def test_memory_that_may_be_locked(fabrics: tuple[str, ...], locked: int | None, is_bad: bool) -> None:
    """'ibv_reg_mr failed: Cannot allocate memory'."""
    memory = Memory(64 * GIB, 64 * GIB, locked, 32 * GIB, 32 * GIB)
    findings = check_memory(rank_facts(memory=memory, system=replace(SYSTEM, fabrics=fabrics)))
    assert ("memory.locked" in bad(findings)) is is_bad
    if is_bad:
        assert "LimitMEMLOCK=infinity" in only(findings, "memory.locked").fix


def gpu(index: int, cores: tuple[int, ...] = ()) -> Gpu:
    """Return a GPU."""
    return Gpu(index, "H100", f"GPU-{index}", f"0000:{index:02x}:00.0", 0, cores)


def with_gpus(*gpus: Gpu, **changes: Any) -> RankFacts:
    """Return a rank that sees these."""
    return rank_facts(gpus=Gpus("cuda", gpus, len(gpus)), versions=CUDA, **changes)


def test_one_gpu_a_rank() -> None:
    """Behaviour 38: which rank has which, by UUID and PCI address."""
    findings = check_shared([with_gpus(gpu(0), gpu(1)) for _ in range(2)])
    assert not bad(findings)
    text = only(findings, "gpus.ranks").text
    assert "rank 0 on node1: 0 GPU-0 0000:00:00.0" in text and "rank 1 on node1: 1 GPU-1" in text


def test_two_ranks_on_one_gpu() -> None:
    """Behaviour 38."""
    assert bad(check_shared([with_gpus(gpu(0)) for _ in range(2)]))["gpus.shared"] is Level.FAIL
    allowed = [with_gpus(gpu(0), environment={"MPIDP_SHARE_GPU": "1"}) for _ in range(2)]
    assert bad(check_shared(allowed))["gpus.shared"] is Level.WARN


def test_gpus_bound_to_tasks() -> None:
    """'The call to cuIpcOpenMemHandle failed'."""
    job = [with_gpus(gpu(rank), environment={"SLURM_GPUS_PER_TASK": "1"}) for rank in range(2)]
    found = only(check_shared(job), "gpus.bound")
    assert "cuIpcOpenMemHandle" in found.text and "--gpus-per-node" in found.fix and "SLURM_GPUS_PER_TASK" in found.text


def test_a_rank_that_sees_no_gpu() -> None:
    assert bad(check_shared([with_gpus(gpu(0)), rank_facts()])) == {"gpus.some": Level.FAIL}
    assert not check_shared([rank_facts(), rank_facts()])


def test_a_gpu_at_the_other_socket() -> None:
    far = with_gpus(gpu(0, cores=(4, 5)), cores=Cores((0, 1), 8))
    assert "gpus.far" in bad(check_shared([far]))
    assert not bad(check_shared([replace(far, cores=Cores((4, 5, 6), 8))]))


def test_what_one_rank_sees() -> None:
    assert not bad(check_gpus(rank_facts()))
    assert not bad(check_gpus(with_gpus(gpu(0))))
    assert bad(check_gpus(replace(with_gpus(gpu(0)), versions=rank_facts().versions))) == {"gpus.torch": Level.FAIL}
    hidden = rank_facts({"CUDA_VISIBLE_DEVICES": ""}, gpus=Gpus("cuda", (), 4, {}, "the driver gave error 100"))
    found = only(check_gpus(hidden), "gpus")
    assert found.level is Level.WARN and "4 GPU device files" in found.text and "CUDA_VISIBLE_DEVICES=" in found.text


FILE = DataFile("/scratch/a.h5", "", GIB, "lustre", True, 100 * GIB)


def test_a_file_to_read() -> None:
    findings = check_data(rank_facts(file=FILE))
    assert not bad(findings)
    assert "1.0 GiB on lustre (network)" in only(findings, "data").text


def test_a_file_system_without_locks_is_named_and_no_fault() -> None:
    """'unable to lock file, errno = 524': mpidp opens without."""
    findings = check_data(rank_facts(file=replace(FILE, lock_error="ENOLCK 37: No locks available")))
    assert not bad(findings)
    assert "HDF5_USE_FILE_LOCKING=FALSE" in only(findings, "data.locks").text


def test_files_that_cannot_be_read() -> None:
    """Behaviour 29: and a newer HDF5 that refuses older files is named."""
    assert bad(check_data(rank_facts(file=DataFile("/a", "No such file or directory")))) == {"data": Level.FAIL}
    hdf5 = replace(HDF5, file_error="Unable to open file (bad object header)")
    facts = rank_facts(file=FILE, hdf5=hdf5)
    assert bad(check_data(facts)) == {"data.hdf5": Level.FAIL}
    assert "h5py<3.16" in only(check_versions(facts), "versions.hdf5_2").fix
    assert not bad(check_versions(replace(facts, file=DataFile("/a", "No such file or directory"))))


def test_filters_and_mpi_of_hdf5() -> None:
    """'required filter is not registered'; h5py built with MPI is no fault."""
    hdf5 = replace(HDF5, has_mpi=True, filters={"deflate": True, "zstd": False}, packages={"hdf5plugin": False})
    findings = check_data(rank_facts(hdf5=hdf5))
    assert not bad(findings)
    assert "zstd" in only(findings, "hdf5.filters").text and "hdf5plugin" in only(findings, "hdf5.filters").text
    assert "built with MPI" in only(findings, "hdf5").text
    assert bad(check_data(rank_facts(hdf5=None, hdf5_error="exit code 1: no h5py"))) == {"hdf5": Level.FAIL}


def test_nodes_that_differ() -> None:
    other = rank_facts(versions=Versions("3.11", "/e", PACKAGES | {"torch": "2.4.0"}), system=replace(SYSTEM, host="b"))
    found = only(check_same([rank_facts(), rank_facts(), other]), "job.versions")
    assert found.level is Level.FAIL
    assert "2.13.0 on rank 0 (node1), 2.4.0 on rank 2 (b)" in found.text
    assert not check_same([rank_facts(), rank_facts()])
    assert bad(check_same([rank_facts({"OMP_NUM_THREADS": "4"}), rank_facts()])) == {"job.threads": Level.WARN}


def test_clocks() -> None:
    assert not check_clocks(["a"], [0.0])
    assert not bad(check_clocks(["a", "b"], [0.0, 0.01]))
    found = only(check_clocks(["a", "b", "c"], [0.0, 0.01, -7.5]), "job.clocks")
    assert found.level is Level.WARN and "the clock of c differs from that of a by -7.500 s" in found.text


MEASURED = {
    "ranks": 2,
    "num_bytes": 1 << 24,
    "copy_s": 0.002,
    "allreduce_s": 0.02,
    "plain_step_s": 0.01,
    "step_s": 0.011,
    "checkpoint_bytes": 1 << 20,
    "save_s": 0.1,
    "load_s": 0.01,
    "cuda_aware": False,
    "aware_reason": "no rank has a GPU",
    "device": "cpu",
}


def test_what_was_measured_beside_a_copy() -> None:
    assert not bad(check_measured(MEASURED, 1))
    assert bad(check_measured(MEASURED | {"allreduce_s": 1.0}, 1)) == {"probe.reduction": Level.WARN}
    assert not bad(check_measured(MEASURED | {"allreduce_s": 1.0}, 2))
    assert bad(check_measured(MEASURED | {"step_s": 1.0}, 1)) == {"probe.step": Level.WARN}
    assert bad(check_measured({"error": "wrong values"}, 1)) == {"probe": Level.FAIL}
    on_gpu = check_measured(MEASURED | {"device": "cuda:0", "cuda_aware": True, "aware_reason": "proven"}, 1)
    assert "takes GPU memory: proven" in only(on_gpu, "probe.gpu_memory").text
