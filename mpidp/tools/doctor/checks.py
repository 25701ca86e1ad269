"""All checks of a job: of each rank, between ranks, and of what `--probe` measured. Pure: from facts to findings."""

from collections.abc import Callable, Iterator, Mapping, Sequence
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

# Files that one node writes and another reads look older or newer than they are from here on.
LARGE_SKEW_S = 1.0
# Allreduce moves every byte a few times; on one node anything slower than this goes by a way that it should not.
SLOW_ALLREDUCE, SLOW_STEP = 50.0, 5.0

OF_A_RANK: tuple[Callable[[RankFacts], Iterator[Finding]], ...] = (
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


def check_same(job: Sequence[RankFacts]) -> Iterator[Finding]:
    """Versions and libraries that must be the same everywhere."""
    for name in ("mpidp", "torch", "mpi4py", "numpy", "h5py"):
        text = _differ(job, [str(facts.versions.packages.get(name)) for facts in job])
        if text is not None:
            yield fail("job.versions", f"{name} differs: {text}", "use one environment on all nodes")
    text = _differ(job, [facts.mpi.name if facts.mpi else "none" for facts in job])
    if text is not None:
        yield fail("job.mpi", f"the MPI library differs: {text}", "load the same module on all nodes")
    text = _differ(job, [facts.environment.get("OMP_NUM_THREADS", "not set") for facts in job])
    if text is not None:
        yield warn("job.threads", f"OMP_NUM_THREADS differs: {text}", "export it before srun or mpiexec")


def _differ(job: Sequence[RankFacts], values: Sequence[str]) -> str | None:
    """The first value that is not rank 0's, with both places; None when all are equal."""
    for rank, value in enumerate(values):
        if value != values[0]:
            hosts = [job[index].system.host for index in (0, rank)]
            return f"{values[0]} on rank 0 ({hosts[0]}), {value} on rank {rank} ({hosts[1]})"
    return None


def check_clocks(hosts: Sequence[str], offsets_s: Sequence[float]) -> Iterator[Finding]:
    """Clocks of nodes, as seconds ahead of the first; nothing where there is one node."""
    if len(offsets_s) < 2:
        return
    worst = max(range(len(offsets_s)), key=lambda node: abs(offsets_s[node]))
    text = f"the clock of {hosts[worst]} differs from that of {hosts[0]} by {offsets_s[worst]:+.3f} s"
    if abs(offsets_s[worst]) < LARGE_SKEW_S:
        yield ok("job.clocks", f"{text}; the others are nearer")
    else:
        yield warn("job.clocks", f"{text}: times in logs do not compare", "let the nodes run chrony or ntpd")


def check_measured(measured: Mapping[str, Any], num_nodes: int) -> Iterator[Finding]:
    """Compare what `--probe` measured with a copy in the same run.

    Across nodes the speed of the network is not known, so that a reduction or a step is named but not judged.
    """
    if "error" in measured:
        text = f"the probe failed: {measured['error']}"
        yield fail("probe", text, "fix that first; mpidp train would stop at the same place")
        return
    ms = {name: f"{measured[name] * 1e3:.1f} ms" for name in ("copy_s", "allreduce_s", "step_s", "plain_step_s")}
    copy = f"a copy of {size_text(measured['num_bytes'])} takes {ms['copy_s']}"
    copies, ratio = measured["allreduce_s"] / measured["copy_s"], measured["step_s"] / measured["plain_step_s"]
    text = f"right values; {copy}, MPI's Allreduce {ms['allreduce_s']} ({copies:.1f} copies)"
    if measured["ranks"] == 1:
        yield ok("probe.copy", f"{copy}; one rank reduces nothing")
    elif num_nodes == 1 and copies > SLOW_ALLREDUCE:
        fix = "look at cores.* and node.copies above; export OMPI_MCA_mpi_yield_when_idle=1 with more ranks than cores"
        yield warn("probe.reduction", text + ": slow for one node", fix)
    else:
        yield ok("probe.reduction", text)
    without = f"without mpidp {ms['plain_step_s']} ({ratio:.2f} times)"
    text = f"a training step takes {ms['step_s']} on {measured['device']}, {without}"
    if num_nodes == 1 and ratio > SLOW_STEP:
        fix = "mpidp bench step --reducers null,naive,flat,node shows which part costs it"
        yield warn("probe.step", text, fix)
    else:
        yield ok("probe.step", text)
    yield ok(
        "probe.checkpoint",
        f"{size_text(measured['checkpoint_bytes'])} written and flushed in {measured['save_s'] * 1e3:.0f} ms, checked "
        f"and loaded in {measured['load_s'] * 1e3:.0f} ms, the same values on all ranks",
    )
    if measured["device"].startswith("cuda"):
        takes = "takes" if measured["cuda_aware"] else "does not take"
        yield ok("probe.gpu_memory", f"MPI {takes} GPU memory: {measured['aware_reason']}")
