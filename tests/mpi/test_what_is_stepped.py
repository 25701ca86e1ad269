"""Habits of scripts that move, replace or set gradients and layers: stepped as in one process, or refused by name."""

import copy
import gc
import io
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from mpi_helpers import batch, same_bits, share, small_model
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # the name every PyTorch program gives it

import mpidp
from mpidp.errors import MpidpError
from mpidp.train import gradient_sync as step_watch

WAYS = [("naive", False), ("flat", False), ("flat", True), ("node", False), ("node", True), ("staged", True)]
ways = pytest.mark.parametrize("reducer, overlap", WAYS)
Change = Callable[[nn.Module], None]


def wrap(world: mpidp.World, module: nn.Module, reducer: str = "flat", overlap: bool = False) -> mpidp.DataParallel:
    return mpidp.DataParallel(module, world, reducer=reducer, overlap=overlap, bucket_bytes=200)


def assert_same_steps(
    world: mpidp.World,
    reducer: str,
    overlap: bool,
    make: Callable[[], nn.Module],
    train: Callable[[nn.Module, Callable[[Tensor], Tensor]], None],
) -> None:
    """`train(model, mine)` leaves all ranks with the parameters that plain torch has on all rows."""
    plain, model = make(), wrap(world, make(), reducer, overlap)
    train(plain, lambda rows: rows)
    train(model, lambda rows: share(world, rows))
    for (name, found), (_, expected) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-13, msg=lambda text: f"{name}: {text}")  # noqa: B023
    assert same_bits(world, model.parameters())
    model.unwrap()


def conv_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Unflatten(1, (1, 5, 1)), nn.Conv2d(1, 4, (3, 1)), nn.Flatten(), nn.Linear(12, 3)).double()


def clip_by_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.data = parameter.grad.data.clamp(-0.05, 0.05)


def clip_by_assignment(model: nn.Module) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad = parameter.grad.clamp(-0.05, 0.05)


def to_channels_last(model: nn.Module) -> None:
    model.to(memory_format=torch.channels_last)


@ways
@pytest.mark.parametrize("change", [clip_by_data, clip_by_assignment, to_channels_last])
def test_gradients_moved_after_backward(world: mpidp.World, change: Change, reducer: str, overlap: bool) -> None:
    """Behaviour 51: in every second step, so that the buckets are met again."""

    def train(model: nn.Module, mine: Callable[[Tensor], Tensor]) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(6):
            x, y = (mine(part) for part in batch(step))
            F.mse_loss(model(x), y).backward()
            if step % 2 == 0:
                change(model)
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 3 == 0)

    assert_same_steps(world, reducer, overlap, conv_net, train)


@ways
@pytest.mark.parametrize("synchronizes", [False, True])
def test_gradients_of_torch_func(world: mpidp.World, reducer: str, overlap: bool, synchronizes: bool) -> None:
    """Behaviour 51: no backward pass brings them; they are reduced before the step, or by synchronize()."""

    def train(model: nn.Module, mine: Callable[[Tensor], Tensor]) -> None:
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        plain = model.module if isinstance(model, mpidp.DataParallel) else model

        def loss(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            return F.mse_loss(torch.func.functional_call(plain, parameters, (x,)), y)  # type: ignore[arg-type]

        for step in range(4):
            parameters = dict(plain.named_parameters())
            gradients = torch.func.grad(loss)(
                {name: parameter.detach() for name, parameter in parameters.items()},
                *(mine(part) for part in batch(step)),
            )
            for name, parameter in parameters.items():
                if step == 3:  # into the memory of the step before
                    assert parameter.grad is not None
                    parameter.grad.copy_(gradients[name])
                else:
                    parameter.grad = gradients[name]
            if synchronizes and isinstance(model, mpidp.DataParallel):
                model.synchronize()
            optimizer.step()

    assert_same_steps(world, reducer, overlap, small_model, train)


@ways
@pytest.mark.parametrize("is_training", [True, False])
def test_layers_unfrozen_later(world: mpidp.World, reducer: str, overlap: bool, is_training: bool) -> None:
    """Behaviours 15 and 51: also in eval mode, as for fine-tuning with frozen batch norm; aliases stay valid."""

    def make() -> nn.Module:
        model = nn.Sequential(small_model(), nn.BatchNorm1d(3), nn.Linear(3, 3)).double()
        model[0].requires_grad_(False)
        return model

    def train(model: nn.Module, mine: Callable[[Tensor], Tensor]) -> None:
        model.train(is_training)
        if is_training:
            next(layer for layer in model.modules() if isinstance(layer, nn.BatchNorm1d)).eval()
        kept: list[tuple[Tensor, Tensor]] = []
        for step in range(4):
            if step == 2:
                model.requires_grad_(True)
            optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
            x, y = (mine(part) for part in batch(step))
            F.mse_loss(model(x), y).backward()
            kept += [(p.grad.detach(), p.grad.clone()) for p in model.parameters() if p.grad is not None and step == 1]
            optimizer.step()
        assert all(torch.isfinite(alias).all() for alias, _ in kept), "the memory of former buckets is there"

    assert_same_steps(world, reducer, overlap, make, train)


@ways
def test_a_gradient_outlives_the_wrapper(world: mpidp.World, reducer: str, overlap: bool) -> None:
    """Behaviour 51: memory that ranks share stays as long as somebody looks into it."""
    model = wrap(world, small_model(), reducer, overlap)
    model(share(world, batch(0)[0])).sum().backward()
    kept = [p.grad.detach() for p in model.parameters() if p.grad is not None]
    values = [gradient.clone() for gradient in kept]
    model.unwrap()
    del model
    assert all(map(torch.equal, kept, values))


def add_layer(model: nn.Module) -> None:
    model.append(nn.Linear(3, 3).double())  # type: ignore[operator]


def replace_layer(model: nn.Module) -> None:
    model[2] = nn.Linear(7, 3).double()  # type: ignore[index]


def parametrize(model: nn.Module) -> None:
    torch.nn.utils.parametrizations.weight_norm(model[2])  # type: ignore[index]


def assign_state(model: nn.Module) -> None:
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("change", [add_layer, replace_layer, parametrize, assign_state])
def test_parameters_that_came_after_wrapping(world: mpidp.World, change: Change, overlap: bool) -> None:
    """Behaviour 51: before the first step of an optimizer that holds them, on every rank, and with the way out."""
    model = wrap(world, small_model(), overlap=overlap)
    torch.manual_seed(1)
    change(model.module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = (share(world, part) for part in batch(0))
    F.mse_loss(model(x), y).backward()
    with pytest.raises(MpidpError, match=r"whose gradients are not reduced.*DataParallel\(model.unwrap\(\), world\)"):
        optimizer.step()
    model = wrap(world, model.unwrap(), overlap=overlap)  # as it says
    optimizer.zero_grad()
    F.mse_loss(model(x), y).backward()
    optimizer.step()
    assert same_bits(world, model.parameters())
    model.unwrap()


@pytest.mark.parametrize("position", [False, True])
def test_assigning_a_state_to_the_wrapper(world: mpidp.World, position: bool) -> None:
    """Behaviour 51."""
    model = wrap(world, small_model())
    with pytest.raises(MpidpError, match="assign=True"):
        if position:
            model.load_state_dict(model.state_dict(), True, True)
        else:
            model.load_state_dict(model.state_dict(), assign=True)
    model.unwrap()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("overlap", [False, True])
def test_an_optimizer_that_steps_in_backward(world: mpidp.World, overlap: bool) -> None:
    """Behaviour 51: torch's recipe to save memory steps each rank's own gradient."""
    model = wrap(world, small_model(), overlap=overlap)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for parameter in model.parameters():
        own = torch.optim.SGD([parameter], lr=0.1)
        parameter.register_post_accumulate_grad_hook(lambda _, own=own: own.step())
    with pytest.raises(MpidpError, match=r"inside backward\(\)"):
        model(share(world, batch(0)[0])).sum().backward()
    assert all(map(torch.equal, before, model.parameters()))


@pytest.mark.mpi(min_size=2)
def test_batch_norm_of_torch_distributed(world: mpidp.World) -> None:
    """Behaviour 18: it would act on each rank alone."""
    module = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(small_model(), nn.BatchNorm1d(3)))
    with pytest.raises(MpidpError, match=r"layer 1 is torch.nn.SyncBatchNorm.*mpidp.SyncBatchNorm.convert"):
        wrap(world, module)


def read_back(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert isinstance(loaded, nn.Module)
    return loaded


@ways
@pytest.mark.parametrize("duplicate", [copy.deepcopy, read_back])
def test_a_copy_reduces_nothing(
    world: mpidp.World, duplicate: Callable[[nn.Module], nn.Module], reducer: str, overlap: bool
) -> None:
    """Behaviour 51: it is the plain module, with the values of that moment, and one rank may train it alone."""
    model = wrap(world, small_model(), reducer, overlap)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = (share(world, part) for part in batch(0))
    F.mse_loss(model(x), y).backward()
    optimizer.step()
    best = duplicate(model)
    assert type(best) is nn.Sequential
    assert all(map(torch.equal, best.parameters(), model.parameters()))
    if world.rank == world.size - 1:
        F.mse_loss(best(x), y).backward()
        torch.optim.SGD(best.parameters(), lr=0.1).step()
    F.mse_loss(model(x), y).backward()
    optimizer.step()
    assert same_bits(world, model.parameters())
    model.unwrap()


def test_an_average_of_the_parameters(world: mpidp.World) -> None:
    """Behaviour 51: torch's AveragedModel takes the wrapper, and all ranks hold the same average."""
    model = wrap(world, small_model())
    average = torch.optim.swa_utils.AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        x, y = (share(world, part) for part in batch(step))
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
    assert same_bits(world, average.parameters())
    assert not any(map(torch.equal, average.parameters(), model.parameters()))
    model.unwrap()


@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
def test_lbfgs_on_each_ranks_own_loss(world: mpidp.World, line_search: str | None) -> None:
    """Behaviours 7 and 52: the closure's loss becomes the mean over ranks, by which all search alike."""

    def train(model: nn.Module, mine: Callable[[Tensor], Tensor]) -> None:
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, line_search_fn=line_search)
        x, y = (mine(part) for part in batch(0))

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            return loss

        for _ in range(4):
            optimizer.step(closure)

    plain, model = small_model(), wrap(world, small_model())
    train(plain, lambda rows: rows)
    train(model, lambda rows: share(world, rows))
    assert same_bits(world, model.parameters())
    for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)
    model.unwrap()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_a_scaler_looks_at_reduced_gradients(world: mpidp.World, overlap: bool, fused: bool) -> None:
    """Behaviours 11 and 13: an accumulation cut short, infinite on one rank: all skip the step and halve the scale."""
    model = wrap(world, small_model(dtype=torch.float32), overlap=overlap)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(3):
        before = [parameter.detach().clone() for parameter in model.parameters()]
        x, y = (share(world, part) for part in batch(step, dtype=torch.float32))
        if step == 1 and world.rank == world.size - 1:
            x = x * float("inf")
        with model.no_sync():
            scaler.scale(F.mse_loss(model(x), y)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert all(map(torch.equal, before, model.parameters())) == (step == 1)
        assert scaler.get_scale() == (8.0 if step == 0 else 4.0)
    assert same_bits(world, model.parameters())
    model.unwrap()


@pytest.mark.mpi(min_size=2)
def test_clipping_before_the_reduction(world: mpidp.World) -> None:
    """Behaviour 11: each rank would clip its own part of the sum; refused on every rank."""
    model = wrap(world, small_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.no_sync():
        model(share(world, batch(0)[0])).sum().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    with pytest.raises(MpidpError, match=r"model.synchronize\(\)"):
        optimizer.step()


@pytest.fixture
def normalised(world: mpidp.World) -> Iterator[mpidp.DataParallel]:
    model = mpidp.DataParallel(nn.BatchNorm1d(2, momentum=1.0).double(), world, reducer="flat")
    yield model
    model.unwrap()


def test_statistics_in_a_loop_of_ones_own(
    world: mpidp.World, normalised: mpidp.DataParallel, caplog: pytest.LogCaptureFixture
) -> None:
    """Behaviour 17: weighted by what each rank has trained on, and said where they are read before."""
    rows = torch.arange(2.0 * sum(range(1, world.size + 1)), dtype=torch.float64).view(-1, 2)
    own = torch.split(rows, list(range(1, world.size + 1)))[world.rank]
    normalised(own + own if len(own) > 1 else torch.cat([own, own])).sum().backward()
    normalised.state_dict()
    assert ("call model.combine_statistics()" in caplog.text) == (world.size > 1 and world.rank == 0)
    normalised.combine_statistics()
    held = normalised.state_dict()["running_mean"]
    parts = [torch.split(rows, list(range(1, world.size + 1)))[rank] for rank in range(world.size)]
    seen = torch.cat([part + part if len(part) > 1 else torch.cat([part, part]) for part in parts])
    torch.testing.assert_close(held, seen.mean(0))
    assert same_bits(world, normalised.state_dict().values())


def test_two_models_count_the_same_steps(world: mpidp.World) -> None:
    """Behaviour 32: the step in messages is that of the loop, not of all optimizers together."""
    models = [wrap(world, small_model()), wrap(world, small_model(1))]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    before = world.status.step
    for step in range(3):
        outputs = [model(share(world, batch(step)[0])) for model in models]
        for output, optimizer in zip(outputs, optimizers, strict=True):
            output.square().mean().backward()
            optimizer.step()
    assert world.status.step == before + 3
    for model in models:
        model.unwrap()


@pytest.mark.parametrize("reducer, overlap", [("node", False), ("node", True), ("staged", False)])
def test_a_wrapper_that_is_dropped(world: mpidp.World, reducer: str, overlap: bool) -> None:
    """Behaviour 22: its hooks and the memory it shared go with it, and the module trains on as a plain one."""

    def shared_maps() -> int:
        return Path("/proc/self/maps").read_text().count("memfd:mpidp")

    gc.collect()
    maps, listeners = shared_maps(), len(step_watch._living())
    module = small_model()
    model = wrap(world, module, reducer, overlap)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = (share(world, part) for part in batch(0))
    F.mse_loss(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
    del model
    gc.collect()
    assert (shared_maps(), len(step_watch._living())) == (maps, listeners)
    if world.rank == 0:
        F.mse_loss(module(x), y).backward()
        optimizer.step()
