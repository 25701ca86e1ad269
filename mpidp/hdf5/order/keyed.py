"""Random words, permutations and bijections keyed by a seed and small integers, the same in every version of NumPy.

NumPy may change the algorithms of `numpy.random.Generator` (shuffle, integers, ...) in any release, but it
promises that a fixed seed of a bit generator gives the same raw stream for ever. So only raw streams are
used. This is for shuffling; it keeps no secrets.
"""

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
