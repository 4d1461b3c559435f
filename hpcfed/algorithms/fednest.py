"""FedNest: nested federated bilevel optimization by hypergradients with a truncated Neumann series."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
from annotated_types import Ge, Gt

from hpcfed.algorithms.bilevel import BilevelState, Stateless, sizes_of, split, stack
from hpcfed.capabilities import Array
from hpcfed.federation import Federation, PerClient
from hpcfed.options import option


@dataclass(frozen=True)
class Nested(Stateless):
    """A method whose round improves y by several exchanges, estimates the hypergradient, and then moves x.

    The last is ``x_i <- x_i - upper_step (D_x f_i(x_i, y) - D_x f_i(x, y) + h)``, ``upper_local_steps`` times from
    ``x_i = x`` with h the estimate, and the mean of the x_i.
    """

    state_type: ClassVar[type] = BilevelState

    lower_rounds: Annotated[int, Ge(1)] = option(1, "T, exchanges of y in a round, after local_steps each")
    upper_local_steps: Annotated[int, Ge(1)] = option(5, "steps on x that a client takes in a round")
    neumann_terms: Annotated[int, Ge(0)] = option(5, "N, where the series for the inverse lower Hessian is cut off")
    neumann_step: Annotated[float, Gt(0)] = option(
        0.1, "eta_h in the series eta_h sum (I - eta_h H)^n; below 2/L_g", metavar="ETA_H"
    )

    def init(self, fed: Federation, start: Array) -> BilevelState:
        return BilevelState(start)

    def round(self, state: BilevelState, fed: Federation) -> BilevelState:
        cohort = fed.sample(self.participants)
        x, y = split(state.point, sizes_of(fed.any_client, "xy"))
        for _ in range(self.lower_rounds):
            y = self.improve(cohort, x, y)
        h = cohort.mean(self.hypergradients(cohort, x, y))
        x = cohort.mean(cohort.map(self._upper_steps, x, y, h))
        return BilevelState(stack(x, y))

    def improve(self, cohort: Federation, x: Array, y: Array) -> Array:
        """y after one exchange."""
        raise NotImplementedError

    def hypergradients(self, cohort: Federation, x: Array, y: Array) -> PerClient[Array]:
        """Each client's part: the hypergradient is their mean."""
        raise NotImplementedError

    def _upper_steps(self, client: Any, rng: np.random.Generator, x: Array, y: Array, h: Array) -> Array:
        here = x - self.upper_step * h  # the first correction is zero
        for _ in range(self.upper_local_steps - 1):
            sample = client.draw_upper(rng, self.batch)
            there = client.upper_gradients(x, y, sample)[0]
            here = here - self.upper_step * (client.upper_gradients(here, y, sample)[0] - there + h)
        return here

    def local_y(
        self, client: Any, rng: np.random.Generator, x: Array, y: Array, mean_slope: Array | None = None
    ) -> Array:
        """y after the client's ``local_steps``; with ``mean_slope`` its slopes are corrected to that mean at y."""
        here = y
        for _ in range(self.local_steps):
            sample = client.draw_lower(rng, self.batch)
            if mean_slope is None:
                slope = client.lower_gradients(x, here, sample)[1]
            elif here is y:
                slope = mean_slope
            else:
                there = client.lower_gradients(x, y, sample)[1]
                slope = client.lower_gradients(x, here, sample)[1] - there + mean_slope
            here = here - self.lower_step * slope
        return here


@dataclass(frozen=True)
class FedNest(Nested):
    """Minimize ``mean f_i(x, y*(x))`` (Tarzanagh, Li, Thrampoulidis, Oymak: FedNest, ICML 2022).

    Round k: T = ``lower_rounds`` times, with the mean ``s`` of the clients' ``D_y g_i(x, y)``, client i takes
    ``local_steps`` steps

        ``y_i <- y_i - lower_step (D_y g_i(x, y_i) - D_y g_i(x, y) + s)``  from y,  and y becomes the mean of the y_i

    (``svrg``; otherwise ``y_i <- y_i - lower_step D_y g_i(x, y_i)`` and no exchange of s). Then, with the mean c_0 of
    the ``D_y f_i`` and N = ``neumann_terms`` exchanges ``c_n = mean (c_{n-1} - eta_h H_i c_{n-1})``,

        ``h = mean (D_x f_i - G_xy,i eta_h (c_0 + ... + c_N))``,

    and x moves along h by local steps with a correction (`Nested`). The clients' Hessians multiply *averaged* vectors,
    so that with local_steps = 1 its limit is that of the truncated series ``eta_h sum_{n<=N} (I - eta_h H)^n`` of the
    mean Hessian, near x* for large N.

    The authors' code differs: it leaves eta_h out, lets clients keep vectors of their own in the series and averages
    stale ones with them. Here it is the published formula.
    """

    svrg: bool = option(True, "correct the clients' steps on y by the mean gradient, for one more exchange of y each")

    def improve(self, cohort: Federation, x: Array, y: Array) -> Array:
        if not self.svrg:
            return cohort.mean(cohort.map(self.local_y, x, y))
        slopes = cohort.map(
            lambda client, rng: client.lower_gradients(x, y, client.draw_lower(rng, self.batch))[1],
        )
        return cohort.mean(cohort.map(self.local_y, x, y, cohort.mean(slopes)))

    def hypergradients(self, cohort: Federation, x: Array, y: Array) -> PerClient[Array]:
        in_x, in_y = cohort.map(
            lambda client, rng: client.upper_gradients(x, y, client.draw_upper(rng, self.batch))
        ).unzip(2)
        total = term = cohort.mean(in_y)
        for _ in range(self.neumann_terms):
            term = cohort.mean(cohort.map(self._next_term, x, y, term))
            total = total + term
        return cohort.map(self._own_part, x, y, in_x, self.neumann_step * total)

    def _next_term(self, client: Any, rng: np.random.Generator, x: Array, y: Array, term: Array) -> Array:
        sample = client.draw_lower(rng, self.batch)
        return term - self.neumann_step * client.lower_hessian_product(x, y, sample, term)

    def _own_part(self, client: Any, rng: np.random.Generator, x: Array, y: Array, in_x: Array, solved: Array) -> Array:
        return in_x - client.lower_cross_product(x, y, client.draw_lower(rng, self.batch), solved)
