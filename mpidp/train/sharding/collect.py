"""The state that each rank holds of some runs in; what each wants to have of it, out."""

from collections.abc import Sequence

from torch import Tensor

from mpidp.train.sharding.gather import bytes_of
from mpidp.train.sharding.layout import Run, by_parameter, sources
from mpidp.train.sharding.state import Part, State, join, select, to_host
from mpidp.world.mpi import MPI

# Elements sent at once: their state is copied to the host, and each rank keeps what it wants.
PIECE = 1 << 22


def collect(
    comm: MPI.Intracomm,
    numels: Sequence[int],
    held: Sequence[Part],
    wanted: Sequence[Run],
    flats: Sequence[Tensor] | None = None,
) -> list[State]:
    """Broadcasts the state of all elements, once, piece by piece. Collective.

    Every rank sees all of it, and keeps little: it is for after a loss, and for saving, not for every step.

    Args:
        comm: the ranks.
        numels: elements of each parameter.
        held: what this rank has; several ranks may have the same.
        wanted: what it wants to have.
        flats: the memory of the parameters, to take their elements, too, from who holds them; None for state only.

    Returns:
        The state of each wanted run, in host memory.

    Raises:
        LookupError: on all ranks, the first run that nobody holds.
    """
    lists: list[list[Run]] = comm.allgather([run for run, _ in held])
    found: dict[Run, list[Part]] = {run: [] for run in wanted}
    of_parameter = by_parameter(found, lambda run: run)
    for source in sources(numels, lists, PIECE):
        message: tuple[State, Tensor | None] | None = None
        if source.rank == comm.rank:
            part = select(source.run, held[source.index])
            assert part is not None
            message = to_host(part[1]), None if flats is None else bytes_of(flats[part[0].parameter], part[0]).cpu()
        state, values = comm.bcast(message, root=source.rank)
        if flats is not None and values is not None and source.rank != comm.rank:
            bytes_of(flats[source.run.parameter], source.run).copy_(values)
        for run in of_parameter.get(source.run.parameter, []):
            part = select(run, (source.run, state))
            if part is not None:
                found[run].append(part)
    return [join(run, found.pop(run)) for run in wanted]
