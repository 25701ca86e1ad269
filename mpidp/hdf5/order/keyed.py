"""Enters: a seed and a key of small integers. Leaves: random words and permutations that never change.

NumPy may change the algorithms of `numpy.random.Generator` (shuffle, integers, ...) in any release, but it
promises that a fixed seed of a bit generator gives the same raw stream for ever. So only raw streams are
used.
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
