"""The facts of a healthy rank, and of ranks that are changed in part."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from mpidp.hdf5.files.library import HDF5Library
from mpidp.tools.doctor.facts import RankFacts, Versions
from mpidp.tools.doctor.finding import Finding, Level
from mpidp.tools.doctor.machine import Cores, Gpus, Memory, System
from mpidp.world.launch import launch_facts
from mpidp.world.library import Library, Mapped

GIB = 1 << 30
MPICH = "MPICH Version:      5.0.2\nMPICH Device:       ch4:ucx ofi\nMPICH configure:    --with-device=ch4:ucx,ofi"
OPEN_MPI = "Open MPI v5.0.8, package: Open MPI, ident: 5.0.8"
SYSTEM = System("node1", "6.1", "", 0, "", True, ())
PACKAGES = {
    "mpidp": "0.1.0",
    "torch": "2.13.0",
    "mpi4py": "4.1.2",
    "numpy": "2.4.6",
    "h5py": "3.16.0",
}
HDF5 = HDF5Library("3.16.0", "2.0.0", False, {"deflate": True}, {"hdf5plugin": True, "imagecodecs": True})


def library(text: str = MPICH, size: int = 1, **changes: Any) -> Library:
    """Return an MPI library that has been started."""
    healthy = Library(
        text, "4.1", "MPI.mpich", "MPI_THREAD_MULTIPLE", size, False, Mapped(("/opt/mpi/lib/libmpi.so.12",), (), False)
    )
    return replace(healthy, **changes)


def rank_facts(environment: dict[str, str] | None = None, **changes: Any) -> RankFacts:
    """Return the facts of a rank whose launcher set these variables."""
    variables = environment or {}
    healthy = RankFacts(
        launch_facts(variables),
        variables,
        Versions("3.11.9", "/home/me/env", PACKAGES),
        Cores((0, 1, 2, 3), 8),
        Memory(64 * GIB, 64 * GIB, None, 32 * GIB, 32 * GIB),
        Gpus(),
        SYSTEM,
        library(),
        hdf5=HDF5,
    )
    return replace(healthy, **changes)


def bad(findings: Iterable[Finding]) -> dict[str, Level]:
    """Return the codes that are not good news, with their levels."""
    return {finding.code: finding.level for finding in findings if finding.level is not Level.OK}


def only(findings: Iterable[Finding], code: str) -> Finding:
    """Return the one finding of a code."""
    (found,) = (finding for finding in findings if finding.code == code)
    return found
