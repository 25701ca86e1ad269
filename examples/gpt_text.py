"""A small GPT on text, in a loop of your own: windows of bytes in HDF5, warm-up, clipping, gradient accumulation.

mpiexec -n 4 python examples/gpt_text.py [--text FILE] [--epochs 1]

Without --text it learns from this project's own pages.
"""

import argparse
from pathlib import Path

import h5py
import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812

import mpidp
from mpidp.models.gpt import gpt

FILE = Path("runs/examples/text.h5")
CONTEXT = 64


def write_windows(text: bytes) -> None:
    """Write windows of CONTEXT + 1 bytes that overlap by one, so that every byte but the first is a target once."""
    count = (len(text) - 1) // CONTEXT
    data = np.frombuffer(text, np.uint8)
    rows = np.stack([data[i * CONTEXT : (i + 1) * CONTEXT + 1] for i in range(count)])
    FILE.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(FILE, "w") as file:
        file.create_dataset("tokens", data=rows, chunks=(64, CONTEXT + 1), compression="gzip")


def read_text(path: str | None) -> bytes:
    """The text to learn from."""
    paths = [Path(path)] if path else sorted((Path(__file__).parent.parent / "docs").rglob("*.md"))
    return b"\n".join(path.read_bytes() for path in paths)


def main() -> None:
    """Train, and let the model write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text")
    parser.add_argument("--epochs", type=int, default=1)
    options = parser.parse_args()

    torch.manual_seed(0)
    world = mpidp.init()
    text = read_text(options.text)
    world.call_on_root(lambda: write_windows(text))
    loader = mpidp.HDF5Loader(FILE, fields=("tokens",), global_batch=32, seed=0)
    model = mpidp.DataParallel(gpt(context=CONTEXT, layers=2, heads=2, width=64).to(world.device), world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=10)

    for epoch in range(options.epochs):
        total, samples = 0.0, 0
        for batch in model.batches(loader):
            for part in batch.micro_batches(8):  # at most 8 windows at once in memory; one reduction a step
                tokens = part.tokens.long()
                scores = model(tokens[:, :-1])
                loss = F.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())
                part.weigh(loss).backward()
                if part.size:
                    total, samples = total + loss.item() * part.size, samples + part.size
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # of the mean over all ranks
            optimizer.step()
            optimizer.zero_grad()
            warm_up.step()
        mean = world.mean(total / max(samples, 1), weight=samples)
        if world.rank == 0:
            print(f"epoch {epoch + 1}: loss {mean:.4f} of a byte")
    if world.rank == 0:
        prompt = torch.tensor([list(b"The ranks ")], device=world.device)
        written = model.module.generate(prompt, 60, generator=torch.Generator(world.device).manual_seed(0))
        print(bytes(written[0].tolist()).decode(errors="replace"))


if __name__ == "__main__":
    main()
