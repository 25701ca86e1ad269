"""Started on every rank: checks each reducer against arithmetic; rank 0 prints what was checked.

A wrong mean raises on the rank that has it and so ends the job; the error names reducer, dtype, comm_dtype and rank.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor, nn

import mpidp
from mpidp.reduce.buckets import Buckets, Reducer
from mpidp.reduce.choice import REDUCERS
from mpidp.reduce.transport import SIXTEEN_BITS, ReducerOptions, sent_dtype

NAMES = [name for name in REDUCERS if name != "null"]  # null averages nothing
FORMATS = (  # dtype of the gradients, and comm_dtype
    (torch.float64, "full"),
    (torch.float32, "full"),
    (torch.float32, "bf16"),
    (torch.float32, "fp16"),
    (torch.float16, "full"),
    (torch.bfloat16, "full"),
)
# 0 to 3 dimensions; odd, prime, less than one a rank. The last is sent in several pieces, also in 16 bits.
SHAPES = ((), (1,), (3,), (5, 7), (3, 1, 11), (1009,), (257, 129), (600_011,))
BUCKET_BYTES = 1 << 16  # three buckets: a small one of many gradients, a middle one, and one of several pieces
Gradients = Callable[[int], Tensor]


def main() -> None:
    """Check every reducer with every dtype and comm_dtype."""
    world = mpidp.init()
    cases = list(product(NAMES, FORMATS))
    for name, (dtype, comm_dtype) in cases:
        case = Case(world, name, dtype, comm_dtype)
        try:
            check_arithmetic(case)
            check_random(case)
        except Exception as error:
            error.add_note(f"reducer {name}, {dtype}, comm_dtype {comm_dtype}, rank {world.rank} on {world.host}")
            raise
    world.barrier()
    if world.rank == 0:
        print(json.dumps([[name, str(dtype), comm_dtype] for name, (dtype, comm_dtype) in cases]))


@dataclass
class Case:
    """Parameters whose gradients lie in buckets of one reducer."""

    world: mpidp.World
    name: str
    dtype: torch.dtype
    comm_dtype: str

    def __post_init__(self) -> None:
        self.reducer: Reducer = REDUCERS[self.name](self.world, ReducerOptions(comm_dtype=self.comm_dtype))
        self.parameters = [nn.Parameter(torch.zeros(shape, dtype=self.dtype)) for shape in SHAPES]
        self.buckets = Buckets(self.parameters, BUCKET_BYTES, self.reducer.allocate)

    def mean(self, gradients: Gradients) -> list[Tensor]:
        """One step with the gradient `gradients(k)` of parameter k; what is then in `p.grad`, copied."""
        for k, parameter in enumerate(self.parameters):
            parameter.grad = None
            self.buckets.expect(k)
            assert parameter.grad is not None
            parameter.grad.add_(gradients(k))
        for bucket in self.buckets.buckets:
            self.buckets.pack(bucket)
            self.reducer.mean(bucket)
            self.buckets.unpack(bucket)
        return [parameter.grad.clone() for parameter in self.parameters if parameter.grad is not None]


def check_arithmetic(case: Case) -> None:
    """Behaviour 1: gradients rank + k have the mean (size - 1) / 2 + k, on the first step and on the second."""

    def gradient(k: int) -> Tensor:
        return torch.tensor(case.world.rank + k)

    for step in range(2):
        for k, (mean, shape) in enumerate(zip(case.mean(gradient), SHAPES, strict=True)):
            expected = torch.full(shape, (case.world.size - 1) / 2 + k, dtype=case.dtype)
            assert torch.equal(mean, expected), f"step {step}, parameter {k}: {mean}, expected {expected}"


def check_random(case: Case) -> None:
    """Behaviours 2, 4 and 8: the mean to rounding, as of `naive`, and the same bits on every rank."""
    all_gradients = [random_gradients(rank, case.dtype) for rank in range(case.world.size)]
    means = case.mean(all_gradients[case.world.rank].__getitem__)
    for k, mean in enumerate(means):
        contributions = torch.stack([gradients[k].double() for gradients in all_gradients])
        error = (mean.double() - contributions.mean(0)).abs().max().item()
        allowed = contributions.abs().max().item() * relative_error(case)
        assert error <= allowed, f"parameter {k} of shape {SHAPES[k]}: off by {error}, allowed {allowed}"
    content = b"".join(mean.flatten().view(torch.uint8).numpy().tobytes() for mean in means)
    digests = case.world.comm.allgather(hashlib.sha256(content).hexdigest())
    assert len(set(digests)) == 1, f"ranks hold different bits: {digests}"


def relative_error(case: Case) -> float:
    """What a mean may be off by, relative to the largest contribution.

    A sum rounds at each addition. 16 bits round once when sent, where the gradient is longer, and once as a result.
    """
    adds_in = torch.float64 if case.dtype == torch.float64 else torch.float32
    travels = sent_dtype(case.dtype, case.comm_dtype)
    summing = case.world.size * torch.finfo(adds_in).eps
    return summing + (torch.finfo(travels).eps if travels in SIXTEEN_BITS else 0.0)


def random_gradients(rank: int, dtype: torch.dtype) -> list[Tensor]:
    """A normal gradient for each parameter, the same wherever this rank's are asked for."""
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


if __name__ == "__main__":
    main()
