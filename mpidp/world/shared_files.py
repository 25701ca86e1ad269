"""Files through which MPICH shares memory on a node come in; the same memory without names goes out.

MPICH removes its file when MPI ends. A job that is killed never comes there, and each leaves some megabytes of the
node's memory in use until somebody looks into /dev/shm. Memory stays as long as a process has it, named or not.
"""

import logging
import os
import re

from mpidp.world.maps import MAPS, mapped_files
from mpidp.world.mpi import MPI

log = logging.getLogger("mpidp.rank")

# MPICH 4 and 5. Memory of windows has lost its name by the time that they can be used.
_NAMES = re.compile(r"/dev/shm/mpich_shm_[0-9a-f]+_\d+")


def shared_files(maps: str) -> list[str]:
    """Those of this process that have a name, from the text of `/proc/self/maps`. Pure."""
    return [path for path in mapped_files(maps) if _NAMES.fullmatch(path)]


def forget_names(node_comm: MPI.Intracomm) -> None:
    """Removes the names, when every rank of the node has the memory. Collective on the node."""
    node_comm.Barrier()
    if node_comm.rank != 0 or not MAPS.exists():
        return
    for path in shared_files(MAPS.read_text()):
        try:
            os.unlink(path)
        except OSError as error:  # it only stays where it is
            log.info("cannot remove the name of %s: %s", path, error)
