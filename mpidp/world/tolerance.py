"""An exception or an environment in; whether it tells of the death of another rank, and whether that can be survived.

MPI's user-level failure mitigation (ULFM, in the MPI standard's terms: process fault tolerance) turns the death of a
rank into an error of the calls that need it. Open MPI 5 has it when `mpiexec --with-ft ulfm` starts the job.
"""

from collections.abc import Iterator, Mapping

from mpidp.world import communicators, mpi
from mpidp.world.mpi import MPI

# Set by Open MPI's launcher; the library reads it as well.
VARIABLE = "OMPI_MCA_mpi_ft_enable"
LIBRARY = "Open MPI v5"

_is_on = False


def why_not(environment: Mapping[str, str], library: str, ends_mpi: bool) -> str:
    """Why a job cannot go on without a rank, or "" if it can. Pure.

    Args:
        environment: of this process.
        library: version text of the MPI library.
        ends_mpi: whether the end of MPI is left to this package.
    """
    name = library.splitlines()[0].strip("\0 ") if library else "this MPI"
    if not library.startswith(LIBRARY):
        return f"{name} does not survive the death of a rank; Open MPI 5 does, under `mpiexec --with-ft ulfm`"
    if environment.get(VARIABLE, "").lower() not in ("1", "true", "yes"):
        return f"{name} was started without fault tolerance; start the job with `mpiexec --with-ft ulfm`"
    if not ends_mpi:
        return "mpi4py was imported before mpidp, and its end of MPI waits for dead ranks; import mpidp first"
    return ""


def turn_on() -> None:
    """From now on the death of a rank does not end the job. Not collective.

    MPI is then not ended: `MPI_Finalize` sometimes waits for ever for a rank that has died, at any time before.
    """
    global _is_on
    _is_on = True
    mpi.never_end()


def is_on() -> bool:
    """Whether this process goes on when another rank dies."""
    return _is_on


def is_loss(error: BaseException) -> bool:
    """Whether an exception, or one it came from, says that a rank died or that others have noticed so already."""
    classes = MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED
    return any(isinstance(one, MPI.Exception) and one.Get_error_class() in classes for one in _chain(error))


def is_survived(error: BaseException) -> bool:
    """Whether the exception tells of a death that this process goes on after.

    Some of Open MPI's collectives (Alltoall) give an error of another class then, so an error of MPI is taken for a
    loss as well where MPI knows of one.
    """
    return _is_on and (is_loss(error) or (any(map(_is_of_mpi, _chain(error))) and communicators.know_of_loss()))


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        yield error
        seen.add(id(error))
        error = error.__cause__ or error.__context__


def _is_of_mpi(error: BaseException) -> bool:
    return isinstance(error, MPI.Exception)
