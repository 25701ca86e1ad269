"""Options of `mpidp doctor`, apart from it so that `--help` imports nothing heavy."""

from dataclasses import dataclass
from typing import Annotated

from mpidp.errors import ConfigError
from mpidp.options import Arg


@dataclass(frozen=True)
class DoctorOptions:
    """Look at this machine, this installation and this job, and say what is wrong and how to fix it.

    Alone, or on all ranks under mpiexec or srun, which are then compared. Alone it starts MPI in a child process only.
    Exit code 3 when something FAILs.
    """

    file: Annotated[str, Arg("[FILE]", positional=True)] = ""
    """An HDF5 file that training would read."""
    probe: bool = False
    """Also measure copies and an Allreduce, train a step, write and read a checkpoint, and prove by value whether MPI
    takes GPU memory."""
    json: bool = False
    """Print one line of JSON."""
    markdown: bool = False
    """Print what an issue report needs."""
    log: Annotated[str, Arg("FILE")] = ""
    """Say what known texts in a job's output mean; only that."""

    def __post_init__(self) -> None:
        """Raise `ConfigError` for options that exclude each other."""
        if self.json and self.markdown:
            raise ConfigError("--json and --markdown both say how to print; give one of them.")
