"""Enters: values packed as the CF conventions of netCDF say. Leaves: what they stand for, NaN where that is nothing."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Packing:
    """How the values of a dataset are packed: value * scale + offset, in `dtype`.

    Attributes:
        missing: stored values that stand for none.
        scale, offset: of the attributes scale_factor and add_offset.
        dtype: of unpacked values, "float32" or "float64".
        attributes: names of the attributes that say so.
    """

    missing: tuple[float, ...]
    scale: float
    offset: float
    dtype: str
    attributes: tuple[str, ...]

    def unpack(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the unpacked values, NaN for those that are missing."""
        wide = np.dtype(self.dtype)
        unpacked = values.astype(wide)
        if self.scale != 1.0:
            unpacked *= wide.type(self.scale)
        if self.offset != 0.0:
            unpacked += wide.type(self.offset)
        for number in self.missing:
            unpacked[values == number] = np.nan
        return unpacked
