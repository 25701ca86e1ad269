"""A bucket in, the same bucket out: gradients are packed and unpacked but not sent. The meter of what the sum costs."""

from mpidp.reduce.buckets import Bucket
from mpidp.reduce.buffers import plain_buffers
from mpidp.reduce.options import ReducerOptions
from mpidp.world.world import World


class NullReducer:
    """Does nothing, which is right for one rank and leaves several ranks to drift apart."""

    def __init__(self, world: World, options: ReducerOptions):
        del world, options

    allocate = staticmethod(plain_buffers)

    def close(self) -> None:
        """Nothing to give back."""

    def mean(self, bucket: Bucket) -> None:
        """Leaves the local gradients as they are. Not collective."""
