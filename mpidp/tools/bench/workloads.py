"""A name enters, a model with a fixed local batch leaves: the training steps that benchmarks time."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from mpidp.models.gpt import gpt
from mpidp.models.mlp import mlp
from mpidp.world.world import World

SEED = 0


@dataclass(frozen=True)
class Workload:
    """A model, the same on all ranks, and this rank's own batch: inputs, and the class of each output row."""

    module: nn.Module
    inputs: Tensor
    targets: Tensor

    def loss(self, model: nn.Module) -> Tensor:
        """Mean cross entropy over the batch (for tokens, over all of them)."""
        scores: Tensor = model(self.inputs)
        return functional.cross_entropy(scores.flatten(0, -2), self.targets.flatten())


def make_workload(name: str, scale: int, world: World) -> Workload:
    """The workload of that name, with `scale` times its usual batch; leaves torch's random state as it was."""
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        module = MODELS[name]().to(world.device)
        torch.manual_seed(SEED + 1 + world.rank)
        inputs, targets = BATCHES[name](scale)
    return Workload(module, inputs.to(world.device), targets.to(world.device))


VOCABULARY, CONTEXT = 4096, 64  # a transformer's tokens
FEATURES, CLASSES = 1024, 256  # the perceptron's


def _transformer() -> nn.Module:
    """21.05 million parameters."""
    return gpt(vocabulary=VOCABULARY, context=CONTEXT, layers=6, heads=8, width=512)


def _transformer_batch(sequences: int) -> tuple[Tensor, Tensor]:
    """As many tokens as a core of 2020 trains on in about 150 ms, which is about what summing the gradients takes."""
    tokens = torch.randint(VOCABULARY, (2, sequences, CONTEXT))
    return tokens[0], tokens[1]


def _mlp() -> nn.Module:
    """8.66 million parameters."""
    return mlp(inputs=FEATURES, hidden=(2048, 2048, 1024), classes=CLASSES)


def _mlp_batch(scale: int) -> tuple[Tensor, Tensor]:
    return torch.randn(64 * scale, FEATURES), torch.randint(CLASSES, (64 * scale,))


MODELS: dict[str, Callable[[], nn.Module]] = {"transformer": _transformer, "mlp": _mlp}
BATCHES: dict[str, Callable[[int], tuple[Tensor, Tensor]]] = {"transformer": _transformer_batch, "mlp": _mlp_batch}
