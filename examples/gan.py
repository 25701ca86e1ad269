"""A GAN: two models and two optimizers on the same ranks, each with gradients of its own.

mpiexec -n 4 python examples/gan.py [--epochs 2]
"""

import argparse
import itertools

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import mpidp

NOISE = 16


def layers(sizes: list[int], last: nn.Module) -> nn.Sequential:
    """Linear layers of these sizes with LeakyReLU between them."""
    parts: list[nn.Module] = []
    for size, following in itertools.pairwise(sizes):
        parts += [nn.Linear(size, following), nn.LeakyReLU(0.2)]
    return nn.Sequential(*parts[:-1], last)


def real_or_not(scores: Tensor, real: bool) -> Tensor:
    """The loss of a discriminator that should have said `real`."""
    return F.binary_cross_entropy_with_logits(scores, torch.full_like(scores, float(real)))


def main() -> None:
    """Train both models in turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=2)
    epochs = parser.parse_args().epochs

    torch.manual_seed(0)
    world = mpidp.init()
    loader = mpidp.HDF5Loader("data/digits.h5", fields=("x",), global_batch=64, seed=0)
    make = mpidp.DataParallel(layers([NOISE, 64, 64], nn.Sigmoid()).to(world.device), world)
    judge = mpidp.DataParallel(layers([64, 64, 1], nn.Identity()).to(world.device), world)
    make_optimizer = torch.optim.Adam(make.parameters(), lr=1e-3, betas=(0.5, 0.99))
    judge_optimizer = torch.optim.Adam(judge.parameters(), lr=1e-3, betas=(0.5, 0.99))
    # The same noise for a sample on whichever rank: drawn for the whole batch, of which each rank takes its rows.
    random = torch.Generator().manual_seed(0)

    for epoch in range(epochs):
        sums = [0.0, 0.0, 0]
        for batch in judge.batches(loader):
            noise = torch.randn(len(loader.dataset), NOISE, generator=random)[batch.indices].to(world.device)

            made = make(noise)
            real = judge(batch.x.flatten(1))
            fake = judge(made.detach())
            judge_loss = real_or_not(real, True) + real_or_not(fake, False)
            batch.weigh(judge_loss).backward()
            judge_optimizer.step()
            judge_optimizer.zero_grad()

            judge.requires_grad_(False)  # its gradients are not wanted here, nor reduced
            make_loss = real_or_not(judge(made), True)
            batch.weigh(make_loss).backward()
            judge.requires_grad_(True)
            make_optimizer.step()
            make_optimizer.zero_grad()
            if batch.size:
                sums = [
                    sums[0] + judge_loss.item() * batch.size,
                    sums[1] + make_loss.item() * batch.size,
                    sums[2] + batch.size,
                ]
        judge_sum, make_sum, samples = world.sum(sums)
        if world.rank == 0:
            print(
                f"epoch {epoch + 1}: loss of the judge {judge_sum / samples:.3f}, of the maker {make_sum / samples:.3f}"
            )


if __name__ == "__main__":
    main()
