"""Memory of one rank enters, findings leave: what is left, /dev/shm, what may be locked. Pure."""

from mpidp.tools.doctor.facts import Memory, RankFacts
from mpidp.tools.doctor.finding import Finding, ok, warn
from mpidp.tools.table import size_text

# Docker gives 64 MiB. Gradients of a model with 20 million parameters, of four ranks, need five times as much.
SMALL_SHM_BYTES = 1 << 30
LITTLE_LOCKED_BYTES = 1 << 30
FEW_OPEN_FILES = 1024


def check_memory(facts: RankFacts) -> list[Finding]:
    """Limits that a job meets."""
    memory = facts.memory
    left = "not said" if memory.available is None else size_text(memory.available)
    limit = "not said" if memory.limit is None else size_text(memory.limit)
    locked = "unlimited" if memory.locked is None else size_text(memory.locked)
    return [
        ok("memory", f"{left} available, limit {limit}; locked memory {locked}; {memory.open_files:,} open files"),
        *_shared(memory, bool(facts.system.container)),
        *_locked(memory, facts.system.fabrics),
        *_open_files(memory),
    ]


def _shared(memory: Memory, in_container: bool) -> list[Finding]:
    fix = "start the container with --shm-size=8g" if in_container else "remove old files there, or ask to enlarge it"
    if memory.shm_free is None or memory.shm_size is None:
        return [warn("memory.shm", "there is no /dev/shm: MPI cannot send messages through the memory of a node", fix)]
    text = f"/dev/shm has {size_text(memory.shm_free)} left of {size_text(memory.shm_size)}"
    if memory.shm_free >= SMALL_SHM_BYTES:
        return [ok("memory.shm", text)]
    return [
        warn(
            "memory.shm",
            f"{text}: MPI's own messages between ranks of a node go through it, and Open MPI says 'not enough space "
            "for the shared-memory backing file' where they do not fit",
            fix + "; for Open MPI alone: OMPI_MCA_btl_sm_backing_directory=/tmp",
        )
    ]


def _locked(memory: Memory, fabrics: tuple[str, ...]) -> list[Finding]:
    if not fabrics or memory.locked is None or memory.locked >= LITTLE_LOCKED_BYTES:
        return []
    return [
        warn(
            "memory.locked",
            f"only {size_text(memory.locked)} may be locked, and the network ({', '.join(fabrics)}) needs locked "
            "memory: 'ibv_reg_mr failed: Cannot allocate memory'",
            "ulimit -l unlimited; in Slurm LimitMEMLOCK=infinity of slurmd and PropagateResourceLimitsExcept=MEMLOCK",
        )
    ]


def _open_files(memory: Memory) -> list[Finding]:
    if memory.open_files >= FEW_OPEN_FILES:
        return []
    return [
        warn("memory.open_files", f"only {memory.open_files} files may be open at once", f"ulimit -n {FEW_OPEN_FILES}")
    ]
