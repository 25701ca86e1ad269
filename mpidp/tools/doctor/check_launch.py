"""The launcher's variables and the MPI library of one rank enter, findings leave. Pure.

What a library does when it does not understand its launcher differs: some stop with a text of their own, which nobody
can catch. So the variables are looked at before MPI is started.
"""

from collections.abc import Mapping

from mpidp.tools.doctor.facts import RankFacts
from mpidp.tools.doctor.finding import Finding, fail, ok, warn
from mpidp.world.launch import LaunchFacts, cannot_share, cannot_start, size_mismatch


def check_launch(facts: RankFacts) -> list[Finding]:
    """Who started this rank, and whether MPI has understood it."""
    return [
        *_launcher(facts),
        *_both_pmi(facts.environment),
        *_slurm(facts.environment),
        *_pmix_settings(facts.environment, facts.system.has_munge, facts.mpi.name if facts.mpi else ""),
    ]


def check_before_start(launch: LaunchFacts, environment: Mapping[str, str], library_text: str) -> Finding | None:
    """What would stop MPI from starting, or start every rank alone; None when nothing speaks against it.

    Args:
        launch: what the launcher said.
        environment: all variables of this process.
        library_text: the MPI library's version text, all of it.
    """
    text = cannot_start(launch, environment, library_text)
    if text is not None:
        return fail("launch.size", text, _fix(launch, library_text))
    text = cannot_share(library_text, launch.local_size, environment)
    return None if text is None else fail("memory.start", text, "a larger /dev/shm for every node or container")


def _fix(launch: LaunchFacts, library: str) -> str:
    if launch.launcher != "Slurm's srun":
        return "use the mpiexec that belongs to this library, from the same folder or module"
    return f"srun --mpi={'pmix' if 'Open MPI' in library else 'pmi2'} ...; srun --mpi=list says what Slurm has"


def _launcher(facts: RankFacts) -> list[Finding]:
    launch = facts.launch
    if launch.launcher == "none":
        return [ok("launch", "no launcher: one process. Start doctor with mpiexec or srun to look at a job")]
    if facts.mpi is None or not facts.mpi.size:
        return []
    text = size_mismatch(launch, facts.mpi.size, facts.mpi.name)
    if text is not None:
        return [fail("launch.size", text, _fix(launch, facts.mpi.name))]
    local = f", {launch.local_size} on this node" if launch.local_size else ""
    return [ok("launch", f"{launch.launcher} started {launch.size} ranks{local}; MPI has understood it")]


def _both_pmi(environment: Mapping[str, str]) -> list[Finding]:
    if not {"PMI_SIZE", "PMIX_NAMESPACE"} <= set(environment):
        return []
    return [
        warn(
            "launch.two_pmis",
            f"both PMI_SIZE={environment['PMI_SIZE']} and PMIX_NAMESPACE={environment['PMIX_NAMESPACE']} are set, as "
            "when one launcher runs inside another: MPICH may stop with 'Found both env vars'",
            "unset the one that is not your launcher's (unset PMIX_NAMESPACE for MPICH, PMI_SIZE for Open MPI)",
        )
    ]


def _slurm(environment: Mapping[str, str]) -> list[Finding]:
    if "SLURM_JOB_ID" not in environment:
        return []
    names = {
        "SLURM_STEP_ID": "step",
        "SLURM_JOB_NUM_NODES": "nodes",
        "SLURM_STEP_NUM_TASKS": "tasks of the step",
        "SLURM_CPUS_PER_TASK": "CPUs a task",
        "SLURM_GPUS_ON_NODE": "GPUs a node",
        "SLURM_MPI_TYPE": "--mpi",
        "SLURM_CPU_BIND": "CPU binding",
        "SLURM_RESTART_COUNT": "restarts",
        "SLURM_ARRAY_TASK_ID": "array task",
    }
    known = ", ".join(f"{what} {environment[name]}" for name, what in names.items() if name in environment)
    return [ok("slurm", f"job {environment['SLURM_JOB_ID']}{': ' + known if known else ''}")]


def _pmix_settings(environment: Mapping[str, str], has_munge: bool, library: str) -> list[Finding]:
    """What Slurm's PMIx wants of a container without munge, and stores that are known to fail."""
    findings: list[Finding] = []
    security = environment.get("PMIX_SECURITY_MODE", "")
    if "munge" in security and not has_munge and environment.get("PMIX_MCA_psec") != "native":
        findings.append(
            warn(
                "launch.psec",
                f"PMIX_SECURITY_MODE={security}, but there is no munge socket here, as in most containers: Open MPI "
                "prints 'PMIX ERROR ... psec ... munge'",
                "export PMIX_MCA_psec=native",
            )
        )
    store = environment.get("PMIX_GDS_MODULE", "")
    if store and "hash" not in store and environment.get("PMIX_MCA_gds") != "hash" and "Open MPI" in library:
        findings.append(
            warn("launch.gds", f"PMIX_GDS_MODULE={store}: PMIx of another version may fail", "export PMIX_MCA_gds=hash")
        )
    return findings
