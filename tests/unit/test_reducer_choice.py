"""Which reducer `choose` takes for which facts about a world, and why."""

from typing import Any, get_args, get_type_hints

import pytest

import mpidp
from mpidp.config import ReduceSection
from mpidp.errors import LaunchError
from mpidp.reduce.choice import REDUCERS, Choice, Facts, choose
from mpidp.reduce.transport import ReducerOptions

WHY = "the reason given"


def facts(size: int = 2, device_type: str = "cpu", cuda_aware: bool = False, local: int | None = None) -> Facts:
    return Facts(size, size if local is None else local, device_type, cuda_aware, WHY)


def ask(name: str, *these: Any, **options: Any) -> Choice:
    return choose(name, facts(*these), ReducerOptions(**options))


@pytest.mark.parametrize(
    "size, device_type, cuda_aware, local, name",
    [
        (1, "cpu", False, 1, "null"),
        (1, "cuda", True, 1, "null"),
        (1, "cuda", False, 1, "null"),
        (2, "cuda", True, 2, "flat"),
        (64, "cuda", False, 4, "staged"),
        (2, "cpu", False, 2, "node"),
        (64, "cpu", True, 4, "node"),
        (2, "cpu", False, 1, "flat"),
    ],
)
def test_auto_is_a_rule_on_facts(size: int, device_type: str, cuda_aware: bool, local: int, name: str) -> None:
    choice = ask("auto", size, device_type, cuda_aware, local)
    assert choice.name == name and choice.options == ReducerOptions()
    assert (WHY in choice.reason) == (size > 1 and device_type == "cuda")


@pytest.mark.parametrize("name", ["auto", "node"])
def test_memory_that_would_not_survive_a_death_is_not_shared(name: str) -> None:
    choice = ask(name, share_memory=False)
    assert choice.name == "flat" and "death" in choice.reason


def test_error_feedback_is_refused_where_the_device_rounds() -> None:
    for name in ("auto", "staged"):
        with pytest.raises(LaunchError, match="error_feedback"):
            ask(name, 2, "cuda", comm_dtype="bf16", error_feedback=True)


@pytest.mark.parametrize("name", REDUCERS)
@pytest.mark.parametrize("size", [1, 4])
def test_a_named_reducer_is_taken_with_its_options(name: str, size: int) -> None:
    """Behaviour 10: `null` and `naive`, too, and on any size: one line of a benchmark each."""
    assert ask(name, size, piece_bytes=123) == Choice(name, ReducerOptions(piece_bytes=123), "as asked")
    assert {"null", "naive"} <= set(REDUCERS)


def test_a_run_file_and_the_wrapper_know_the_same_names() -> None:
    assert get_args(get_type_hints(ReduceSection)["reducer"]) == ("auto", *REDUCERS)
    assert mpidp.DataParallel.__doc__ is not None
    assert all(f'"{name}"' in mpidp.DataParallel.__doc__ for name in REDUCERS)


@pytest.mark.parametrize("name", ["flat", "naive"])
def test_device_memory_is_not_given_to_an_mpi_that_must_not_get_it(name: str) -> None:
    """Behaviour 47."""
    with pytest.raises(LaunchError) as caught:
        ask(name, 2, "cuda", False)
    for part in (repr(name), WHY, "staged"):
        assert part in str(caught.value)
    assert ask(name, 2, "cuda", True).name == name
    assert {ask(name, 2, "cuda", False).name for name in ("staged", "null")} == {"staged", "null"}
    with pytest.raises(LaunchError, match="'node' is for gradients in host memory"):
        ask("node", 2, "cuda", True)


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
        ask(name, comm_dtype="fp8")
    for part in ("'fp8'", "full", "bf16", "fp16"):
        assert part in str(caught.value)
