"""Nodes whose ranks cannot share memory: it is said once a node, and the mean is right all the same."""

import pytest
import torch
from torch import nn

import mpidp
from mpidp.reduce import node as node_mean
from mpidp.reduce.buckets import Buckets
from mpidp.reduce.choice import REDUCERS
from mpidp.reduce.reducer import ReducerOptions

NUMEL = 100_000  # large enough for the window


def mean(world: mpidp.World, name: str) -> torch.Tensor:
    """The mean of rank + 1, by a reducer of that name."""
    reducer = REDUCERS[name](world, ReducerOptions())
    buckets = Buckets([nn.Parameter(torch.zeros(NUMEL))], 1 << 30, reducer.allocate)
    buckets.expect(0)
    gradient = buckets.parameters[0].grad
    assert gradient is not None
    gradient.fill_(world.rank + 1)
    (bucket,) = buckets.buckets
    buckets.pack(bucket)
    reducer.mean(bucket)
    result = gradient.clone()
    reducer.close()
    return result


@pytest.mark.parametrize("name", ["node", "staged"])
def test_windows_that_cannot_be_had(
    world: mpidp.World, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A system that lets ranks share nothing is named by its own error, once a node."""

    class NoWindow:
        def __init__(self, *_: object) -> None:
            raise PermissionError(13, "Permission denied", "/proc/1/fd/3")

    monkeypatch.setattr(node_mean, "SharedWindow", NoWindow)
    assert bool((mean(world, name) == (world.size + 1) / 2).all())
    if world.size > 1:
        assert caplog.text.count("cannot share memory") == (1 if world.local_rank == 0 else 0)


@pytest.mark.parametrize("name", list(REDUCERS))
@pytest.mark.parametrize(
    "dtype, comm_dtype", [(torch.float32, "full"), (torch.float32, "bf16"), (torch.bfloat16, "full")]
)
def test_no_memory_is_allocated_in_the_steady_state(
    world: mpidp.World, name: str, dtype: torch.dtype, comm_dtype: str
) -> None:
    """After two reductions of a bucket, a third asks torch for no buffer."""
    reducer = REDUCERS[name](world, ReducerOptions(comm_dtype=comm_dtype))
    buckets = Buckets([nn.Parameter(torch.zeros(NUMEL, dtype=dtype))], 1 << 30, reducer.allocate)
    buckets.expect(0)
    (bucket,) = buckets.buckets
    for _ in range(2):
        reducer.mean(bucket)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        reducer.mean(bucket)
    allocated = {event.key: event.self_cpu_memory_usage for event in profile.key_averages()}
    # Torch makes a number of a few bytes of each divisor.
    assert not {name: size for name, size in allocated.items() if size > 64}
    reducer.close()
