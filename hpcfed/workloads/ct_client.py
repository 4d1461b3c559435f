"""A client of tomography: its views, and what can be computed from them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcfed import devices
from hpcfed.capabilities import Array
from hpcfed.lipschitz import norm
from hpcfed.operators.fourier_metric import FourierMetric
from hpcfed.operators.identity import Identity
from hpcfed.workloads.ct_geometry import Geometry, Shape

SSIM_WINDOW = 7
# An arc of views, in radians, below which the blur is not that of all directions: undoing it feeds what no view sees.
NARROW = math.pi / 2


@dataclass(frozen=True)
class CtClient:
    """One client's views and what can be computed from them; ``f_i(x) = N/2 |A_i x - b_i|^2``.

    ``geometry`` is that of all views. ``reference`` holds, by their place z, the slices (ny, nx) of the true volume
    that this client compares with.
    """

    number: int
    num_clients: int
    geometry: Geometry
    projector: Any
    projections: Array
    regularizer: Any
    reference: Mapping[int, NDArray[np.float32]]
    count: Callable[..., None]

    @property
    def metric(self) -> FourierMetric | Identity:
        """The inverse of the blur of projecting along all directions and backprojecting; of few, the identity."""
        return _metric(self.geometry, self.projector.shape)

    def energy(self, rng: np.random.Generator) -> float:
        """This client's share of the misfit of an empty volume."""
        return norm(self.projections) ** 2 / 2

    def value(self, x: Array) -> float:
        return float(self.num_clients * self.projector.misfit(x, self.projections))

    def gradient(self, x: Array, rng: np.random.Generator | None = None, batch: int | None = None) -> Array:
        total = self.projector.num_views
        batch = total if batch is None else min(batch, total)
        self.count(gradients=1, samples=batch)
        if batch == total:
            return self.projector.gradient(x, self.projections, float(self.num_clients))
        if rng is None:
            raise ValueError("a gradient from a batch of views needs a stream")
        views = np.sort(rng.choice(total, size=batch, replace=False))
        return self.projector.gradient(x, self.projections, self.num_clients * total / batch, views=views)

    def curvature(self, direction: Array) -> Array:
        return self.num_clients * self.projector.normal(direction)

    def filtered_backprojection(self, rng: np.random.Generator) -> Array:
        """The whole volume as this client's views alone show it."""
        return self.projector.filtered_backprojection(self.projections, "ramp")

    def measure(self, rng: np.random.Generator, x: Array, part: tuple[int, int]) -> NDArray[np.float64]:
        """This client's share of misfit and penalty, and of squared error and SSIM summed over slices.

        It is the ``part[0]``-th of ``part[1]`` that share the penalty's rows.
        """
        rows, (place, count) = x.shape[0], part
        first, last = rows * place // count, rows * (place + 1) // count
        penalty = self.regularizer.value(x, first, last)
        misfit = self.projector.misfit(x, self.projections)
        if not self.reference:
            return np.array([misfit, penalty, 0.0, 0.0])
        from skimage.metrics import structural_similarity

        squared, similarity = 0.0, 0.0
        for z, truth in self.reference.items():
            own = devices.to_host(x[:, :, z])
            squared += float(np.sum((own - truth) ** 2, dtype=np.float64))
            if min(truth.shape) >= SSIM_WINDOW:
                similarity += structural_similarity(truth, own, data_range=1.0, win_size=SSIM_WINDOW)
        return np.array([misfit, penalty, squared, similarity])


@cache
def _metric(geometry: Geometry, shape: Shape) -> FourierMetric | Identity:
    """One for all clients of a rank."""
    arc = geometry.arc
    if arc is not None and arc[1] < NARROW:
        return Identity()
    return FourierMetric(shape, geometry.slopes(shape))
