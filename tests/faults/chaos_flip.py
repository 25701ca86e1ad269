"""Flip random bits of one rank's parameters or optimizer state, many times; each must be found and named.

Usage: mpiexec -n 3 python tests/faults/chaos_flip.py [--flips 50] [--seed S]

Each time a random bit of a random element of a random tensor on a random rank is flipped between two steps. The check
of replicas must find it within its interval, with the same words on all ranks, and name the rank and the parameter.
Then the tensors are made equal again, and training goes on. Exit code 1 when a flip was not found or another rank or
parameter was named. The same seed repeats the same choices.
"""

from __future__ import annotations

import argparse
import random
import sys

import torch
from torch import nn

import mpidp
from mpidp.errors import MismatchError

EVERY_STEPS = 10


class Training:
    """A small model in training, and what of it is equal on all ranks."""

    def __init__(self, world: mpidp.World) -> None:
        self.world = world
        module = nn.Sequential(nn.Linear(20, 50), nn.Tanh(), nn.Linear(50, 30), nn.Tanh(), nn.Linear(30, 5))
        self.model = mpidp.DataParallel(module, world, reducer="flat", compare_steps=EVERY_STEPS, quiet=True)
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.generator = torch.Generator().manual_seed(world.rank)

    def step(self) -> None:
        inputs = torch.randn(8, 20, generator=self.generator)
        self.model(inputs).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        """Parameters, and the optimizer's state of each, by name of the parameter."""
        found = []
        for name, parameter in self.model.named_parameters():
            found.append((name, parameter.detach()))
            state = self.optimizer.state[parameter]
            found += [(name, state[key]) for key in ("exp_avg", "exp_avg_sq")]
        return found


def flip(tensor: torch.Tensor, element: int, bit: int) -> None:
    """Flip one bit of a float32 element."""
    tensor.view(-1).view(torch.int32)[element] ^= torch.tensor(1 << bit if bit < 31 else -(1 << 31), dtype=torch.int32)


def find(training: Training) -> str:
    """Step until a difference is found; what was said of it, or nothing."""
    for _ in range(EVERY_STEPS + 3):
        try:
            training.step()
        except MismatchError as error:
            return str(error)
    return ""


def chaos(world: mpidp.World, flips: int, seed: int) -> list[str]:
    """Flip so many bits; what went wrong, a line each."""
    choose = random.Random(seed)  # the same choices on every rank
    training = Training(world)
    for _ in range(3):
        training.step()
    faults = []
    for number in range(flips):
        guilty = choose.randrange(world.size)
        name, tensor = choose.choice(training.tensors())
        element, bit = choose.randrange(tensor.numel()), choose.randrange(32)
        if world.rank == guilty:
            flip(tensor, element, bit)
        text = find(training)
        same = len(set(world.comm.allgather(text))) == 1
        if not same or f"rank {guilty} " not in text or name not in text:
            faults.append(f"flip {number}: bit {bit} of element {element} of {name} on rank {guilty}: {text!r}")
        training.optimizer.zero_grad()
        for _, values in training.tensors():  # equal again, from a rank that was right
            world.comm.Bcast(values.numpy(), root=(guilty + 1) % world.size)
    return faults


def main() -> int:
    """Do as the words say; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flips", type=int, default=50)
    parser.add_argument("--seed", type=int, default=None)
    options = parser.parse_args()
    torch.manual_seed(0)
    world = mpidp.init()
    if world.size < 3:
        parser.error("give at least 3 ranks: with two nobody can tell which of them is right")
    seed = world.broadcast(random.SystemRandom().randrange(1 << 32) if options.seed is None else options.seed)
    faults = chaos(world, options.flips, seed)
    if world.rank == 0:
        found = options.flips - len(faults)
        print("\n".join([*faults, f"{options.flips} bits flipped in memory, {found} found and named; seed {seed}"]))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
