"""The node of one rank enters, findings leave: container, copies between processes, variables that mislead. Pure."""

from mpidp.tools.doctor.facts import RankFacts
from mpidp.tools.doctor.finding import Finding, ok, warn

ATTACH_ADMIN_ONLY = 2  # of /proc/sys/kernel/yama/ptrace_scope


def check_node(facts: RankFacts) -> list[Finding]:
    """What the node and its container do to MPI."""
    system = facts.system
    place = f"in a container ({system.container})" if system.container else "in no container"
    fast = f"; fast network {', '.join(system.fabrics)}" if system.fabrics else ""
    return [ok("node", f"{system.host}, Linux {system.kernel}, {place}{fast}"), *_copies(facts)]


def _copies(facts: RankFacts) -> list[Finding]:
    system = facts.system
    is_blocked = bool(system.cross_memory) or (system.ptrace_scope or 0) >= ATTACH_ADMIN_ONLY
    if not is_blocked or facts.environment.get("OMPI_MCA_smsc") == "^cma":
        return []
    why = f"process_vm_readv: {system.cross_memory}" if system.cross_memory else f"ptrace_scope {system.ptrace_scope}"
    return [
        warn(
            "node.copies",
            f"processes may not copy from each other's memory ({why}): Open MPI stops with 'Read -1, expected N, "
            "errno = 1'",
            "docker run --cap-add=SYS_PTRACE; or OMPI_MCA_smsc=^cma (Open MPI 5), for Open MPI 4 "
            "OMPI_MCA_btl_vader_single_copy_mechanism=none",
        )
    ]
