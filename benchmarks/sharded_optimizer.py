"""Time and memory of AdamW with its state on every rank, and in shards.

Usage: mpiexec -n RANKS python benchmarks/sharded_optimizer.py [--model transformer] [--steps 5] [--blocks 20]

Three trainings of the same model take turns, a block of steps each: the plain optimizer; shards whose parameters are
gathered as mpidp chooses (shared memory on one node); and shards whose parameters are gathered by MPI's messages.
First it checks that all three have the same parameters, bit for bit. Prints, from rank 0, the median time of a step and
of the optimizer's part in it, their quartiles, and the bytes of state on this rank.
"""

import argparse
import statistics
import time
from unittest import mock

import torch

import mpidp
from mpidp.reduce.transport import MAX_PIECE_BYTES
from mpidp.tools.bench.step import MODELS, make_workload
from mpidp.train import sharded_optimizer as sharding
from mpidp.train.data_parallel import DataParallel
from mpidp.train.sharded_gather import TOTAL_BYTES, Channel, Messages
from mpidp.world.world import World

SIDES = ("plain", "sharded", "sharded, by messages")


def messages(world: World) -> Channel:
    """The plain way to gather."""
    return Messages(world, min(TOTAL_BYTES, MAX_PIECE_BYTES) // world.size)


class Training:
    """A model in training. Construction is collective."""

    def __init__(self, side: str, name: str, scale: int, world: World):
        self.world = world
        torch.manual_seed(0)
        self.workload = make_workload(name, scale, world)
        self.model = DataParallel(self.workload.module, world, quiet=True)
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5)
        if side == SIDES[1]:
            self.optimizer = mpidp.ShardedOptimizer(self.optimizer, world)
        elif side == SIDES[2]:
            with mock.patch.object(sharding, "make_channel", messages):
                self.optimizer = mpidp.ShardedOptimizer(self.optimizer, world)
        self.optimizer_s = 0.0

    def block(self, steps: int) -> tuple[float, float]:
        """Seconds of a step, and of its optimizer, in so many steps. Collective."""
        self.optimizer_s = 0.0
        self.world.comm.Barrier()
        start = time.perf_counter()
        for _ in range(steps):
            self.workload.loss(self.model).backward()  # type: ignore[no-untyped-call]
            self.world.comm.Barrier()
            before = time.perf_counter()
            self.optimizer.step()
            self.world.comm.Barrier()
            self.optimizer_s += time.perf_counter() - before
            self.optimizer.zero_grad()
        return (time.perf_counter() - start) / steps, self.optimizer_s / steps

    def state_bytes(self) -> int:
        """Of the tensors that the optimizer keeps on this rank."""
        sharded = isinstance(self.optimizer, mpidp.ShardedOptimizer)
        states = (self.optimizer.inner if sharded else self.optimizer).state.values()  # type: ignore[attr-defined]
        return sum(value.nbytes for state in states for value in state.values() if isinstance(value, torch.Tensor))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=sorted(MODELS), default="transformer")
    parser.add_argument("--scale", type=int, default=1)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--blocks", type=int, default=20)
    options = parser.parse_args()
    world = mpidp.init()
    trainings = {side: Training(side, options.model, options.scale, world) for side in SIDES}
    for training in trainings.values():
        training.block(options.steps)
    plain, *others = [list(training.model.parameters()) for training in trainings.values()]
    same = all(torch.equal(one, other) for parameters in others for one, other in zip(plain, parameters, strict=True))
    if not world.all(same):
        raise SystemExit("the trainings differ")
    times: dict[str, list[tuple[float, float]]] = {side: [] for side in SIDES}
    for _ in range(options.blocks):
        for side, training in trainings.items():
            times[side].append(training.block(options.steps))
    if world.rank == 0:
        print(f"{options.model}, AdamW, {world.size} ranks, {options.blocks} blocks of {options.steps} steps")
        for side, training in trainings.items():
            steps, parts = zip(*times[side], strict=True)
            pairs = zip(steps, (step for step, _ in times[SIDES[0]]), strict=True)
            ratio = statistics.median(ours / base for ours, base in pairs)
            print(
                f"{side}: step {_text(steps)}, optimizer {_text(parts)}, {training.state_bytes():,} bytes of state, "
                f"step {ratio:.3f} of plain (median over pairs)"
            )


def _text(seconds: tuple[float, ...]) -> str:
    low, median, high = statistics.quantiles(seconds, n=4)
    return f"{median * 1e3:.1f} ms ({low * 1e3:.1f} to {high * 1e3:.1f})"


if __name__ == "__main__":
    main()
