"""F2SA: fully first-order stochastic approximation of bilevel problems, made federated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np

from hpcfed.algorithms.bilevel import BilevelState, DoubleLoop, Stateless, derivatives, draw, sizes_of, split
from hpcfed.capabilities import Array
from hpcfed.federation import Federation
from hpcfed.options import option


class Rates(NamedTuple):
    """Of one step: those of x, y and z, and the multiplier of the lower level."""

    x: float
    y: float
    z: float
    multiplier: float


@dataclass(frozen=True)
class F2saState(BilevelState):
    """The averaged x, y and z, the number of steps so far, and the multiplier of the next one."""

    z: Array
    count: int
    multiplier: float


@dataclass(frozen=True)
class F2sa(DoubleLoop, Stateless):
    """Minimize ``f(x, y) + lam_k (g(x, y) - g(x, z))`` with a growing ``lam_k`` (Kwon et al., ICML 2023).

    Step k of client i is T = ``inner`` steps on y and z and one on x:

        ``z <- z - gam_k D_y g(x, z)``,  ``y <- y - al_k (D_y f(x, y) + lam_k D_y g(x, y))``
        ``x <- x - xi_k (D_x f(x, y) + lam_k (D_x g(x, y) - D_x g(x, z)))``

    with ``lam_0 = 1/rho``. After ``local_steps`` steps x, y and z are averaged (`DoubleLoop`). ``schedule``:

    ``theory``: ``lam_k = lam_0 (1+k)^(1/7)`` and ``gam_k = al_k lam_k = lower_step (1+k)^(-4/7)``.
    ``constant``: all stay as they are at k = 0; the limit is that of the penalty form with rho.
    ``benchmark``: a published benchmark's rule, ``lam_{k+1} = lam_k + lam_0/10 (1+k)^(-1/7)``, so that lam_k grows like
    ``k^(6/7)``, ``al_k = al_0 (1+k)^(-5/7)`` and ``gam_k = lower_step (1+k)^(-4/7)``.

    Always ``al_0 = rho lower_step``, ``xi_k = upper_step al_k / al_0``, and ``al_k lam_k <= lower_step``, which has to
    be at most 1/L_g and which the benchmark's rule would exceed in the end.

    The published method draws one sample of g for y and another for z, whose noise ``lam_k`` multiplies;
    ``shared_sample`` lets most of it cancel. UNVERIFIED: the exponents of ``theory`` (the paper's text was not at hand)
    and the federated form, which is assumed.
    """

    state_type: ClassVar[type] = F2saState

    schedule: Literal["theory", "constant", "benchmark"] = option(
        "theory", "how steps fall and the multiplier 1/rho grows"
    )
    shared_sample: bool = option(True, "one sample of the lower level for y and z, whose noise then cancels in x")

    def init(self, fed: Federation, start: Array) -> F2saState:
        _, y = split(start, sizes_of(fed.any_client, "xy"))
        return F2saState(start, y, 0, 1 / self.penalty)

    def round(self, state: F2saState, fed: Federation) -> F2saState:
        cohort = fed.sample(self.participants)
        count, multiplier, rates = state.count, state.multiplier, []
        for _ in range(self.local_steps):
            rates.append(self._rates(count, multiplier))
            count += 1
            multiplier = self._next_multiplier(count, multiplier)
        point, z = self.alternate(cohort, state.point, state.z, rates)
        return F2saState(point, z, count, multiplier)

    def _rates(self, k: int, multiplier: float) -> Rates:
        first = self.penalty * self.lower_step
        fall = 1.0 if self.schedule == "constant" else (1 + k) ** (-4 / 7)
        of_y = self.lower_step * fall / multiplier
        if self.schedule == "benchmark":
            of_y = min(first * (1 + k) ** (-5 / 7), self.lower_step / multiplier)
        return Rates(self.upper_step * of_y / first, of_y, self.lower_step * fall, multiplier)

    def _next_multiplier(self, k: int, multiplier: float) -> float:
        """``lam_k``, from ``lam_{k-1}``."""
        if self.schedule == "constant":
            return multiplier
        if self.schedule == "theory":
            return float((1 + k) ** (1 / 7) / self.penalty)
        return float(multiplier + 0.1 / self.penalty * k ** (-1 / 7))

    def lower(
        self, client: Any, rng: np.random.Generator, x: Array, y: Array, z: Array, rates: Rates
    ) -> tuple[Array, Array]:
        for _ in range(self.inner):
            samples = draw(client, rng, self.batch, shared=self.shared_sample)
            of_f = client.upper_gradients(x, y, samples.upper)[1]
            of_g = client.lower_gradients(x, y, samples.lower)[1]
            y, z = (
                y - rates.y * (of_f + rates.multiplier * of_g),
                z - rates.z * client.lower_gradients(x, z, samples.lower_z)[1],
            )
        return y, z

    def upper(self, client: Any, rng: np.random.Generator, x: Array, y: Array, z: Array, rates: Rates) -> Array:
        slope = derivatives(client, draw(client, rng, self.batch, shared=self.shared_sample), x, y, z)
        return x - rates.x * (slope.u1 + rates.multiplier * (slope.u2 - slope.u3))
