"""Which GPU a rank takes, and how it is decided whether MPI may be given its memory. Needs no GPU."""

import pytest
import torch

from mpidp.errors import LaunchError
from mpidp.world.device import choose_index, decide, device_uuid, probe_in_child, shared_gpu


def test_gpu_of_a_rank() -> None:
    """Behaviour 38: as many ranks as GPUs share none; one visible GPU is the one the launcher bound."""
    ranks = range(16)
    assert [choose_index(rank, 0) for rank in ranks] == [None] * 16
    assert [choose_index(rank, 1) for rank in ranks] == [0] * 16
    assert [choose_index(rank, 16) for rank in ranks] == [*ranks]


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


SIGNAL = "exit code -11: Segmentation fault"


@pytest.mark.parametrize(
    "override, hint, proof, aware, reason",
    [
        *((None, hint, None, True, "right result") for hint in (True, None)),  # by value, whatever the library says
        *((None, hint, SIGNAL, False, SIGNAL) for hint in (True, None)),
        (None, False, "not run", False, "does not support"),
        *(("0", hint, "not run", False, "MPIDP_CUDA_AWARE=0") for hint in (True, False, None)),
        *(("1", hint, "not run", True, "MPIDP_CUDA_AWARE=1") for hint in (True, False, None)),
    ],
)
def test_the_proof_decides(
    override: str | None, hint: bool | None, proof: str | None, aware: bool, reason: str
) -> None:
    """Behaviour 47: a library that says no is not tried, and an override needs no proof."""

    def prove() -> str | None:
        assert proof != "not run"
        return proof

    found = decide({} if override is None else {"MPIDP_CUDA_AWARE": override}, hint, prove)
    assert found.aware is aware and reason in found.reason


@pytest.mark.parametrize("value", ["", "yes", "2", " 1"])
def test_a_bad_override_is_an_error_not_a_guess(value: str) -> None:
    with pytest.raises(LaunchError, match=f"MPIDP_CUDA_AWARE={value!r}: allowed are 0 .* and 1"):
        decide({"MPIDP_CUDA_AWARE": value}, None, lambda: None)


@pytest.mark.job
def test_the_child() -> None:
    """Behaviour 47: it passes where MPI handles the memory, and says why it fails."""
    assert probe_in_child("cpu") is None
    assert "exit code" in str(probe_in_child("no such device"))
