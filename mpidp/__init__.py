"""Data-parallel PyTorch training over MPI, from HDF5 files: the names below are the whole public interface.

They are imported when first used, so that `import mpidp` starts neither MPI nor CUDA and loads no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from mpidp import errors

if TYPE_CHECKING:
    from mpidp.hdf5.batch import Batch
    from mpidp.hdf5.field import FieldSpec
    from mpidp.hdf5.loader import HDF5Loader
    from mpidp.hdf5.shares import Shares, shares
    from mpidp.train.batch_norm import SyncBatchNorm
    from mpidp.train.checkpoints import Checkpoints
    from mpidp.train.data_parallel import DataParallel
    from mpidp.train.elastic import Elastic
    from mpidp.train.records.trace import Trace
    from mpidp.train.sharded_optimizer import ShardedOptimizer
    from mpidp.train.state import TrainState
    from mpidp.train.stop import StopSignal
    from mpidp.world.start import init
    from mpidp.world.world import World

__version__ = "0.1.0"
__all__ = [
    "Batch",
    "Checkpoints",
    "DataParallel",
    "Elastic",
    "FieldSpec",
    "HDF5Loader",
    "ShardedOptimizer",
    "Shares",
    "StopSignal",
    "SyncBatchNorm",
    "Trace",
    "TrainState",
    "World",
    "__version__",
    "errors",
    "init",
    "shares",
]

_HOMES = {
    "Batch": "mpidp.hdf5.batch",
    "Checkpoints": "mpidp.train.checkpoints",
    "DataParallel": "mpidp.train.data_parallel",
    "Elastic": "mpidp.train.elastic",
    "FieldSpec": "mpidp.hdf5.field",
    "HDF5Loader": "mpidp.hdf5.loader",
    "ShardedOptimizer": "mpidp.train.sharded_optimizer",
    "Shares": "mpidp.hdf5.shares",
    "StopSignal": "mpidp.train.stop",
    "SyncBatchNorm": "mpidp.train.batch_norm",
    "Trace": "mpidp.train.records.trace",
    "TrainState": "mpidp.train.state",
    "World": "mpidp.world.world",
    "init": "mpidp.world.start",
    "shares": "mpidp.hdf5.shares",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value  # the next use finds it without coming here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
