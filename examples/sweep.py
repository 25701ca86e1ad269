"""A sweep by job array: each task trains with one combination of settings; then a table of the results.

sbatch --array=0-5 --ntasks=4 --wrap 'srun --mpi=pmi2 python examples/sweep.py'
python examples/sweep.py --table

Without Slurm: SLURM_ARRAY_TASK_ID=0 mpiexec -n 4 python examples/sweep.py
"""

import argparse
import itertools
import json
import os
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import mpidp

FOLDER = Path("runs/sweep")
GRID = list(itertools.product([1e-3, 3e-3, 1e-2], [32, 64]))  # learning rate, global batch


def train(lr: float, global_batch: int, epochs: int) -> float:
    """Train with these settings; the accuracy on held-out samples, the same on all ranks."""
    torch.manual_seed(0)
    world = mpidp.init()
    parts = {
        name: mpidp.HDF5Loader("data/digits.h5", ("x", "y"), global_batch, split=(name, 0.2))
        for name in ("train", "validation")
    }
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    model = mpidp.DataParallel(net.to(world.device), world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    for _ in range(epochs):
        for batch in model.batches(parts["train"]):
            batch.weigh(F.cross_entropy(model(batch.x), batch.y)).backward()
            optimizer.step()
            optimizer.zero_grad()
    right, count = 0, 0
    with torch.no_grad():
        for batch in parts["validation"]:
            right, count = right + int((model(batch.x).argmax(1) == batch.y).sum()), count + batch.size
    right, count = world.sum([right, count])
    return right / count


def table() -> None:
    """Print the results that are there, the best first."""
    results = [json.loads(path.read_text()) for path in sorted(FOLDER.glob("task_*.json"))]
    for result in sorted(results, key=lambda result: -result["accuracy"]):
        print(f"lr {result['lr']:<6g} batch {result['global_batch']:<4d} accuracy {result['accuracy']:.2%}")


def main() -> None:
    """Train with the settings of this task, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--table", action="store_true", help="print the results of all tasks")
    options = parser.parse_args()
    if options.table:
        return table()
    task = int(os.environ["SLURM_ARRAY_TASK_ID"])
    lr, global_batch = GRID[task]
    accuracy = train(lr, global_batch, options.epochs)
    if mpidp.init().rank == 0:
        FOLDER.mkdir(parents=True, exist_ok=True)
        result = {"lr": lr, "global_batch": global_batch, "accuracy": accuracy}
        (FOLDER / f"task_{task}.json").write_text(json.dumps(result))
        print(f"task {task}: lr {lr:g}, global batch {global_batch}: accuracy {accuracy:.2%}")


if __name__ == "__main__":
    main()
