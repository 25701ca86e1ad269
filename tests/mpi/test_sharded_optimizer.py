"""An optimizer whose state is in shards: the steps of the plain one, a share of the memory (behaviour 21)."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from mpi_helpers import batch, same_bits, share, small_model
from torch import Tensor, nn

import mpidp
from mpidp.errors import LaunchError, MismatchError, MpidpError
from mpidp.train import sharded_optimizer as optimizer_module
from mpidp.train.sharded_gather import Gather, Messages, collect, make_channel
from mpidp.train.sharded_optimizer import ShardedOptimizer
from mpidp.train.sharded_state import ELEMENTWISE, RANKS, Run, SavedPart, cut, shards
from mpidp.train.state import optimizer_rank_state, optimizer_shared_state, restore_optimizer

OPTIONS: dict[str, list[dict[str, Any]]] = {
    "SGD": [{"momentum": 0.9, "nesterov": True}],
    "Adam": [{"amsgrad": True}, {"foreach": True}],
    "AdamW": [{}, {"fused": True}],
    "RMSprop": [{"momentum": 0.5, "centered": True}],
}
CASES = [(name, options) for name in ELEMENTWISE for options in OPTIONS.get(name, [{}])]


def conv_net(seed: int = 0) -> nn.Module:
    """Parameters of many sizes, laid out as channels_last, one without dimensions, one unused, one frozen."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 50))
    model.register_parameter("scale", nn.Parameter(torch.tensor(1.5)))
    model.register_parameter("unused", nn.Parameter(torch.randn(70)))
    model.register_parameter("frozen", nn.Parameter(torch.randn(7), requires_grad=False))
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def make(name: str, model: nn.Module, options: dict[str, Any]) -> torch.optim.Optimizer:
    """Two groups, the second with a rate of its own."""
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1]},
        {"params": [p for p in model.parameters() if p.dim() <= 1], "lr": 0.02},
    ]
    kind: Any = getattr(torch.optim, name)
    optimizer: torch.optim.Optimizer = kind(groups, lr=0.01, **options)
    return optimizer


def backward(model: nn.Module, step: int) -> None:
    """The same gradients on every rank, as DataParallel leaves them."""
    x = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(step))
    (model(x).square().mean() * model.get_parameter("scale")).backward()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, first: int = 0) -> None:
    for step in range(first, first + steps):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    """States of plain optimizers, bit for bit, strides included."""
    assert one["param_groups"] == other["param_groups"]
    assert one["state"].keys() == other["state"].keys()
    for number, state in one["state"].items():
        assert state.keys() == other["state"][number].keys()
        for name, value in state.items():
            found = other["state"][number][name]
            if isinstance(value, Tensor):
                assert torch.equal(value, found), (number, name)
                assert (value.dtype, value.stride()) == (found.dtype, found.stride())
            else:
                assert value == found, (number, name)


@pytest.mark.mpi
@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize(("name", "options"), CASES)
def test_steps_are_those_of_the_plain_optimizer(
    world: mpidp.World, name: str, options: dict[str, Any], copies: int
) -> None:
    """Bit for bit, a scheduler included; and so is the state, put together."""
    models = conv_net(), conv_net()
    plain = make(name, models[0], options)
    sharded = ShardedOptimizer(make(name, models[1], options), world, copies=copies)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9) for optimizer in (plain, sharded)]
    for step in range(4):
        for model, optimizer in zip(models, (plain, sharded), strict=True):
            train(model, optimizer, 1, step)
        for scheduler in schedulers:
            scheduler.step()
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(one, other)
    full = sharded.full_state_dict(rank=world.size - 1)
    if world.rank == world.size - 1:
        assert_same(plain.state_dict(), full)
    else:
        assert full == {}
    sharded.close()


@pytest.mark.mpi
@pytest.mark.parametrize("copies", [1, 2])
def test_each_rank_keeps_its_share(world: mpidp.World, copies: int) -> None:
    """Of 84,000 numbers each, to within the block of 64 elements at which parameters are cut."""
    model = nn.Sequential(nn.Linear(200, 200), nn.Linear(200, 200), nn.Linear(200, 10))
    sharded = ShardedOptimizer(torch.optim.Adam(model.parameters()), world, copies=copies)
    model(torch.ones(2, 200)).sum().backward()
    sharded.step()
    held = [value for state in sharded.inner.state.values() for value in state.values() if value.dim()]
    numel = 2 * sum(parameter.numel() for parameter in model.parameters())
    share = numel * min(1.0, copies / world.size)
    assert abs(sum(value.numel() for value in held) - share) <= 2 * copies * 2 * 64
    sharded.close()


@pytest.mark.mpi
@pytest.mark.parametrize("clip", [0.0, 0.1])
@pytest.mark.parametrize("overlap", [False, True])
def test_with_data_parallel(world: mpidp.World, overlap: bool, clip: float) -> None:
    """Each rank its rows; clipping sees whole gradients; after each step all ranks hold the same."""
    trained = []
    for is_sharded in (False, True):
        model = mpidp.DataParallel(small_model(), world, reducer="flat", overlap=overlap)
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        if is_sharded:
            optimizer = ShardedOptimizer(optimizer, world)
        for step in range(5):
            x, y = (share(world, part) for part in batch(step))
            (model(x) - y).square().mean().backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            assert same_bits(world, model.parameters())
        trained.append([parameter.detach().clone() for parameter in model.parameters()])
        if isinstance(optimizer, ShardedOptimizer):
            optimizer.close()
        model.unwrap()
    assert all(torch.equal(one, other) for one, other in zip(*trained, strict=True))


@pytest.mark.mpi
def test_a_state_goes_on_in_shards_and_back(world: mpidp.World) -> None:
    """Behaviour 20: of a plain optimizer that has stepped; by wrapping it, by loading it, and back into a plain one."""
    models = [conv_net() for _ in range(4)]
    optimizers = [make("Adam", model, {}) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, 3)
    wrapped = ShardedOptimizer(optimizers[1], world)
    loaded = ShardedOptimizer(make("Adam", models[2], {}), world, copies=2)
    loaded.load_state_dict(optimizers[2].state_dict())
    for model, optimizer in zip(models, (optimizers[0], wrapped, loaded), strict=False):
        train(model, optimizer, 2, first=3)
    full = world.broadcast(loaded.full_state_dict())
    assert_same(optimizers[0].state_dict(), full)
    for one, other, third in zip(*(model.parameters() for model in models[:3]), strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one, third)
    plain = make("Adam", models[2], {})
    plain.load_state_dict(full)
    for model, optimizer in ((models[0], optimizers[0]), (models[2], plain)):
        train(model, optimizer, 2, first=5)
    assert all(torch.equal(*pair) for pair in zip(models[0].parameters(), models[2].parameters(), strict=True))
    wrapped.close()
    loaded.close()


def files_of(full: dict[str, Any], model: nn.Module, ranks: int) -> list[list[SavedPart]]:
    """What so many ranks would have saved of a state, each for itself."""
    parameters = [parameter for group in make("Adam", model, {}).param_groups for parameter in group["params"]]

    def saved(run: Run) -> SavedPart:
        state = full["state"].get(run.parameter, {})
        return run.parameter, run.start, run.stop, cut(state, parameters[run.parameter], run)

    return [[saved(run) for run in runs] for runs in shards([p.numel() for p in parameters], ranks)]


@pytest.mark.mpi
@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("saved_ranks", [1, 2, 3, 5])
def test_what_other_numbers_of_ranks_saved(world: mpidp.World, saved_ranks: int, copies: int) -> None:
    """Each rank asks for the shards that it needs, and no others; a plain optimizer for all."""
    models = [conv_net() for _ in range(3)]
    sharded = ShardedOptimizer(make("Adam", models[0], {}), world)
    train(models[0], sharded, 3)
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())
    full = world.broadcast(sharded.full_state_dict())
    saved = optimizer_shared_state(sharded) | {RANKS: saved_ranks}
    files = files_of(full, models[0], saved_ranks)
    asked: list[int] = []

    def read(rank: int) -> Any:
        asked.append(rank)
        return files[rank]

    again = ShardedOptimizer(make("Adam", models[1], {}), world, copies=copies)
    restore_optimizer(again, saved, read)
    if saved_ranks == world.size and copies == 1:
        assert asked == [world.rank]
    plain = make("Adam", models[2], {})
    restore_optimizer(plain, saved, read)
    for model, optimizer in zip(models, (sharded, again, plain), strict=True):
        train(model, optimizer, 2, first=3)
    for one, other, third in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one, third)
    sharded.close()
    again.close()


@pytest.mark.mpi
def test_ranks_save_each_element_once(world: mpidp.World) -> None:
    """Also where two hold it."""
    model = conv_net()
    sharded = ShardedOptimizer(make("Adam", model, {}), world, copies=2)
    train(model, sharded, 1)
    lists = world.comm.allgather([saved[:3] for saved in optimizer_rank_state(sharded)])
    numels = [numel for group in sharded.param_groups for numel in [p.numel() for p in group["params"]]]
    assert [[(run.parameter, run.start, run.stop) for run in runs] for runs in shards(numels, world.size)] == lists
    sharded.close()


@pytest.mark.mpi
@pytest.mark.parametrize("piece_bytes", [16, 1000, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.float64])
def test_messages_and_shared_memory_carry_the_same(world: mpidp.World, dtype: torch.dtype, piece_bytes: int) -> None:
    """The plain way and the fast one, in pieces of many sizes: every rank ends with what the owners wrote."""
    numels = [1000, 1, 0, 77, 640]
    lists = shards(numels, world.size)
    for channel in (Messages(world, piece_bytes), make_channel(world)):
        channel.piece_bytes = min(channel.piece_bytes, piece_bytes)
        flats = [torch.full((numel,), -1.0, dtype=dtype) for numel in numels]
        gather = Gather(world.rank, lists, flats, channel)
        for turn in range(3):
            for run in lists[world.rank]:
                values = torch.arange(run.start, run.stop) + run.parameter + turn
                flats[run.parameter][run.start : run.stop] = values.to(dtype)
            gather()
            for parameter, flat in enumerate(flats):
                assert torch.equal(flat, (torch.arange(numels[parameter]) + parameter + turn).to(dtype))
        channel.close()


@pytest.mark.mpi
def test_parameters_that_were_given_new_memory(world: mpidp.World) -> None:
    """As `module.to(...)` and `p.data = ...` do: steps go on in the new one."""
    models = conv_net(), conv_net()
    plain, sharded = make("Adam", models[0], {}), ShardedOptimizer(make("Adam", models[1], {}), world)
    for step in range(3):
        for model, optimizer in zip(models, (plain, sharded), strict=True):
            for parameter in model.parameters():
                parameter.data = parameter.detach().clone()
            train(model, optimizer, 1, step)
    assert all(torch.equal(*pair) for pair in zip(models[0].parameters(), models[1].parameters(), strict=True))
    sharded.close()


@pytest.mark.mpi
def test_dealing_anew_that_only_some_ranks_ended(world: mpidp.World, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when one more dies meanwhile: the others have not taken what rank 0 gave away, so it must still have it."""
    models = conv_net(), conv_net()
    plain, sharded = make("Adam", models[0], {}), ShardedOptimizer(make("Adam", models[1], {}), world)
    for model, optimizer in zip(models, (plain, sharded), strict=True):
        train(model, optimizer, 2)

    def interrupted(*args: Any) -> Any:
        collect(*args)
        raise InterruptedError

    held = sharded.held_parts()
    with monkeypatch.context() as patch, pytest.raises(InterruptedError) if world.rank else nullcontext():
        patch.setattr(optimizer_module, "shards", lambda numels, count: shards(numels, count)[::-1])
        if world.rank:
            patch.setattr(optimizer_module, "collect", interrupted)
        interim = ShardedOptimizer(make("Adam", models[1], {}), world)
        interim.collect_parts(held)
        held = [*interim.held_parts(), *held]
    sharded = ShardedOptimizer(make("Adam", models[1], {}), world)
    sharded.collect_parts(held)
    for model, optimizer in zip(models, (plain, sharded), strict=True):
        train(model, optimizer, 2, first=2)
    assert all(torch.equal(*pair) for pair in zip(models[0].parameters(), models[1].parameters(), strict=True))
    sharded.close()


@pytest.mark.mpi(min_size=2)
def test_a_state_that_nobody_holds_any_more(world: mpidp.World) -> None:
    """On all ranks, and named: a checkpoint must help."""
    model = conv_net()
    sharded = ShardedOptimizer(make("Adam", model, {}), world)
    train(model, sharded, 1)
    if world.rank == 1:
        sharded._shard.hold([], [])
    with pytest.raises(
        LaunchError, match=r"elements [\d,]+ to [\d,]+ of parameter \d+ was held by lost ranks .*copies=2"
    ):
        sharded.collect_parts(sharded.held_parts())


@pytest.mark.mpi
@pytest.mark.parametrize("where", ["owner", "another"])
def test_a_flipped_bit_is_found_before_the_step_spreads_or_hides_it(world: mpidp.World, where: str) -> None:
    """Behaviour 35: gathering gives all ranks what the owner has, whatever the others had."""
    model = mpidp.DataParallel(small_model(), world, reducer="flat", compare_steps=1)
    sharded = ShardedOptimizer(torch.optim.Adam(model.parameters()), world)
    weight = model.module.get_parameter("0.weight")  # all of it on the first rank that has anything
    guilty = 0 if where == "owner" else world.size - 1
    told = rf"rank {guilty} \(.*\) held other values than most ranks, in one of parameter .*0\.weight"
    if world.size == 2:
        told = r"ranks 0 \(.*\), 1 \(.*\) held different values"
    with pytest.raises(MismatchError, match=told) if world.size > 1 else nullcontext():
        for step in range(6):
            x, y = (share(world, part) for part in batch(step))
            loss = (model(x) - y).square().mean()
            if step == 3 and world.rank == guilty:
                weight.data.view(-1)[0] += 100
            loss.backward()
            sharded.step()
            sharded.zero_grad()
    sharded.close()


@pytest.mark.mpi
def test_a_float32_state_of_16_bit_parameters(world: mpidp.World) -> None:
    """An optimizer of the user's own may keep it; dealing anew does not round it."""

    class Wide(torch.optim.SGD):
        elementwise = True

        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for parameter in group["params"]:
                    total = self.state[parameter].setdefault("total", torch.zeros(parameter.shape))
                    total += parameter.grad.float()
                    parameter.data.copy_(total)

    parameter = nn.Parameter(torch.zeros(300, dtype=torch.bfloat16))
    sharded = ShardedOptimizer(Wide([parameter]), world)
    for _ in range(2):
        parameter.grad = torch.full((300,), 1 + 2**-7, dtype=torch.bfloat16)
        sharded.step()
        sharded.collect_parts(sharded.held_parts())
    totals = [state["total"] for state in sharded.inner.state.values()]
    assert all(total.dtype == torch.float32 and bool((total == 2 + 2**-6).all()) for total in totals)
    sharded.close()


@pytest.mark.mpi(min_size=2)
def test_state_dict_is_refused_where_no_rank_has_it_all(world: mpidp.World) -> None:
    """It says what to call, and who must."""
    sharded = ShardedOptimizer(torch.optim.SGD([nn.Parameter(torch.ones(3))]), world)
    with pytest.raises(MpidpError, match=rf"spread over {world.size} ranks: call full_state_dict\(\) on all of them"):
        sharded.state_dict()
    sharded.close()


@pytest.mark.mpi(min_size=2)
def test_ranks_that_differ(world: mpidp.World) -> None:
    """Behaviour 33: an error on every rank before anything is exchanged."""
    parameters = [nn.Parameter(torch.ones(3 + world.rank))]
    with pytest.raises(MismatchError, match="the sharded optimizers"):
        ShardedOptimizer(torch.optim.SGD(parameters), world)
    with pytest.raises(MismatchError, match="lr = 1"):
        ShardedOptimizer(torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=1.0 + world.rank), world)
