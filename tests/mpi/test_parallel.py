"""`DataParallel` around a model: what it leaves as it was, and what all ranks hold afterwards."""

import copy
import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI
from mpi_helpers import SUMMING, batch, gradients, same_bits, share, small_model
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # the name every PyTorch program gives it

import mpidp
from mpidp.models.cnn import cnn

WAYS = ["auto", *SUMMING]
OPTIMIZERS: dict[str, Any] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "NAdam": lambda parameters: torch.optim.NAdam(parameters, lr=0.01),
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.01),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.01),
    "Adadelta": lambda parameters: torch.optim.Adadelta(parameters),
    "LBFGS": lambda parameters: torch.optim.LBFGS(parameters, max_iter=3),
}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, world: mpidp.World | None, steps: int) -> None:
    """Some steps; on a rank's share of each batch, or without `world` on the whole batches."""
    for step in range(steps):
        x, y = batch(step) if world is None else (share(world, part) for part in batch(step))

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        optimizer.step(closure)


@pytest.mark.parametrize("reducer", WAYS)
def test_one_rank_is_plain_torch_bit_for_bit(world: mpidp.World, reducer: str) -> None:
    """Behaviour 6."""
    if world.size > 1:
        pytest.skip("about one rank")
    torch.manual_seed(1)
    plain = cnn(channels=2, width=4)
    wrapped = mpidp.DataParallel(copy.deepcopy(plain), world, reducer=reducer, bucket_bytes=4000)
    x, y = torch.randn(6, 2, 8, 8), torch.arange(6)
    for model in (plain, wrapped):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for _ in range(5):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    for name, parameter in plain.named_parameters():
        other = wrapped.module.get_parameter(name)
        assert torch.equal(parameter, other)
        assert parameter.grad is not None and other.grad is not None and torch.equal(parameter.grad, other.grad)


@pytest.mark.parametrize(
    "name, reducer", [*((name, "auto") for name in OPTIMIZERS), *(("SGD", reducer) for reducer in SUMMING)]
)
def test_steps_equal_those_of_one_process(world: mpidp.World, name: str, reducer: str) -> None:
    """Behaviours 7 and 8: to 1e-10 in float64, and bit-identical on all ranks. LBFGS sees the local loss."""
    plain = small_model()
    model = mpidp.DataParallel(small_model(), world, reducer=reducer, bucket_bytes=100)
    train(plain, OPTIMIZERS[name](plain.parameters()), None, 6)
    train(model, OPTIMIZERS[name](model.parameters()), world, 6)
    for expected, found in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    assert same_bits(world, model.parameters())


def test_start_is_that_of_rank_0(world: mpidp.World) -> None:
    """Behaviours 8 and 17: parameters and buffers of any dtype, shape and layout, bit for bit."""
    torch.manual_seed(world.rank)
    module = small_model(seed=world.rank)
    module.register_buffer("flag", torch.tensor(world.rank > 0))
    module.register_buffer("count", torch.tensor([world.rank, 7]))
    module.register_buffer("empty", torch.empty(0, 3))
    module.register_buffer("two_bytes", torch.full((3,), float(world.rank), dtype=torch.bfloat16))
    module.register_buffer("pairs", torch.full((2, 2), complex(world.rank, 1)).t())
    module.register_parameter("scalar", nn.Parameter(torch.tensor(float(world.rank))))
    module.register_parameter("images", nn.Parameter(torch.rand(2, 3, 4, 4).to(memory_format=torch.channels_last)))
    model = mpidp.DataParallel(module, world)
    expected = small_model(seed=0)
    assert all(torch.equal(module.get_parameter(name), value) for name, value in expected.named_parameters())
    assert module.get_buffer("flag").item() is False
    assert module.get_buffer("count").tolist() == [0, 7]
    assert module.get_buffer("two_bytes").tolist() == [0, 0, 0]
    assert same_bits(world, [*model.parameters(), *model.buffers()])


def test_traffic_does_not_mix_with_the_users(world: mpidp.World) -> None:
    """Behaviour 9: messages of any tag and collectives, open during backward, on COMM_WORLD."""
    comm = MPI.COMM_WORLD
    model = mpidp.DataParallel(small_model(), world)
    received = [np.zeros(4) for _ in range(world.size)]
    requests = [comm.Irecv(buffer, MPI.ANY_SOURCE, MPI.ANY_TAG) for buffer in received]
    total = np.zeros(3)
    collective = comm.Iallreduce(np.full(3, float(world.rank)), total)
    x, y = (share(world, part) for part in batch(3))
    F.mse_loss(model(x), y).backward()  # type: ignore[no-untyped-call]
    found = gradients(model)
    for target in range(world.size):
        comm.Send(np.full(4, float(world.rank)), target, tag=17 * world.rank)
    assert comm.allreduce(1) == world.size
    MPI.Request.Waitall([*requests, collective])
    assert sorted(buffer[0] for buffer in received) == list(range(world.size))
    assert total.tolist() == [sum(range(world.size))] * 3
    plain = small_model()
    x, y = batch(3)
    F.mse_loss(plain(x), y).backward()  # type: ignore[no-untyped-call]
    for name, gradient in gradients(plain).items():
        torch.testing.assert_close(found[name], gradient)


def test_optimizer_state_survives_wrapping_and_states_are_plain(world: mpidp.World) -> None:
    """Behaviour 20."""
    module = small_model()
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    train(module, optimizer, None, 2)
    plain, plain_optimizer = copy.deepcopy(module), torch.optim.Adam(module.parameters())
    model = mpidp.DataParallel(module, world)
    assert [id(parameter) for parameter in model.parameters()] == [id(p) for p in optimizer.param_groups[0]["params"]]
    train(model, optimizer, world, 2)
    assert {int(state["step"]) for state in optimizer.state.values()} == {4}
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
    plain.load_state_dict(model.state_dict())
    plain_optimizer.load_state_dict(optimizer.state_dict())
    assert all(torch.equal(*pair) for pair in zip(plain.parameters(), model.parameters(), strict=True))
    model.load_state_dict(small_model(seed=5).state_dict())
    assert torch.equal(module.get_parameter("0.weight"), small_model(seed=5).get_parameter("0.weight"))


def test_unwrapped_module_is_clean(world: mpidp.World) -> None:
    """Behaviour 22: gradients are local again, an optimizer's step sends nothing, nothing of the wrapper is left."""
    module = small_model()
    model = mpidp.DataParallel(module, world)
    x, y = batch(world.rank)
    with model.no_sync():  # leaves gradients that are not reduced: stepping must not reduce them any more
        F.mse_loss(model(x), y).backward()  # type: ignore[no-untyped-call]
    assert model.unwrap() is module
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    if world.rank == 0:
        optimizer.step()  # would wait for the others
    module.zero_grad()
    plain = copy.deepcopy(module)
    for each in (module, plain):
        F.mse_loss(each(x), y).backward()  # type: ignore[no-untyped-call]
    for ours, other in zip(module.parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None and other.grad is not None and torch.equal(ours.grad, other.grad)
        assert ours.grad.untyped_storage().nbytes() == ours.grad.nbytes
    assert type(module) is nn.Sequential


class Remembering(nn.Module):
    """Keeps its last output, as models do to look at it later."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = small_model()
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.last = self.inner(x)
        return self.last


@pytest.mark.parametrize("make", [small_model, Remembering])
@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_dropped_model_is_collected(world: mpidp.World, make: Any, steps: int, overlap: bool) -> None:
    """Behaviour 22: neither autograd's graph, the optimizer hook nor a thread keeps wrapper, module or buffers."""
    module = make()
    model = mpidp.DataParallel(module, world, reducer="flat", overlap=overlap)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), world, steps)
    dead = [weakref.ref(model), weakref.ref(module), weakref.ref(model.buckets)]
    del model, module
    gc.collect()
    assert [reference() for reference in dead] == [None, None, None]
