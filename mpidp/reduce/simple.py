"""The reducers `naive` (the specification), `flat` and `null` (reduces nothing, for measurements)."""

from mpidp.reduce.buckets import Bucket, plain_buffers
from mpidp.reduce.reducer import ReducerOptions
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


class NullReducer:
    """Does nothing, which is right for one rank and leaves several ranks to drift apart."""

    def __init__(self, world: World, options: ReducerOptions):
        del world, options

    allocate = staticmethod(plain_buffers)

    def close(self) -> None:
        """Nothing to give back."""

    def mean(self, bucket: Bucket) -> None:
        """Leaves the local gradients as they are. Not collective."""
