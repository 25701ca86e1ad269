"""Ranks that go different ways in their loops: an error on every rank, at the reduction in which they meet."""

import contextlib
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from mpi_helpers import batch, same_bits, share, small_model
from torch import nn
from torch.nn import functional as F  # noqa: N812  # the name every PyTorch program gives it

import mpidp
from mpidp.errors import MismatchError, MpidpError
from mpidp.hdf5.batch import Batch

pytestmark = pytest.mark.mpi(min_size=2)
REDUCERS = [("naive", False), ("flat", True), ("node", False), ("staged", False)]
ways = pytest.mark.parametrize("reducer, overlap", REDUCERS)


class Loop:
    """A model, its optimizer, and their steps."""

    def __init__(self, world: mpidp.World, reducer: str = "flat", overlap: bool = False) -> None:
        self.world = world
        self.model = mpidp.DataParallel(
            small_model(), world, reducer=reducer, overlap=overlap, bucket_bytes=200, compare_steps=0
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def backward(self, seed: int) -> None:
        x, y = (share(self.world, part) for part in batch(seed))
        F.mse_loss(self.model(x), y).backward()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def told(world: mpidp.World, caught: pytest.ExceptionInfo[MpidpError]) -> str:
    """What all ranks say alike."""
    texts = set(world.comm.allgather(str(caught.value)))
    assert len(texts) == 1
    return texts.pop()


@ways
def test_micro_batches_in_different_numbers(world: mpidp.World, reducer: str, overlap: bool) -> None:
    """Behaviour 52: without no_sync() each pass is reduced, with one of another step on other ranks."""
    loop = Loop(world, reducer, overlap)
    with pytest.raises(MismatchError) as caught:
        for step in range(3):
            for number in range(3 if world.rank == 1 and step == 1 else 2):
                loop.backward(number)
            loop.step()
    text = told(world, caught)
    assert "rank 0 has taken 2 optimizer steps and is in backward pass 1 since" in text
    assert "rank 1 has taken 1 and is in pass 3" in text and "no_sync()" in text


@ways
def test_micro_batches_that_are_weighed(world: mpidp.World, reducer: str, overlap: bool) -> None:
    """Behaviours 13 and 52: all but the last only accumulate, so that ranks may have different numbers of them."""
    plain, loop = small_model(), Loop(world, reducer, overlap)
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(3):
        x, y = batch(step)
        F.mse_loss(plain(x), y).backward()
        reference.step()
        reference.zero_grad()
        mine = np.arange(len(x))[world.rank :: world.size] if step != 1 else np.arange(len(x))[: (world.rank == 1) * 12]
        whole = Batch({"x": x[mine], "y": y[mine]}, mine, len(x), world)
        for part in whole.micro_batches(1 + 2 * world.rank):
            part.weigh(F.mse_loss(loop.model(part.x), part.y)).backward()
        loop.step()
    for found, expected in zip(loop.model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-13)
    assert same_bits(world, loop.model.parameters())


@ways
@pytest.mark.parametrize("when", ["before weigh", "after weigh"])
def test_a_batch_that_one_rank_skips(
    world: mpidp.World, reducer: str, overlap: bool, when: str, mpi_tmp_path: Path
) -> None:
    """Behaviour 52: its next batch would be added to this one of the others."""
    path = mpi_tmp_path / "rows.h5"
    if world.rank == 0:
        with h5py.File(path, "w") as file:
            file["x"], file["y"] = np.random.default_rng(0).normal(size=(64, 5)), np.zeros((64, 3))
    world.barrier()
    loop = Loop(world, reducer, overlap)
    loader = mpidp.HDF5Loader(path, ("x", "y"), 8, seed=0, world=world)
    with pytest.raises(MismatchError) as caught:
        for number, part in enumerate(loader):
            is_bad = number == 2 and world.rank == world.size - 1
            if is_bad and when == "before weigh":
                continue
            loss = part.weigh(F.mse_loss(loop.model(part["x"]), part["y"]))
            if is_bad:
                continue
            loss.backward()
            loop.step()
    text = told(world, caught)
    assert "rank 0 of the one that ends at sample 24 of epoch 0" in text
    assert "at 32 of epoch 0" in text and "if world.any(bad)" in text
    loader.close()


@ways
def test_a_step_that_one_rank_skips(world: mpidp.World, reducer: str, overlap: bool) -> None:
    """Behaviour 52: with the same gradients, decided by something of its own."""
    loop = Loop(world, reducer, overlap)
    with pytest.raises(MismatchError, match=r"rank 0 has taken 3 .* rank 1 has taken 2 and is in pass 2"):
        for number in range(5):
            loop.backward(number)
            if number == 2 and world.rank == 1:
                loop.optimizer.zero_grad()
            else:
                loop.step()


@ways
def test_learning_rates_by_each_ranks_own_loss(world: mpidp.World, reducer: str, overlap: bool) -> None:
    """Behaviour 52: before a step is taken with them."""
    loop = Loop(world, reducer, overlap)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(loop.optimizer, patience=0, factor=0.5)
    with pytest.raises(MismatchError) as caught:
        for number in range(4):
            before = [parameter.detach().clone() for parameter in loop.model.parameters()]
            loop.backward(number)
            loop.step()
            plateau.step(1.0 if number < 2 or world.rank == 0 else 0.5)
    text = told(world, caught)
    assert "rank 0 steps with lr 0.025, rank 1 with lr 0.05" in text
    assert "ReduceLROnPlateau" in text and "world.mean(loss.item())" in text
    assert all(map(torch.equal, before, loop.model.parameters()))
    assert same_bits(world, loop.model.parameters())


@ways
def test_an_accumulation_that_one_rank_gives_up(world: mpidp.World, reducer: str, overlap: bool) -> None:
    """Behaviour 52: a check of gradients that are not reduced yet decides for one rank alone."""
    loop = Loop(world, reducer, overlap)
    with pytest.raises(MismatchError, match=r"given up 0 accumulations by zero_grad\(\), rank 1 1"):
        for number in range(3):
            with model_no_sync(loop, number < 2):
                loop.backward(number)
            if number == 0 and world.rank == 1:
                loop.optimizer.zero_grad()
    loop.optimizer.zero_grad()
    for number in range(2):  # whoever catches it on all ranks may go on
        loop.backward(number)
        loop.step()
    assert same_bits(world, loop.model.parameters())


def model_no_sync(loop: Loop, wanted: bool) -> contextlib.AbstractContextManager[None]:
    return loop.model.no_sync() if wanted else contextlib.nullcontext()


class Greedy(nn.Module):
    """Runs out of memory when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = small_model()

    def forward(self, x: torch.Tensor, fails: bool = False) -> torch.Tensor:
        if fails:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
        return self.layer(x)  # type: ignore[no-any-return]


def test_out_of_memory_caught_on_one_rank(world: mpidp.World) -> None:
    """Behaviour 52: its cause is named with the rank, beside what the ranks do differently."""
    model = mpidp.DataParallel(Greedy(), world, reducer="flat")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(MismatchError, match=r"Rank 1 went on after OutOfMemoryError in forward \(CUDA out of memory"):
        for number in range(4):
            x = share(world, batch(number)[0])
            with contextlib.suppress(torch.OutOfMemoryError):
                model(x, fails=number == 1 and world.rank == 1).sum().backward()
            if number != 2 or world.rank == 1:  # the others step here, in step with nobody
                optimizer.step()


@pytest.mark.parametrize("guilty", [0, 1])
def test_a_backward_pass_that_fails_on_one_rank(world: mpidp.World, guilty: int) -> None:
    """Behaviour 30: with overlap the others wait for its buckets; all hear of it, and may go on."""
    loop = Loop(world, "flat", True)
    x, y = (share(world, part) for part in batch(0))
    hidden = loop.model.module[0](x)

    def fail(gradient: torch.Tensor) -> None:
        if world.rank == guilty:
            raise MemoryError("not now")

    hidden.register_hook(fail)
    with pytest.raises(
        MemoryError if world.rank == guilty else MpidpError, match=r"not now|failed after some of its gradients"
    ):
        F.mse_loss(loop.model.module[2](loop.model.module[1](hidden)), y).backward()
    loop.optimizer.zero_grad()
    for number in range(3):
        loop.backward(number)
        loop.step()
    assert same_bits(world, loop.model.parameters())
