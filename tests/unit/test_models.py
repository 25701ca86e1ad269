"""The reference models: shapes, empty batches, what a GPT may see, and that they learn."""

from importlib import import_module
from pathlib import Path
from typing import Any

import h5py
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from mpidp.models import BUILT_IN
from mpidp.models.cnn import cnn
from mpidp.models.gpt import GPT, gpt
from mpidp.models.mlp import mlp

DIGITS = Path(__file__).parents[2] / "data" / "digits.h5"
SMALL = {"vocabulary": 11, "context": 8, "layers": 2, "heads": 2, "width": 16}


def small_gpt(**changes: Any) -> GPT:
    torch.manual_seed(0)
    return gpt(**(SMALL | changes))


def tokens(batch: int, time: int) -> Tensor:
    return torch.randint(11, (batch, time), generator=torch.Generator().manual_seed(batch))


@pytest.mark.parametrize("name", BUILT_IN)
def test_the_table_names_functions_that_make_modules(name: str) -> None:
    module, _, function = BUILT_IN[name].partition(":")
    assert isinstance(getattr(import_module(module), function)(), nn.Module)


@pytest.mark.parametrize("size", [8, 28, 33])
def test_cnn_takes_images_of_any_size(size: int) -> None:
    assert cnn(classes=7, channels=3, width=4)(torch.zeros(2, 3, size, size)).shape == (2, 7)


def test_mlp_flattens_samples_and_takes_several_hidden_layers() -> None:
    model = mlp(inputs=12, hidden=[8, 6], classes=5)
    assert model(torch.zeros(2, 3, 4)).shape == (2, 5)
    assert [layer.out_features for layer in model if isinstance(layer, nn.Linear)] == [8, 6, 5]


@pytest.mark.parametrize(
    ("model", "empty", "shape"),
    [
        (cnn(), torch.zeros(0, 1, 8, 8), (0, 10)),
        (cnn(), torch.zeros(0, 1, 28, 28), (0, 10)),
        (mlp(), torch.zeros(0, 64), (0, 10)),
        (small_gpt(), torch.zeros(0, 8, dtype=torch.int64), (0, 8, 11)),
    ],
    ids=["cnn-8", "cnn-28", "mlp", "gpt"],
)
def test_a_rank_without_samples_takes_part(model: nn.Module, empty: Tensor, shape: tuple[int, ...]) -> None:
    """Behaviour 16: forward and backward work on a batch of 0 samples, and all gradients are 0."""
    scores = model(empty)
    assert scores.shape == shape
    scores.sum().backward()
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in model.parameters())


def test_gpt_sees_no_later_token() -> None:
    model, before = small_gpt().eval(), tokens(2, 8)
    after = before.clone()
    after[:, 5:] = (after[:, 5:] + 1) % 11
    changed = (model(before) - model(after)).abs().amax(dim=(0, 2)) > 1e-6
    assert changed.tolist() == [False] * 5 + [True] * 3


def test_gpt_sees_every_earlier_token() -> None:
    model, before = small_gpt().eval(), tokens(1, 8)
    for place in range(8):
        after = before.clone()
        after[0, place] = (after[0, place] + 1) % 11
        assert (model(before) - model(after))[0, -1].abs().max() > 1e-6


def test_gpt_ties_output_weights_to_the_embedding() -> None:
    names = [name for name, _ in small_gpt().named_parameters()]
    assert not any("head" in name or "out_features" in name for name in names)
    assert sum(11 in parameter.shape for parameter in small_gpt().parameters()) == 1


def test_gpt_starts_near_chance() -> None:
    loss = cross_entropy(small_gpt()(tokens(16, 8)).flatten(0, 1), tokens(16, 8).flatten())
    assert loss.item() == pytest.approx(torch.tensor(11.0).log().item(), rel=0.05)


@pytest.mark.parametrize(
    ("changes", "prompt", "message"),
    [({"width": 15}, 8, "width 15 is not a multiple of heads 2"), ({}, 9, "9 tokens are more than the context of 8")],
)
def test_gpt_refuses_sizes_that_do_not_fit(changes: dict[str, Any], prompt: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small_gpt(**changes)(tokens(1, prompt))


def test_gpt_generates_past_its_context_and_stays_in_training() -> None:
    model, prompt = small_gpt(dropout=0.5).train(), tokens(3, 2)
    twice = [model.generate(prompt, 20, generator=torch.Generator().manual_seed(1)) for _ in range(2)]
    assert twice[0].shape == (3, 22)
    assert torch.equal(twice[0][:, :2], prompt)
    assert torch.equal(*twice), "the same generator gives the same text, dropout or not"
    assert model.training


def test_gpt_at_temperature_0_takes_the_likeliest_token() -> None:
    model, prompt = small_gpt().eval(), tokens(3, 4)
    assert torch.equal(model.generate(prompt, 1, temperature=0)[:, -1], model(prompt)[:, -1].argmax(-1))


def test_gpt_learns_a_repeated_text() -> None:
    model = small_gpt()
    text = (torch.arange(9) * 4 % 11)[None]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(40):
        loss = cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss.item() < 0.1
    assert torch.equal(model.generate(text[:, :1], 7, temperature=0), text[:, :8])


def test_cnn_learns_the_digits() -> None:
    with h5py.File(DIGITS) as file:
        images, digits = torch.from_numpy(file["x"][:]), torch.from_numpy(file["y"][:])
    torch.manual_seed(0)
    held_out, train = torch.randperm(len(images)).split([359, 1438])
    model = cnn()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(5):
        for batch in train[torch.randperm(len(train))].split(64):
            cross_entropy(model(images[batch]), digits[batch]).backward()
            optimizer.step()
            optimizer.zero_grad()
    right = (model(images[held_out]).argmax(1) == digits[held_out]).double().mean().item()
    assert right > 0.95
