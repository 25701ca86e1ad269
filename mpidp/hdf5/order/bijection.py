"""Enters: numbers in [0, count). Leaves: the numbers that a keyed bijection of [0, count) makes of them.

A Feistel network (Luby and Rackoff, "How to construct pseudorandom permutations", 1988) permutes the next
even power of two; cycle walking (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002) brings
what falls outside back in. The round function is the finalizer of SplitMix64 (Steele, Lea and Flood, 2014).
No table, so the memory needed does not depend on `count`. This is for shuffling; it keeps no secrets.
"""

import numpy as np

from mpidp.hdf5.order.keyed import FULL_ROUNDS, IntArray, WordArray, words

_ROUNDS = 8


class Bijection:
    """A bijection of [0, count), keyed by (seed, epoch)."""

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
