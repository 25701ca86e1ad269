"""The facts of all ranks enter, findings about what differs between them leave. Pure."""

from collections.abc import Callable, Sequence

from mpidp.tools.doctor.facts import RankFacts
from mpidp.tools.doctor.finding import Finding, fail, ok, warn

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
