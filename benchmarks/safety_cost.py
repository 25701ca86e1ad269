"""What the checks of a run cost, at their defaults.

Usage: mpiexec -n RANKS python benchmarks/safety_cost.py [--model transformer] [--steps 25] [--blocks 40]

Blocks of training steps take turns: some with what a run does for safety, the look at all gradients before the
optimizer steps, the comparison of parameters and optimizer state over ranks and the agreement on stopping, the others
without. Prints, from rank 0, the median step of both sides; the median over pairs of neighbouring blocks of how much
longer one with them took, and its quartiles; the time that is spent inside their calls, waits for slower ranks
included; and the processor time of the watchdog's thread.
"""

import argparse
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import mpidp
from mpidp.tools.bench.step import MODELS, Workload, make_workload
from mpidp.train.data_parallel import DataParallel
from mpidp.train.stop import StopSignal
from mpidp.world.world import World


class Training:
    """A model in training, the same with and without the checks. Construction is collective."""

    def __init__(self, workload: Workload, world: World, pause_s: float = 0.0):
        self.world, self.workload, self.pause_s = world, workload, pause_s
        self.model = DataParallel(workload.module, world)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5)
        self.stop = StopSignal(world)
        self.inside_s = 0.0
        sync = self.model._sync
        sync.replicas.check = self._timed(sync.replicas.check)  # type: ignore[method-assign]
        sync.before_step = self._timed(sync.before_step)  # type: ignore[method-assign]
        sync.after_step = self._timed(sync.after_step)  # type: ignore[method-assign]
        self.is_checked = True

    def step(self, is_checked: bool) -> None:
        """One step of the optimizer, as the trainer takes it. Collective."""
        self.is_checked = is_checked
        time.sleep(self.pause_s)
        self.workload.loss(self.model).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._timed(self.stop.agreed)()

    def _timed(self, check: Callable[..., Any]) -> Callable[..., Any]:
        """The same check, whose time is added up; it is left out where the step is to go without."""

        def call(*args: Any) -> Any:
            if not self.is_checked:
                return None
            start = time.perf_counter()
            result = check(*args)
            self.inside_s += time.perf_counter() - start
            return result

        return call

    def block(self, steps: int, is_checked: bool) -> float:
        """Seconds a step, in so many."""
        self.world.comm.Barrier()
        start = time.perf_counter()
        for _ in range(steps):
            self.step(is_checked)
        self.world.comm.Barrier()
        return (time.perf_counter() - start) / steps

    def close(self) -> None:
        """Gives everything back. Collective."""
        self.stop.close()


def make_training(model: str, scale: int, world: World) -> Training:
    """Of a bench's model; or "paused": 40 small tensors, and 20 ms in which no rank computes, as if a GPU did."""
    if model != "paused":
        return Training(make_workload(model, scale, world), world)
    layers = [torch.nn.Linear(128, 128) for _ in range(20)]
    rows = torch.randn(8 * scale, 128)
    return Training(Workload(torch.nn.Sequential(*layers), rows, torch.randint(128, (8 * scale,))), world, 0.02)


def watchdog_cpu_s() -> float:
    """Processor seconds of the watchdog's thread so far; a single rank has none."""
    threads = [thread.native_id for thread in threading.enumerate() if thread.name == "mpidp-watchdog"]
    schedules = [Path(f"/proc/self/task/{thread}/schedstat").read_text() for thread in threads]
    return sum(int(schedule.split()[0]) / 1e9 for schedule in schedules)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=[*sorted(MODELS), "paused"], default="transformer")
    parser.add_argument("--scale", type=int, default=1)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--blocks", type=int, default=40)
    options = parser.parse_args()
    world = mpidp.init()
    training = make_training(options.model, options.scale, world)
    for is_checked in (True, False):
        training.block(options.steps, is_checked)
    training.inside_s = 0.0
    start, cpu_s = time.perf_counter(), watchdog_cpu_s()
    sides: dict[bool, list[float]] = {True: [], False: []}
    for number in range(options.blocks):  # with, without, without, with: a drift of the machine is on both sides
        for is_checked in (True, False) if number % 2 == 0 else (False, True):
            sides[is_checked].append(training.block(options.steps, is_checked))
    share = (watchdog_cpu_s() - cpu_s) / (time.perf_counter() - start)
    inside_s = training.inside_s / (options.blocks * options.steps)
    training.close()
    if world.rank == 0:
        more = statistics.quantiles([with_s / without_s - 1 for with_s, without_s in zip(*sides.values(), strict=True)])
        step_s = statistics.median(sides[False])
        print(f"{options.model}, {world.size} ranks, {options.blocks} pairs of {options.steps} steps")
        print(f"a step: {statistics.median(sides[True]) * 1e3:.3f} ms with checks, {step_s * 1e3:.3f} ms without")
        print(f"longer with checks: {more[1]:+.2%} (quartiles {more[0]:+.2%} to {more[2]:+.2%})")
        print(f"inside their calls: {inside_s * 1e6:.0f} us a step, {inside_s / step_s:.2%}")
        print(f"watchdog's thread: {share:.4%} of one core")


if __name__ == "__main__":
    main()
