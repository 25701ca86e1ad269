"""A trained model in, whatever the run file's `train.on_end` makes of it out, on rank 0."""

from collections.abc import Callable

import torch
from torch import nn

from mpidp.config import RunConfig
from mpidp.errors import ConfigError
from mpidp.train.components.lookup import find

BUILT_IN = {"sample_text": "mpidp.train.components.on_end:sample_text"}
SAMPLE_BYTES = 400

OnEnd = Callable[[nn.Module, RunConfig], object]


def build_on_end(config: RunConfig) -> OnEnd | None:
    """The function of the run file, called as `function(model, config)` on rank 0 after training; None for none."""
    return find("train.on_end", config.train.on_end, BUILT_IN) if config.train.on_end else None


def sample_text(model: nn.Module, config: RunConfig) -> None:
    """Prints text that a byte-level language model writes, from the run's seed."""
    generate = getattr(model, "generate", None)
    if generate is None:
        raise ConfigError(f"train.on_end = 'sample_text': model {config.model.name!r} has no method generate")
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(config.run.seed)
    prompt = torch.tensor([[ord("\n")]], device=device)
    model.eval()
    tokens = generate(prompt, SAMPLE_BYTES, temperature=0.8, generator=generator)
    text = bytes(tokens[0].tolist()).decode(errors="replace").strip()
    print(f"A sample of what the model writes:\n\n{text}\n", flush=True)
