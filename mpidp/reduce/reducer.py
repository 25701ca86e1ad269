"""The base class of reducers, and their options.

A reducer replaces each bucket by its mean over the ranks. The strategies differ only in how; `naive` is the
specification that the others are tested against.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mpidp.reduce.buckets import Bucket, BucketLayout, plain_buffers
from mpidp.reduce.exchange import Residuals
from mpidp.world.world import World

# Across a network. With a library that sends a large buffer in one go, every hop waits for the whole of it; pieces of a
# mebibyte keep all links busy at once.
PIECE_BYTES = 1 << 20


@dataclass(frozen=True)
class ReducerOptions:
    """Options that every reducer understands, as far as they concern it.

    Attributes:
        piece_bytes: the largest buffer given to one call of MPI; 0 for what suits: 1 MiB across a network, anything on
            one node, where pieces would only cost calls.
        comm_dtype: "full", or "bf16" or "fp16": 16 bits travel for float32 gradients.
        error_feedback: add what rounding to 16 bits lost to the next step's gradient; costs 1.5 copies of them.
        residuals: where the lost parts are noted, for checkpoints; not an option, and the same for all.
        share_memory: let ranks of a node sum in memory that they share; it does not survive the death of one of them.
        pause_s: how long a thread that waits for the network may sleep between two looks at it; 0 never sleeps.
    """

    piece_bytes: int = 0
    comm_dtype: str = "full"
    error_feedback: bool = False
    pause_s: float = 0.0
    share_memory: bool = field(default=True, repr=False)
    residuals: Residuals | None = field(default=None, repr=False, compare=False)


class Reducer:
    """The strategy that sums buckets over ranks. Making one may be collective.

    Args:
        world: the ranks.
        options: how it is to work.
    """

    def __init__(self, world: World, options: ReducerOptions):
        self._world, self._options = world, options

    def allocate(self, layouts: Sequence[BucketLayout], device: torch.device) -> list[Tensor]:
        """Zeroed memory for the buckets, of the kind that this strategy likes. May be collective."""
        return plain_buffers(layouts, device)

    def mean(self, bucket: Bucket) -> None:
        """Replaces `bucket.flat` by its mean over the ranks, in place. Collective, in the same order on every rank.

        When it returns, work queued on the current stream afterwards sees the mean.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Lets go of what `allocate` took: it is given back with the last tensor that looks there. Not collective."""
