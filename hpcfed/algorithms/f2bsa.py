"""F2BSA: fully first-order bilevel optimization with Moreau smoothing of the lower level, made federated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from annotated_types import Gt, Le

from hpcfed.algorithms.bilevel import (
    DoubleLoop,
    EstimatedPenalty,
    EstimatedState,
    LevelSteps,
    derivatives,
    draw,
    sizes_of,
    split,
)
from hpcfed.capabilities import Array
from hpcfed.errors import ConfigError
from hpcfed.federation import Federation, PerClient
from hpcfed.options import option


@dataclass(frozen=True)
class F2bsa(EstimatedPenalty, DoubleLoop, LevelSteps):
    """Minimize ``f(x, y) + (g(x, y) - g(x, z)) / rho`` over x and y, maximize over z (Kwon et al., ICLR 2024).

    A step of client i is T = ``inner`` steps, from ``u = y`` and ``w = z``, on the two lower problems with their
    proximal terms, then one on x:

        ``u <- u - s (rho D_y f(x, u) + D_y g(x, u) + (u - y)/m)``,  ``w <- w - s (D_y g(x, w) + (w - z)/m)``
        ``y <- (1 - b) y + b u``,  ``z <- (1 - b) z + b w``
        ``x <- x - upper_step (D_x f(x, y) + (D_x g(x, y) - D_x g(x, z)) / rho)``

    with ``s = lower_step``, ``m = moreau`` and ``b = relaxation``; after ``local_steps`` steps x, y and z are averaged
    (`DoubleLoop`). For T = 1 the proximal term is 0.

    ``variance_reduced``: T = 1, every partial derivative a STORM estimate, averaged as well, and x, y and z move at
    once; then a step takes the six joint gradients that `FedDs` takes.

    UNVERIFIED: that the lower problems are smoothed by a Moreau envelope, that there is a double loop with large
    batches and a single loop with momentum, and rho = O(eps) are from the paper. The formulas above, one sample for y
    and z, and the federated form (averages every ``local_steps`` steps) are assumed.
    """

    moreau: Annotated[float, Gt(0)] = option(
        0.5, "parameter m of the proximal term |y - y_k|^2 / 2m; below 1/L_g it makes the lower level strongly convex"
    )
    relaxation: Annotated[float, Gt(0), Le(1)] = option(0.5, "b in y <- (1 - b) y + b u, u what the inner steps found")
    variance_reduced: bool = option(False, "estimate every gradient recursively; with --inner 1")

    def __post_init__(self) -> None:
        if self.variance_reduced and self.inner > 1:
            raise ConfigError(f"--inner {self.inner} with --variance-reduced, which is a single loop: give --inner 1")

    def weights(self) -> tuple[float, float]:
        return self.penalty, 1.0

    def steps(self) -> tuple[float, float, float]:
        lower = self.relaxation * self.lower_step
        return self.upper_step / self.penalty, lower, lower

    def init(self, fed: Federation, start: Array) -> EstimatedState:
        if self.variance_reduced:
            return super().init(fed, start)
        _, y = split(start, sizes_of(fed.any_client, "xy"))
        return EstimatedState(start, y, y[:0], PerClient({}))

    def round(self, state: EstimatedState, fed: Federation) -> EstimatedState:
        if self.variance_reduced:
            return super().round(state, fed)
        point, z = self.alternate(fed, state.point, state.rest, [None] * self.local_steps)
        return EstimatedState(point, z, state.estimates, state.own)

    def lower(
        self, client: Any, rng: np.random.Generator, x: Array, y: Array, z: Array, rates: None
    ) -> tuple[Array, Array]:
        u, w = y, z
        for _ in range(self.inner):
            samples = draw(client, rng, self.batch)
            of_f = client.upper_gradients(x, u, samples.upper)[1]
            at_u = client.lower_gradients(x, u, samples.lower)[1]
            at_w = client.lower_gradients(x, w, samples.lower_z)[1]
            u = u - self.lower_step * (self.penalty * of_f + at_u + (u - y) / self.moreau)
            w = w - self.lower_step * (at_w + (w - z) / self.moreau)
        return y + self.relaxation * (u - y), z + self.relaxation * (w - z)

    def upper(self, client: Any, rng: np.random.Generator, x: Array, y: Array, z: Array, rates: None) -> Array:
        slope = derivatives(client, draw(client, rng, self.batch), x, y, z)
        return x - self.upper_step * (slope.u1 + (slope.u2 - slope.u3) / self.penalty)
