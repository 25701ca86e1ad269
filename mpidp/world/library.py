"""A line of JSON enters, an MPI library as it says of itself leaves. Pure: no MPI is loaded to read it."""

import json
from dataclasses import dataclass

from mpidp.world.mapped import Mapped


@dataclass(frozen=True)
class Library:
    """An MPI library.

    Attributes:
        text: its version text, as it is.
        standard: version of the MPI standard, such as "4.1".
        abi: which binding of mpi4py was taken, such as "MPI.mpich".
        thread_level: what it gave when asked for MPI_THREAD_MULTIPLE; "" before it is started.
        size: of its world; 0 before it is started.
        says_cuda: whether it says that it takes CUDA memory; None when it cannot be asked.
        mapped: MPI and UCX libraries in this process.
    """

    text: str
    standard: str
    abi: str
    thread_level: str
    size: int
    says_cuda: bool | None
    mapped: Mapped

    @property
    def name(self) -> str:
        """The first line of its text."""
        return self.text.splitlines()[0].strip() if self.text else ""


def from_json(text: str) -> Library:
    """Read what `main` printed."""
    facts = json.loads(text)
    parts = facts.pop("mapped")
    return Library(**facts, mapped=Mapped(tuple(parts["mpi"]), tuple(parts["ucx"]), parts["has_gtl"]))
