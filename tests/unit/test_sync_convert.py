"""Torch's batch norm layers made synchronised ones and back, in one process; over ranks: tests/mpi."""

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mpidp
from mpidp.config import from_dict
from mpidp.errors import ConfigError, MpidpError
from mpidp.train.batch_norm import sync_layers
from mpidp.validate import validate

LAYERS: dict[str, tuple[type[nn.Module], tuple[int, ...]]] = {
    "1d": (nn.BatchNorm1d, (5, 3)),
    "1d of sequences": (nn.BatchNorm1d, (5, 3, 4)),
    "2d": (nn.BatchNorm2d, (5, 3, 4, 2)),
    "3d": (nn.BatchNorm3d, (5, 3, 4, 2, 2)),
}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"eps": 0.1, "momentum": 0.3},
    {"momentum": None},
    {"affine": False},
    {"track_running_stats": False},
]


@pytest.fixture(scope="module")
def world() -> mpidp.World:
    return mpidp.init()


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return list(one) == list(other) and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("kind", LAYERS)
def test_one_rank_is_torch_bit_for_bit(world: mpidp.World, kind: str, options: dict[str, Any]) -> None:
    """Behaviour 18: output, running statistics and gradients; in training, then in evaluation."""
    make, shape = LAYERS[kind]
    plain = make(3, **options)
    synced = mpidp.SyncBatchNorm.convert(copy.deepcopy(plain), world)
    assert isinstance(synced, mpidp.SyncBatchNorm)
    for training in (True, True, False):
        inputs = torch.randn(shape)
        found = []
        for layer in (plain.train(training), synced.train(training)):
            leaf = inputs.clone().requires_grad_()
            output = layer(leaf)
            (output * inputs).sum().backward()
            found.append([output, leaf.grad, *(p.grad for p in layer.parameters()), *layer.buffers()])
            layer.zero_grad()
        assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
    assert same(plain.state_dict(), synced.state_dict())


def net() -> nn.Sequential:
    shared = nn.BatchNorm1d(4)
    return nn.Sequential(
        nn.Conv2d(2, 4, 1),
        nn.BatchNorm2d(4, eps=0.01, momentum=None).eval(),
        nn.Sequential(nn.SyncBatchNorm(4, affine=False), nn.Flatten(2), shared, shared),
        nn.InstanceNorm1d(4),
    )


def test_convert_keeps_everything_else(world: mpidp.World) -> None:
    """Behaviours 18 and 20: parameters, buffers, settings, mode, hooks, and a layer that stands in two places."""
    model = net()
    parameters, before = list(model.parameters()), copy.deepcopy(model.state_dict())
    seen: list[int] = []
    model[1].register_forward_hook(lambda *_: seen.append(1))
    assert mpidp.SyncBatchNorm.convert(model, world) is model
    assert [type(layer).__name__ for layer in sync_layers(model)] == ["SyncBatchNorm"] * 3
    assert model[2][2] is model[2][3]
    assert all(one is other for one, other in zip(parameters, model.parameters(), strict=True))
    assert same(before, model.state_dict())
    layer = model[1]
    assert (layer.eps, layer.momentum, layer.training, model[2][0].affine) == (0.01, None, False, False)
    assert isinstance(model[3], nn.InstanceNorm1d)
    model(torch.randn(3, 2, 2, 2))
    assert seen == [1]


def test_revert_gives_back_what_there_was(world: mpidp.World) -> None:
    """Behaviour 20: the plain model, which one rank may use alone."""
    model, plain = net(), net()
    plain.load_state_dict(model.state_dict())
    mpidp.SyncBatchNorm.convert(mpidp.SyncBatchNorm.convert(model, world), world)
    assert mpidp.SyncBatchNorm.revert(model) is model
    assert [type(module) for module in model.modules()] == [type(module) for module in plain.modules()]
    assert [vars(module).keys() for module in model.modules()] == [vars(module).keys() for module in plain.modules()]


def test_state_loads_in_plain_torch_and_back(world: mpidp.World) -> None:
    """Behaviour 20."""
    model = mpidp.SyncBatchNorm.convert(net(), world)
    model.train()(torch.randn(3, 2, 2, 2))
    plain = net()
    plain.load_state_dict(model.state_dict())
    model.load_state_dict(plain.state_dict())
    assert same(plain.state_dict(), model.state_dict())


def test_a_copy_talks_to_the_same_ranks(world: mpidp.World) -> None:
    """As averaged models are made."""
    model = mpidp.SyncBatchNorm.convert(net(), world)
    copied = copy.deepcopy(model)
    assert {layer.group for layer in sync_layers(copied)} == {sync_layers(model)[0].group}


def test_a_layer_out_of_a_file_knows_no_ranks(world: mpidp.World) -> None:
    """It evaluates; in training it says what to do instead of normalising over one rank's samples."""
    file = io.BytesIO()
    torch.save(mpidp.SyncBatchNorm.convert(nn.BatchNorm1d(3), world), file)
    file.seek(0)
    layer = torch.load(file, weights_only=False)
    layer.eval()(torch.randn(4, 3))
    with pytest.raises(MpidpError, match=r"does not know the ranks.*SyncBatchNorm\.convert\(model, world\)"):
        layer.train()(torch.randn(4, 3))
    mpidp.SyncBatchNorm.convert(layer, world)(torch.randn(4, 3))


@pytest.mark.parametrize("lazy", [nn.LazyBatchNorm1d, nn.LazyBatchNorm2d, nn.LazyBatchNorm3d])
def test_lazy_layers_are_refused_by_name(world: mpidp.World, lazy: type[nn.Module]) -> None:
    """Behaviour 18."""
    model = nn.Sequential(nn.Linear(2, 2), nn.ModuleDict({"norm": lazy()}))
    with pytest.raises(MpidpError, match=rf"layer 1\.norm is a {lazy.__name__}, which does not know its number"):
        mpidp.SyncBatchNorm.convert(model, world)


def test_classes_of_ones_own_are_refused_by_name(world: mpidp.World) -> None:
    """Behaviour 18: what their forward does would be lost without a word."""

    class Own(nn.BatchNorm1d):
        pass

    model = nn.Sequential(nn.BatchNorm1d(2), Own(2))
    with pytest.raises(MpidpError, match="layer 1 is a Own, a class of its own"):
        mpidp.SyncBatchNorm.convert(model, world)
    assert type(model[0]) is nn.BatchNorm1d


def test_micro_batches_are_refused() -> None:
    """Behaviour 18: ranks may have different numbers of them."""
    table = {"data": {"train": "x.h5"}, "model": {"name": "mlp"}, "train": {"sync_batch_norm": True, "micro_batch": 4}}
    with pytest.raises(ConfigError, match=r"train\.sync_batch_norm is true, but train\.micro_batch is set"):
        validate(from_dict(table))
