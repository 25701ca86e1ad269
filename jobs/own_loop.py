"""A loop of your own on any number of ranks: mpidp's pieces in plain PyTorch.

mpiexec -n 4 python jobs/own_loop.py        (or without mpiexec, on one rank)

Stopped by SIGTERM or SIGUSR2, it saves and exits with 75; started again, it goes on in the middle of the epoch.
"""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import mpidp


class Net(nn.Sequential):
    """Any module will do."""

    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


torch.manual_seed(0)
world = mpidp.init()
loader = mpidp.HDF5Loader("data/digits.h5", fields=("x", "y"), global_batch=64, seed=0, world=world)
model = mpidp.DataParallel(Net().to(world.device), world)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

state = mpidp.TrainState(model, optimizer, loader)

with mpidp.Checkpoints("runs/own_loop", state) as checkpoints:
    checkpoints.resume()
    for epoch in range(checkpoints.epoch, 5):
        total, samples = 0.0, 0
        for batch in model.batches(loader):  # one pass is one epoch, in a new order
            loss = F.cross_entropy(model(batch.x), batch.y)
            batch.weigh(loss).backward()  # gradients are the mean over the global batch now
            optimizer.step()
            optimizer.zero_grad()
            if batch.size:  # a rank may have no sample in an epoch's last batch
                total, samples = total + loss.item() * batch.size, samples + batch.size
            checkpoints.step()
        mean = world.mean(total / max(samples, 1), weight=samples)
        if world.rank == 0:
            print(f"epoch {epoch + 1}: loss {mean:.4f}")
