"""The MPI library of one rank enters, findings leave: loaded once, threads, GPU memory. Pure."""

from mpidp.tools.doctor.facts import RankFacts
from mpidp.tools.doctor.finding import Finding, fail, ok, warn
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
