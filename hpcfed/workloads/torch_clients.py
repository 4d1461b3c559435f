"""What workloads with a network have in common: their options, and clients whose loss is counted.

torch is loaded by the loss that a client is given, not by this module.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from annotated_types import Ge

from hpcfed.capabilities import Array
from hpcfed.options import option

Size = Annotated[int, Ge(1)]


@dataclass(frozen=True)
class NetworkWorkload:
    """Options of a workload whose clients train a network."""

    clients: Size = option(10, "number of clients N")
    data: str | None = option(None, "images, .npz  [default: data that need no file]", metavar="FILE")
    model: Literal["linear", "mlp", "cnn", "cnn7", "conv4"] = option(
        "mlp", "network; cnn: 2 convolutions (images from 16 x 16); cnn7: 4, wide; conv4: 4 with group normalization"
    )
    hidden: tuple[Size, ...] = option((40, 40), "widths of the hidden layers of --model mlp", metavar="N,N,...")
    activation: Literal["relu", "elu", "tanh"] = option(
        "tanh", "activation of the network; the published convolutional ones have relu"
    )

    def __post_init__(self) -> None:
        if self.data is not None:
            object.__setattr__(self, "data", os.path.abspath(self.data))

    def network(self, shape: tuple[int, ...], outputs: int) -> Any:
        """The `FlatModel` that the options name."""
        from hpcfed.models.nets import network

        return network(self.model, shape, outputs, self.hidden, self.activation)


@dataclass(frozen=True)
class LossClient:
    """A client with a loss over its samples: `Smooth` by itself, the base of clients that are more.

    What is counted, here and in the classes derived from it, wherever a sample of b samples is evaluated at a point:

    ==========================  ========================================================================================
    call                        count
    ==========================  ========================================================================================
    value, outer value          samples b
    gradient, outer gradient    samples b (0 where the map has no samples), gradients 1
    inner value                 samples b, and gradients 1 where the map itself is a gradient step
    inner pullback              as the inner value, once; each product: jacobian_products 1, and hessian_products 1
                                where the Jacobian has a Hessian in it
    inner Jacobian              samples b and the products of its p rows
    ==========================  ========================================================================================

    Where a client has J tasks, what is done for each of them is counted for each.
    """

    loss: Any
    count: Callable[..., None]

    def value(self, x: Array) -> float:
        self.count(samples=len(self.loss))
        return float(self.loss.value(x)[0])

    def gradient(self, x: Array, rng: np.random.Generator | None = None, batch: int | None = None) -> Array:
        if batch is not None and batch < len(self.loss) and rng is None:
            raise ValueError("a gradient from a batch of samples needs a stream")
        sample = None if rng is None else self.loss.draw(rng, batch)
        self.count(samples=self.loss.count(sample), gradients=1)
        return self.loss.value_and_gradient(x, sample)[1]
