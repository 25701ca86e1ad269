"""mpi4py's `MPI` module, imported in the one way this package wants it: not started by the import."""

import mpi4py

from mpidp.errors import LaunchError

mpi4py.rc.initialize = False  # mpidp.init() starts MPI, so that an import on a login node does not
mpi4py.rc.finalize = True

try:
    from mpi4py import MPI
except RuntimeError as error:  # what mpi4py raises when it finds no library to load
    raise LaunchError(
        f"mpi4py cannot load an MPI library ({error}). On a cluster load its MPI module; on your own machine "
        f"`pip install mpich`; or name the library's file in MPI4PY_LIBMPI."
    ) from error

__all__ = ["MPI"]
