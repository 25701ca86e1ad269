"""This process enters, `RankFacts` leave. Children answer while the node is looked at. Starts no MPI here."""

import json
import os

from mpidp.hdf5.files.library import HDF5Library
from mpidp.tools.doctor.child import Child
from mpidp.tools.doctor.facts import RankFacts
from mpidp.tools.doctor.facts_environment import chosen
from mpidp.tools.doctor.facts_file import data_file
from mpidp.tools.doctor.facts_gpu import gpus
from mpidp.tools.doctor.facts_node import cores, memory, system
from mpidp.tools.doctor.facts_versions import versions
from mpidp.world.launch import launch_facts
from mpidp.world.library import from_json

MPI_MODULE, HDF5_MODULE = "mpidp.world.library", "mpidp.hdf5.files.library"


def gather(file: str = "") -> RankFacts:
    """Look at everything that does not need other ranks; a node's first rank asks for HDF5, for all of them.

    Args:
        file: a file that training would read; "" for none.
    """
    launch = launch_facts(os.environ)
    # Under a launcher MPI is looked at where it must work: in this process, later.
    mpi_child = Child(MPI_MODULE) if launch.launcher == "none" else None
    hdf5_child = Child(HDF5_MODULE, *([file] if file else [])) if launch.local_rank in (None, 0) else None
    mpi = mpi_child.answer() if mpi_child else None
    hdf5 = hdf5_child.answer() if hdf5_child else None
    return RankFacts(
        launch,
        chosen(os.environ),
        versions(),
        cores(),
        memory(),
        gpus(),
        system(os.environ),
        mpi=from_json(mpi.line) if mpi and mpi.line else None,
        mpi_error=mpi.error if mpi else "",
        hdf5=HDF5Library(**json.loads(hdf5.line)) if hdf5 and hdf5.line else None,
        hdf5_error=hdf5.error if hdf5 else "",
        file=data_file(file) if file else None,
    )
