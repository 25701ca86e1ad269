"""A batch's fields in, the same fields as the model wants them out: the built-in transforms of run files."""

from torch import Tensor

from mpidp.errors import DataError
from mpidp.printable import listed

BUILT_IN = {
    "image": "mpidp.train.components.transforms:image",
    "next_token": "mpidp.train.components.transforms:next_token",
}


def image(fields: dict[str, Tensor]) -> dict[str, Tensor]:
    """Byte images (N, H, W) in the first field become float32 (N, 1, H, W) in [0, 1]; labels become int64."""
    first, *rest = fields
    pixels = fields[first]
    if pixels.dim() != 3:
        raise DataError(
            f"transform 'image' wants field {first!r} of shape (N, height, width), found {tuple(pixels.shape)}"
        )
    changed = {first: (pixels.unsqueeze(1) / 255).float()}
    return changed | {name: fields[name].long() for name in rest}


def next_token(fields: dict[str, Tensor]) -> dict[str, Tensor]:
    """Windows of tokens (N, T + 1) become `input` and `target` (N, T), int64, the target one token ahead."""
    if len(fields) != 1:
        raise DataError(f"transform 'next_token' wants one field of token windows, found {listed(fields)}")
    tokens = next(iter(fields.values())).long()
    return {"input": tokens[:, :-1].contiguous(), "target": tokens[:, 1:].contiguous()}
