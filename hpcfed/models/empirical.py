"""The loss of a model over a set of samples, with the derivatives that methods ask for."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hpcfed import devices
from hpcfed.capabilities import Array
from hpcfed.models.flat import FlatModel

CHUNK = 1000
"""So many samples go through the model at once where all are asked for: activations of large sets would fill memory."""

Sample = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class EmpiricalLoss:
    """``l(x) = (1/n) sum_j loss(model(x; input_j), target_j)``: cross-entropy for classes, squared error for numbers.

    A sample is drawn once, gathered into tensors of its own, and evaluated at as many points as a method likes. None
    stands for all samples. Points are NumPy arrays (used without a copy) or tensors; results are new arrays of the same
    kind and floating type, which the caller may overwrite. No autograd graph outlives a call, but the one that the
    products of `gradient_and_products` work on lives as long as they do.

    Attributes
    ----------
    inputs : (n, ...), of the floating type of the points.
    targets : (n,) int64 for classes, (n, outputs) for numbers.
    """

    model: FlatModel
    inputs: Tensor
    targets: Tensor

    @classmethod
    def over(cls, model: FlatModel, inputs: Any, targets: Any, device: devices.Device | None = None) -> EmpiricalLoss:
        """The loss over samples in host arrays, which go to the device."""
        place = device.name if device is not None else "cpu"
        return cls(model, *(torch.from_numpy(np.ascontiguousarray(part)).to(place) for part in (inputs, targets)))

    def __len__(self) -> int:
        return len(self.targets)

    def draw(self, rng: np.random.Generator, batch: int | None) -> Sample | None:
        """``batch`` samples without replacement; None, which stands for all, if there are no more than that."""
        if batch is None or batch >= len(self):
            return None
        rows = torch.from_numpy(rng.choice(len(self), size=batch, replace=False)).to(self.inputs.device)
        return self.inputs[rows], self.targets[rows]

    def count(self, sample: Sample | None) -> int:
        """How many samples that is."""
        return len(self) if sample is None else len(sample[1])

    def value(self, x: Array, sample: Sample | None = None) -> Array:
        """``l(x; sample)``, of shape (1,)."""
        with torch.no_grad():
            return _like(_sum(self._losses(_tensor(x), sample)), x)

    def value_and_gradient(self, x: Array, sample: Sample | None = None) -> tuple[Array, Array]:
        """``l(x; sample)``, of shape (1,), and its gradient, from one pass."""
        point = _leaf(x)
        losses = []
        for loss in self._losses(point, sample):  # one graph at a time
            loss.backward()
            losses.append(loss.detach())
        gradient: Tensor = point.grad
        return _like(_sum(losses), x), _like(gradient, x)

    def gradient_and_products(self, x: Array, sample: Sample | None = None) -> tuple[Array, Callable[[Array], Array]]:
        """``grad l(x; sample)`` and the map ``v -> (Hess l(x; sample)) v``, which shares its passes.

        The point must stay as it is as long as products are asked for, and so must the gradient.
        """
        point, gradient = self._differentiable_gradient(x, sample)

        def product(v: Array) -> Array:
            return _like(torch.autograd.grad(gradient, point, _tensor(v), retain_graph=True)[0], x)

        return _like(gradient.detach(), x), product

    def hessian(self, x: Array, sample: Sample | None = None, rows: int = 256) -> Array:
        """``Hess l(x; sample)``, of shape (d, d), that many rows at a time."""
        point, gradient = self._differentiable_gradient(x, sample)
        identity = torch.eye(len(point), dtype=point.dtype, device=point.device)
        blocks = [
            torch.autograd.grad(gradient, point, some, retain_graph=True, is_grads_batched=True)[0]
            for some in identity.split(rows)
        ]
        return _like(torch.cat(blocks), x)

    def judge(self, x: Array) -> tuple[float, int]:
        """The sum of the losses and, of classes, how many samples are classified rightly."""
        loss, hits = 0.0, 0
        with torch.no_grad():
            for (inputs, targets), _ in self._parts(None):
                outputs = self.model.apply(_tensor(x), inputs)
                loss += len(targets) * self._criterion(outputs, targets).item()
                if not targets.is_floating_point():
                    hits += int((outputs.argmax(1) == targets).sum())
        return loss, hits

    def predict(self, x: Array, inputs: Array) -> Array:
        """The model's outputs."""
        with torch.no_grad():
            return _like(self.model.apply(_tensor(x), _tensor(inputs)), x)

    def _differentiable_gradient(self, x: Array, sample: Sample | None) -> tuple[Tensor, Tensor]:
        point = _leaf(x)
        loss = _sum(self._losses(point, sample))
        return point, torch.autograd.grad(loss, point, create_graph=True)[0]

    def _losses(self, point: Tensor, sample: Sample | None) -> Iterator[Tensor]:
        """What parts of the samples, as many as go through the model at once, add to the loss."""
        for (inputs, targets), share in self._parts(sample):
            loss = self._criterion(self.model.apply(point, inputs), targets)
            yield loss if share == 1.0 else share * loss

    def _parts(self, sample: Sample | None) -> Iterator[tuple[Sample, float]]:
        """Parts, and their share of the samples."""
        if sample is not None or len(self) <= CHUNK:
            yield sample or (self.inputs, self.targets), 1.0
            return
        for part in zip(self.inputs.split(CHUNK), self.targets.split(CHUNK), strict=True):
            yield part, len(part[1]) / len(self)

    def _criterion(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.mse_loss(outputs, targets) if targets.is_floating_point() else F.cross_entropy(outputs, targets)


def _sum(losses: Iterable[Tensor]) -> Tensor:
    return reduce(operator.add, losses).reshape(1)


def _tensor(x: Array) -> Tensor:
    return x if isinstance(x, Tensor) else torch.from_numpy(x)


def _leaf(x: Array) -> Tensor:
    """The point, in its own memory, as something to differentiate by."""
    return _tensor(x).detach().requires_grad_()


def _like(result: Tensor, x: Array) -> Array:
    """The result as an array of the kind of x."""
    return result if isinstance(x, Tensor) else result.numpy()
