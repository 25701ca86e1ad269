"""Which elements belong to which shard; the state of an optimizer cut along them and joined again (behaviour 21)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import mpidp
from mpidp.errors import MpidpError
from mpidp.train.sharded_gather import pieces
from mpidp.train.sharded_optimizer import ShardedOptimizer
from mpidp.train.sharded_state import (
    BLOCK,
    RANKS,
    SHAPES,
    Run,
    cut,
    holders,
    join,
    overlap,
    plain_state,
    shards,
    sources,
)

NUMELS = st.lists(st.integers(0, 1000), min_size=1, max_size=8)
COUNTS = st.integers(1, 9)


def elements(runs: list[Run]) -> list[tuple[int, int]]:
    return [(run.parameter, element) for run in runs for element in range(run.start, run.stop)]


@given(NUMELS, COUNTS)
def test_shards_hold_every_element_once_and_are_equal_to_a_block(numels: list[int], count: int) -> None:
    lists = shards(numels, count)
    assert len(lists) == count
    expected = [(parameter, element) for parameter, numel in enumerate(numels) for element in range(numel)]
    assert [place for runs in lists for place in elements(runs)] == expected
    assert all(run.start % BLOCK == 0 and run.numel > 0 for runs in lists for run in runs)
    blocks = [sum(-(-run.numel // BLOCK) for run in runs) for runs in lists]
    assert max(blocks) - min(blocks) <= 1


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ([0], [(0,)]),
        ([0, 0, 0], [(0, 1), (1, 2), (2, 0)]),
        ([0, 0, 1, 1], [(0, 2), (1, 3), (2, 0), (3, 1)]),
        ([0, 0, 0, 1, 1, 1, 2, 2, 2], [(rank, (rank + 3) % 9) for rank in range(9)]),
    ],
)
def test_the_second_holder_is_on_another_node(nodes: list[int], expected: list[tuple[int, ...]]) -> None:
    """The loss of a node then loses no shard."""
    assert holders(nodes, 2) == expected
    assert holders(nodes, 1) == [(rank,) for rank in range(len(nodes))]


@given(NUMELS, COUNTS, COUNTS, st.integers(1, 300))
def test_sources_find_every_element_once_among_holders_of_two_layouts(
    numels: list[int], before: int, now: int, piece: int
) -> None:
    """Some ranks have dealt anew, others not: together they still have it all."""
    held = [*shards(numels, before), *shards(numels, now)][::-1]
    found = sources(numels, held, piece)
    expected = [(parameter, element) for parameter, numel in enumerate(numels) for element in range(numel)]
    assert elements([source.run for source in found]) == expected
    for source in found:
        assert source.run.numel <= piece
        assert overlap(source.run, held[source.rank][source.index]) == source.run


def test_elements_that_nobody_holds_are_named() -> None:
    lists = shards([1000, 10], 4)
    lists[1] = []
    with pytest.raises(LookupError) as caught:
        sources([1000, 10], lists, 1 << 20)
    assert caught.value.args[0] == Run(0, 256, 512)


@given(NUMELS, st.integers(8, 500))
def test_pieces_are_full_but_the_last(numels: list[int], piece_bytes: int) -> None:
    runs = shards(numels, 1)[0]
    itemsizes = [(2, 4, 8)[number % 3] for number in range(len(numels))]
    lists = pieces(runs, itemsizes, piece_bytes)
    assert elements([run for of_piece in lists for run in of_piece]) == elements(runs)
    sizes = [sum(run.numel * itemsizes[run.parameter] for run in of_piece) for of_piece in lists]
    assert all(piece_bytes - 8 < size <= piece_bytes for size in sizes[:-1])
    assert all(0 < size <= piece_bytes for size in sizes)


def adam_like(parameter: Tensor) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    moments = torch.empty_like(parameter).copy_(torch.randn(parameter.shape, generator=generator))
    return {"step": torch.tensor(7.0), "exp_avg": moments, "exp_avg_sq": moments.square()}


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(("before", "now"), [(1, 3), (3, 1), (2, 5), (4, 3)])
def test_a_state_cut_for_some_ranks_is_joined_for_others(
    before: int, now: int, memory_format: torch.memory_format
) -> None:
    """In memory order, so that runs are the same elements of state and parameter."""
    parameter = torch.zeros(6, 5, 4, 7).to(memory_format=memory_format)
    state = adam_like(parameter)
    parts = [(run, cut(state, parameter, run)) for runs in shards([parameter.numel()], before) for run in runs]
    for runs in shards([parameter.numel()], now):
        for run in runs:
            joined, expected = join(run, parts), cut(state, parameter, run)
            assert joined.keys() == expected.keys()
            assert all(torch.equal(joined[name], expected[name]) for name in expected)
    saved = {
        "param_groups": [{"lr": 0.1, "params": [0]}],
        SHAPES: [(tuple(parameter.shape), parameter.stride())],
        RANKS: before,
    }
    of_ranks = [
        [(run.parameter, run.start, run.stop, cut(state, parameter, run)) for run in runs]
        for runs in shards([parameter.numel()], before)
    ]
    plain = plain_state(saved, of_ranks.__getitem__)
    assert plain["param_groups"] == [{"lr": 0.1, "params": [0]}]
    for name, value in state.items():
        assert torch.equal(plain["state"][0][name], value)
        assert plain["state"][0][name].stride() == value.stride()


def test_the_state_of_a_parameter_without_dimensions() -> None:
    """Its moments have none either, but are cut; the count of steps is not."""
    parameter = torch.tensor(3.0)
    part = cut(adam_like(parameter), parameter, Run(0, 0, 1))
    assert part["exp_avg"].shape == (1,)
    assert part["step"].shape == ()


def test_a_state_of_another_shape_is_refused_by_name() -> None:
    with pytest.raises(MpidpError, match=r"'row_var' has shape \(4, 1\) for a parameter of shape \(4, 5\)"):
        cut({"row_var": torch.zeros(4, 1)}, torch.zeros(4, 5), Run(0, 0, 20))


@pytest.fixture(scope="module")
def world() -> mpidp.World:
    """One rank."""
    return mpidp.init()


def test_options_that_an_optimizer_keeps_itself(world: mpidp.World) -> None:
    """A class that promises to be elementwise: a count in its group goes on, and is seen outside."""

    class Counting(torch.optim.SGD):
        elementwise = True

        def step(self, closure: Any = None) -> Any:
            self.param_groups[0]["lr"] = 1 / (1 + self.param_groups[0].setdefault("k", 0))
            self.param_groups[0]["k"] += 1
            return super().step(closure)

    parameters = [nn.Parameter(torch.ones(200)) for _ in range(2)]
    plain, sharded = Counting([parameters[0]], lr=1.0), ShardedOptimizer(Counting([parameters[1]], lr=1.0), world)
    for _ in range(3):
        for parameter, optimizer in zip(parameters, (plain, sharded), strict=True):
            parameter.grad = torch.ones(200)
            optimizer.step()
    assert torch.equal(*parameters)
    assert sharded.param_groups[0]["k"] == 3
    sharded.close()


def test_closures(world: mpidp.World) -> None:
    """Called once, with gradients on, before the step."""
    parameter = nn.Parameter(torch.ones(100))
    sharded = ShardedOptimizer(torch.optim.SGD([parameter], lr=0.5), world)

    def closure() -> float:
        sharded.zero_grad()
        loss = parameter.square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.item()

    assert sharded.step(closure) == 100
    assert torch.equal(parameter, torch.zeros(100))
    sharded.close()


class Mixing(torch.optim.Optimizer):
    """An optimizer of the user's own, of which nothing is known."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, torch.optim.Adafactor, Mixing])
def test_optimizers_that_mix_elements_are_refused_by_name(world: mpidp.World, kind: Any) -> None:
    """On all ranks; with what may be used instead."""
    with pytest.raises(MpidpError, match=rf"{kind.__name__} cannot be sharded.*Use one of SGD, Adam, .*elementwise"):
        ShardedOptimizer(kind([nn.Parameter(torch.ones(4, 4))]), world)


def test_what_else_is_refused(world: mpidp.World) -> None:
    """Parameters with holes between their elements; further groups; odd numbers of copies."""
    holes = nn.Parameter(torch.ones(4, 6)[:, ::2])
    with pytest.raises(MpidpError, match=r"parameter 0 of shape \(4, 3\) does not lie densely"):
        ShardedOptimizer(torch.optim.SGD([holes]), world)
    with pytest.raises(ValueError, match="copies = 3: give 1, or 2"):
        ShardedOptimizer(torch.optim.SGD([nn.Parameter(torch.ones(3))]), world, copies=3)
    parameter = nn.Parameter(torch.ones(3, 4, 5, 6))
    plain = torch.optim.SGD([parameter])
    sharded = ShardedOptimizer(plain, world)
    with pytest.raises(MpidpError, match="takes no further parameters"):
        sharded.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    with pytest.raises(MpidpError, match="cannot be copied or pickled: save full_state_dict"):
        copy.deepcopy(sharded)
    parameter.data = parameter.detach().to(memory_format=torch.channels_last)
    with pytest.raises(MpidpError, match=r"parameter 0 of shape \(3, 4, 5, 6\) had strides .*change memory formats"):
        sharded.step()
    sharded.close()
    scheduled = torch.optim.SGD([nn.Parameter(torch.ones(3))])
    torch.optim.lr_scheduler.ExponentialLR(scheduled, 0.9)
    with pytest.raises(MpidpError, match="make it afterwards, over the sharded one"):
        ShardedOptimizer(scheduled, world)
