"""Cores and threads enter, of one rank and of all; findings leave. Pure."""

from collections.abc import Sequence

from mpidp.tools.doctor.facts import RankFacts
from mpidp.tools.doctor.finding import Finding, fail, ok, warn
from mpidp.world.system import Pinned, crowded, too_few_cores


def check_cores(facts: RankFacts) -> list[Finding]:
    """The mask of one rank, and what limits it."""
    mask = facts.cores.mask
    threads = facts.environment.get("OMP_NUM_THREADS", "not set")
    findings = [
        ok("cores", f"{len(mask)} of {facts.cores.node_cores} cores ({ranges(mask)}); OMP_NUM_THREADS {threads}")
    ]
    quota = facts.cores.quota
    if quota is not None and quota < len(mask):
        findings.append(
            warn(
                "cores.quota",
                f"the control group pays for {quota:g} cores, the mask has {len(mask)}",
                f"set OMP_NUM_THREADS={max(1, int(quota))}, or give the container more (docker run --cpus)",
            )
        )
    wanted = facts.environment.get("SLURM_CPUS_PER_TASK", "")
    if facts.launch.launcher == "Slurm's srun" and wanted.isdecimal() and len(mask) < int(wanted):
        findings.append(
            warn(
                "cores.srun",
                f"the job has {wanted} CPUs a task, srun gave this one {len(mask)}: srun does not take it over",
                "export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK before srun",
            )
        )
    return findings


def check_sharing(job: Sequence[RankFacts]) -> list[Finding]:
    """Masks of all ranks: pinned too tightly, on top of each other, or not at all."""
    ranks = [Pinned(facts.system.host, frozenset(facts.cores.mask), threads_of(facts)) for facts in job]
    findings: list[Finding] = []
    slow = too_few_cores(ranks)
    if slow is not None:
        findings.append(
            warn("cores.threads", slow, "set OMP_NUM_THREADS to the cores of a rank, or give it more cores")
        )
    together = crowded(ranks, job[0].cores.node_cores)
    if together is not None:
        findings.append(
            fail("cores.same", together, "--cpus-per-task=N and SRUN_CPUS_PER_TASK, or mpiexec --bind-to none")
        )
    overlap = _partly_shared(ranks) if together is None else None
    if overlap is not None:
        findings.append(warn("cores.overlap", overlap, "give each rank cores of its own: srun --cpu-bind=cores -c N"))
    threads = _too_many_threads(ranks)
    if threads is not None and slow is None and together is None:
        findings.append(
            warn("cores.oversubscribed", threads, "ranks x OMP_NUM_THREADS = cores of a node: fewer of either")
        )
    return findings


def threads_of(facts: RankFacts) -> int:
    """Threads that torch would take: OMP_NUM_THREADS, else what mpidp's trainer takes, which fits."""
    asked = facts.environment.get("OMP_NUM_THREADS", "")
    return int(asked) if asked.isdecimal() and int(asked) else 1


def ranges(cores: Sequence[int]) -> str:
    """Numbers of cores as a short list, such as "0-3,8"."""
    parts: list[list[int]] = []
    for core in cores:
        if parts and parts[-1][1] == core - 1:
            parts[-1][1] = core
        else:
            parts.append([core, core])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


def _partly_shared(ranks: Sequence[Pinned]) -> str | None:
    for second, b in enumerate(ranks):
        for first, a in enumerate(ranks[:second]):
            if a.host == b.host and a.cores != b.cores and a.cores & b.cores:
                common = ranges(sorted(a.cores & b.cores))
                return f"ranks {first} and {second} on {a.host} have masks that overlap in cores {common}"
    return None


def _too_many_threads(ranks: Sequence[Pinned]) -> str | None:
    for host in dict.fromkeys(pinned.host for pinned in ranks):
        here = [pinned for pinned in ranks if pinned.host == host]
        threads, cores = sum(p.threads for p in here), len(frozenset[int]().union(*(p.cores for p in here)))
        if threads > cores:
            return f"{len(here)} ranks on {host} have {threads} threads together and {cores} cores"
    return None
