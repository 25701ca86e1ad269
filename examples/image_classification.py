"""Image classification in a loop of your own: evaluation, the best model kept, resume in the middle of an epoch.

mpiexec -n 4 python examples/image_classification.py [--epochs 5]

Started again with more epochs, it goes on where it stopped. SIGTERM, SIGUSR2 or a file runs/images/STOP make it save
and exit with code 75.
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import mpidp

FOLDER = Path("runs/images")
FILE = "data/digits.h5"


class Net(nn.Sequential):
    """A convolutional network for images of 8x8 pixels."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(32 * 4 * 4, 10),
        )


@torch.no_grad()
def evaluate(model: mpidp.DataParallel, loader: mpidp.HDF5Loader, world: mpidp.World) -> tuple[float, float]:
    """Mean loss and accuracy over all samples, each counted once, the same on all ranks."""
    model.eval()
    loss, right, samples = 0.0, 0, 0
    for batch in loader:
        scores = model(batch.x)
        loss += F.cross_entropy(scores, batch.y, reduction="sum").item()
        right += int((scores.argmax(1) == batch.y).sum())
        samples += batch.size
    model.train()
    loss, right, samples = world.sum([loss, right, samples])
    return loss / samples, right / samples


def main() -> None:
    """Train, and evaluate after each epoch."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=5)
    epochs = parser.parse_args().epochs

    torch.manual_seed(0)
    world = mpidp.init()
    split = {"fields": ("x", "y"), "seed": 0}
    train = mpidp.HDF5Loader(FILE, global_batch=64, split=("train", 0.2), **split)
    held_out = mpidp.HDF5Loader(FILE, global_batch=256, split=("validation", 0.2), shuffle="none", **split)
    model = mpidp.DataParallel(Net().to(world.device), world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
    best = Best()
    state = mpidp.TrainState(model, optimizer, train, scheduler, others={"best": best})

    # every_epochs=0: the checkpoint of an epoch is made by save(), after its evaluation, so that a resume repeats it.
    with mpidp.Checkpoints(FOLDER, state, every_steps=10, every_epochs=0) as checkpoints:
        checkpoints.resume()
        for epoch in range(checkpoints.epoch, epochs):
            for batch in model.batches(train):
                batch.weigh(F.cross_entropy(model(batch.x), batch.y)).backward()
                optimizer.step()
                optimizer.zero_grad()
                checkpoints.step()
            loss, accuracy = evaluate(model, held_out, world)
            scheduler.step()
            if best.is_better(loss) and world.rank == 0:
                torch.save(model.state_dict(), FOLDER / "best.pt")
            checkpoints.save()
            if world.rank == 0:
                print(f"epoch {epoch + 1}: held out: loss {loss:.4f}, accuracy {accuracy:.2%}")
    if world.rank == 0:
        print(f"best loss {best.loss:.4f}, saved in {FOLDER / 'best.pt'}")


class Best:
    """The lowest loss so far; saved with the checkpoints, so that a resume does not forget it."""

    def __init__(self) -> None:
        self.loss = float("inf")

    def is_better(self, loss: float) -> bool:
        """Whether this loss is the lowest, which is then remembered."""
        self.loss, before = min(self.loss, loss), self.loss
        return loss < before

    def state_dict(self) -> dict[str, float]:
        """The lowest loss."""
        return {"loss": self.loss}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Go on from what `state_dict` returned."""
        self.loss = state["loss"]


if __name__ == "__main__":
    main()
