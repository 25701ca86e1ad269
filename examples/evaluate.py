"""Evaluation only: a saved model over a data set on all ranks, every sample once, with a confusion matrix.

mpiexec -n 4 python examples/evaluate.py [--model runs/images/best.pt] [--data data/digits.h5]

First train the model: mpiexec -n 4 python examples/image_classification.py
"""

import argparse

import numpy as np
import torch
from image_classification import Net

import mpidp


@torch.no_grad()
def main() -> None:
    """Gather the predictions in the order of the file, and count."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="runs/images/best.pt")
    parser.add_argument("--data", default="data/digits.h5")
    options = parser.parse_args()

    world = mpidp.init()
    model = Net().to(world.device).eval()  # no gradients, so nothing has to be wrapped
    with world.raise_on_all_ranks("loading the model"):
        model.load_state_dict(torch.load(options.model, map_location=world.device, weights_only=True))
    loader = mpidp.HDF5Loader(options.data, ("x", "y"), global_batch=256, shuffle="none")
    predicted, labels, rows = [], [], []
    for batch in loader:
        predicted.append(model(batch.x).argmax(1))
        labels.append(batch.y)
        rows.append(batch.indices)
    rows = np.concatenate(rows)
    predicted = world.gather_rows(torch.cat(predicted), rows, len(loader.dataset))
    labels = world.gather_rows(torch.cat(labels), rows, len(loader.dataset))
    if world.rank == 0:
        matrix = torch.zeros(10, 10, dtype=torch.int64).index_put_(
            (labels, predicted), torch.ones_like(labels), accumulate=True
        )
        print(f"{len(labels):,} samples, accuracy {(predicted == labels).double().mean():.2%}; rows are labels")
        print("\n".join(" ".join(f"{count:4d}" for count in row) for row in matrix.tolist()))


if __name__ == "__main__":
    main()
