"""Does the order "streams" train as well as a permutation of all rows? Class-sorted Fashion-MNIST, several seeds.

    python data/make_fashion_mnist.py
    python benchmarks/order_accuracy.py [--seeds 0,1,2,3,4] [--epochs 5]

The file is written sorted by class, in gzip chunks of 256 images, which is the hardest case for an order that
keeps chunks whole: a chunk holds one class only. Prints a table of held-out accuracies.
"""

import argparse
import tempfile
from pathlib import Path
from statistics import mean, stdev

import h5py
import numpy as np
import torch
from torch import Tensor, nn

import mpidp

DATA = Path(__file__).resolve().parent.parent / "data"
ORDERS = ("streams", "full", "none")


def write_sorted(source: Path, target: Path) -> None:
    """Write the data set of `source` sorted by class, stably."""
    with h5py.File(source) as read, h5py.File(target, "w") as written:
        order = np.argsort(read["y"][:], kind="stable")
        options = {"chunks": (256, 28, 28), "compression": "gzip", "shuffle": True}
        written.create_dataset("x", data=read["x"][:][order], **options)
        written.create_dataset("y", data=read["y"][:][order])


def images(batch: mpidp.Batch) -> tuple[Tensor, Tensor]:
    """Return pixels in [0, 1] and classes."""
    return batch["x"].flatten(1).float() / 255, batch["y"].long()


def accuracy(file: Path, test_file: Path, order: str, seed: int, epochs: int) -> float:
    """Train a perceptron on one process and return the share of test images it names rightly."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    loader = mpidp.HDF5Loader(file, ("x", "y"), global_batch=128, seed=seed, shuffle=order)
    # To zero at the end: at a constant rate the last few batches decide the last half per cent.
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * len(loader))
    for _ in range(epochs):
        for batch in loader:
            pixels, classes = images(batch)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(pixels), classes).backward()
            optimizer.step()
            schedule.step()
    loader.close()
    test = mpidp.HDF5Loader(test_file, ("x", "y"), global_batch=1000, shuffle="none")
    right = 0
    with torch.no_grad():
        for batch in test:
            pixels, classes = images(batch)
            right += int((model(pixels).argmax(1) == classes).sum())
    test.close()
    return right / test.num_samples


def main() -> None:
    """Print one row for each order."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0,1,2,3,4")
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()
    seeds = [int(seed) for seed in options.seeds.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "sorted.h5"
        write_sorted(DATA / "fashion_mnist_train.h5", file)
        print(f"{options.epochs} epochs, batch 128, class-sorted file; held-out accuracy in %, seeds {options.seeds}")
        for order in ORDERS:
            found = [
                100 * accuracy(file, DATA / "fashion_mnist_test.h5", order, seed, options.epochs) for seed in seeds
            ]
            spread = f" +- {stdev(found):.2f}" if len(found) > 1 else ""
            print(f"{order:6} {mean(found):.2f}{spread}   {'  '.join(f'{value:.2f}' for value in found)}", flush=True)


if __name__ == "__main__":
    main()
