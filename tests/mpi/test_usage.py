"""Models and loops as people write them: every gradient must be the one of plain torch on the whole batch."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from mpi_helpers import CountedMean, batch, gradients, same_bits, share, small_model
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # the name every PyTorch program gives it
from torch.utils.checkpoint import checkpoint

import mpidp
from mpidp.errors import MpidpError


class Chain(nn.Module):
    """Three square layers, the middle one called in a way that tests choose."""

    def __init__(self, call: Callable[[nn.Module, Tensor], Tensor] = lambda layer, x: layer(x)) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.last = (nn.Linear(5, 5).double() for _ in range(3))
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.call(self.middle, self.call(self.first, x).tanh()).tanh())


def wrap(world: mpidp.World, module: nn.Module, overlap: bool) -> mpidp.DataParallel:
    return mpidp.DataParallel(module, world, reducer="flat", bucket_bytes=300, overlap=overlap)


def assert_like_plain(world: mpidp.World, make: Callable[[], nn.Module], loss_of: Callable[..., Tensor]) -> None:
    """Steps of `loss_of(model, x, y)` give the gradients of plain torch on the whole batch, by one reduction each."""
    for overlap in (False, True):
        assert_steps(world, make(), wrap(world, make(), overlap), loss_of)


def assert_steps(
    world: mpidp.World, plain: nn.Module, model: mpidp.DataParallel, loss_of: Callable[..., Tensor]
) -> None:
    counted = CountedMean(model)
    for step in range(2):
        whole = batch(step, outputs=5)
        plain.zero_grad()
        model.zero_grad()
        loss_of(plain, *whole).backward()  # type: ignore[no-untyped-call]
        loss_of(model, *(share(world, part) for part in whole)).backward()  # type: ignore[no-untyped-call]
        found = gradients(model)
        for name, expected in gradients(plain).items():
            torch.testing.assert_close(found[name], expected, rtol=1e-10, atol=1e-13)
        assert counted.calls == (step + 1) * len(model.buckets.buckets)


def squared_error(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x), y)


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("what", ["layers", "whole model"])
def test_activation_checkpointing(world: mpidp.World, what: str, use_reentrant: bool) -> None:
    """Behaviour 15: both kinds, and still one reduction a step (11)."""

    def call(module: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(module, x, use_reentrant=use_reentrant)

    def whole(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(call(model, x.clone().requires_grad_()), y)

    if what == "layers":
        assert_like_plain(world, lambda: Chain(call), lambda model, x, y: squared_error(model, x.requires_grad_(), y))
    else:
        assert_like_plain(world, Chain, whole)


def test_tied_weights(world: mpidp.World) -> None:
    """Behaviour 15."""

    def make() -> nn.Module:
        chain = Chain()
        chain.last.weight = chain.first.weight
        return chain

    assert_like_plain(world, make, squared_error)


def test_frozen_parameters(world: mpidp.World) -> None:
    """Behaviour 15: they get no gradient and no room in a bucket."""

    def make() -> nn.Module:
        chain = Chain()
        chain.middle.requires_grad_(False)
        return chain

    assert_like_plain(world, make, squared_error)
    model = mpidp.DataParallel(make(), world, reducer="flat")
    assert len(model.buckets.parameters) == 4


def test_compiled_module(world: mpidp.World) -> None:
    """Behaviour 15: compiled before wrapping; the backend that needs no compiler."""
    compiled: list[Any] = []

    def make() -> nn.Module:
        compiled.append(torch.compile(Chain(), backend="eager") if compiled else Chain())
        return compiled[-1]

    plain, model = make(), mpidp.DataParallel(make(), world)
    x, y = batch(0, outputs=5)
    squared_error(plain, x, y).backward()  # type: ignore[no-untyped-call]
    squared_error(model, share(world, x), share(world, y)).backward()  # type: ignore[no-untyped-call]
    for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad)


@pytest.mark.filterwarnings("ignore:Complex modules")
def test_complex_parameters(world: mpidp.World) -> None:
    """Behaviour 15."""

    def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return (model(x.to(torch.complex128)) - y).abs().square().mean()

    assert_like_plain(world, lambda: Chain().to(torch.complex128), loss_of)


def test_two_forwards_before_one_backward(world: mpidp.World) -> None:
    """Behaviour 17."""
    assert_like_plain(world, Chain, lambda model, x, y: F.mse_loss(model(x), y) + model(-x).square().mean())


def test_output_in_a_dictionary_and_frozen_input_branch(world: mpidp.World) -> None:
    class Named(Chain):
        def forward(self, x: Tensor) -> Any:
            return {"scores": [super().forward(x)], "shape": x.shape, "first": self.first.bias}

    def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        output = model(x)
        return F.mse_loss(output["scores"][0], y) + output["first"].sum()

    assert_like_plain(world, Named, loss_of)


def test_gradient_penalty(world: mpidp.World) -> None:
    """Behaviour 15: torch.autograd.grad with create_graph before backward, which reduces nothing itself."""

    def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        output = model(x)
        (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        return F.mse_loss(output, y) + (slope.norm(dim=1) - 1).square().mean()

    assert_like_plain(world, Chain, loss_of)


def test_autograd_grad_on_one_rank_disturbs_nobody(world: mpidp.World) -> None:
    """Behaviour 14: it returns local gradients, and neither touches p.grad nor waits for others."""
    model = mpidp.DataParallel(Chain(), world)
    plain = copy.deepcopy(model.module)
    x, y = batch(0, outputs=5)
    if world.rank == 0:
        ours = torch.autograd.grad(squared_error(model, x, y), list(model.parameters()))
        expected = torch.autograd.grad(squared_error(plain, x, y), list(plain.parameters()))
        assert all(torch.equal(*pair) for pair in zip(ours, expected, strict=True))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_thawed_parameters_are_taken_in(world: mpidp.World) -> None:
    """Behaviour 15: requires_grad set later, as in fine-tuning, and taken back again."""
    model = mpidp.DataParallel(Chain(), world)
    model.module.first.requires_grad_(False)
    plain = copy.deepcopy(model.module)
    frozen = mpidp.DataParallel(copy.deepcopy(model.module), world)
    for trainable in (False, True, True, False):
        x, y = batch(1, outputs=5)
        for module in (plain, model.module, frozen.module):
            module.first.requires_grad_(trainable)
            module.zero_grad()
        squared_error(plain, x, y).backward()  # type: ignore[no-untyped-call]
        for wrapped in (model, frozen):  # one that started thawed, one that started frozen
            squared_error(wrapped, share(world, x), share(world, y)).backward()  # type: ignore[no-untyped-call]
            for name, expected in gradients(plain).items():
                torch.testing.assert_close(gradients(wrapped)[name], expected, rtol=1e-10, atol=1e-13)


def test_two_optimizers_for_one_model(world: mpidp.World) -> None:
    """Behaviour 15: with an accumulation that the first of them finds not reduced yet."""
    plain, model = Chain(), mpidp.DataParallel(Chain(), world)
    for each in (plain, model):
        inner = each.module if isinstance(each, mpidp.DataParallel) else each
        head = torch.optim.SGD(inner.last.parameters(), lr=0.1)
        body = torch.optim.AdamW([*inner.first.parameters(), *inner.middle.parameters()], lr=0.01)
        for step in range(3):
            x, y = batch(step, outputs=5)
            if each is plain:
                squared_error(plain, x, y).backward()  # type: ignore[no-untyped-call]
            else:
                with model.no_sync():
                    squared_error(model, share(world, x), share(world, y)).backward()  # type: ignore[no-untyped-call]
            head.step()
            body.step()
            each.zero_grad()
    for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-13)
    assert same_bits(world, model.parameters())


def test_two_models_in_the_manner_of_gans(world: mpidp.World) -> None:
    """Behaviour 15: the generator's loss runs backward through both wrappers."""

    def train(generator: nn.Module, critic: nn.Module, mine: Callable[[Tensor], Tensor]) -> None:
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (generator, critic)]
        for step in range(3):
            noise, real = (mine(part) for part in batch(step, outputs=5))
            critic.zero_grad()
            (critic(generator(noise).detach()).mean() - critic(real).square().mean()).backward()  # type: ignore
            optimizers[1].step()
            generator.zero_grad()
            critic(generator(noise)).square().mean().backward()  # type: ignore[no-untyped-call]
            optimizers[0].step()

    plain = [Chain(), small_model()]
    wrapped = [mpidp.DataParallel(copy.deepcopy(each), world) for each in plain]
    train(*plain, mine=lambda rows: rows)
    train(*wrapped, mine=lambda rows: share(world, rows))
    for model, reference in zip(wrapped, plain, strict=True):
        for found, expected in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-13)
        assert same_bits(world, model.parameters())


def test_a_wrapper_around_a_wrapper_is_refused(world: mpidp.World) -> None:
    """Behaviour 51: gradients would be reduced twice."""
    model = mpidp.DataParallel(small_model(), world, quiet=True)
    for inner in (model, nn.Sequential(model)):
        with pytest.raises(MpidpError, match="is wrapped in mpidp's DataParallel already"):
            mpidp.DataParallel(inner, world, quiet=True)
    mpidp.DataParallel(model.unwrap(), world, quiet=True).unwrap()
