"""A multilayer perceptron."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn


def mlp(inputs: int = 64, hidden: int | Sequence[int] = 128, classes: int = 10) -> nn.Sequential:
    """A multilayer perceptron with ReLU between its layers.

    Args:
        inputs: number of values of one sample; samples of any shape are flattened first.
        hidden: width of the hidden layer, or of each of several.
        classes: number of scores of one sample.

    Returns:
        A module that takes (batch, ...) and gives (batch, classes); a batch of 0 samples is fine.
    """
    widths = [hidden] if isinstance(hidden, int) else list(hidden)
    layers: list[nn.Module] = [nn.Flatten()]
    for width in widths:
        layers += [nn.Linear(inputs, width), nn.ReLU()]
        inputs = width
    layers.append(nn.Linear(inputs, classes))
    return nn.Sequential(*layers)
