"""What a batch knows of its step: its share of the loss, its slices, its fields."""

from typing import Any

import numpy as np
import pytest
import torch
from loaders import CPU, OneOf
from torch.nn import functional as F  # noqa: N812  # the name every PyTorch program gives it

from mpidp.errors import DataError
from mpidp.hdf5.batch import Batch
from mpidp.world.world import World


def _batch(size: int, global_size: int, world: Any = None) -> Batch:
    x = torch.arange(size * 3, dtype=torch.float32).reshape(size, 3)
    return Batch(
        {"x": x, "y": torch.zeros(size, dtype=torch.int64)}, np.arange(size), global_size, world or World.alone()
    )


def test_weigh_at_size_1_is_the_loss_itself() -> None:
    """Behaviour 6: bit for bit what plain torch gives."""
    loss = torch.tensor(1.5, requires_grad=True)
    assert _batch(4, 4).weigh(loss) is loss
    assert _batch(4, 4).weigh(loss, count=9) is loss
    assert _batch(4, 8, OneOf(0, 2)).weigh(loss) is loss


def test_weighed_losses_average_to_the_global_mean() -> None:
    """Behaviour 16: uneven parts, one of them empty."""
    losses = torch.arange(10, dtype=torch.float64)
    total = torch.tensor(0.0, dtype=torch.float64)
    start = 0
    for rank, size in enumerate((5, 0, 3, 2)):
        part = losses[start : start + size]
        total += _batch(size, 10, OneOf(rank, 4)).weigh(part.mean())
        start += size
    assert (total / 4).item() == pytest.approx(losses.mean().item())


def test_weigh_counts_things() -> None:
    """Behaviour 16: tokens instead of samples; OneOf pretends that both ranks have 6."""
    batch = _batch(4, 8, OneOf(0, 2))
    loss = torch.tensor(3.0)
    assert batch.weigh(loss, count=6) is loss
    assert batch.weigh(loss * float("nan"), count=0).item() == 0
    with pytest.raises(DataError, match="count of -1"):
        batch.weigh(loss, count=-1)
    with pytest.raises(DataError, match="one of several micro batches"):
        batch.micro_batches(2)[0].weigh(loss, count=6)
    with pytest.raises(DataError, match=r"loss of shape \(4,\)"):
        batch.weigh(torch.zeros(4))


def test_a_rank_without_samples_passes_all_parameters_and_touches_none() -> None:
    """Behaviour 16: 0 x NaN is NaN, so the mean over nothing must not be multiplied by 0."""
    model = torch.nn.Linear(3, 2)
    passed: list[str] = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: passed.append(name))
    batch = _batch(0, 4, OneOf(1, 2))
    loss = F.cross_entropy(model(batch.x), batch.y)
    assert loss.isnan()
    weighed = batch.weigh(loss)
    assert weighed.item() == 0
    weighed.backward()
    assert sorted(passed) == ["bias", "weight"]
    assert model.weight.grad is None and model.bias.grad is None
    assert not batch.weigh(loss.detach()).requires_grad


@pytest.mark.parametrize(("size", "max_size", "sizes"), [(10, 4, [3, 3, 4]), (4, 4, [4]), (0, 4, [0])])
def test_micro_batches(size: int, max_size: int, sizes: list[int]) -> None:
    """Behaviour 13: their weighed losses sum to that of the whole."""
    batch = _batch(size, 16, OneOf(0, 3))
    parts = batch.micro_batches(max_size)
    assert [part.size for part in parts] == sizes
    assert [part.last for part in parts] == [False] * (len(parts) - 1) + [True]
    assert torch.equal(torch.cat([part.x for part in parts]), batch.x)
    assert np.array_equal(np.concatenate([part.indices for part in parts]), batch.indices)
    whole = batch.weigh(batch.x.mean(dim=1).mean())
    assert sum(part.weigh(part.x.mean(dim=1).mean()).item() for part in parts) == pytest.approx(whole.item())
    with pytest.raises(DataError, match="micro batches of 0"):
        batch.micro_batches(0)


def test_fields_of_a_batch() -> None:
    batch = _batch(2, 4)
    assert batch.fields == ("x", "y")
    assert batch.x is batch["x"]
    assert repr(batch) == "Batch(x (2, 3), y (2,); 2 of 4 samples)"
    with pytest.raises(AttributeError, match='no field "z"; this batch has x, y'):
        _ = batch.z
    with pytest.raises(KeyError, match="this batch has x, y"):
        batch["z"]
    x, y = batch
    assert x is batch.x and y is batch.y


def test_a_batch_goes_to_a_device() -> None:
    """As a tensor does; what it knows of its step goes with it."""
    part = _batch(6, 8, OneOf(0, 2)).micro_batches(4)[0]
    moved = part.to("meta", non_blocking=True)
    assert [tensor.device.type for tensor in moved] == ["meta", "meta"]
    assert (moved.size, moved.global_size, moved.last, moved.fields) == (3, 8, False, ("x", "y"))
    assert moved.indices is part.indices
    with pytest.raises(DataError, match="one of several micro batches"):
        moved.weigh(torch.tensor(1.0), count=3)
    assert moved.weigh(torch.tensor(1.0)).item() == 3 * 2 / 8
    assert part.to(CPU).x is part.x
