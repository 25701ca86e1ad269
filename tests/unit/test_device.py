"""Local ranks and visible GPUs come in; which GPU `mpidp.world.device` gives them is looked at. Needs no GPU."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mpidp.world.device import choose_index, device_uuid, shared_gpu


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
