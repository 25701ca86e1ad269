"""A loop of one's own with `mpidp.Checkpoints`: writes the samples of each step of each rank, and the model at the end.

Run under mpiexec, with DATA (an HDF5 file) and FOLDER (of the checkpoints). PAUSE_S in the environment is slept in
each step.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn

import mpidp

EPOCHS = 3


def main(data: str, folder: Path) -> None:
    """Train, or go on."""
    torch.manual_seed(0)
    world = mpidp.init()
    loader = mpidp.HDF5Loader(data, ("x", "y"), global_batch=12, seed=3, world=world)
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))
    model = mpidp.DataParallel(net.to(world.device), world)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    records = open(f"steps_{world.rank}.jsonl", "a")  # noqa: SIM115
    state = mpidp.TrainState(model, optimizer, loader, scheduler)
    with mpidp.Checkpoints(folder, state, every_steps=2) as checkpoints:
        checkpoints.resume()
        sys.stderr.write(f"rank {world.rank} begins at step {checkpoints.state.step}\n")
        for epoch in range(checkpoints.epoch, EPOCHS):
            for batch in model.batches(loader):
                loss = nn.functional.mse_loss(model(batch.x)[:, 0], batch.y)
                batch.weigh(loss).backward()
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
                record = {"step": checkpoints.state.step + 1, "epoch": epoch, "rows": batch.indices.tolist()}
                print(json.dumps(record), file=records, flush=True)
                time.sleep(float(os.environ.get("PAUSE_S", "0")))
                checkpoints.step()
    if world.rank == 0:
        torch.save(model.state_dict(), "end.pt")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
