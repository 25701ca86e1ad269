"""Random streams of torch, numpy and Python: different on every rank, the same in every repetition."""

import random
from typing import Any, cast

import numpy
import torch

_DOMAIN = 0x52414E4B  # keeps these streams apart from those of the sample order


def seed_all(seed: int, rank: int, step: int) -> None:
    """Seeds torch (all devices), numpy and random for what happens from `step` on: dropout, augmentation."""
    torch_seed, numpy_seed, python_seed = numpy.random.SeedSequence([_DOMAIN, seed, rank, step]).generate_state(3)
    torch.manual_seed(int(torch_seed))
    numpy.random.seed(int(numpy_seed))
    random.seed(int(python_seed))


def capture(device: torch.device) -> dict[str, Any]:
    """The state of all streams of this rank, in types that `torch.load(weights_only=True)` accepts."""
    kind, keys, position, has_gauss, gauss = cast(tuple[Any, ...], numpy.random.get_state(legacy=True))
    version, internal, gauss_next = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": [
            str(kind),
            torch.from_numpy(keys.astype(numpy.int64)),
            int(position),
            int(has_gauss),
            float(gauss),
        ],
        "python": [version, list(internal), gauss_next],
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def restore(state: dict[str, Any], device: torch.device) -> None:
    """Puts the streams of this rank back to where `capture` found them."""
    torch.set_rng_state(state["torch"])
    kind, keys, position, has_gauss, gauss = state["numpy"]
    numpy.random.set_state((kind, keys.numpy().astype(numpy.uint32), position, has_gauss, gauss))
    version, internal, gauss_next = state["python"]
    random.setstate((version, tuple(internal), gauss_next))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
