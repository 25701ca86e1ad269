"""The contract of a reducer, and the table of those there are.

A reducer replaces each bucket by its mean over the ranks. The strategies differ only in how; `naive` is the
specification that the others are tested against.
"""

from collections.abc import Callable
from typing import Protocol

from mpidp.reduce.buckets import Bucket
from mpidp.reduce.buffers import Allocate
from mpidp.reduce.flat import FlatReducer
from mpidp.reduce.naive import NaiveReducer
from mpidp.reduce.node import NodeReducer
from mpidp.reduce.null import NullReducer
from mpidp.reduce.options import ReducerOptions
from mpidp.reduce.staged import StagedReducer
from mpidp.world.world import World


class Reducer(Protocol):
    """The strategy that sums buckets over ranks."""

    @property
    def allocate(self) -> Allocate:
        """Where the memory of the buckets comes from, of the kind that this strategy likes. May be collective."""

    def close(self) -> None:
        """Lets go of what `allocate` took: it is given back with the last tensor that looks there. Not collective."""

    def mean(self, bucket: Bucket) -> None:
        """Replaces `bucket.flat` by its mean over the ranks, in place. Collective, in the same order on every rank.

        When it returns, work queued on the current stream afterwards sees the mean.
        """


REDUCERS: dict[str, Callable[[World, ReducerOptions], Reducer]] = {
    "naive": NaiveReducer,
    "flat": FlatReducer,
    "node": NodeReducer,
    "staged": StagedReducer,
    "null": NullReducer,
}
