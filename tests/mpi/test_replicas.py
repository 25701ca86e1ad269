"""A bit that flips in one rank's memory: found within the interval, named, and healed if that is wanted."""

import pytest
import torch
from mpi_helpers import batch, same_bits, share, small_model

import mpidp
from mpidp.errors import MismatchError
from mpidp.train.replicas.replicas import ReplicaCheck

Training = tuple[mpidp.DataParallel, torch.optim.Optimizer]


def make(world: mpidp.World, reducer: str = "flat") -> Training:
    model = mpidp.DataParallel(small_model(), world, reducer=reducer)
    return model, torch.optim.Adam(model.parameters())


def step(world: mpidp.World, training: Training, seed: int) -> None:
    model, optimizer = training
    x, y = (share(world, part) for part in batch(seed))
    (model(x) - y).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def flip(tensor: torch.Tensor, index: int) -> None:
    """The lowest bit of the exponent of one element."""
    tensor.detach().view(-1).view(torch.int64)[index] ^= 1 << 52


def found_after(world: mpidp.World, training: Training, check: ReplicaCheck) -> tuple[int, str]:
    """In which step a difference is found, and what is said."""
    for number in range(100):
        step(world, training, number)
        try:
            check.check()
        except MismatchError as error:
            return number, str(error)
    raise AssertionError("a difference was not found")


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("every_steps", [1, 7])
@pytest.mark.parametrize("where", ["parameter", "optimizer state"])
def test_a_flipped_bit_is_found(world: mpidp.World, every_steps: int, where: str) -> None:
    """Behaviour 35: within the interval, and two steps for the message; with two ranks nobody knows which is right."""
    training = model, optimizer = make(world)
    check = ReplicaCheck(model, optimizer, every_steps=every_steps)
    for number in range(10):
        step(world, training, number)
        check.check()
    guilty = world.size - 1
    if world.rank == guilty:
        weight = model.module.get_parameter("2.weight")
        flip(weight if where == "parameter" else optimizer.state[weight]["exp_avg"], 4)
    steps, text = found_after(world, training, check)
    assert steps <= every_steps + 2
    assert len(set(world.comm.allgather(text))) == 1
    assert "2.weight" in text
    if world.size == 2:
        assert f"ranks 0 ({world.host}), 1 ({world.host}) hold different values" in text
    else:
        assert f"rank {guilty} ({world.host}) holds other values than most ranks" in text
        assert "elements, the first" in text
    model.unwrap()


@pytest.mark.mpi(min_size=3)
def test_the_majority_heals(world: mpidp.World) -> None:
    """Behaviour 35: training goes on with equal bits, and the rank is named."""
    training = model, optimizer = make(world)
    check = ReplicaCheck(model, optimizer, every_steps=5, on_mismatch="heal")
    step(world, training, 0)
    if world.rank == 1:
        flip(model.module.get_parameter("0.weight"), 3)
        optimizer.state[model.module.get_parameter("0.bias")]["exp_avg_sq"][2] = 7.0
    for number in range(20):
        step(world, training, number)
        check.check()
    check.close()
    state = [value for of_one in optimizer.state.values() for value in of_one.values()]
    assert same_bits(world, [*model.parameters(), *state])
    model.unwrap()


@pytest.mark.mpi(min_size=2)
def test_the_last_steps_are_looked_at(world: mpidp.World) -> None:
    """Behaviour 35: when training ends, so does the check, but not before it has compared what it has."""
    model, optimizer = training = make(world)
    check = ReplicaCheck(model, optimizer, every_steps=1)
    step(world, training, 0)
    if world.rank == 0:
        flip(model.module.get_parameter("0.weight"), 0)
    check.check()
    with pytest.raises(MismatchError, match=r"0\.weight"):
        check.close()
    model.unwrap()


@pytest.mark.parametrize("every_steps", [0, 3])
def test_equal_ranks_are_left_alone(world: mpidp.World, every_steps: int) -> None:
    """Behaviour 35: buffers may differ, as each rank has statistics of its own."""
    module = torch.nn.Sequential(small_model(), torch.nn.BatchNorm1d(3, dtype=torch.float64))
    model = mpidp.DataParallel(module, world, reducer="flat")
    optimizer = torch.optim.Adam(model.parameters())
    check = ReplicaCheck(model, optimizer, every_steps=every_steps)
    for number in range(12):
        step(world, (model, optimizer), number)
        check.check()
    check.close()
    model.unwrap()


@pytest.mark.mpi(min_size=2)
def test_ranks_that_reduce_nothing_are_not_compared(world: mpidp.World) -> None:
    model, optimizer = make(world, "null")
    assert not ReplicaCheck(model, optimizer).is_on
    model.unwrap()


@pytest.mark.parametrize("wrong", [{"on_mismatch": "ignore"}, {"every_steps": -1}])
def test_settings_that_mean_nothing(world: mpidp.World, wrong: dict[str, object]) -> None:
    model, optimizer = make(world)
    with pytest.raises(ValueError, match=str(next(iter(wrong.values())))):
        ReplicaCheck(model, optimizer, **wrong)  # type: ignore[arg-type]
    model.unwrap()


@pytest.mark.mpi(min_size=2)
def test_different_settings(world: mpidp.World) -> None:
    """Behaviour 33."""
    model, optimizer = make(world)
    with pytest.raises(MismatchError, match="every_steps"):
        ReplicaCheck(model, optimizer, every_steps=10 + world.rank)
    model.unwrap()
