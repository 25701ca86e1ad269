"""Enters: cores and threads of every rank. Leaves: a line about ranks that get in each other's way, or None. Pure."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from mpidp.printable import listed


@dataclass(frozen=True)
class Pinned:
    """Where a rank may run: its node, the cores of its mask, and how many threads it computes with."""

    host: str
    cores: frozenset[int]
    threads: int


def too_few_cores(ranks: Sequence[Pinned]) -> str | None:
    """Return a line when ranks have more threads than cores, else None. `ranks` is indexed by rank."""
    slow = [rank for rank, pinned in enumerate(ranks) if pinned.threads > len(pinned.cores)]
    if not slow:
        return None
    first = ranks[slow[0]]
    others = f" (and {len(slow) - 1} more of {len(ranks)})" if len(slow) > 1 else ""
    return (
        f"rank {slow[0]}{others} on {first.host} computes with {first.threads} threads, but may run on "
        f"{len(first.cores)} {'core' if len(first.cores) == 1 else 'cores'} only: threads will wait for each other. "
        f"Set OMP_NUM_THREADS={len(first.cores)}, or give a rank more cores (`--cpus-per-task`, with "
        f"`export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK` before srun; `mpiexec --bind-to none`)."
    )


def crowded(ranks: Sequence[Pinned], node_cores: int) -> str | None:
    """Return a line when ranks of one node are pinned together to fewer cores than there are ranks, else None.

    Args:
        ranks: indexed by rank.
        node_cores: cores of a node; ranks that may run on all of them are not pinned.
    """
    groups: dict[tuple[str, frozenset[int]], list[int]] = defaultdict(list)
    for rank, pinned in enumerate(ranks):
        groups[pinned.host, pinned.cores].append(rank)
    for (host, cores), sharing in groups.items():
        if len(cores) < len(sharing) and len(cores) < node_cores:
            return (
                f"ranks {listed(sharing)} on {host} are all pinned to the same "
                f"{'core' if len(cores) == 1 else f'{len(cores)} cores'} ({listed(sorted(cores))}) of "
                f"{node_cores}: they take turns. Give each its own: `--cpus-per-task=N` with `export "
                f"SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK` before srun, or `mpiexec --bind-to none`."
            )
    return None
