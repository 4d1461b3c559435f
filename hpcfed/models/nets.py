"""The networks that workloads offer by name."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from math import prod

import torch
from torch import nn

from hpcfed.errors import ConfigError
from hpcfed.models.flat import FlatModel

ACTIVATIONS = {"relu": nn.ReLU, "elu": nn.ELU, "tanh": nn.Tanh}


def network(
    name: str, shape: tuple[int, ...], outputs: int, hidden: tuple[int, ...] = (), activation: str = "relu"
) -> FlatModel:
    """A network from inputs of the given shape to ``outputs`` numbers (logits, or values of a regression).

    =======  ===========================================================================================================
    linear   one affine map: with cross-entropy, softmax regression
    mlp      affine maps of widths ``hidden``
    cnn      conv 5x5x6, pool, conv 5x5x16, pool, dense 120 (the LeNet of robust federated learning on MNIST)
    cnn7     conv 3x3x96, 3x3x96, 1x1x196, 1x1x10, pool, dense 1000, dense 1000 (federated meta-learning on CIFAR-10;
             where the pool lies is not published: 10 channels of 14 x 14 = 1960 numbers follow it)
    conv4    four blocks of conv 3x3x64, group normalization, pool (few-shot classification; C. Finn et al. 2017,
             with GroupNorm in the place of BatchNorm)
    =======  ===========================================================================================================

    A last affine map gives the outputs; the activation follows every convolution and hidden dense layer.

    Parameters
    ----------
    shape
        Of one input: (channels, rows, columns) for images; the convolutional networks need these.
    activation
        ``relu``, ``elu`` or ``tanh``.

    Raises
    ------
    ConfigError
        On every rank, which all make the same network: the inputs are too small for it, or are no images.
    """
    with torch.device("meta"):
        layers = list(_features(name, shape, hidden, ACTIVATIONS[activation]))
        features = shape
        if layers:
            try:
                features = tuple(nn.Sequential(*layers)(torch.empty(1, *shape)).shape[1:])
            except (RuntimeError, ValueError):
                raise ConfigError(
                    f"--model {name}: inputs of shape {' x '.join(map(str, shape))} are too small: "
                    "use mlp or larger images"
                ).on_all_ranks() from None
        layers += [nn.Flatten(), nn.Linear(prod(features), outputs)]
        return FlatModel.of(nn.Sequential(*layers))


def _features(
    name: str, shape: tuple[int, ...], hidden: tuple[int, ...], activation: type[nn.Module]
) -> Iterator[nn.Module]:
    """The layers before the last affine map."""
    if name == "linear":
        return
    if name == "mlp":
        yield nn.Flatten()
        yield from _dense((prod(shape), *hidden), activation)
    elif name == "cnn":
        for before, after in ((shape[0], 6), (6, 16)):
            yield from (nn.Conv2d(before, after, 5), activation(), nn.MaxPool2d(2))
        yield nn.Flatten()
        yield from (nn.LazyLinear(120), activation())
    elif name == "cnn7":
        for before, after, width in ((shape[0], 96, 3), (96, 96, 3), (96, 196, 1), (196, 10, 1)):
            yield from (nn.Conv2d(before, after, width), activation())
        yield from (nn.MaxPool2d(2), nn.Flatten())
        yield from (nn.LazyLinear(1000), activation())
        yield from _dense((1000, 1000), activation)
    else:
        for before, after in ((shape[0], 64), (64, 64), (64, 64), (64, 64)):
            yield from (nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(8, after), activation(), nn.MaxPool2d(2))


def _dense(widths: tuple[int, ...], activation: type[nn.Module]) -> Iterator[nn.Module]:
    for before, after in pairwise(widths):
        yield from (nn.Linear(before, after), activation())
