"""Sets of points with different sizes, from an ordinary Dataset and DataLoader: nothing is padded.

mpiexec -n 4 python examples/ragged_sets.py [--epochs 4]

The points of all sets lie in one dataset, one set after the other, as particles of events or nodes of graphs often do;
`start` says where each set begins. `mpidp.shares` gives each rank its sets of every global batch.
"""

import argparse
from pathlib import Path

import h5py
import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import mpidp

FILE = Path("runs/examples/sets.h5")


def write_sets(count: int = 801) -> None:
    """Write sets of 1 to 30 points in space; the label is whether they lie wider apart than the median set does."""
    random = np.random.default_rng(0)
    sizes = random.integers(1, 31, count)
    spread = random.uniform(0.2, 2.0, count)
    FILE.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(FILE, "w") as file:
        points = random.normal(size=(sizes.sum(), 3)) * np.repeat(spread, sizes)[:, None]
        file["points"] = points.astype(np.float32)
        file["start"] = np.concatenate(([0], np.cumsum(sizes)))
        file["label"] = (spread > np.median(spread)).astype(np.int64)


class Sets(Dataset):
    """The sets of the file, each an array (points, 3), with its label."""

    def __init__(self) -> None:
        with h5py.File(FILE) as file:
            self.points, self.start, self.label = (file[name][:] for name in ("points", "start", "label"))

    def __len__(self) -> int:
        return len(self.label)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        rows = slice(self.start[index], self.start[index + 1])
        return torch.from_numpy(self.points[rows]), int(self.label[index])


def collate(samples: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor, Tensor]:
    """All points of a batch, which set each belongs to, and the labels."""
    sizes = torch.tensor([len(points) for points, _ in samples])
    labels = torch.tensor([label for _, label in samples])
    return torch.cat([points for points, _ in samples]), torch.arange(len(samples)).repeat_interleave(sizes), labels


class SetNet(nn.Module):
    """A network on each point, the mean over the points of a set, a network on that (Zaheer et al. 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.point = nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU())
        self.whole = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))

    def forward(self, points: Tensor, owner: Tensor, count: int) -> Tensor:
        """Scores (count, 2) of points (n, 3) that belong to the sets `owner` (n,)."""
        features = self.point(points)
        sums = features.new_zeros(count, features.shape[1]).index_add(0, owner, features)
        return self.whole(sums / owner.bincount(minlength=count)[:, None])


def main() -> None:
    """Train, and print the accuracy over all sets."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=4)
    epochs = parser.parse_args().epochs

    torch.manual_seed(0)
    world = mpidp.init()
    world.call_on_root(write_sets)
    sets = Sets()
    shares = mpidp.shares(len(sets), global_batch=32, seed=0)
    loader = DataLoader(sets, batch_sampler=shares, collate_fn=collate)
    model = mpidp.DataParallel(SetNet().to(world.device), world)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    for epoch in range(epochs):
        right, count = 0, 0
        for share, (points, owner, labels) in shares.steps(loader):
            scores = model(points.to(world.device), owner.to(world.device), len(labels))
            labels = labels.to(world.device)
            share.weigh(F.cross_entropy(scores, labels)).backward()
            optimizer.step()
            optimizer.zero_grad()
            # A rank without samples in an epoch's last step gets a substitute, which does not count.
            right += int((scores.argmax(1) == labels)[: share.size].sum())
            count += share.size
        right, count = world.sum([right, count])
        if world.rank == 0:
            print(f"epoch {epoch + 1}: {right / count:.1%} of {count:,.0f} sets are right")


if __name__ == "__main__":
    main()
