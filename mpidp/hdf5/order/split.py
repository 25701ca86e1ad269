"""The split of a data set in two: which rows of each chunk train and which validate.

Every chunk gives its share, so that a file sorted by class or by time is split fairly. Shares are rounded
cumulatively (Bresenham's line, with a phase drawn from the seed), which makes the total exact. The rows of a
chunk are drawn when they are asked for; memory is in proportion to chunks. Only NumPy is imported here.
"""

from typing import Literal

import numpy as np

from mpidp.errors import DataError
from mpidp.hdf5.order.keyed import SPLIT_PHASE, SPLIT_ROWS, IntArray, check_seed, permutation, words

Part = Literal["train", "validation"]


class Split:
    """Rows in two parts: round(fraction * rows) for validation, the others for training.

    Raises `DataError` for a fraction outside (0, 1), and when a part would be empty.
    """

    def __init__(self, chunk_rows: IntArray, fraction: float, seed: int) -> None:
        check_seed(seed)
        if not 0.0 < fraction < 1.0:
            raise DataError(f"the validation fraction is {fraction}; give a number between 0 and 1")
        self._chunk_rows = np.asarray(chunk_rows, dtype=np.int64)
        self._seed = seed
        num_rows = int(self._chunk_rows.sum())
        validation = round(fraction * num_rows)
        if not 0 < validation < num_rows:
            raise DataError(
                f"a validation fraction of {fraction} of {num_rows} rows leaves {num_rows - validation} rows "
                f"for training and {validation} for validation; both need at least one: change the fraction"
            )
        phase = int(words(1, seed, SPLIT_PHASE)[0]) % num_rows
        self._validation = _shares(self._chunk_rows, validation, phase)

    def counts(self, part: Part) -> IntArray:
        """Return the number of rows of `part` in each chunk (int64)."""
        return self._validation.copy() if part == "validation" else self._chunk_rows - self._validation

    def rows(self, chunk: int, part: Part) -> IntArray:
        """Return the rows of `part` in `chunk`: ascending int64 offsets from the chunk's first row."""
        share = int(self._validation[chunk])
        drawn = permutation(int(self._chunk_rows[chunk]), self._seed, SPLIT_ROWS, chunk)
        return np.sort(drawn[:share] if part == "validation" else drawn[share:])


def _shares(chunk_rows: IntArray, total: int, phase: int) -> IntArray:
    """Return shares of `total` in proportion to `chunk_rows`, each within one of exact, `total` in sum."""
    num_rows = int(chunk_rows.sum())
    # Python integers: rows * total passes 2^63 from some 4 * 10^9 rows on.
    ends = np.cumsum(chunk_rows).astype(object)
    filled = ((ends * total + phase) // num_rows).astype(np.int64)
    return np.diff(filled, prepend=0)
