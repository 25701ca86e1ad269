"""Regression on a gridded field: several variables, chunks along time and space, missing values, normalisation.

mpiexec -n 4 python examples/gridded_field.py [--epochs 3]

The file is laid out as a simulation writes it: temperature and wind on a periodic grid, one map a time step, chunked
along all axes. The model learns the change of temperature in one step, which the wind and diffusion cause.
"""

import argparse
from pathlib import Path

import h5py
import numpy as np
import torch
from torch import nn

import mpidp

FILE = Path("runs/examples/field.h5")
STEPS, LAT, LON = 300, 24, 48


def simulate() -> None:
    """Write a temperature that wind carries over a periodic grid, some of it missing, as CF conventions have it."""
    random = np.random.default_rng(0)
    lat, lon = np.meshgrid(np.linspace(0, 2 * np.pi, LAT, False), np.linspace(0, 2 * np.pi, LON, False), indexing="ij")
    temperature = 10 * np.sin(lat + 2 * lon) + 5 * np.cos(3 * lat - lon) + random.normal(size=lat.shape)
    maps, winds, changes = [], [], []
    for step in range(STEPS):
        wind = 0.3 * np.stack((np.sin(lon + 0.03 * step), np.cos(lat + 0.05 * step)))
        slope = [np.gradient(np.pad(temperature, 1, mode="wrap"), axis=axis)[1:-1, 1:-1] for axis in (0, 1)]
        curve = sum(np.roll(temperature, shift, axis) for axis in (0, 1) for shift in (1, -1)) - 4 * temperature
        change = -wind[0] * slope[0] - wind[1] * slope[1] + 0.05 * curve + random.normal(size=lat.shape) * 0.1
        maps.append(temperature), winds.append(wind), changes.append(change)
        temperature = temperature + change
    fill = np.float32(-999)
    target = np.where(random.random((STEPS, LAT, LON)) < 0.02, fill, np.array(changes, np.float32))
    FILE.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(FILE, "w") as file:
        chunks = {"compression": "gzip", "shuffle": True}
        file.create_dataset("temperature", data=np.array(maps, np.float32), chunks=(10, 12, 24), **chunks)
        file.create_dataset("wind", data=np.array(winds, np.float32), chunks=(10, 2, 12, 24), **chunks)
        file.create_dataset("change", data=target, chunks=(10, 12, 24), **chunks).attrs["_FillValue"] = fill


class Net(nn.Sequential):
    """Convolutions that go around the edges of a periodic grid: (batch, 3, lat, lon) -> (batch, 1, lat, lon)."""

    def __init__(self) -> None:
        def convolution(channels_in: int, channels_out: int) -> nn.Conv2d:
            return nn.Conv2d(channels_in, channels_out, 3, padding=1, padding_mode="circular")

        super().__init__(convolution(3, 24), nn.GELU(), convolution(24, 24), nn.GELU(), convolution(24, 1))


def main() -> None:
    """Train, and print the root of the mean squared error over all points of all ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    epochs = parser.parse_args().epochs

    torch.manual_seed(0)
    world = mpidp.init()
    world.call_on_root(simulate)
    fields = (
        mpidp.FieldSpec("temperature", scale=0.1),  # about unit variance
        mpidp.FieldSpec("wind", scale=3.0),
        mpidp.FieldSpec("change", cf=True),  # NaN where values are missing
    )
    loader = mpidp.HDF5Loader(FILE, fields, global_batch=16, seed=0)
    model = mpidp.DataParallel(Net().to(world.device), world)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    for epoch in range(epochs):
        total, points = 0.0, 0
        for batch in model.batches(loader):
            temperature, wind, change = batch
            predicted = model(torch.cat((temperature.unsqueeze(1), wind), dim=1)).squeeze(1)
            known = ~change.isnan()
            squared = (predicted - change)[known].square()
            count = int(known.sum())
            batch.weigh(squared.mean(), count).backward()  # every point has the same weight, on whichever rank
            optimizer.step()
            optimizer.zero_grad()
            total, points = total + float(squared.detach().sum()), points + count
        total, points = world.sum([total, points])
        if world.rank == 0:
            print(f"epoch {epoch + 1}: error {(total / points) ** 0.5:.3f} K a step")


if __name__ == "__main__":
    main()
