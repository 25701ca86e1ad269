"""A contribution to a 16-bit wire in, the same plus what earlier roundings lost out.

Error feedback (Seide et al. 2014, "1-bit stochastic gradient descent"; Karimireddy et al. 2019): each rank keeps the
difference between what it meant to send and what travelled, and adds it to its next contribution, so that small
gradients are not lost for ever but delayed.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


class ErrorFeedback:
    """The rounding errors of one buffer on this rank.

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

    @property
    def error(self) -> Tensor:
        """What will be added next time, real numbers like the buffer's."""
        return self._error

    def compensate(self) -> None:
        """Adds the last error to the buffer, in place, and remembers the error that rounding it now will make."""
        self._flat.add_(self._error)
        torch.mul(self._flat, self._scale, out=self._error)
        self._error.copy_(self._rounded.copy_(self._error)).div_(self._scale)
        torch.sub(self._flat, self._error, out=self._error)
        # What overflowed is gone: an infinite error would be added for ever.
        self._error.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


class Residuals:
    """The rounding errors of all buffers of a model on this rank, so that a checkpoint can hold them.

    Buffers come in the order of their first reduction, which is the same in every run of the same layout.
    """

    def __init__(self) -> None:
        self._feedbacks: list[ErrorFeedback] = []
        self._waiting: list[Tensor] = []  # loaded, for buffers that are yet to come

    def add(self, feedback: ErrorFeedback) -> None:
        """Takes in the next buffer, and gives it what was loaded for it."""
        self._feedbacks.append(feedback)
        if self._waiting:
            feedback.error.copy_(self._waiting.pop(0))

    def tensors(self) -> list[Tensor]:
        """The errors themselves, not copies."""
        return [feedback.error for feedback in self._feedbacks] + self._waiting

    def load(self, errors: Sequence[Tensor]) -> None:
        """Goes on with errors that `tensors` gave in a run of the same layout; before the first reduction."""
        assert not self._feedbacks
        self._waiting = list(errors)
