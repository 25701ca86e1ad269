"""Nodes whose ranks cannot share memory: it is said once a node, and the mean is right all the same."""

import pytest
import torch
from mpi_helpers import Means

import mpidp
from mpidp.reduce import node as node_mean
from mpidp.reduce.choice import REDUCERS
from mpidp.reduce.transport import ReducerOptions

NUMEL = 100_000  # large enough for the window


@pytest.mark.parametrize("name", ["node", "staged"])
def test_windows_that_cannot_be_had(
    world: mpidp.World, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A system that lets ranks share nothing is named by its own error, once a node."""

    class NoWindow:
        def __init__(self, *_: object) -> None:
            raise PermissionError(13, "Permission denied", "/proc/1/fd/3")

    monkeypatch.setattr(node_mean, "SharedWindow", NoWindow)
    means = Means(world, name, [torch.zeros(NUMEL)])
    assert bool((means([torch.full((NUMEL,), world.rank + 1.0)])[0] == (world.size + 1) / 2).all())
    means.reducer.close()
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
    means = Means(world, name, [torch.zeros(NUMEL, dtype=dtype)], ReducerOptions(comm_dtype=comm_dtype))
    means.buckets.expect(0)
    (bucket,) = means.buckets.buckets
    for _ in range(2):
        means.reducer.mean(bucket)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        means.reducer.mean(bucket)
    allocated = {event.key: event.self_cpu_memory_usage for event in profile.key_averages()}
    # Torch makes a number of a few bytes of each divisor.
    assert not {name: size for name, size in allocated.items() if size > 64}
    means.reducer.close()
