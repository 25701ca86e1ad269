"""A gradient's dtype and the user's wish in, the dtype that travels out. Pure decisions."""

import torch

from mpidp.errors import LaunchError

SIXTEEN_BITS = (torch.float16, torch.bfloat16)
WIRES = {"full": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def wire_dtype(gradient: torch.dtype, wire: str) -> torch.dtype:
    """What travels for gradients of a (real) dtype.

    16-bit gradients travel as they are. A 16-bit wire shortens float32 only: who computes in float64 wants the digits.

    Args:
        gradient: dtype of the gradients, as real numbers.
        wire: "full", "bf16" or "fp16".

    Raises:
        LaunchError: an unknown wire.
    """
    if wire not in WIRES:
        raise LaunchError(f"wire {wire!r} is unknown; allowed are {', '.join(WIRES)}")
    shortened = WIRES[wire]
    return shortened if shortened is not None and gradient == torch.float32 else gradient
