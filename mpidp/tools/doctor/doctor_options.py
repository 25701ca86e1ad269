"""The words after `mpidp doctor` enter, its options leave.

With the standard library's parser: a doctor must answer where packages are missing, tyro among them.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

DESCRIPTION = """Look at this machine, this installation and this job, and say what is wrong and how to mend it.

Alone, or on all ranks under mpiexec or srun, which are then compared. Alone it starts MPI in a child process only.
Exit code 3 when something FAILs."""


@dataclass(frozen=True)
class DoctorOptions:
    """What to look at, and how to say it."""

    file: str
    probe: bool
    format: str
    log: str


def parse(words: Sequence[str]) -> DoctorOptions:
    """Read the words; raises `SystemExit` 0 after help, 2 after an error that has been printed."""
    parser = argparse.ArgumentParser(
        "mpidp doctor",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("file", nargs="?", default="", metavar="FILE", help="an HDF5 file that training would read")
    parser.add_argument(
        "--probe",
        action="store_true",
        help="also measure copies and an Allreduce, train a step, write and read a checkpoint, and prove by value "
        "whether MPI takes GPU memory",
    )
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument("--json", action="store_const", dest="format", const="json", help="print one line of JSON")
    shape.add_argument("--markdown", action="store_const", dest="format", const="markdown", help="for an issue report")
    parser.add_argument(
        "--log", default="", metavar="FILE", help="say what known texts in a job's output mean; only that"
    )
    found = parser.parse_args(words)
    return DoctorOptions(found.file, found.probe, found.format or "text", found.log)
