"""A bucket in, its mean out: one Allreduce a bucket, on the buffer itself, in device memory where MPI takes it."""

from mpidp.reduce.buckets import Bucket
from mpidp.reduce.buffers import plain_buffers
from mpidp.reduce.options import ReducerOptions
from mpidp.reduce.transport import transports_of_all
from mpidp.world.world import World


class FlatReducer:
    """Gives each bucket's buffer to MPI as it is; nothing is copied."""

    def __init__(self, world: World, options: ReducerOptions):
        self._transports = transports_of_all(world, options)

    allocate = staticmethod(plain_buffers)

    def close(self) -> None:
        """Nothing to give back."""

    def mean(self, bucket: Bucket) -> None:
        """One Allreduce (in pieces below MPI's limits). Collective."""
        self._transports.mean(bucket.flat)
