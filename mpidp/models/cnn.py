"""A small convolutional net for images."""

from torch import nn


def cnn(classes: int = 10, channels: int = 1, width: int = 16) -> nn.Sequential:
    """A convolutional net for small images, such as the 8x8 of digits and the 28x28 of Fashion-MNIST.

    It has no batch normalisation, so a rank's scores for a sample do not depend on the other samples of the
    batch. Its adaptive pooling leaves the size of the image free (at least 2x2). Weights start as in He et al.
    (2015) and follow torch's global random state.

    Args:
        classes: number of scores of one sample.
        channels: channels of the images.
        width: channels after the first convolution; the second has twice as many.

    Returns:
        A module that takes float images and also works on a batch of 0 samples.
    """
    pooled = 4
    model = nn.Sequential(
        nn.Conv2d(channels, width, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.AdaptiveAvgPool2d(pooled),
        nn.Flatten(),
        nn.Linear(2 * width * pooled * pooled, 4 * width),
        nn.ReLU(),
        nn.Linear(4 * width, classes),
    )
    for layer in model:
        if isinstance(layer, (nn.Conv2d, nn.Linear)):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
    return model
