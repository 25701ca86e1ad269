"""States of wrapped and of other models, and modules that are wrapped already."""

import copy
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mpidp.errors import CheckpointError, MpidpError
from mpidp.train.agreement import check_not_wrapped
from mpidp.train.data_parallel import load_plain_state


def model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def same(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(*pair) for pair in pairs)


@pytest.mark.parametrize("prefixes", [(), ("module.",), ("_orig_mod.",), ("module.", "_orig_mod."), ("module.",) * 2])
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("plain_dict", [True, False])
def test_a_state_that_a_wrapper_saved(prefixes: tuple[str, ...], strict: bool, plain_dict: bool) -> None:
    """Behaviour 20: as saved by DistributedDataParallel, by a compiled model, or by both; it is not changed."""
    source, target = model(1), model(2)
    wrapped = source
    for prefix in reversed(prefixes):
        wrapped = nn.ModuleDict({prefix[:-1]: wrapped})
    state: Any = wrapped.state_dict()
    assert all(key.startswith("".join(prefixes)) for key in state)
    if plain_dict:
        state = dict(state)
    before = list(state)
    result = load_plain_state(target, state, strict=strict)
    assert not result.missing_keys and not result.unexpected_keys
    assert same(source, target) and list(state) == before


def test_versions_of_layers_survive() -> None:
    """Batch norm below version 2 has no count of batches: torch sees it in what it noted of the layer."""
    state = nn.ModuleDict({"module": model(1)}).state_dict()
    del state["module.1.num_batches_tracked"]
    with pytest.raises(RuntimeError, match="num_batches_tracked"):
        load_plain_state(model(2), state)
    state._metadata["module.1"]["version"] = 1  # type: ignore[attr-defined]
    load_plain_state(model(2), state)


class Named(nn.Module):
    """A model that has such a name itself."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)


def test_a_name_of_the_model_is_no_prefix() -> None:
    source, target = Named(), Named()
    load_plain_state(target, source.state_dict())
    assert same(source, target)
    load_plain_state(target, nn.ModuleDict({"_orig_mod": Named()}).state_dict())
    with pytest.raises(RuntimeError, match=r"Missing key.*module\.weight"):
        load_plain_state(target, nn.ModuleDict({"module": Named()}).state_dict())


def test_a_prefix_of_some_keys_is_none() -> None:
    state = model(1).state_dict()
    state["module.0.weight"] = state.pop("0.weight")
    with pytest.raises(RuntimeError, match=r"Unexpected key.*module\.0\.weight"):
        load_plain_state(model(2), state)


@pytest.mark.parametrize(
    ("state", "text"),
    [
        ({}, "the state has no keys, the model Sequential has 0.weight, 0.bias, 1.weight and 6 more"),
        ({"backbone.0.weight": torch.zeros(4, 3)}, "the state has backbone.0.weight, the model"),
        ({f"net.{name}": torch.zeros(()) for name in "abcde"}, "net.a, net.b, net.c and 2 more"),
    ],
)
def test_a_state_of_which_nothing_loads(state: dict[str, Tensor], text: str) -> None:
    target = model(2)
    before = copy.deepcopy(target)
    with pytest.raises(CheckpointError, match="loaded nothing") as caught:
        load_plain_state(target, OrderedDict(state), strict=False)
    assert text in str(caught.value) and "consume_prefix_in_state_dict_if_present" in str(caught.value)
    assert same(target, before)


def test_a_part_of_a_state_loads() -> None:
    source, target = model(1), model(2)
    state = {"module.0.weight": source[0].weight, "module.head": source[0].bias}
    result = load_plain_state(target, state, strict=False)
    assert result.unexpected_keys == ["head"] and "0.weight" not in result.missing_keys
    assert torch.equal(source[0].weight, target[0].weight)


class DataParallel(nn.Module):
    """Somebody's own layer of that name."""


@pytest.mark.parametrize("inside", [False, True])
def test_a_wrapped_module_is_refused(inside: bool) -> None:
    wrapped: nn.Module = nn.DataParallel(model(1))
    if inside:
        wrapped = nn.Sequential(nn.Linear(3, 3), wrapped)
    where = "layer 1 of the model" if inside else "the model"
    with pytest.raises(MpidpError, match=f"^{where} is wrapped in torch's DataParallel already"):
        check_not_wrapped(wrapped)
    check_not_wrapped(model(1))
    check_not_wrapped(nn.Sequential(DataParallel()))
