"""Ranks that disagree, and models that cannot be trained: one error on every rank, before anything is reduced."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from mpi_helpers import small_model
from torch import nn

import mpidp
from mpidp.errors import LaunchError, MismatchError, MpidpError


def renamed() -> nn.Module:
    return nn.ModuleDict({"first": nn.Linear(5, 7), "last": nn.Linear(7, 3)}).double()


def wider() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def without_bias() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3, bias=False)).double()


def with_frozen_layer() -> nn.Module:
    module = small_model()
    module[2].bias.requires_grad_(False)
    return module


def transposed() -> nn.Module:
    module = small_model()
    module[2].weight = nn.Parameter(torch.zeros(7, 3, dtype=torch.float64).t())
    return module


def with_buffer() -> nn.Module:
    module = small_model()
    module.register_buffer("steps", torch.zeros(()))
    return module


DIFFERENT: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "names": (renamed, ["0.weight", "first.weight"]),
    "shapes": (wider, ["0.weight", "(7, 5)", "(8, 5)"]),
    "dtypes": (lambda: small_model(dtype=torch.float32), ["0.weight", "float64", "float32"]),
    "requires_grad": (with_frozen_layer, ["2.bias", "requires_grad=True", "requires_grad=False"]),
    "missing parameter": (without_bias, ["2.bias", "only rank 0 has"]),
    "strides": (transposed, ["2.weight", "(7, 1)", "(1, 3)"]),
    "buffers": (with_buffer, ["buffer steps"]),
}


def error_of_all(world: mpidp.World, kind: type[MpidpError], make: Callable[[], Any]) -> str:
    """The text of the error, which must be the same on all ranks; afterwards collectives must still match."""
    with pytest.raises(kind) as caught:
        make()
    assert type(caught.value) is kind
    texts = world.comm.allgather(str(caught.value))
    assert texts == [texts[0]] * world.size
    return texts[0]


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("difference", DIFFERENT)
def test_different_models(world: mpidp.World, difference: str) -> None:
    """Behaviour 33: the lowest rank that differs from rank 0 is named, with what both have."""
    make, parts = DIFFERENT[difference]
    last = world.size - 1
    text = error_of_all(
        world,
        MismatchError,
        lambda: mpidp.DataParallel(make() if world.rank == last else small_model(), world),
    )
    for part in ["Rank 0", f"rank {last} ({world.host})", *parts]:
        assert part.lower() in text.lower()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    "ours, theirs", [({"reducer": "flat"}, {"reducer": "naive"}), ({"bucket_bytes": 100}, {"bucket_bytes": 200})]
)
def test_different_options(world: mpidp.World, ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Behaviour 33."""
    options = theirs if world.rank == 1 else ours
    text = error_of_all(world, MismatchError, lambda: mpidp.DataParallel(small_model(), world, **options))
    for name, value in [*ours.items(), *theirs.items()]:
        assert f"{name}={value}" in text
    assert "rank 1 (" in text


@pytest.mark.mpi(min_size=2)
def test_thawed_on_one_rank_only(world: mpidp.World) -> None:
    """Behaviour 33: requires_grad toggled later, on all ranks but differently."""
    model = mpidp.DataParallel(with_frozen_layer(), world)
    model.module[2].bias.requires_grad_(True)
    model.module[0].bias.requires_grad_(world.rank == 0)
    text = error_of_all(world, MismatchError, lambda: model(torch.zeros(1, 5, dtype=torch.float64)))
    assert "0.bias" in text


@pytest.mark.parametrize("everywhere", [True, False])
def test_no_trainable_parameter(world: mpidp.World, everywhere: bool) -> None:
    """Behaviour 33: on all ranks, or on the last one only."""
    trainable = not everywhere and world.rank != world.size - 1
    text = error_of_all(world, MpidpError, lambda: mpidp.DataParallel(small_model().requires_grad_(trainable), world))
    assert "Sequential has no trainable parameter" in text


@pytest.mark.parametrize("layer", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_gradients_are_refused_by_name(world: mpidp.World, layer: Any) -> None:
    """Behaviour 15."""
    module = nn.ModuleDict({"tokens": layer(10, 4, sparse=True), "out": nn.Linear(4, 2)})
    text = error_of_all(world, MpidpError, lambda: mpidp.DataParallel(module, world))
    assert "tokens" in text and "sparse=False" in text


def test_wrong_device_is_refused_by_name(world: mpidp.World) -> None:
    module = small_model()
    module.register_parameter("lost", nn.Parameter(torch.empty(3, device="meta")))
    text = error_of_all(world, MpidpError, lambda: mpidp.DataParallel(module, world))
    for part in ("lost", "meta", str(world.device), ".to(world.device)"):
        assert part in text


def test_unknown_reducer(world: mpidp.World) -> None:
    text = error_of_all(world, LaunchError, lambda: mpidp.DataParallel(small_model(), world, reducer="ring"))
    assert "'ring'" in text
