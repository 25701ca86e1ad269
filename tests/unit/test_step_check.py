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


def test_reduced_gradients_may_be_stepped(case: Case) -> None:
    """Behaviour 51: nothing is elsewhere, and clipping in place changes nothing of that."""
    case.reduce()
    torch.nn.utils.clip_grad_norm_(case.module.parameters(), 1e-3)
    assert case.check.held(case.optimizer) == [0, 1, 2, 3]
    assert case.check.elsewhere(range(4)) == [] and not case.by_hand()


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


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("has_stepped", [False, True])
def test_gradients_set_by_hand(case: Case, has_stepped: bool, in_place: bool) -> None:
    """Behaviour 51: since the last step no backward pass brought them, so nobody has reduced them."""
    if has_stepped or in_place:
        case.reduce()
        case.check.stepped(case.optimizer)
        assert not case.by_hand()
    for parameter in case.module.parameters():
        if in_place:
            assert parameter.grad is not None
            parameter.grad.copy_(torch.ones_like(parameter))
        else:
            parameter.grad = torch.ones_like(parameter)
    assert case.by_hand()


def test_two_optimizers_after_one_reduction(case: Case) -> None:
    """Behaviour 15: the second steps what was reduced for both, also when it was clipped in between."""
    head = torch.optim.SGD(case.module[1].parameters(), lr=0.1)
    case.reduce()
    case.check.stepped(head)
    torch.nn.utils.clip_grad_norm_(case.module[0].parameters(), 1e-3)
    assert not case.by_hand()


@pytest.mark.parametrize("change", [torch.nn.utils.clip_grad_norm_, torch.nn.utils.clip_grad_value_])
def test_gradients_changed_before_they_were_reduced(case: Case, change: object) -> None:
    """Behaviour 11: the mean of clipped parts is not the clipped mean."""
    case.reduce()
    case.check.accumulated()
    case.check.check_untouched()
    assert callable(change)
    for parameter in case.module.parameters():
        assert parameter.grad is not None
        parameter.grad.fill_(3)
    case.check.accumulated()
    change(case.module.parameters(), 0.5)
    with pytest.raises(MpidpError, match=r"model\.synchronize"):
        case.check.check_untouched()


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
