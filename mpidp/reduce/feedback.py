"""A contribution to a 16-bit wire in, the same plus what earlier roundings lost out.

Error feedback (Seide et al. 2014, "1-bit stochastic gradient descent"; Karimireddy et al. 2019): each rank keeps the
difference between what it meant to send and what travelled, and adds it to its next contribution, so that small
gradients are not lost for ever but delayed.
"""

import torch
from torch import Tensor


class ErrorFeedback:
    """The rounding errors of one buffer on this rank.

    Args:
        flat: the buffer.
        dtype: the 16-bit dtype that travels.
    """

    def __init__(self, flat: Tensor, dtype: torch.dtype):
        self._flat = flat
        self._rounded = torch.empty_like(flat, dtype=dtype)
        self._error = torch.zeros_like(flat)

    def compensate(self) -> None:
        """Adds the last error to the buffer, in place, and remembers the error that rounding it now will make."""
        self._flat.add_(self._error)
        self._error.copy_(self._rounded.copy_(self._flat))
        torch.sub(self._flat, self._error, out=self._error)
