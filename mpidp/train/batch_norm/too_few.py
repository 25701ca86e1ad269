"""Torch's refusal of a batch norm over one value in; an error that names rank, step and the ways out, out."""

from torch import nn

from mpidp.errors import DataError
from mpidp.world.abort import SHARED_MARK
from mpidp.world.status import status
from mpidp.world.world import World

_TORCHS_WORDS = "Expected more than 1 value per channel when training"


def explain_batch_norm(error: Exception, module: nn.Module, world: World) -> DataError | None:
    """What to raise, from `error`, where a batch norm layer was given one value a channel in training. Not collective.

    Args:
        error: what the module's forward raised.
        module: the model.
        world: the ranks.

    Returns:
        None for any other error, and for that of `SyncBatchNorm`, which all ranks raise together.
    """
    if not isinstance(error, ValueError) or _TORCHS_WORDS not in str(error) or getattr(error, SHARED_MARK, False):
        return None
    if not any(isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in module.modules()):
        return None  # group norm says the same of channels that are too few, whatever the batch
    return DataError(
        f"batch norm takes mean and variance over the samples of a rank, and rank {world.rank} of {world.size} "
        f"({world.host}) has 1 sample to train on in step {status.step + 1:,}: the remainder of an epoch, or a "
        f"micro-batch. Leave out an incomplete last step (drop_last=True, data.drop_last), choose a global_batch that "
        f"leaves every rank two samples in its last step, too, or take them over all ranks "
        f"(mpidp.SyncBatchNorm.convert, train.sync_batch_norm)."
    )
