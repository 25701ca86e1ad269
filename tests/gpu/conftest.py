"""The world of the ranks, on a GPU; without one these tests are not collected by accident: run.sh starts them."""

import pytest
import torch

import mpidp


@pytest.fixture(scope="session")
def world() -> mpidp.World:
    """The World; its device must be a GPU."""
    made = mpidp.init()
    assert made.device.type == "cuda", "these tests need a GPU"
    assert torch.cuda.current_device() == made.device.index
    return made
