"""Sequences of varying length: padded rows, and a loss in which every token has the same weight.

mpiexec -n 4 python examples/variable_length.py [--epochs 4]

Each token is a letter; its label is whether an even number of "a" came before it. Ranks have different numbers of
tokens, so the mean over tokens is not the mean over ranks: `batch.weigh(loss, tokens)` makes it exact.
"""

import argparse
from pathlib import Path

import h5py
import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import mpidp

FILE = Path("runs/examples/sequences.h5")
LONGEST, LETTERS = 24, 4


def write_sequences(count: int = 1003) -> None:
    """Write letters and labels in rows of one length, and how many tokens of each row count."""
    random = np.random.default_rng(0)
    letters = random.integers(0, LETTERS, (count, LONGEST), np.uint8)
    labels = (np.cumsum(letters == 0, axis=1) % 2).astype(np.uint8)
    FILE.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(FILE, "w") as file:
        file["letters"], file["labels"] = letters, labels
        file["length"] = random.integers(1, LONGEST + 1, count)


class Tagger(nn.Module):
    """A recurrent network that labels each token: (batch, time) -> (batch, time, 2)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(LETTERS, 16)
        self.recurrent = nn.GRU(16, 48, batch_first=True)
        self.head = nn.Linear(48, 2)

    def forward(self, letters: Tensor) -> Tensor:
        """Scores of both labels for each token."""
        return self.head(self.recurrent(self.embed(letters))[0])


def main() -> None:
    """Train, and print the accuracy over the tokens of all ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=4)
    epochs = parser.parse_args().epochs

    torch.manual_seed(0)
    world = mpidp.init()
    world.call_on_root(write_sequences)
    loader = mpidp.HDF5Loader(FILE, ("letters", "labels", "length"), global_batch=32, seed=0)
    model = mpidp.DataParallel(Tagger().to(world.device), world)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    for epoch in range(epochs):
        right, tokens = 0, 0
        for batch in model.batches(loader):
            if batch.size == 0:  # nothing for this rank in the last step, in which it takes part all the same
                batch.weigh(sum(parameter.sum() for parameter in model.parameters()), 0).backward()
            else:
                counts = torch.arange(LONGEST, device=world.device) < batch.length[:, None]
                scores = model(batch.letters.long())[counts]  # of tokens that are no padding
                labels = batch.labels.long()[counts]
                batch.weigh(F.cross_entropy(scores, labels), len(labels)).backward()
                right, tokens = right + int((scores.argmax(1) == labels).sum()), tokens + len(labels)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        right, tokens = world.sum([right, tokens])
        if world.rank == 0:
            print(f"epoch {epoch + 1}: {right / tokens:.1%} of {tokens:,.0f} tokens are right")


if __name__ == "__main__":
    main()
