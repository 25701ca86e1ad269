"""Facts about a world come in; which reducer `choose` takes, and why, is looked at."""

from typing import Any

import pytest

from mpidp.errors import LaunchError
from mpidp.reduce.choice import REDUCERS, Candidate, Choice, Facts, Timing, candidates, choose, pick
from mpidp.reduce.reducer import ReducerOptions

WHY = "the reason given"


def facts(size: int = 2, device_type: str = "cpu", cuda_aware: bool = False) -> Facts:
    return Facts(size, 1, size, device_type, cuda_aware, WHY)


def ask(name: str, *these: Any, **options: Any) -> Choice | None:
    return choose(name, facts(*these), ReducerOptions(**options))


@pytest.mark.parametrize(
    "size, device_type, cuda_aware, name",
    [
        (1, "cpu", False, "null"),
        (1, "cuda", True, "null"),
        (1, "cuda", False, "null"),
        (2, "cuda", True, "flat"),
        (64, "cuda", False, "staged"),
    ],
)
def test_auto_where_the_facts_decide(size: int, device_type: str, cuda_aware: bool, name: str) -> None:
    choice = ask("auto", size, device_type, cuda_aware)
    assert choice is not None and choice.name == name
    assert (WHY in choice.reason) == (size > 1)


def test_auto_measures_in_host_memory() -> None:
    assert ask("auto", 2, "cpu", False) is None
    assert ask("auto", 2, "cpu", True) is None


@pytest.mark.parametrize("name", REDUCERS)
@pytest.mark.parametrize("size", [1, 4])
def test_a_named_reducer_is_taken_with_its_options(name: str, size: int) -> None:
    """Behaviour 10: `null` and `naive`, too, and on any size: one line of a benchmark each."""
    assert ask(name, size, piece_bytes=123) == Choice(name, ReducerOptions(piece_bytes=123), "as asked")


def test_the_reducers_that_benchmarks_attribute_cost_by_exist() -> None:
    """Behaviour 10."""
    assert {"null", "naive"} <= set(REDUCERS)


@pytest.mark.parametrize("name", ["flat", "naive"])
def test_device_memory_is_not_given_to_an_mpi_that_must_not_get_it(name: str) -> None:
    """Behaviour 47."""
    with pytest.raises(LaunchError) as caught:
        ask(name, 2, "cuda", False)
    for part in (repr(name), WHY, "staged"):
        assert part in str(caught.value)
    choice = ask(name, 2, "cuda", True)
    assert choice is not None and choice.name == name


def test_node_is_for_host_memory() -> None:
    with pytest.raises(LaunchError, match="staged"):
        ask("node", 2, "cuda", True)


@pytest.mark.parametrize("name", ["staged", "null"])
def test_reducers_by_way_of_the_host_need_no_awareness(name: str) -> None:
    choice = ask(name, 2, "cuda", False)
    assert choice is not None and choice.name == name


@pytest.mark.parametrize("name", ["", "Flat", "ring", "nccl"])
def test_unknown_name_lists_the_known_ones(name: str) -> None:
    with pytest.raises(LaunchError) as caught:
        ask(name)
    for part in (repr(name), "auto", *REDUCERS):
        assert part in str(caught.value)


@pytest.mark.parametrize("name", ["auto", "flat"])
def test_unknown_wire_lists_the_known_ones(name: str) -> None:
    """Behaviour 4."""
    with pytest.raises(LaunchError) as caught:
        ask(name, wire="fp8")
    for part in ("'fp8'", "full", "bf16", "fp16"):
        assert part in str(caught.value)


def timing(name: str, seconds: float) -> Timing:
    return Timing(Candidate(name, ReducerOptions()), seconds)


def test_pick_keeps_the_likeliest_unless_another_is_clearly_faster() -> None:
    """Two runs on equal machines add in the same order, whatever the noise of the measurement."""
    assert pick([timing("node", 1.2), timing("flat", 1.0)]).name == "node"
    assert pick([timing("node", 1.6), timing("flat", 1.0)]).name == "flat"
    assert "flat" in pick([timing("node", 1.0), timing("flat", 3.0)]).reason


def test_candidates_vary_pieces_only_across_a_network() -> None:
    options = ReducerOptions(wire="bf16")
    assert candidates(1, 4, options) == [Candidate("node", options), Candidate("flat", options)]
    across = candidates(4, 1, options)
    assert {c.name for c in across} == {"flat"} and len({c.options.piece_bytes for c in across}) == len(across) > 1
    assert all(c.options.wire == "bf16" for c in across)
    assert {c.options.piece_bytes for c in candidates(4, 2, ReducerOptions(piece_bytes=99))} == {99}
