"""Built-in transforms of a batch, batches without samples included."""

import pytest
import torch

from mpidp.errors import DataError
from mpidp.train.components import TRANSFORMS, find, image, next_token


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_image(rows: int) -> None:
    pixels = torch.randint(0, 256, (rows, 4, 3), dtype=torch.uint8)
    before = pixels.clone()
    labels = torch.zeros(rows, dtype=torch.uint8)
    changed = image({"pixels": pixels, "label": labels})
    assert list(changed) == ["pixels", "label"], "the model takes the first field and the loss the second"
    assert changed["pixels"].shape == (rows, 1, 4, 3) and changed["pixels"].dtype == torch.float32
    assert torch.equal(changed["pixels"].squeeze(1) * 255, before.float())
    assert changed["label"].dtype == torch.int64
    assert torch.equal(pixels, before), "the loader's own tensor must not change"


def test_image_of_float_pixels_does_not_change_the_loaders_tensor() -> None:
    pixels = torch.full((2, 4, 3), 255.0)
    assert torch.equal(image({"x": pixels, "y": torch.zeros(2)})["x"], torch.ones(2, 1, 4, 3))
    assert torch.equal(pixels, torch.full((2, 4, 3), 255.0))


@pytest.mark.parametrize("shape", [(2, 4), (2, 1, 4, 4)])
def test_image_says_what_it_found(shape: tuple[int, ...]) -> None:
    with pytest.raises(DataError) as caught:
        image({"pixels": torch.zeros(shape), "y": torch.zeros(2)})
    assert "'pixels'" in str(caught.value) and str(shape) in str(caught.value)


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_next_token(rows: int) -> None:
    tokens = torch.arange(rows * 5, dtype=torch.uint8).view(rows, 5)
    changed = next_token({"tokens": tokens})
    first, second = changed.values()
    assert first.dtype == second.dtype == torch.int64
    assert first.shape == second.shape == (rows, 4)
    assert torch.equal(first, tokens[:, :-1].long()) and torch.equal(second, tokens[:, 1:].long())


def test_next_token_wants_one_field() -> None:
    with pytest.raises(DataError, match="x, y"):
        next_token({"x": torch.zeros(1, 2), "y": torch.zeros(1)})


@pytest.mark.parametrize("name", TRANSFORMS)
def test_names_are_found(name: str) -> None:
    assert callable(find("data.transform", name, TRANSFORMS))
