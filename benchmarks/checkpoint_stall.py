"""How long a checkpoint in the background holds up training, beside copying its state once.

Usage: mpiexec -n RANKS python benchmarks/checkpoint_stall.py [--mib 477] [--saves 6] [--folder FOLDER]

Prints, from rank 0: the time of one copy of the state into new memory and into memory that was used before; how long
each `save` held up training, and how long it took to be complete; the median and the longest `poll`; and the median
step, a matrix product and a message, with and without a checkpoint on its way.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

import mpidp
from mpidp.train.checkpoint.saver import Saver
from mpidp.world.world import World

TENSORS = 24
SIZE = 700  # of the matrices of a step


def seconds(function: Callable[[], object]) -> float:
    """How long a call takes."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def copies(state: dict[str, torch.Tensor], repeats: int) -> tuple[float, float]:
    """Median seconds of one copy into new memory, and into memory that was used before."""
    new, again = [], []
    for _ in range(repeats):
        copied: dict[str, torch.Tensor] = {}
        new.append(seconds(lambda copied=copied: copied.update({name: t.clone() for name, t in state.items()})))
        again.append(seconds(lambda copied=copied: [copied[name].copy_(tensor) for name, tensor in state.items()]))
    return statistics.median(new), statistics.median(again)


def step(world: World, left: torch.Tensor) -> float:
    """One step of training: a product and a message to all."""
    return seconds(lambda: world.sum([float((left @ left).sum())]))


def measure(world: World, saver: Saver, state: dict[str, torch.Tensor], saves: int) -> list[str]:
    """What happens in so many checkpoints, in words."""
    left = torch.randn(SIZE, SIZE)
    alone = statistics.median(step(world, left) for _ in range(30))
    lines, polls, beside = [], [], []
    for number in range(1, saves + 1):
        world.barrier()
        start = time.perf_counter()
        stalled_s = seconds(lambda number=number: saver.save(number, lambda: dict(state), dict))
        while saver.is_busy:
            beside.append(step(world, left))
            polls.append(seconds(saver.poll))
        lines.append(
            f"save {number}: held up {stalled_s * 1e3:.1f} ms, complete after {time.perf_counter() - start:.2f} s"
        )
    lines.append(f"poll: median {statistics.median(polls) * 1e6:.0f} us, longest {max(polls) * 1e3:.2f} ms")
    lines.append(
        f"step: {alone * 1e3:.1f} ms alone, {statistics.median(beside) * 1e3:.1f} ms while a checkpoint is written"
    )
    return lines


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--mib", type=int, default=477)  # 500 MB
    parser.add_argument("--saves", type=int, default=6)
    parser.add_argument("--folder", type=Path, default=None)
    options = parser.parse_args()
    world = mpidp.init()
    numel = (options.mib << 20) // 4 // TENSORS
    state = {f"tensor_{index}": torch.randn(numel) for index in range(TENSORS if world.rank == 0 else 0)}
    folder = world.call_on_root(lambda: Path(tempfile.mkdtemp(dir=options.folder, prefix="checkpoint_stall_")))
    saver = Saver(world, folder, keep=1)
    new, again = copies(state, 5) if state else (0.0, 0.0)
    lines = measure(world, saver, state, options.saves)
    saver.close()
    if world.rank == 0:
        print(f"{options.mib} MiB on rank 0 of {world.size}, {torch.get_num_threads()} threads a rank, in {folder}")
        print(f"one copy of the state: {new * 1e3:.1f} ms into new memory, {again * 1e3:.1f} ms into used memory")
        print("\n".join(lines))


if __name__ == "__main__":
    main()
