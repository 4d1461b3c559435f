"""Local-SCGD: stochastic compositional gradient descent with local steps and a tracked inner value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
from annotated_types import Gt, Le

from hpcfed.algorithms.composition import DecayedSteps, FirstEstimates, averaged
from hpcfed.capabilities import Array
from hpcfed.federation import Federation, PerClient
from hpcfed.options import option


@dataclass(frozen=True)
class LocalScgdState:
    """The server's model and the inner values that clients track."""

    x: Array
    u: PerClient[Array]


@dataclass(frozen=True)
class LocalScgd(FirstEstimates, DecayedSteps):
    """Minimize ``(1/M) sum_m f_m(g_m(x))`` (Gao, Li, Huang: On the convergence of local stochastic compositional
    gradient descent with momentum, ICML 2022).

    Round k, with ``eta_k = rate / (1 + k / step_decay)``: client m takes ``local_steps`` steps

        ``u_m <- (1 - c) u_m + c g_m(x_m; zeta)``,  c = ``inner_weight``,
        ``x_m <- x_m - eta_k J_m(x_m; zeta)^T grad f_m(u_m; xi)``

    from the server's model, which becomes the mean of theirs. u_m begins as the mean of tau batches.

    This is the order of the authors' program, which also averages u. With inner maps that differ while each client
    has its own Jacobian that solves neither this problem nor the one with ``mean g_m`` inside, so it is left to
    ``average_u``. UNVERIFIED: the paper's own form, said to step first and to tie c to the rate.

    A round costs a client d reals up and d down, and p more each way with ``average_u``.
    """

    state_type: ClassVar[type] = LocalScgdState

    inner_weight: Annotated[float, Gt(0), Le(1)] = option(0.3, "what a fresh sample weighs in the tracked inner value")
    average_u: bool = option(False, "average the tracked inner values, too: another problem unless clients share g")

    def init(self, fed: Federation, start: Array) -> LocalScgdState:
        return LocalScgdState(start, fed.map(self._first, start))

    def round(self, state: LocalScgdState, fed: Federation) -> LocalScgdState:
        changes, u = fed.map(self._local_steps, state.x, state.u, self.eta(fed)).unzip(2)
        return LocalScgdState(state.x + fed.mean(changes, lossy=True), self.shared(u, fed))

    def shared(self, u: PerClient[Array], fed: Federation) -> PerClient[Array]:
        """The tracked inner values after a round."""
        return PerClient(dict.fromkeys(u, fed.mean(u))) if self.average_u else u

    def step(self, client: Any, rng: np.random.Generator, x: Array, u: Array) -> tuple[Array, Array]:
        """The inner value as tracked at x, and the slope there."""
        zeta, xi = self.draw(client, rng)
        value, pullback = client.inner_pullback(x, zeta)
        u = averaged(u, self.inner_weight, value)
        return u, pullback(client.outer_gradient(u, xi))

    def _first(self, client: Any, rng: np.random.Generator, x: Array) -> Array:
        value: Array = client.inner(x, client.draw_inner(rng, self.first(self.local_steps, self.inner_samples)))
        return value

    def _local_steps(
        self, client: Any, rng: np.random.Generator, x: Array, u: Array, eta: float
    ) -> tuple[Array, Array]:
        change = 0 * x
        for _ in range(self.local_steps):
            u, slope = self.step(client, rng, x + change, u)
            change -= eta * slope
        return change, u
