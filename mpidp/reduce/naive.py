"""A bucket in, its mean out: one Allreduce a parameter. The specification; every other is tested against it."""

from mpidp.reduce.buckets import Bucket
from mpidp.reduce.buffers import plain_buffers
from mpidp.reduce.options import ReducerOptions
from mpidp.reduce.transport import transports_of_all
from mpidp.world.world import World


class NaiveReducer:
    """Reduces each gradient by a call of its own."""

    def __init__(self, world: World, options: ReducerOptions):
        self._transports = transports_of_all(world, options)

    allocate = staticmethod(plain_buffers)

    def close(self) -> None:
        """Nothing to give back."""

    def mean(self, bucket: Bucket) -> None:
        """One Allreduce a slot, then one for the flags. Collective."""
        for slot in bucket.layout.slots:
            self._transports.mean(bucket.flat[slot.offset : slot.offset + slot.numel])
        self._transports.mean(bucket.flags)
