"""Local ranks and visible GPUs come in; which GPU `mpidp.world.device` gives them is looked at. Needs no GPU."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mpidp.errors import LaunchError
from mpidp.world.device import check_not_shared, choose_index, device_uuid, find_shared


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


@pytest.mark.parametrize(
    "uuids, shared",
    [
        ([], None),
        (["a"], None),
        (["a", "b", "c"], None),
        (["", ""], None),
        (["a", "", "b", ""], None),
        (["a", "b", "a"], (0, 2)),
        (["", "b", "b", "b"], (1, 2)),
    ],
)
def test_find_shared(uuids: list[str], shared: tuple[int, int] | None) -> None:
    """Behaviour 38: CPUs, which have no UUID, are never shared."""
    assert find_shared(uuids) == shared


def test_shared_gpu_is_refused_with_the_fix() -> None:
    """Behaviour 38."""
    with pytest.raises(LaunchError) as caught:
        check_not_shared(["GPU-1", "GPU-2", "GPU-1", "GPU-2"], "node07")
    for part in ("local ranks 0 and 2", "node07", "GPU-1", "4 ranks", "2 GPU", "share_gpu=True", "MPIDP_SHARE_GPU=1"):
        assert part in str(caught.value)


def test_own_gpus_are_fine() -> None:
    check_not_shared(["GPU-1", "GPU-2"], "node07")


def test_cpu_has_no_uuid() -> None:
    assert device_uuid(torch.device("cpu")) == ""
