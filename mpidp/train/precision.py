"""The precision of a run: dtype of parameters and inputs, autocast, and scaling of the loss in fp16."""

import torch
from torch.amp.grad_scaler import GradScaler

from mpidp.errors import SHARED_MARK, ConfigError, MpidpError

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
# A scale that is halved again and again means that no scale helps. It begins at 65,536.
_FIRST_SCALE, _LEAST_SCALE = 2.0**16, 1e-4


def parameter_dtype(precision: str) -> torch.dtype:
    """The dtype of parameters and floating-point inputs: float64, or float32 with or without autocast."""
    return torch.float64 if precision == "float64" else torch.float32


class Precision:
    """How a run computes. Not collective.

    Attributes:
        dtype: of parameters and floating-point inputs.
        scaler: scales the loss in fp16, so that small gradients stay above zero; else it does nothing.

    Args:
        name: "float32", "float64", or "bf16" or "fp16": float32 with autocast.
        device: of the model.

    Raises:
        ConfigError: the device cannot compute in bf16.
    """

    def __init__(self, name: str, device: torch.device):
        self.dtype = parameter_dtype(name)
        self._device_type = device.type
        self._autocast = _AUTOCAST.get(name)
        self.scaler = GradScaler(device.type, init_scale=_FIRST_SCALE, enabled=name == "fp16")
        if name == "bf16" and device.type == "cuda" and not torch.cuda.is_bf16_supported():
            raise ConfigError('train.precision = "bf16": this GPU cannot compute in it. Set "fp16" or "float32".')

    def autocast(self) -> torch.autocast:
        """A context manager for the forward pass and the loss."""
        return torch.autocast(self._device_type, self._autocast, enabled=self._autocast is not None)

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Steps an optimizer, unless gradients have overflowed in fp16; then the next losses are scaled less.

        Gradients are the mean over ranks, so all ranks decide the same.

        Returns:
            Whether the optimizer has stepped.

        Raises:
            MpidpError: on all ranks, gradients stay infinite or NaN however little the loss is scaled.
        """
        self.scaler.step(optimizer)
        before = self.scaler.get_scale()
        self.scaler.update()
        scale = self.scaler.get_scale()
        if scale < _LEAST_SCALE:
            error = MpidpError(
                f'train.precision = "fp16": gradients are infinite or NaN even with the loss scaled by {before:g}: the '
                f"loss is not finite, or a value of the model exceeds 65504. Lower optimizer.lr, set train.clip_norm, "
                f'or train.precision = "bf16".'
            )
            setattr(error, SHARED_MARK, True)
            raise error
        return scale >= before
