"""FedNest for compositions: a nested round for the inner value, then a step with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from annotated_types import Ge, Gt, Le

from hpcfed.algorithms.composition import DecayedSteps, averaged
from hpcfed.capabilities import Array
from hpcfed.federation import Federation
from hpcfed.options import option


@dataclass(frozen=True)
class FedNestCompState:
    """The server's model, and its inner value if clients share one (None before the first round)."""

    x: Array
    y: Array | None


@dataclass(frozen=True)
class FedNestComp(DecayedSteps):
    """Federated nested optimization (Tarzanagh, Li, Thrampoulidis, Oymak 2022) with least squares for a lower level.

    ``scope="global"`` is its own problem, ``min_x (1/M) sum_m f_m(y)``, ``y = (1/M) sum_m g_m(x)``, one inner map for
    all clients: not the objective that clients with inner maps of their own have. In round k, ``inner_rounds`` times,
    the server gets ``r = mean g_m(x; zeta)``, clients take ``inner_iterations`` variance-reduced steps

        ``y_m <- y_m - b ((y_m - g_m(x; zeta)) - (y - g_m(x; zeta)) + (y - r))``,  b = ``value_step``,

    from y, and y becomes their mean; then with ``v = mean grad f_m(y; xi)`` and ``H = mean J_m(x; zeta)^T v`` clients
    take ``local_steps`` steps ``x_m <- x_m - eta_k H`` and x becomes their mean. The local corrections of both levels
    cancel, the lower one's because zeta does (so each client evaluates its map once an inner round), the upper one's
    because f_m does not depend on x directly: more local steps make the rate larger, and no client drifts. The first y
    is the first r. UNVERIFIED: that this is what the paper's specialization to compositions says.

    ``scope="local"`` gives each client's own map the place of the mean: it averages
    ``inner_rounds * inner_iterations`` samples, ``y_m <- y_m - b (y_m - g_m(x; zeta))`` from the first on,
    ``v_m = grad f_m(y_m; xi)``, ``H = mean J_m(x; zeta)^T v_m``. This, no published method, is what can be compared
    with others on ``(1/M) sum_m f_m(g_m(x))``.

    Clients keep no state. A round costs a client, up and down, 2d reals and, if global, ``2 inner_rounds + 1`` times p.
    """

    state_type: ClassVar[type] = FedNestCompState

    scope: Literal["local", "global"] = option(
        "local", "local: each client's own inner map; global: the mean of all, another problem"
    )
    inner_rounds: Annotated[int, Ge(1)] = option(1, "rounds of the lower level in one of the upper")
    inner_iterations: Annotated[int, Ge(1)] = option(1, "steps that a client takes in a round of the lower level")
    value_step: Annotated[float, Gt(0), Le(1)] = option(1.0, "step size of the lower level; 1 solves it at once")

    def init(self, fed: Federation, start: Array) -> FedNestCompState:
        return FedNestCompState(start, None)

    def round(self, state: FedNestCompState, fed: Federation) -> FedNestCompState:
        cohort, x, y = fed.sample(self.participants), state.x, state.y
        if self.scope == "local":
            slopes = cohort.map(self._own_slope, x)
        else:
            for _ in range(self.inner_rounds):
                y = self._inner_round(x, y, cohort)
            v = cohort.mean(cohort.map(self._outer_gradient, y))
            slopes = cohort.map(self._pulled_back, x, v)
        slope = cohort.mean(slopes, lossy=True)
        changes = cohort.map(self._local_steps, slope, self.eta(fed))
        return FedNestCompState(x + cohort.mean(changes, lossy=True), y)

    def _inner_round(self, x: Array, y: Array | None, cohort: Federation) -> Array:
        r = cohort.mean(cohort.map(self._inner, x))
        return cohort.mean(cohort.map(self._inner_steps, r if y is None else y, r))

    def _inner(self, client: Any, rng: np.random.Generator, x: Array) -> Array:
        value: Array = client.inner(x, client.draw_inner(rng, self.inner_samples))
        return value

    def _inner_steps(self, client: Any, rng: np.random.Generator, y: Array, r: Array) -> Array:
        for _ in range(self.inner_iterations):
            y = averaged(y, self.value_step, r)
        return y

    def _outer_gradient(self, client: Any, rng: np.random.Generator, y: Array) -> Array:
        gradient: Array = client.outer_gradient(y, client.draw_outer(rng, self.batch))
        return gradient

    def _pulled_back(self, client: Any, rng: np.random.Generator, x: Array, v: Array) -> Array:
        slope: Array = client.inner_pullback(x, client.draw_inner(rng, self.inner_samples))[1](v)
        return slope

    def _own_slope(self, client: Any, rng: np.random.Generator, x: Array) -> Array:
        y = self._inner(client, rng, x)
        for _ in range(self.inner_rounds * self.inner_iterations - 1):
            y = averaged(y, self.value_step, self._inner(client, rng, x))
        return self._pulled_back(client, rng, x, self._outer_gradient(client, rng, y))

    def _local_steps(self, client: Any, rng: np.random.Generator, slope: Array, eta: float) -> Array:
        return -(self.local_steps * eta) * slope
