"""Residual networks for small images, with group normalization, and networks whose weights a mask multiplies."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Self

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from hpcfed.capabilities import Array
from hpcfed.devices import Device
from hpcfed.models.flat import FlatModel

GROUPS = 8


def resnet20(channels: int, classes: int) -> FlatModel:
    """The ResNet of 20 layers for CIFAR (He et al. 2015, section 4.2), GroupNorm in the place of BatchNorm.

    A 3x3 convolution, then three stages of three blocks with 16, 32 and 64 channels, the mean over the image and one
    affine map: 0.27 million parameters. Where the image is halved, the shortcut takes every second pixel and fills up
    with zero channels; it has no parameters.
    """
    return _residual(channels, classes, widths=(16, 32, 64), blocks=3)


def small(channels: int, classes: int) -> FlatModel:
    """The same with one block a stage and two stages of 8 and 16 channels: some five thousand parameters, for tests."""
    return _residual(channels, classes, widths=(8, 16), blocks=1)


class Block(nn.Module):  # type: ignore[misc]
    """``relu(norm(conv(relu(norm(conv(a))))) + shortcut(a))``."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.added = after - before
        self.stride = 2 if self.added else 1
        self.conv1, self.norm1 = _conv(before, after, self.stride), nn.GroupNorm(GROUPS, after)
        self.conv2, self.norm2 = _conv(after, after), nn.GroupNorm(GROUPS, after)

    def forward(self, inputs: Tensor) -> Tensor:
        shortcut = inputs[:, :, :: self.stride, :: self.stride]
        if self.added:
            shortcut = F.pad(shortcut, (0, 0, 0, 0, 0, self.added))
        hidden = F.relu(self.norm1(self.conv1(inputs)))
        return F.relu(self.norm2(self.conv2(hidden)) + shortcut)


class MeanOverImage(nn.Module):  # type: ignore[misc]
    """(n, channels, rows, columns) to (n, channels)."""

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs.mean((2, 3))


@dataclass(frozen=True)
class MaskedModel:
    """The network ``m(x) y``: of a point (x, y), the scores x make a mask of the weights, which are a part of y.

    Weights are the parameters with two or more axes; scales, shifts and biases are never masked.

    Attributes
    ----------
    model : the network without a mask.
    rule : ``sigmoid``, ``m = 1 / (1 + exp(-x / temperature))``; or ``straight-through``, 1 for the ``kept`` largest
        scores and 0 for the others, with the derivative 1.
    kept : number of weights that pruning keeps.
    places : where in y the weights are.
    """

    model: FlatModel
    rule: str
    temperature: float
    kept: int
    places: Tensor

    @classmethod
    def over(cls, model: FlatModel, rule: str, temperature: float, part: float, device: Device) -> Self:
        """The masked network that keeps this part of the weights, at least one."""
        masked = np.repeat([len(shape) > 1 for shape in model.shapes.values()], model.sizes)
        places = torch.from_numpy(np.flatnonzero(masked)).to(device.name)
        return cls(model, rule, temperature, max(1, round(part * len(places))), places)

    @property
    def upper_size(self) -> int:
        """The number of scores."""
        return len(self.places)

    @property
    def lower_size(self) -> int:
        """The number of parameters."""
        return self.model.size

    def parts(self, point: Array) -> tuple[Array, Array]:
        """x and y."""
        return point[: self.upper_size], point[self.upper_size :]

    def apply(self, point: Tensor, inputs: Tensor) -> Tensor:
        """The outputs (n, ...) for inputs (n, ...), differentiable in the point (x, y)."""
        x, y = self.parts(point)
        return self.model.apply(self._times(y, self._mask(x)), inputs)

    def pruned(self, x: Array, y: Array) -> Array:
        """Parameters of the pruned network, for the model without a mask: weights that are not kept are 0."""
        scores, parameters = torch.as_tensor(x), torch.as_tensor(y)
        weights = self._times(parameters, self._mask(scores) * self._largest(scores))
        return weights if isinstance(y, Tensor) else weights.numpy()

    def initial(self, rng: np.random.Generator) -> NDArray[np.float32]:
        """A random y after scores ``|y| / sigma - c``: sigma is the layer's, c such that kept scores are positive."""
        y = self.model.initial(rng)
        magnitudes = []
        for shape, piece in zip(self.model.shapes.values(), np.split(y, np.cumsum(self.model.sizes)[:-1]), strict=True):
            if len(shape) > 1:
                magnitudes.append(np.abs(piece) / piece.std())
        scores = np.concatenate(magnitudes)
        return np.concatenate([scores - np.partition(scores, -self.kept - 1)[-self.kept - 1], y])

    def kept_by_layer(self, x: NDArray[np.float32]) -> tuple[list[str], NDArray[np.int64]]:
        """The names of the layers with weights; for each, how many are kept and how many there are."""
        layers = {name: prod(shape) for name, shape in self.model.shapes.items() if len(shape) > 1}
        sizes = np.array(list(layers.values()))
        largest = self._largest(torch.as_tensor(x)).numpy() > 0
        kept = [int(part.sum()) for part in np.split(largest, np.cumsum(sizes)[:-1])]
        return [name.removesuffix(".weight") for name in layers], np.column_stack([kept, sizes])

    def _mask(self, x: Tensor) -> Tensor:
        if self.rule == "sigmoid":
            return torch.sigmoid(x / self.temperature)
        return self._largest(x.detach()) + (x - x.detach())

    def _largest(self, x: Tensor) -> Tensor:
        """1 at the ``kept`` largest scores, 0 elsewhere; of equal ones the first."""
        chosen = torch.argsort(x, descending=True, stable=True)[: self.kept]
        return torch.zeros_like(x).index_fill_(0, chosen, 1.0)

    def _times(self, y: Tensor, mask: Tensor) -> Tensor:
        return y * torch.ones_like(y).index_copy(0, self.places, mask)


def _residual(channels: int, classes: int, widths: tuple[int, ...], blocks: int) -> FlatModel:
    with torch.device("meta"):
        layers: list[nn.Module] = [_conv(channels, widths[0]), nn.GroupNorm(GROUPS, widths[0]), nn.ReLU()]
        before = widths[0]
        for width in widths:
            for _ in range(blocks):
                layers.append(Block(before, width))
                before = width
        return FlatModel.of(nn.Sequential(*layers, MeanOverImage(), nn.Linear(before, classes)))


def _conv(before: int, after: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(before, after, 3, stride=stride, padding=1, bias=False)
