"""The facts of all ranks enter, all findings leave. Pure: every check is a function from facts to findings."""

from collections.abc import Callable, Sequence

from mpidp.tools.doctor.check_cores import check_cores, check_sharing
from mpidp.tools.doctor.check_data import check_data
from mpidp.tools.doctor.check_gpu import check_gpus, check_shared
from mpidp.tools.doctor.check_job import check_clocks, check_same
from mpidp.tools.doctor.check_launch import check_launch
from mpidp.tools.doctor.check_memory import check_memory
from mpidp.tools.doctor.check_mpi import check_mpi
from mpidp.tools.doctor.check_node import check_node
from mpidp.tools.doctor.check_versions import check_versions
from mpidp.tools.doctor.facts import RankFacts
from mpidp.tools.doctor.finding import Finding, merge

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
OF_A_JOB: tuple[Callable[[Sequence[RankFacts]], list[Finding]], ...] = (check_same, check_sharing, check_shared)


def check(job: Sequence[RankFacts], offsets_s: Sequence[float] = ()) -> list[Finding]:
    """Run all checks.

    Args:
        job: facts, indexed by rank.
        offsets_s: seconds by which each node's clock is ahead of the first one's.
    """
    by_rank = [[finding for look in OF_A_RANK for finding in look(facts)] for facts in job]
    places = [f"rank {rank} on {facts.system.host}" for rank, facts in enumerate(job)]
    together = [finding for look in OF_A_JOB for finding in look(job)]
    hosts = list(dict.fromkeys(facts.system.host for facts in job))
    return [*merge(by_rank, places), *together, *check_clocks(hosts, offsets_s)]
