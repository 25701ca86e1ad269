"""What an optimizer finds before it steps, on one process: gradients at home, moved, set by hand, or of strangers."""

import pytest
import torch
from torch import nn

from mpidp.errors import MpidpError
from mpidp.reduce.buckets import Buckets
from mpidp.train.gradient_sync import StepCheck


class Case:
    """A small module whose gradients lie in buckets, and an optimizer of it."""

    def __init__(self) -> None:
        self.module = nn.Sequential(nn.Linear(3, 4), nn.Conv2d(2, 2, 2))
        self.buckets = Buckets(list(self.module.parameters()), 1 << 20)
        self.check = StepCheck(self.module, self.buckets)
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.1)

    def reduce(self) -> None:
        for index in range(len(self.buckets.parameters)):
            self.buckets.expect(index)
        self.check.reduced()

    def by_hand(self) -> bool:
        return self.check.was_set_by_hand(self.optimizer, self.check.elsewhere(self.check.held(self.optimizer)))


@pytest.fixture
def case() -> Case:
    return Case()


@pytest.mark.parametrize("move", ["data", "assign", "channels_last", "set_"])
def test_a_gradient_that_left_its_bucket_is_known_by_its_memory(case: Case, move: str) -> None:
    """Behaviour 51: whatever Python object it is; taken in, it is where it was, with its values."""
    case.reduce()
    parameter = case.module[1].weight
    assert parameter.grad is not None
    parameter.grad.fill_(2)
    if move == "data":
        parameter.grad.data = parameter.grad.data.clamp(-1, 1)
    elif move == "assign":
        parameter.grad = parameter.grad.clamp(-1, 1)
    elif move == "channels_last":
        parameter.grad.data.clamp_(-1, 1)
        case.module.to(memory_format=torch.channels_last)
    else:
        parameter.grad.set_(torch.ones_like(parameter.grad))  # type: ignore[call-overload]
    assert case.check.elsewhere(range(4)) == [2]
    assert not case.by_hand(), "it was reduced before it was moved"
    case.buckets.take_in(2)
    assert case.check.elsewhere(range(4)) == []
    assert parameter.grad is not None and bool((parameter.grad == 1).all())
    parameter.grad = None
    case.buckets.expect(2)  # the next backward pass comes to the bucket again
    assert case.check.elsewhere(range(4)) == []


def test_parameters_of_the_module_that_are_not_known(case: Case) -> None:
    """Behaviour 51: named, three of them; those of another model are nobody's business."""
    other = nn.Linear(2, 2)
    other(torch.ones(1, 2)).sum().backward()
    assert case.check.held(torch.optim.SGD(other.parameters(), lr=0.1)) == []
    case.module.append(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    for parameter in case.module[2].parameters():
        parameter.grad = torch.zeros_like(parameter)
    with pytest.raises(MpidpError, match=r"step 2\.0\.weight, 2\.0\.bias, 2\.1\.weight and 1 more, .*unwrap\(\)"):
        case.check.held(torch.optim.SGD(case.module.parameters(), lr=0.1))


def test_a_change_of_dtype_after_wrapping(case: Case) -> None:
    """Behaviour 51: one line, not torch's complaint about an assigned gradient."""
    case.module.double()
    with pytest.raises(MpidpError, match=r"torch.float32 on cpu is now of shape \(4, 3\), torch.float64.*unwrap"):
        case.buckets.expect(0)
