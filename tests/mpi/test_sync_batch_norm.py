"""Batch norm over the samples of all ranks, against torch's on one process that holds them all."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from mpi_helpers import same_bits
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # the name every PyTorch program gives it
from torch.utils.checkpoint import checkpoint

import mpidp
from mpidp.errors import MismatchError
from mpidp.train.batch_norm import SyncBatchNorm, combine_statistics

ROWS, CHANNELS = 11, 3
CLOSE = {"rtol": 1e-10, "atol": 1e-12}
SHARES = ["first has none", "only first has any", "all have some"]
SPATIAL: list[tuple[int, ...]] = [(), (4,), (3, 2), (2, 3, 2)]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"momentum": None, "eps": 0.1},
    {"affine": False},
    {"track_running_stats": False, "momentum": 0.3},
]


def edges(world: mpidp.World, shares: str) -> list[int]:
    """Where each rank's rows begin and end."""
    if world.size == 1:
        return [0, ROWS]
    if shares == "first has none":
        return [0, *(ROWS * rank // (world.size - 1) for rank in range(world.size))]
    if shares == "only first has any":
        return [0, *([ROWS] * world.size)]
    return [*(rank * (rank + 1) // 2 for rank in range(world.size)), ROWS]


def mine(world: mpidp.World, shares: str) -> slice:
    return slice(*edges(world, shares)[world.rank : world.rank + 2])


def say(name: str) -> Callable[[str], str]:
    return lambda text: f"{name}: {text}"


def local_batch(world: mpidp.World, x: Tensor, y: Tensor, shares: str) -> mpidp.Batch:
    rows = mine(world, shares)
    return mpidp.Batch({"x": x[rows], "y": y[rows]}, np.arange(rows.start, rows.stop), ROWS, world)


def plain_layer(options: dict[str, Any]) -> nn.SyncBatchNorm:
    """Torch's own: without torch.distributed it is batch norm for any number of dimensions."""
    layer = nn.SyncBatchNorm(CHANNELS, **options).double()
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    return layer


def both(world: mpidp.World, plain: nn.Module) -> tuple[nn.Module, nn.Module]:
    return plain, SyncBatchNorm.convert(copy.deepcopy(plain), world)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("spatial", SPATIAL, ids=str)
@pytest.mark.parametrize("shares", SHARES)
def test_equals_one_process(world: mpidp.World, shares: str, spatial: tuple[int, ...], options: dict[str, Any]) -> None:
    """Behaviour 18: output, running statistics, gradients of inputs and parameters; twice, as momentum None counts."""
    torch.manual_seed(1)
    plain, synced = both(world, plain_layer(options))
    rows = mine(world, shares)
    for step in range(2):
        x = 100 * step + torch.randn(ROWS, CHANNELS, *spatial, dtype=torch.float64)
        weights = torch.randn_like(x)  # of a loss that is their sum over all ranks
        whole, part = x.clone().requires_grad_(), x[rows].clone().requires_grad_()
        outputs = plain(whole), synced(part)
        torch.testing.assert_close(outputs[1], outputs[0][rows], **CLOSE)
        (outputs[0] * weights).sum().backward()
        (outputs[1] * weights[rows]).sum().backward()
        assert whole.grad is not None
        torch.testing.assert_close(part.grad, whole.grad[rows], **CLOSE)
        for expected, found in zip(plain.parameters(), synced.parameters(), strict=True):
            assert expected.grad is not None and found.grad is not None
            summed = torch.tensor(world.sum(found.grad.tolist()), dtype=torch.float64)
            torch.testing.assert_close(summed, expected.grad, **CLOSE)
        for expected, found in zip(plain.buffers(), synced.buffers(), strict=True):
            torch.testing.assert_close(found, expected, **CLOSE)
    assert same_bits(world, synced.buffers())
    if plain.running_mean is not None:
        torch.testing.assert_close(synced.eval()(x[rows]), plain.eval()(x)[rows], **CLOSE)


class Convolutions(nn.Module):
    """Two layers of batch norm, so that one's statistics depend on what another one made of all ranks' samples."""

    def __init__(self, checkpoints: bool = False):
        super().__init__()
        torch.manual_seed(3)
        self.checkpoints = checkpoints
        self.first = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Tanh())
        self.second = nn.Sequential(nn.Conv2d(4, 5, 3, bias=False), nn.BatchNorm2d(5), nn.ReLU())
        self.last = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.BatchNorm1d(5), nn.Linear(5, 4))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for part in (self.first, self.second):
            x = checkpoint(part, x, use_reentrant=False) if self.checkpoints and self.training else part(x)
        output: Tensor = self.last(x)
        return output


def draw() -> tuple[Tensor, Tensor]:
    return torch.randn(ROWS, 2, 8, 8, dtype=torch.float64), torch.randint(4, (ROWS,))


def train(model: nn.Module, batches: Callable[[], tuple[Tensor, Tensor, Callable[[Tensor], Tensor]]]) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(3):
        x, y, weigh = batches()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        weigh(loss).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("overlap", [False, True], ids=["after", "overlap"])
@pytest.mark.parametrize("checkpoints", [False, True], ids=["", "checkpointing"])
@pytest.mark.parametrize("shares", SHARES)
def test_training_equals_one_process(world: mpidp.World, shares: str, checkpoints: bool, overlap: bool) -> None:
    """Behaviours 16 and 18: a net under DataParallel, its loss weighed; also where a layer's forward runs twice."""
    plain, synced = both(world, Convolutions(checkpoints))
    model = mpidp.DataParallel(synced, world, reducer="flat", bucket_bytes=400, overlap=overlap)
    torch.manual_seed(4)
    train(plain, lambda: (*draw(), lambda loss: loss))
    torch.manual_seed(4)

    def batches() -> tuple[Tensor, Tensor, Callable[[Tensor], Tensor]]:
        batch = local_batch(world, *draw(), shares)
        return batch.x, batch.y, batch.weigh

    train(model, batches)
    for (name, expected), found in zip(plain.state_dict().items(), model.state_dict().values(), strict=True):
        torch.testing.assert_close(
            found, expected, rtol=1e-9, atol=1e-11, msg=lambda text, name=name: f"{name}: {text}"
        )
    assert same_bits(world, model.state_dict().values())
    model.unwrap()


def test_samples_that_no_loss_counts(world: mpidp.World) -> None:
    """Behaviours 16 and 18: tokens to ignore have no loss, but their rank's samples moved the others' outputs."""
    plain, synced = both(world, Convolutions())
    model = mpidp.DataParallel(synced, world, reducer="flat")
    torch.manual_seed(5)
    x, y = draw()
    y[: edges(world, "all have some")[world.size - 1]] = -100  # all but those of the last rank
    F.cross_entropy(plain(x), y).backward()  # type: ignore[no-untyped-call]
    batch = local_batch(world, x, y, "all have some")
    batch.weigh(F.cross_entropy(model(batch.x), batch.y), int((batch.y != -100).sum())).backward()  # type: ignore[no-untyped-call]
    for (name, expected), found in zip(plain.named_parameters(), synced.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, **CLOSE, msg=say(name))
    model.unwrap()


@pytest.mark.mpi(min_size=2)  # one rank is torch's own, which sums up to narrow parameters less exactly
@pytest.mark.parametrize("parameters", [torch.float32, None], ids=["float32 parameters", "narrow parameters"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits(world: mpidp.World, dtype: torch.dtype, parameters: torch.dtype | None) -> None:
    """Behaviour 18: inputs of 16 bits, statistics and sums in float32: all is as exact as its dtype allows."""
    torch.manual_seed(6)
    synced = SyncBatchNorm.convert(nn.BatchNorm2d(CHANNELS, dtype=parameters or dtype), world)
    plain = nn.BatchNorm2d(CHANNELS)
    x, weights = ((3 + torch.randn(ROWS, CHANNELS, 4, 4)).to(dtype) for _ in range(2))
    rows = mine(world, "first has none")
    whole, part = x.float().requires_grad_(), x[rows].clone().requires_grad_()
    expected, found = plain(whole), synced(part)
    (expected * weights).sum().backward()
    (found * weights[rows]).sum().backward()
    unit = torch.finfo(dtype).eps
    narrow = parameters or dtype
    pairs = [(found.detach(), expected[rows].detach(), dtype), (part.grad, whole.grad[rows], dtype)]
    pairs += [(synced.get_buffer(name), plain.get_buffer(name), narrow) for name in ("running_mean", "running_var")]
    for one, other in zip(synced.parameters(), plain.parameters(), strict=True):
        assert one.grad is not None and one.grad.dtype == narrow
        pairs.append((torch.tensor(world.sum(one.grad.tolist())).to(narrow), other.grad, narrow))
    for one, other, kind in pairs:
        assert one.dtype == kind
        largest = float(other.abs().max()) if other.numel() else 0.0
        torch.testing.assert_close(one.float(), other, rtol=2 * unit, atol=2 * unit * largest)


@pytest.mark.parametrize("shares", SHARES)
def test_strides_of_channels_last(world: mpidp.World, shares: str) -> None:
    """Behaviour 18: output and gradient lie in memory as the input does."""
    _, synced = both(world, nn.BatchNorm2d(CHANNELS))
    x = torch.randn(ROWS, CHANNELS, 4, 5).to(memory_format=torch.channels_last)[mine(world, shares)].requires_grad_()
    output = synced(x)
    output.square().sum().backward()
    assert x.grad is not None
    for tensor in (output, x.grad):
        assert tensor.stride() == x.stride()


def test_mean_much_larger_than_deviation(world: mpidp.World) -> None:
    """Behaviour 18: in float32, where a mean of squares is exact to 1 only, and so would be the variance."""
    torch.manual_seed(7)
    plain, synced = both(world, nn.BatchNorm1d(CHANNELS))
    x = 4096 + torch.randn(64 * world.size, CHANNELS)
    unit = 4096 * torch.finfo(torch.float32).eps
    found, expected = synced(x[world.rank :: world.size]), plain(x)[world.rank :: world.size]
    torch.testing.assert_close(found, expected, rtol=0, atol=4 * unit)
    torch.testing.assert_close(synced.get_buffer("running_var"), plain.get_buffer("running_var"), rtol=1e-4, atol=0)


def test_one_value_on_all_ranks_together(world: mpidp.World) -> None:
    """Behaviour 18: torch's error, on every rank; two values on different ranks are enough."""
    layer = SyncBatchNorm.convert(nn.BatchNorm1d(CHANNELS), world)
    before = copy.deepcopy(layer.state_dict())
    rows = 1 if world.rank == world.size - 1 else 0
    with pytest.raises(ValueError, match="Expected more than 1 value per channel when training"):
        layer(torch.randn(rows, CHANNELS))
    if world.size > 1:
        assert all(torch.equal(before[name], value) for name, value in layer.state_dict().items())
        layer(torch.randn(1 if world.rank < 2 else 0, CHANNELS))


def test_no_sample_anywhere(world: mpidp.World) -> None:
    """Behaviour 18: as torch, which gives nothing back and learns nothing."""
    plain, synced = both(world, nn.BatchNorm1d(CHANNELS))
    assert synced(torch.empty(0, CHANNELS)).shape == plain(torch.empty(0, CHANNELS)).shape
    assert all(torch.equal(*pair) for pair in zip(plain.buffers(), synced.buffers(), strict=True))


def test_evaluation_communicates_nothing(world: mpidp.World) -> None:
    """Behaviour 18: one rank evaluates alone, through the wrapper and its gradients included."""
    plain, synced = both(world, Convolutions().eval())
    model = mpidp.DataParallel(synced, world)
    if world.rank == 0:
        found = []
        for net in (plain, model):
            x = torch.ones(ROWS, 2, 8, 8, dtype=torch.float64, requires_grad=True)
            found.append(torch.autograd.grad(net(x).square().sum(), x)[0])
        torch.testing.assert_close(*found, **CLOSE)
    world.barrier()
    model.unwrap()


def test_combining_statistics_leaves_them_alone(world: mpidp.World) -> None:
    """Behaviours 17 and 18: those of synchronised layers are equal; others' are combined as ever."""
    model = nn.Sequential(nn.BatchNorm1d(CHANNELS), nn.BatchNorm1d(CHANNELS))
    SyncBatchNorm.convert(model[0], world)
    torch.manual_seed(world.rank)
    model(torch.randn(world.rank + 2, CHANNELS))
    before = [buffer.clone() for buffer in model[0].buffers()]
    combine_statistics(model, world, world.rank + 2)
    assert all(torch.equal(*pair) for pair in zip(before, model[0].buffers(), strict=True))
    assert same_bits(world, model.buffers())


@pytest.mark.mpi(min_size=2)
def test_other_layers_on_one_rank(world: mpidp.World) -> None:
    """Behaviour 18: sums of different layers are never mixed; all ranks hear who went where."""
    model = SyncBatchNorm.convert(nn.ModuleDict({"a": nn.BatchNorm1d(2), "b": nn.BatchNorm1d(2)}), world)
    with pytest.raises(MismatchError, match=r"rank.? 0.* came to forward of batch norm layer a; rank 1 came to .* b"):
        model["b" if world.rank == 1 else "a"](torch.randn(4, 2))


@pytest.mark.mpi(min_size=2)
def test_different_layers_are_found_by_convert(world: mpidp.World) -> None:
    with pytest.raises(MismatchError, match="the batch norm layers differ between ranks"):
        SyncBatchNorm.convert(nn.Sequential(*[nn.BatchNorm1d(2) for _ in range(1 + (world.rank == 1))]), world)


@pytest.mark.mpi(min_size=2)
def test_different_numbers_of_micro_batches(world: mpidp.World) -> None:
    """Behaviour 18: no endless wait; all ranks raise what is wrong."""
    model = mpidp.DataParallel(SyncBatchNorm.convert(Convolutions(), world), world, reducer="flat", overlap=False)
    slices = 2 if world.rank == 1 else 1
    with pytest.raises(MismatchError, match=r"rank 1 came to a forward pass.* run the model equally often"):
        for _ in range(slices - 1):
            with model.no_sync():
                model(draw()[0]).sum().backward()
        model(draw()[0]).sum().backward()


@pytest.mark.parametrize("overlap", [False, True])
def test_equal_numbers_of_micro_batches(world: mpidp.World, overlap: bool) -> None:
    """Behaviours 13 and 18: as one process that takes the concatenated micro-batches one after the other."""
    plain, synced = both(world, Convolutions())
    model = mpidp.DataParallel(synced, world, reducer="flat", overlap=overlap)
    torch.manual_seed(8)
    for last in (False, True):
        x, y = draw()
        (F.cross_entropy(plain(x), y)).backward()  # type: ignore[no-untyped-call]
        batch = local_batch(world, x, y, "all have some")
        loss: Any = batch.weigh(F.cross_entropy(model(batch.x), batch.y))
        if last:
            loss.backward()
        else:
            with model.no_sync():
                loss.backward()
    for expected, found in zip(plain.parameters(), synced.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, **CLOSE)
    model.unwrap()
