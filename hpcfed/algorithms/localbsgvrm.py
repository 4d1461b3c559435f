"""LocalBSGVRM: recursive estimates of the clients' own hypergradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, NamedTuple

import numpy as np
from annotated_types import Ge, Gt

from hpcfed.algorithms.bilevel import BilevelState, LevelSteps, Recursive, sizes_of, split, stack, storm
from hpcfed.capabilities import Array
from hpcfed.federation import Federation
from hpcfed.options import option


class Samples(NamedTuple):
    """Of f, of g for y, of g for the mixed derivatives, and of g for each factor of the series."""

    upper: Any
    lower: Any
    cross: Any
    factors: list[Any]


@dataclass(frozen=True)
class LocalBsgvrmState(BilevelState):
    """The averaged x and y, and the averaged estimates of their directions."""

    estimates: Array


@dataclass(frozen=True)
class LocalBsgvrm(Recursive, LevelSteps):
    """Minimize ``mean f_i(x, y*(x))`` with the hypergradients that clients find alone (Gao, arXiv 2204.13299).

    A step of client i, from its STORM estimates u of the local hypergradient

        ``h_i(x, y) = D_x f_i - G_xy,i eta_h sum_{n<=N} (I - eta_h H_i)^n D_y f_i``

    and v of ``D_y g_i(x, y)``, is ``x <- x - upper_step u``, ``y <- y - lower_step v``; after ``local_steps`` steps x,
    y, u and v are averaged.

    *It is biased where the clients' lower levels differ*: the Hessian inverses are local. For quadratics it settles
    (local_steps = 1, long series) where ``D_x f - mean (G_xy,i H_i^-1 D_y f_i(x, y*))`` is zero; only for homogeneous
    lower levels is that the solution.

    UNVERIFIED: the paper's text was not at hand. That each factor of the series has a sample of its own is assumed.
    """

    state_type: ClassVar[type] = LocalBsgvrmState

    neumann_terms: Annotated[int, Ge(0)] = option(5, "N, where the series for the inverse lower Hessian is cut off")
    neumann_step: Annotated[float, Gt(0)] = option(
        0.1, "eta_h in the series eta_h sum (I - eta_h H)^n; below 2/L_g", metavar="ETA_H"
    )

    def init(self, fed: Federation, start: Array) -> LocalBsgvrmState:
        x, y = split(start, sizes_of(fed.any_client, "xy"))
        first = fed.map(
            lambda client, rng: stack(*self._directions(client, self._draw(client, rng, self.start_batch), x, y))
        )
        return LocalBsgvrmState(start, fed.mean(first))

    def round(self, state: LocalBsgvrmState, fed: Federation) -> LocalBsgvrmState:
        mean = fed.mean(fed.map(self._local_steps, state))
        return LocalBsgvrmState(*split(mean, (state.point.shape[0], state.estimates.shape[0])))

    def _local_steps(self, client: Any, rng: np.random.Generator, state: LocalBsgvrmState) -> Array:
        sizes = sizes_of(client, "xy")
        (x, y), (u, v) = split(state.point, sizes), split(state.estimates, sizes)
        for _ in range(self.local_steps):
            samples, old = self._draw(client, rng, self.batch), (x, y)
            x, y = x - self.upper_step * u, y - self.lower_step * v
            new, before = self._directions(client, samples, x, y), self._directions(client, samples, *old)
            u, v = (storm(*each, self.storm_weight) for each in zip((u, v), new, before, strict=True))
        return stack(x, y, u, v)

    def _draw(self, client: Any, rng: np.random.Generator, batch: int | None) -> Samples:
        upper, lower, cross, *factors = (
            client.draw_upper(rng, batch),
            *(client.draw_lower(rng, batch) for _ in range(2 + self.neumann_terms)),
        )
        return Samples(upper, lower, cross, factors)

    def _directions(self, client: Any, samples: Samples, x: Array, y: Array) -> tuple[Array, Array]:
        """``h_i`` and ``D_y g_i``; the series by Horner's rule."""
        in_x, in_y = client.upper_gradients(x, y, samples.upper)
        total = in_y
        for sample in samples.factors:
            total = in_y + total - self.neumann_step * client.lower_hessian_product(x, y, sample, total)
        hypergradient = in_x - client.lower_cross_product(x, y, samples.cross, self.neumann_step * total)
        return hypergradient, client.lower_gradients(x, y, samples.lower)[1]
