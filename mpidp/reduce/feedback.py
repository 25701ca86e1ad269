"""A contribution to a 16-bit wire in, the same plus what earlier roundings lost out.

Error feedback (Seide et al. 2014, "1-bit stochastic gradient descent"; Karimireddy et al. 2019): each rank keeps the
difference between what it meant to send and what travelled, and adds it to its next contribution, so that small
gradients are not lost for ever but delayed.
"""

import torch
from torch import Tensor


class ErrorFeedback:
    """The rounding errors of this rank, one float32 tensor for each buffer that travels.

    Args:
        dtype: the 16-bit dtype that travels.
    """

    def __init__(self, dtype: torch.dtype):
        self.dtype = dtype
        self._errors: dict[tuple[int, int], Tensor] = {}

    def compensate(self, flat: Tensor) -> None:
        """Adds the last error of this buffer, in place, and remembers the error that rounding it now will make."""
        key = (flat.data_ptr(), flat.numel())
        error = self._errors.get(key)
        if error is None:
            self._errors[key] = error = torch.zeros_like(flat)
        flat.add_(error)
        error.copy_(flat)
        error.sub_(flat.to(self.dtype))
