"""Gradients of small modules live in flat buffers, and how. No MPI."""

import pytest
import torch
from torch import Tensor, nn

from mpidp.reduce.buckets import Buckets

SHAPES = [(), (1,), (7,), (3, 5), (2, 3, 5), (2, 3, 4, 4), (0,), (4, 0)]
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64]


def parameters_of(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]


def accumulate(buckets: Buckets, indices: list[int], value: float = 1.0) -> None:
    """What autograd does, with the wrapper's hook before it: each gradient grows by `value`."""
    for index in indices:
        buckets.expect(index)
        gradient = buckets.parameters[index].grad
        assert gradient is not None
        gradient.add_(value)


def round_trip(buckets: Buckets) -> None:
    """The step of one rank under a reducer that leaves everything as it is."""
    for bucket in buckets.buckets:
        buckets.pack(bucket)
        buckets.unpack(bucket)


def lies_in(gradient: Tensor | None, flat: Tensor) -> bool:
    assert gradient is not None
    if gradient.numel() == 0:
        return True  # torch gives it no address
    start, size = flat.data_ptr(), flat.numel() * flat.element_size()
    return start <= gradient.data_ptr() and gradient.data_ptr() + gradient.nbytes <= start + size


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradient_stays_the_same_view_for_the_whole_run(dtype: torch.dtype, set_to_none: bool) -> None:
    """Behaviours 3 and 12: like its parameter, without copies, whichever way gradients are zeroed."""
    parameters = parameters_of(*SHAPES, dtype=dtype)
    buckets = Buckets(parameters, bucket_bytes=100)
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    views: list[Tensor | None] = []
    for _ in range(5):
        optimizer.zero_grad(set_to_none=set_to_none)
        accumulate(buckets, list(range(len(parameters))))
        round_trip(buckets)
        now = [parameter.grad for parameter in parameters]
        views = views or now
        assert all(before is after for before, after in zip(views, now, strict=True))
        assert all(torch.equal(gradient, torch.ones_like(gradient)) for gradient in now if gradient is not None)
        assert all(any(lies_in(gradient, bucket.flat) for bucket in buckets.buckets) for gradient in now)
        for parameter, gradient in zip(parameters, now, strict=True):
            assert gradient is not None and gradient.shape == parameter.shape and gradient.dtype == dtype
            assert gradient.stride() == parameter.stride()
        optimizer.step()
    assert buckets.copies == 0
    assert buckets.num_bytes == sum(bucket.flat.nbytes for bucket in buckets.buckets)


STRANGE_MEMORY = {
    "channels_last": torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last),
    "channels_last_3d": torch.randn(2, 3, 4, 4, 4).to(memory_format=torch.channels_last_3d),
    "transposed": torch.randn(5, 3).t(),
    "every second": torch.randn(6, 4)[::2],
    "column": torch.randn(6, 4)[:, 1],
    "permuted": torch.randn(2, 3, 4).permute(2, 0, 1),
}


@pytest.mark.parametrize("name", STRANGE_MEMORY)
def test_strange_memory_in_a_real_backward(name: str) -> None:
    """Behaviour 3: the gradient is as plain torch has it, dense, and needs no copy."""
    plain = nn.Parameter(STRANGE_MEMORY[name].clone(memory_format=torch.preserve_format))
    ours = nn.Parameter(STRANGE_MEMORY[name])
    factor = torch.randn(ours.shape)
    buckets = Buckets([ours, *parameters_of((3,))], 1 << 20)
    (plain.square() * factor).sum().backward()
    for _ in range(2):
        ours.grad = None
        buckets.expect(0)
        (ours.square() * factor).sum().backward()
        round_trip(buckets)
        assert plain.grad is not None and ours.grad is not None
        assert torch.equal(ours.grad, plain.grad)
        assert ours.grad.stride() == torch.empty_like(ours).stride()
        assert lies_in(ours.grad, buckets.buckets[0].flat)
    assert buckets.copies == 0


def test_stale_values_never_come_back() -> None:
    """Behaviour 12: the buffer still holds the last step's mean when a gradient was set to None."""
    first, second = parameters_of((3,), (2,))
    buckets = Buckets([first, second], 1 << 20)
    accumulate(buckets, [0, 1], value=float("nan"))
    round_trip(buckets)
    first.grad = second.grad = None
    accumulate(buckets, [0])
    (bucket,) = buckets.buckets
    buckets.pack(bucket)
    assert first.grad is not None and first.grad.tolist() == [1, 1, 1]
    assert buckets.view(1).tolist() == [0, 0]


@pytest.mark.filterwarnings("ignore:Using backward")  # about the very cycle that taking the gradient in breaks
def test_create_graph_and_assigned_gradients_are_copied_once_and_counted() -> None:
    """Behaviour 3: autograd replaces p.grad under create_graph=True; users may assign it."""
    (parameter,) = parameters_of((3,))
    buckets = Buckets([parameter], 1 << 20)
    buckets.expect(0)
    parameter.pow(3).sum().backward(create_graph=True)  # type: ignore[no-untyped-call]
    expected = 3 * parameter.detach().square()
    assert parameter.grad is not None and parameter.grad.requires_grad
    round_trip(buckets)
    assert torch.equal(parameter.grad, expected) and not parameter.grad.requires_grad
    assert lies_in(parameter.grad, buckets.buckets[0].flat)
    assert buckets.copies == 1
    parameter.grad = torch.full((3,), 5.0)
    round_trip(buckets)
    assert parameter.grad.tolist() == [5, 5, 5]
    assert lies_in(parameter.grad, buckets.buckets[0].flat)
    assert buckets.copies == 2
