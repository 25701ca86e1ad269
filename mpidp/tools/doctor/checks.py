"""All checks of a job: of each rank, between ranks, and of what `--probe` measured. Pure: from facts to findings."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mpidp.tools.doctor.check_machine import (
    check_cores,
    check_data,
    check_gpus,
    check_memory,
    check_node,
    check_shared,
    check_sharing,
)
from mpidp.tools.doctor.check_mpi import check_launch, check_mpi, check_versions
from mpidp.tools.doctor.facts import RankFacts
from mpidp.tools.doctor.finding import Finding, fail, merge, ok, warn
from mpidp.tools.table import size_text

OF_A_RANK: tuple[Callable[[RankFacts], list[Finding]], ...] = (
    check_versions,
    check_launch,
    check_mpi,
    check_node,
    check_cores,
    check_memory,
    check_gpus,
    check_data,
)


def check(job: Sequence[RankFacts], offsets_s: Sequence[float] = ()) -> list[Finding]:
    """Run all checks.

    Args:
        job: facts, indexed by rank.
        offsets_s: seconds by which each node's clock is ahead of the first one's.
    """
    by_rank = [[finding for look in OF_A_RANK for finding in look(facts)] for facts in job]
    places = [f"rank {rank} on {facts.system.host}" for rank, facts in enumerate(job)]
    together = [finding for look in (check_same, check_sharing, check_shared) for finding in look(job)]
    hosts = list(dict.fromkeys(facts.system.host for facts in job))
    return [*merge(by_rank, places), *together, *check_clocks(hosts, offsets_s)]


# Files that one node writes and another reads look older or newer than they are from here on.
LARGE_SKEW_S = 1.0


def check_same(job: Sequence[RankFacts]) -> list[Finding]:
    """Versions and libraries that must be the same everywhere."""
    findings: list[Finding] = []
    for name in ("mpidp", "torch", "mpi4py", "numpy", "h5py"):
        text = _differ(job, lambda facts, name=name: str(facts.versions.packages.get(name)))  # type: ignore[misc]
        if text is not None:
            findings.append(fail("job.versions", f"{name} differs: {text}", "use one environment on all nodes"))
    text = _differ(job, lambda facts: facts.mpi.name if facts.mpi else "none")
    if text is not None:
        findings.append(fail("job.mpi", f"the MPI library differs: {text}", "load the same module on all nodes"))
    text = _differ(job, lambda facts: facts.environment.get("OMP_NUM_THREADS", "not set"))
    if text is not None:
        findings.append(warn("job.threads", f"OMP_NUM_THREADS differs: {text}", "export it before srun or mpiexec"))
    return findings


def check_clocks(hosts: Sequence[str], offsets_s: Sequence[float]) -> list[Finding]:
    """Clocks of nodes, as seconds ahead of the first; nothing where there is one node."""
    if len(offsets_s) < 2:
        return []
    worst = max(range(len(offsets_s)), key=lambda node: abs(offsets_s[node]))
    text = f"the clock of {hosts[worst]} differs from that of {hosts[0]} by {offsets_s[worst]:+.3f} s"
    if abs(offsets_s[worst]) < LARGE_SKEW_S:
        return [ok("job.clocks", f"{text}; the others are nearer")]
    return [warn("job.clocks", f"{text}: times in logs do not compare", "let the nodes run chrony or ntpd")]


def _differ(job: Sequence[RankFacts], of: Callable[[RankFacts], str]) -> str | None:
    """The first value that is not rank 0's, with both places; None when all are equal."""
    first = of(job[0])
    for rank, facts in enumerate(job):
        if of(facts) != first:
            return f"{first} on rank 0 ({job[0].system.host}), {of(facts)} on rank {rank} ({facts.system.host})"
    return None


# Allreduce moves every byte a few times; on one node anything slower than this goes by a way that it should not.
SLOW_ALLREDUCE, SLOW_STEP = 50.0, 5.0


def check_measured(measured: Mapping[str, Any], num_nodes: int) -> list[Finding]:
    """Compare with what the machine gave in the same run; across nodes the network is not known, and only named."""
    if "error" in measured:
        text = f"the probe failed: {measured['error']}"
        return [fail("probe", text, "mend that first; mpidp train would stop at the same place")]
    return [*_reduction(measured, num_nodes), *_step(measured, num_nodes), _checkpoint(measured), *_gpu(measured)]


def _reduction(measured: Mapping[str, Any], num_nodes: int) -> list[Finding]:
    ratio = measured["allreduce_s"] / measured["copy_s"]
    size = size_text(measured["num_bytes"])
    if measured["ranks"] == 1:
        return [ok("probe.copy", f"a copy of {size} takes {measured['copy_s'] * 1e3:.1f} ms; one rank reduces nothing")]
    text = (
        f"right values; a copy of {size} takes {measured['copy_s'] * 1e3:.1f} ms, MPI's Allreduce "
        f"{measured['allreduce_s'] * 1e3:.1f} ms ({ratio:.1f} copies)"
    )
    if num_nodes == 1 and ratio > SLOW_ALLREDUCE:
        fix = "look at cores.* and node.copies above; export OMPI_MCA_mpi_yield_when_idle=1 with more ranks than cores"
        return [warn("probe.reduction", text + ": slow for one node", fix)]
    return [ok("probe.reduction", text)]


def _step(measured: Mapping[str, Any], num_nodes: int) -> list[Finding]:
    ratio = measured["step_s"] / measured["plain_step_s"]
    text = (
        f"a training step takes {measured['step_s'] * 1e3:.1f} ms on {measured['device']}, without mpidp "
        f"{measured['plain_step_s'] * 1e3:.1f} ms ({ratio:.2f} times)"
    )
    if num_nodes == 1 and ratio > SLOW_STEP:
        return [warn("probe.step", text, "mpidp bench step --reducers null,naive,flat,node shows which part costs it")]
    return [ok("probe.step", text)]


def _checkpoint(measured: Mapping[str, Any]) -> Finding:
    size = size_text(measured["checkpoint_bytes"])
    return ok(
        "probe.checkpoint",
        f"{size} written and flushed in {measured['save_s'] * 1e3:.0f} ms, checked and loaded in "
        f"{measured['load_s'] * 1e3:.0f} ms, the same values on all ranks",
    )


def _gpu(measured: Mapping[str, Any]) -> list[Finding]:
    if not measured["device"].startswith("cuda"):
        return []
    takes = "takes" if measured["cuda_aware"] else "does not take"
    return [ok("probe.gpu_memory", f"MPI {takes} GPU memory: {measured['aware_reason']}")]
