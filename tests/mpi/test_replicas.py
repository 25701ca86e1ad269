"""Copies that differ: found within the interval in a loop of one's own, by default; the user's error is named first."""

import pytest
import torch
from mpi_helpers import SUMMING, batch, same_bits, share, small_model

import mpidp
from mpidp.errors import MismatchError
from mpidp.train.replicas import EVERY_STEPS

Training = tuple[mpidp.DataParallel, torch.optim.Optimizer]


def make(
    world: mpidp.World, reducer: str = "flat", compare_steps: int = EVERY_STEPS, overlap: bool = False
) -> Training:
    model = mpidp.DataParallel(small_model(), world, reducer=reducer, compare_steps=compare_steps, overlap=overlap)
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


def found_after(world: mpidp.World, training: Training) -> tuple[int, str]:
    """In which step a difference is found, and what is said."""
    for number in range(100):
        try:
            step(world, training, number)
        except MismatchError as error:
            return number, str(error)
    raise AssertionError("a difference was not found")


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("compare_steps", [1, 7])
@pytest.mark.parametrize("where", ["parameter", "optimizer state"])
def test_a_flipped_bit_is_found(world: mpidp.World, compare_steps: int, where: str) -> None:
    """Behaviour 35: within the interval, and two steps for the message; with two ranks nobody knows which is right."""
    training = model, optimizer = make(world, compare_steps=compare_steps)
    for number in range(10):
        step(world, training, number)
    guilty = world.size - 1
    if world.rank == guilty:
        weight = model.module.get_parameter("2.weight")
        flip(weight if where == "parameter" else optimizer.state[weight]["exp_avg"], 4)
    steps, text = found_after(world, training)
    assert steps <= compare_steps + 2
    assert len(set(world.comm.allgather(text))) == 1
    assert "2.weight" in text
    assert text.index("Usual causes") < text.index("faulty memory")
    if world.size == 2:
        assert f"ranks 0 ({world.host}), 1 ({world.host}) hold different values" in text
    else:
        assert f"rank {guilty} ({world.host}) holds other values than most ranks" in text
        assert "elements, the first" in text


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("reducer", SUMMING)
def test_by_default_with_every_reducer(world: mpidp.World, reducer: str, overlap: bool) -> None:
    """Behaviour 52: a state that one rank alone loads after wrapping is found at once, by the next steps."""
    training = model, _ = make(world, reducer, overlap=overlap)
    for number in range(3):
        step(world, training, number)
    own = {name: value.clone() + (world.rank == 0) for name, value in model.state_dict().items()}
    model.load_state_dict(own)
    steps, text = found_after(world, training)
    assert steps <= 2 and "a state that was loaded" in text


@pytest.mark.mpi(min_size=2)
def test_a_buffer_of_each_ranks_own_samples(world: mpidp.World) -> None:
    """Behaviour 52: it would make checkpoints depend on the rank that writes them."""

    class Normalised(torch.nn.Module):
        def __init__(self, persistent: bool) -> None:
            super().__init__()
            self.layer = small_model()
            self.register_buffer("scale", torch.ones(5, dtype=torch.float64), persistent=persistent)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.scale.mul_(0.9).add_(x.std(0), alpha=0.1)
            return self.layer(x / self.scale)

    for persistent in (False, True):
        model = mpidp.DataParallel(Normalised(persistent), world, reducer="flat")
        training = model, torch.optim.SGD(model.parameters(), lr=0.01)
        if persistent:
            _, text = found_after(world, training)
            assert "buffer scale" in text and "persistent=False" in text
        else:
            for number in range(25):
                step(world, training, number)


@pytest.mark.mpi(min_size=2)
def test_the_last_steps_are_looked_at(world: mpidp.World) -> None:
    """Behaviour 35: when the wrapper goes, so does the check, but not before it has compared what it has."""
    model, _ = training = make(world, compare_steps=1)
    step(world, training, 0)
    if world.rank == 0:
        flip(model.module.get_parameter("0.weight"), 0)
    step(world, training, 1)
    with pytest.raises(MismatchError, match=r"0\.weight"):
        model.unwrap()


@pytest.mark.parametrize("compare_steps", [0, 3])
def test_equal_ranks_are_left_alone(world: mpidp.World, compare_steps: int) -> None:
    """Behaviour 35: running statistics may differ, as each rank has those of its own samples; 0 is for never."""
    module = torch.nn.Sequential(small_model(), torch.nn.BatchNorm1d(3, dtype=torch.float64))
    model = mpidp.DataParallel(module, world, reducer="flat", compare_steps=compare_steps)
    optimizer = torch.optim.Adam(model.parameters())
    for number in range(12):
        step(world, (model, optimizer), number)
    if compare_steps == 0 and world.rank == 0:
        flip(module[0][0].weight, 0)
    for number in range(6):
        step(world, (model, optimizer), number)
    assert same_bits(world, model.parameters()) == (compare_steps > 0 or world.size == 1)
    model.unwrap()


@pytest.mark.mpi(min_size=2)
def test_ranks_that_reduce_nothing_are_not_compared(world: mpidp.World) -> None:
    """With the reducer "null" each trains a model of its own."""
    training = model, _ = make(world, "null", compare_steps=1)
    for number in range(4):
        step(world, training, number)
    sums = world.comm.allgather(sum(parameter.sum().item() for parameter in model.parameters()))
    assert len(set(sums)) > 1
    model.unwrap()


@pytest.mark.mpi(min_size=2)
def test_different_settings(world: mpidp.World) -> None:
    """Behaviour 33."""
    with pytest.raises(MismatchError, match="compare_steps"):
        make(world, compare_steps=10 + world.rank)
