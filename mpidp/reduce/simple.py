"""The reducers `naive` (the specification), `flat` and `null` (reduces nothing, for measurements)."""

from mpidp.reduce.buckets import Bucket
from mpidp.reduce.reducer import Reducer, ReducerOptions
from mpidp.reduce.transport import Transport
from mpidp.world.world import World


class NaiveReducer(Reducer):
    """Reduces each gradient by a call of its own."""

    def __init__(self, world: World, options: ReducerOptions):
        super().__init__(world, options)
        self._transport = Transport.of_all(world, options)

    def mean(self, bucket: Bucket) -> None:
        """One Allreduce a slot, then one for the flags. Collective."""
        for slot in bucket.layout.slots:
            self._transport.mean(bucket.flat[slot.offset : slot.offset + slot.numel])
        self._transport.mean(bucket.flags)


class FlatReducer(Reducer):
    """Gives each bucket's buffer to MPI without copying it."""

    def __init__(self, world: World, options: ReducerOptions):
        super().__init__(world, options)
        self._transport = Transport.of_all(world, options)

    def mean(self, bucket: Bucket) -> None:
        """One Allreduce (in pieces below MPI's limits). Collective."""
        self._transport.mean(bucket.flat)


class NullReducer(Reducer):
    """Does nothing, which is right for one rank; several ranks then train different models."""

    def mean(self, bucket: Bucket) -> None:
        """Leaves the local gradients as they are. Not collective."""
