"""Which GPU a rank takes, and how it is decided whether MPI may be given its memory. Needs no GPU."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mpidp.errors import LaunchError
from mpidp.world.device import choose_index, decide, device_uuid, probe_in_child, shared_gpu


@given(local_rank=st.integers(0, 63))
def test_no_gpu_means_cpu(local_rank: int) -> None:
    assert choose_index(local_rank, 0) is None


@given(local_rank=st.integers(0, 63))
def test_one_visible_gpu_is_the_one_the_launcher_bound(local_rank: int) -> None:
    assert choose_index(local_rank, 1) == 0


@given(visible=st.integers(1, 16))
def test_as_many_ranks_as_gpus_share_none(visible: int) -> None:
    """Behaviour 38."""
    assert [choose_index(local_rank, visible) for local_rank in range(visible)] == list(range(visible))


@pytest.mark.parametrize("uuids", [[], ["a"], ["a", "b", "c"], ["", ""], ["a", "", "b", ""]])
def test_gpus_of_their_own_are_fine(uuids: list[str]) -> None:
    """Behaviour 38: CPUs, which have no UUID, are never shared."""
    assert shared_gpu(uuids, "node07") is None
    assert device_uuid(torch.device("cpu")) == ""


@pytest.mark.parametrize(
    "uuids, first, second", [(["GPU-1", "GPU-2", "GPU-1", "GPU-2"], 0, 2), (["", "GPU-1", "GPU-2", "GPU-1"], 1, 3)]
)
def test_a_shared_gpu_is_refused_with_the_fix(uuids: list[str], first: int, second: int) -> None:
    """Behaviour 38."""
    text = str(shared_gpu(uuids, "node07"))
    for part in (f"local ranks {first} and {second} on node07", "GPU-1", "4 ranks", "2 GPU", "share_gpu=True"):
        assert part in text
    assert "MPIDP_SHARE_GPU=1" in text


@pytest.mark.parametrize("hint", [True, None])
@pytest.mark.parametrize("failure", [None, "exit code -11: Segmentation fault"])
def test_the_proof_decides(hint: bool | None, failure: str | None) -> None:
    """Behaviour 47: by value, whatever the library says; a failure is quoted."""
    awareness = decide({}, hint, lambda: failure)
    assert awareness.aware is (failure is None)
    assert (failure or "right result") in awareness.reason


def no_proof() -> None:
    raise AssertionError("the proof was run")


def test_a_library_that_says_no_is_not_tried() -> None:
    """Behaviour 47."""
    awareness = decide({}, False, no_proof)
    assert not awareness.aware and "does not support" in awareness.reason


@pytest.mark.parametrize("hint", [True, False, None])
@pytest.mark.parametrize("value", ["0", "1"])
def test_the_override_wins_without_a_proof(value: str, hint: bool | None) -> None:
    awareness = decide({"MPIDP_CUDA_AWARE": value}, hint, no_proof)
    assert awareness.aware is (value == "1") and f"MPIDP_CUDA_AWARE={value}" in awareness.reason


@pytest.mark.parametrize("value", ["", "yes", "2", " 1"])
def test_a_bad_override_is_an_error_not_a_guess(value: str) -> None:
    with pytest.raises(LaunchError, match=f"MPIDP_CUDA_AWARE={value!r}: allowed are 0 .* and 1"):
        decide({"MPIDP_CUDA_AWARE": value}, None, no_proof)


@pytest.mark.job
def test_the_child_passes_where_mpi_handles_the_memory() -> None:
    """Behaviour 47: a probe that could never pass would send every GPU's gradients through the host."""
    assert probe_in_child("cpu") is None


@pytest.mark.job
def test_a_child_that_fails_says_why() -> None:
    failure = probe_in_child("no such device")
    assert failure is not None and "exit code" in failure
