"""Device memory through every reducer that may have it here, with kernels still in flight when it begins."""

import pytest
import torch
from torch import nn

import mpidp
from mpidp.reduce.buckets import Buckets
from mpidp.reduce.choice import REDUCERS
from mpidp.reduce.staged import StagedReducer
from mpidp.reduce.transport import ReducerOptions

NUMEL = 5_000_003


def names(world: mpidp.World) -> list[str]:
    """The reducers that may be given this device's memory."""
    return ["staged", *(["flat", "naive"] if world.cuda_aware.aware else [])]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_mean_of_what_kernels_are_still_writing(world: mpidp.World, dtype: torch.dtype) -> None:
    """Behaviour 1, and the order of streams: a poison value shows if anything is read or overwritten too early."""
    for name in names(world):
        reducer = REDUCERS[name](world, ReducerOptions())
        buckets = Buckets(
            [nn.Parameter(torch.zeros(NUMEL, dtype=dtype, device=world.device))], 1 << 30, reducer.allocate
        )
        (bucket,) = buckets.buckets
        for step in range(4):
            buckets.expect(0)
            gradient = buckets.parameters[0].grad
            assert gradient is not None
            gradient.fill_(1e30)
            torch.cuda._sleep(20_000_000)  # the right values come late
            gradient.fill_(float(world.rank + step))
            buckets.pack(bucket)
            reducer.mean(bucket)
            expected = (world.size - 1) / 2 + step
            assert bool((gradient == expected).all()), (name, step)
            buckets.parameters[0].grad = None
        reducer.close()


@pytest.mark.parametrize("comm_dtype", ["bf16", "fp16"])
def test_a_sixteen_bit_comm_dtype(world: mpidp.World, comm_dtype: str) -> None:
    """Behaviour 4."""
    reducer = StagedReducer(world, ReducerOptions(comm_dtype=comm_dtype))
    parameter = nn.Parameter(torch.zeros(NUMEL, device=world.device))
    buckets = Buckets([parameter], 1 << 30, reducer.allocate)
    generator = [torch.Generator().manual_seed(rank) for rank in range(world.size)]
    everybody = torch.stack([torch.randn(NUMEL, generator=g) for g in generator])
    buckets.expect(0)
    assert parameter.grad is not None
    parameter.grad.copy_(everybody[world.rank])
    (bucket,) = buckets.buckets
    buckets.pack(bucket)
    reducer.mean(bucket)
    error = (parameter.grad.cpu() - everybody.mean(0)).abs()
    bound = everybody.abs().amax(0) * (2.0**-7 if comm_dtype == "bf16" else 2.0**-10) + 2.0**-24
    assert bool((error <= bound).all())
    reducer.close()


def test_overlap_changes_no_bit(world: mpidp.World) -> None:
    results = []
    for overlap in (False, True):
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(8)]
        module = nn.Sequential(*layers).to(world.device)
        model = mpidp.DataParallel(module, world, bucket_bytes=1 << 20, overlap=overlap)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(5):
            inputs = torch.randn(64, 512, generator=torch.Generator().manual_seed(10 * step + world.rank))
            model(inputs.to(world.device)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append([parameter.detach().clone() for parameter in model.parameters()])
        model.unwrap()
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_awareness_was_decided_for_a_reason(world: mpidp.World) -> None:
    """Behaviour 47."""
    print(world.cuda_aware)
    assert world.cuda_aware.reason


@pytest.mark.parametrize("copies", [1, 2])
def test_an_optimizer_in_shards(world: mpidp.World, copies: int) -> None:
    """Behaviour 21: parameters gathered out of device memory or by way of the host, while kernels still write them."""
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(300, 500), nn.Linear(500, 7)).to(world.device) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    plain: torch.optim.Optimizer = torch.optim.AdamW(models[0].parameters(), lr=0.01)
    sharded = mpidp.ShardedOptimizer(torch.optim.AdamW(models[1].parameters(), lr=0.01), world, copies=copies)
    for step in range(4):
        x = torch.randn(16, 300, generator=torch.Generator().manual_seed(step)).to(world.device)
        for model, optimizer in zip(models, (plain, sharded), strict=True):
            model(x).square().mean().backward()
            torch.cuda._sleep(20_000_000)
            optimizer.step()
            optimizer.zero_grad()
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(one, other)
    sharded.close()
