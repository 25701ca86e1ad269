"""The base class of reducers, and their options.

A reducer replaces each bucket by its mean over the ranks. They differ only in how they do it; `naive` is the
specification that the others are tested against.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mpidp.reduce.buckets import Bucket, BucketLayout, plain_buffers
from mpidp.reduce.exchange import Residuals
from mpidp.world.world import World

# Across a network: with a library that sends a large buffer in one message every hop waits for all of it, while pieces
# of a mebibyte keep all links busy at once.
PIECE_BYTES = 1 << 20


@dataclass(frozen=True)
class ReducerOptions:
    """Options that every reducer understands, as far as they concern it.

    Attributes:
        piece_bytes: the largest buffer given to one call of MPI; 0 for 1 MiB across a network and no limit on one node,
            where pieces would only cost calls.
        comm_dtype: "full", or "bf16" or "fp16": float32 gradients are sent in 16 bits.
        error_feedback: add the error of rounding to 16 bits to the next step's gradient; takes 1.5 times the memory of
            the gradients.
        residuals: the rounding errors of all buffers, for checkpoints; not an option.
        share_memory: let ranks of a node sum in shared memory, which is not possible when ranks may die.
        pause_s: seconds that a thread which waits for the network may sleep between two tests; 0 never sleeps.
    """

    piece_bytes: int = 0
    comm_dtype: str = "full"
    error_feedback: bool = False
    pause_s: float = 0.0
    share_memory: bool = field(default=True, repr=False)
    residuals: Residuals | None = field(default=None, repr=False, compare=False)


class Reducer:
    """Base class of the reducers, which average buckets over ranks. Making one may be collective.

    Args:
        world: the ranks.
        options: of the reducer.
    """

    def __init__(self, world: World, options: ReducerOptions):
        self._world, self._options = world, options

    def allocate(self, layouts: Sequence[BucketLayout], device: torch.device) -> list[Tensor]:
        """Returns zeroed memory for the buckets, of the kind that this reducer needs. May be collective."""
        return plain_buffers(layouts, device)

    def mean(self, bucket: Bucket) -> None:
        """Replaces `bucket.flat` by its mean over the ranks, in place. Collective, in the same order on every rank.

        When it returns, work queued on the current stream afterwards sees the mean.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Drops the memory of `allocate`, which is freed with the last tensor that refers to it. Not collective."""
