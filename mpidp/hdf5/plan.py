"""The order of one epoch: rows as they lie in the file, permuted as a whole, or shuffled in streams.

In streams, whole chunks are permuted and laid end to end; this line is cut into streams of equal length; inside a
stream, rows are permuted within groups of a few chunks. Global index i is place i // streams of stream i % streams, so
a batch mixes all streams, while a reader of one stream holds one group. A plan holds memory in proportion to chunks,
not to rows, and one group's permutation for each stream.

Random words, permutations and bijections are keyed by a seed and small integers. NumPy may change the algorithms of
`numpy.random.Generator` in any release, but promises that a fixed seed of a bit generator always gives the same raw
stream, so only raw streams are used. They are for shuffling, not for secrets.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mpidp.errors import DataError

IntArray = npt.NDArray[np.int64]
WordArray = npt.NDArray[np.uint64]

# What a stream is drawn for. The numbers are part of the order on disk of checkpoints: never renumber.
CHUNKS = 1
FIRST_GROUP = 2
GROUP_ROWS = 3
FULL_ROUNDS = 4
SPLIT_ROWS = 5
SPLIT_PHASE = 6
SAMPLE_NOISE = 7

_WORD = 2**32


def check_seed(seed: int) -> None:
    """Raise `DataError` unless `seed` is in [0, 2^64)."""
    if not 0 <= seed < 2**64:
        raise DataError(f"seed is {seed}; give an integer from 0 to 2^64 - 1")


def words(count: int, seed: int, purpose: int, *key: int) -> WordArray:
    """Return `count` random 64-bit words, the PCG64DXSM stream of (seed, purpose, key)."""
    # SeedSequence splits integers of more than 32 bits itself, which would let two keys of different shape
    # collide; two words for the seed and for each key keep every field at its own place.
    fields = [part for value in (seed, *key) for part in (value % _WORD, value // _WORD)]
    generator = np.random.PCG64DXSM(np.random.SeedSequence([purpose, *fields]))
    return np.asarray(generator.random_raw(count), dtype=np.uint64).reshape(count)


def permutation(count: int, seed: int, purpose: int, *key: int) -> IntArray:
    """Return a permutation of range(count), int64: the stable sort of the key's random words."""
    return np.argsort(words(count, seed, purpose, *key), kind="stable").astype(np.int64, copy=False)


_ROUNDS = 8


class Bijection:
    """A bijection of [0, count), keyed by (seed, epoch).

    A Feistel network (Luby and Rackoff, "How to construct pseudorandom permutations", 1988) permutes the next even
    power of two; cycle walking (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002) brings what falls
    outside back in. The round function is the finalizer of SplitMix64 (Steele, Lea and Flood, 2014). No table, so
    the memory needed does not depend on `count`.
    """

    def __init__(self, count: int, seed: int, epoch: int) -> None:
        assert count >= 1, count
        self._count = np.uint64(count)
        half_bits = max(1, ((count - 1).bit_length() + 1) // 2)
        self._shift = np.uint64(half_bits)
        self._mask = np.uint64((1 << half_bits) - 1)
        self._keys = words(_ROUNDS, seed, FULL_ROUNDS, epoch)

    def __call__(self, numbers: IntArray) -> IntArray:
        """Return the image (int64) of each of `numbers`, which lie in [0, count)."""
        image = self._network(np.asarray(numbers).astype(np.uint64))
        # Fewer than 4 * count values are permuted, so on average a value is back inside within 4 turns.
        outside = np.flatnonzero(image >= self._count)
        while outside.size:
            image[outside] = self._network(image[outside])
            outside = outside[image[outside] >= self._count]
        return image.astype(np.int64)

    def _network(self, numbers: WordArray) -> WordArray:
        left, right = numbers >> self._shift, numbers & self._mask
        for key in self._keys:
            left, right = right, left ^ (mix(right ^ key) & self._mask)
        return (left << self._shift) | right


def mix(word: WordArray) -> WordArray:
    """Return the SplitMix64 finalizer of each word; products wrap modulo 2^64, as they should."""
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return word ^ (word >> np.uint64(31))


class EpochPlan(ABC):
    """The order of one epoch: global index i in [0, num_samples) -> row, and the owner of i in each step.

    Which rows a step holds never depends on the number of ranks; which rank reads them does.
    """

    def __init__(self, num_samples: int, global_batch: int) -> None:
        self.num_samples = num_samples
        self.global_batch = global_batch

    def step(self, position: int) -> tuple[int, int]:
        """Return (start, stop) in global indices of the step that starts at `position`."""
        if not 0 <= position <= self.num_samples:
            raise DataError(f"position {position} is outside this epoch of {self.num_samples} samples")
        return position, min(position + self.global_batch, self.num_samples)

    @abstractmethod
    def rows(self, indices: IntArray) -> IntArray:
        """Return the row (int64) of each global index: a bijection of [0, num_samples)."""

    @abstractmethod
    def local_indices(self, position: int, size: int, rank: int) -> IntArray:
        """Return the global indices (int64, ascending) that `rank` of `size` reads in the step at `position`."""


class FilePlan(EpochPlan):
    """Rows in file order; a global batch is cut into `size` runs whose lengths differ by at most one."""

    def rows(self, indices: IntArray) -> IntArray:
        """Return the indices themselves: row i is sample i."""
        return np.asarray(indices, dtype=np.int64)

    def local_indices(self, position: int, size: int, rank: int) -> IntArray:
        """Return the rank's run of the step that starts at `position`."""
        start, stop = self.step(position)
        count = stop - start
        return np.arange(start + count * rank // size, start + count * (rank + 1) // size, dtype=np.int64)


class FullPlan(FilePlan):
    """Any row next to any other: a keyed bijection of all rows; ranks take runs as in `FilePlan`."""

    def __init__(self, num_samples: int, global_batch: int, seed: int, epoch: int) -> None:
        super().__init__(num_samples, global_batch)
        self._bijection = Bijection(num_samples, seed, epoch)

    def rows(self, indices: IntArray) -> IntArray:
        """Return the row (int64) that the bijection gives each global index."""
        return self._bijection(indices)


_MOST_STREAMS = 64


@dataclass(frozen=True)
class Piece:
    """Rows [start, stop) of a chunk, counted from the chunk's first row."""

    chunk: int
    start: int
    stop: int


@dataclass(frozen=True, eq=False)
class Group:
    """Rows that are permuted together: place k holds row permutation[k] of its pieces laid end to end."""

    pieces: tuple[Piece, ...]
    permutation: IntArray


class StreamPlan(EpochPlan):
    """The order "streams" of one epoch. *Spot* below: a row's place on the line of all permuted chunks."""

    def __init__(
        self, chunk_rows: IntArray, global_batch: int, seed: int, epoch: int, streams: int, mixing_chunks: int
    ) -> None:
        super().__init__(int(chunk_rows.sum()), global_batch)
        self.streams = streams
        self._seed, self._epoch = seed, epoch
        self._row_starts = np.cumsum(chunk_rows) - chunk_rows
        self._chunks = permutation(len(chunk_rows), seed, CHUNKS, epoch)
        self._chunk_spots = np.concatenate(([0], np.cumsum(chunk_rows[self._chunks])))
        self._stream_spots = _even_cuts(self.num_samples, streams)
        # Cutting at chunk ends and at stream ends gives pieces; chunks without rows give none.
        self._piece_spots = np.union1d(self._chunk_spots, self._stream_spots)
        self._group_pieces, self._stream_groups = self._form_groups(mixing_chunks)
        self._group_spots = self._piece_spots[self._group_pieces]
        self._kept: dict[int, tuple[int, IntArray]] = {}

    def _form_groups(self, mixing_chunks: int) -> tuple[IntArray, IntArray]:
        """Return the first piece of each group and the first group of each stream, each with the end added."""
        num_pieces = len(self._piece_spots) - 1
        stream_pieces = np.searchsorted(self._piece_spots, self._stream_spots)
        first_length = words(self.streams, self._seed, FIRST_GROUP, self._epoch) % np.uint64(mixing_chunks)
        # Piece number j of a stream opens a group at j = 0, f, f + K, f + 2K, ... with f in 1..K.
        number = np.arange(num_pieces) - np.repeat(stream_pieces[:-1], np.diff(stream_pieces))
        first = np.repeat(first_length.astype(np.int64) + 1, np.diff(stream_pieces))
        opens = np.flatnonzero((number == 0) | ((number >= first) & ((number - first) % mixing_chunks == 0)))
        stream_groups = np.searchsorted(opens, stream_pieces)
        return np.append(opens, num_pieces), stream_groups

    def rows(self, indices: IntArray) -> IntArray:
        """Return the row (int64) of each global index."""
        spots = self.spots(indices)
        groups = self.groups(spots)
        by_group = np.argsort(groups, kind="stable")
        numbers, firsts = np.unique(groups[by_group], return_index=True)
        for group, inside in zip(numbers.tolist(), np.split(by_group, firsts[1:]), strict=False):
            start = self._group_spots[group]
            spots[inside] = start + self._kept_permutation(group)[spots[inside] - start]
        return self._row_at(spots)

    def local_indices(self, position: int, size: int, rank: int) -> IntArray:
        """Return what `rank` reads: stream l belongs to rank l mod size.

        With more ranks than streams, the ranks r with r mod streams = l take the places of stream l in turn.
        """
        start, stop = self.step(position)
        indices = np.arange(start, stop, dtype=np.int64)
        if size == 1:
            return indices
        stream, place = indices % self.streams, indices // self.streams
        if size <= self.streams:
            own = stream % size == rank
        else:
            sharers = len(range(rank % self.streams, size, self.streams))
            own = (stream == rank % self.streams) & (place % sharers == rank // self.streams)
        local: IntArray = indices[own]
        return local

    def spots(self, indices: IntArray) -> IntArray:
        """Return where each global index lies on the line of permuted chunks, before rows are permuted."""
        indices = np.asarray(indices, dtype=np.int64)
        spots: IntArray = self._stream_spots[indices % self.streams] + indices // self.streams
        return spots

    def groups(self, spots: IntArray) -> IntArray:
        """Return the number of the group that each spot lies in, counted over all streams."""
        numbers: IntArray = np.searchsorted(self._group_spots, spots, side="right") - 1
        return numbers

    def group_start(self, groups: IntArray) -> IntArray:
        """Return the first spot of each of `groups`."""
        starts: IntArray = self._group_spots[groups]
        return starts

    def stream_groups(self, stream: int) -> tuple[IntArray, IntArray, IntArray]:
        """Return the groups of a stream in order, and the first place and the end of each (int64)."""
        groups = np.arange(self._stream_groups[stream], self._stream_groups[stream + 1], dtype=np.int64)
        start = self._stream_spots[stream]
        return groups, self._group_spots[groups] - start, self._group_spots[groups + 1] - start

    def group(self, group: int) -> Group:
        """Return the pieces and the permutation of a group, numbered as by `groups`."""
        pieces = range(self._group_pieces[group], self._group_pieces[group + 1])
        return Group(tuple(self._piece(piece) for piece in pieces), self._group_permutation(group))

    def _piece(self, piece: int) -> Piece:
        start, stop = int(self._piece_spots[piece]), int(self._piece_spots[piece + 1])
        slot = int(np.searchsorted(self._chunk_spots, start, side="right")) - 1
        begin = int(self._chunk_spots[slot])
        return Piece(int(self._chunks[slot]), start - begin, stop - begin)

    def _kept_permutation(self, group: int) -> IntArray:
        """Return the permutation of a group. The last one of each stream is kept: ranks go through streams in order."""
        stream = self._stream_of(group)
        number, permuted = self._kept.get(stream, (-1, None))
        if permuted is None or number != group:
            permuted = self._group_permutation(group)
            self._kept[stream] = group, permuted
        return permuted

    def _stream_of(self, group: int) -> int:
        return int(np.searchsorted(self._stream_groups, group, side="right")) - 1

    def _group_permutation(self, group: int) -> IntArray:
        stream = self._stream_of(group)
        count = int(self._group_spots[group + 1] - self._group_spots[group])
        number = group - int(self._stream_groups[stream])
        return permutation(count, self._seed, GROUP_ROWS, self._epoch, stream, number)

    def _row_at(self, spots: IntArray) -> IntArray:
        slot = np.searchsorted(self._chunk_spots, spots, side="right") - 1
        return self._row_starts[self._chunks[slot]] + spots - self._chunk_spots[slot]


def automatic_streams(num_rows: int, chunk_bytes: float, mixing_chunks: int, most_bytes: int = 2**30) -> int:
    """Return the largest power of two of streams within 64, one a row, and `most_bytes` of groups over all ranks."""
    group_bytes = max(1, mixing_chunks) * chunk_bytes  # Order refuses a depth below 1, and says so
    limit = min(_MOST_STREAMS, num_rows, int(most_bytes / group_bytes))
    return 1 << (max(1, limit).bit_length() - 1)


def _even_cuts(count: int, parts: int) -> IntArray:
    """Return the parts + 1 edges that cut [0, count) into parts of ceil((count - part) / parts) each."""
    part = np.arange(parts + 1, dtype=np.int64)
    return part * (count // parts) + np.minimum(part, count % parts)
