"""A torch module as a pure function of one flat vector that holds all its parameters."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import prod, sqrt
from typing import Self

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call

RECTIFIERS = (nn.ReLU, nn.ELU)
"""Activations that pass half of their inputs on: weights before them are drawn with twice the variance."""


@dataclass(frozen=True)
class FlatModel:
    """A module that holds no numbers itself: parameters are handed in, as one vector of any floating type.

    Attributes
    ----------
    module : the layers; made on the device ``meta``, they have shapes only.
    shapes : shape of each parameter by name, in the order in which they lie in the vector.
    sizes : number of entries of each.
    """

    module: nn.Module
    shapes: dict[str, tuple[int, ...]]
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, module: nn.Module) -> Self:
        """The module's flat form.

        Raises
        ------
        ValueError
            If the module has buffers, such as the running statistics of BatchNorm: they are no function of the
            parameters, and two evaluations of one sample would differ. GroupNorm has none.
        """
        buffers = [name for name, _ in module.named_buffers()]
        if buffers:
            raise ValueError(f"a model with buffers ({buffers[0]}) is no function of its parameters: use GroupNorm")
        shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
        return cls(module, shapes, tuple(prod(shape) for shape in shapes.values()))

    @property
    def size(self) -> int:
        """The number d of parameters."""
        return sum(self.sizes)

    def initial(self, rng: np.random.Generator) -> NDArray[np.float32]:
        r"""A random start, of shape (d,).

        Weights are normal with variance 2 / fan-in before a rectifier (He et al. 2015) and 1 / fan-in elsewhere
        (Glorot and Bengio 2010, for the forward pass), biases 0, scales of normalization layers 1. All numbers come
        from ``rng``; torch's own generator is not touched.
        """
        parts = []
        for layer, following in pairwise((*self.module.modules(), None)):
            normalizes = isinstance(layer, nn.GroupNorm)
            variance = 2.0 if isinstance(following, (*RECTIFIERS, nn.GroupNorm)) else 1.0
            for name, parameter in layer.named_parameters(recurse=False):
                shape = tuple(parameter.shape)
                if len(shape) > 1:
                    scale = np.float32(sqrt(variance / prod(shape[1:])))
                    parts.append(scale * rng.standard_normal(prod(shape), dtype=np.float32))
                else:
                    parts.append(np.full(shape, float(normalizes and name == "weight"), np.float32))
        return np.concatenate(parts)

    def apply(self, parameters: Tensor, inputs: Tensor) -> Tensor:
        """The outputs (n, ...) for inputs (n, ...), differentiable in ``parameters``, (d,), which is not copied."""
        pieces = parameters.split(self.sizes)
        named = {name: piece.view(shape) for (name, shape), piece in zip(self.shapes.items(), pieces, strict=True)}
        return functional_call(self.module, named, (inputs,))  # type: ignore[no-any-return]
