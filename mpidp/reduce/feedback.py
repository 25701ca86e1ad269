"""A contribution to a 16-bit wire in, the same plus what earlier roundings lost out.

Error feedback (Seide et al. 2014, "1-bit stochastic gradient descent"; Karimireddy et al. 2019): each rank keeps the
difference between what it meant to send and what travelled, and adds it to its next contribution, so that small
gradients are not lost for ever but delayed.
"""

import torch
from torch import Tensor


class ErrorFeedback:
    """The rounding errors of one buffer on this rank. They are not part of a checkpoint.

    Args:
        flat: the buffer.
        dtype: the 16-bit dtype that travels.
        scale: what the buffer is multiplied by before it is rounded.
    """

    def __init__(self, flat: Tensor, dtype: torch.dtype, scale: float):
        self._flat = flat
        self._scale = scale
        self._rounded = torch.empty_like(flat, dtype=dtype)
        self._error = torch.zeros_like(flat)

    def compensate(self) -> None:
        """Adds the last error to the buffer, in place, and remembers the error that rounding it now will make."""
        self._flat.add_(self._error)
        torch.mul(self._flat, self._scale, out=self._error)
        self._error.copy_(self._rounded.copy_(self._error)).div_(self._scale)
        torch.sub(self._flat, self._error, out=self._error)
        # What overflowed is gone: an infinite error would be added for ever.
        self._error.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
