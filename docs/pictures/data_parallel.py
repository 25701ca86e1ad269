"""Draw the pictures of docs/explanation/data_parallel.md from a real step on three ranks.

mpiexec -n 3 python docs/pictures/data_parallel.py
"""

import copy
from pathlib import Path

import matplotlib
import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import mpidp

matplotlib.use("Agg")
from matplotlib import pyplot

FOLDER = Path(__file__).parent
COLORS = ["#0072b2", "#d55e00", "#009e73"]


def flat_gradient(module: nn.Module) -> torch.Tensor:
    """All gradients one after the other, as they lie in a bucket."""
    return torch.cat([parameter.grad.flatten() for parameter in module.parameters()])


def draw_samples(indices: list[list[np.ndarray]]) -> None:
    """Which rows of the file each rank took in the first steps: a list of steps for each rank."""
    figure, axes = pyplot.subplots(figsize=(8, 2.2), layout="constrained")
    for rank, steps in enumerate(indices):
        rows = np.concatenate(steps)
        heights = [np.full(len(step), number + 0.2 * (rank - 1)) for number, step in enumerate(steps, 1)]
        places = np.concatenate(heights)
        axes.plot(rows, places, "|", color=COLORS[rank], label=f"rank {rank}")
    axes.set(xlabel="row of the file", ylabel="step", yticks=range(1, len(indices[0]) + 1))
    axes.invert_yaxis()
    figure.legend(loc="outside upper center", ncols=3, frameon=False)
    figure.savefig(FOLDER / "samples.png", dpi=110)


def draw_gradients(gradients: list[torch.Tensor], mean: torch.Tensor) -> None:
    """The weighed gradient of each rank, and what every rank has after backward()."""
    figure, axes = pyplot.subplots(4, 1, figsize=(8, 4), sharex=True, sharey=True, layout="constrained")
    names = [*(f"rank {rank}" for rank in range(3)), "mean"]
    for place, name, values, color in zip(axes, names, [*gradients, mean], [*COLORS, "black"], strict=True):
        place.bar(np.arange(80), values[:80], color=color)
        place.set_ylabel(name)
    axes[-1].set_xlabel("place in the flat buffer (the first 80)")
    figure.savefig(FOLDER / "gradients.png", dpi=110)


def main() -> None:
    """Take three steps, and draw them on rank 0."""
    torch.manual_seed(0)
    world = mpidp.init()
    assert world.size == 3, "the pictures show three ranks"
    loader = mpidp.HDF5Loader("data/digits.h5", ("x", "y"), global_batch=64, seed=0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    model = mpidp.DataParallel(net, world)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    taken, own, mean = [], torch.empty(0), torch.empty(0)
    for _, batch in zip(range(3), loader, strict=False):
        taken.append(batch.indices)
        alone = copy.deepcopy(model)  # a plain module, which reduces nothing
        batch.weigh(F.cross_entropy(alone(batch.x), batch.y)).backward()
        batch.weigh(F.cross_entropy(model(batch.x), batch.y)).backward()
        own, mean = flat_gradient(alone), flat_gradient(model).clone()
        optimizer.step()
        optimizer.zero_grad()
    indices, gradients = world.comm.allgather(taken), world.comm.allgather(own)
    assert torch.allclose(sum(gradients) / 3, mean, atol=1e-6)
    if world.rank == 0:
        draw_samples(indices)
        draw_gradients(gradients, mean)


if __name__ == "__main__":
    main()
