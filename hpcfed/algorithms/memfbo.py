"""MemFBO: a single loop of first-order steps on all variables at once, with step sizes of clients and server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
from annotated_types import Gt

from hpcfed.algorithms.bilevel import BilevelState, Penalized, Stateless, derivatives, draw, sizes_of, split, stack
from hpcfed.capabilities import Array
from hpcfed.federation import Federation
from hpcfed.options import option


@dataclass(frozen=True)
class MemFboState(BilevelState):
    """The server's x, y and z."""

    z: Array


@dataclass(frozen=True)
class MemFbo(Penalized, Stateless):
    """Minimize ``f(x, y) + (g(x, y) - g(x, z)) / rho`` over x and y, maximize over z (Yang, Xiao, Ma, Ji, AAAI 2025).

    Client i takes ``local_steps`` steps, from the server's x, y and z, on all three at once:

        ``z <- z - lower_step D_y g(x, z)``,  ``y <- y - lower_step (rho D_y f(x, y) + D_y g(x, y))``
        ``x <- x - upper_step (D_x f(x, y) + (D_x g(x, y) - D_x g(x, z)) / rho)``

    and sends what has changed; the server adds the mean changes, that of x times ``upper_server_step``, those of y and
    z times ``lower_server_step``.

    UNVERIFIED: that it is a single loop, of first order, updates all variables at once and allows partial participation
    is from the paper's abstract. The steps, and one sample for y and z, are assumed.
    """

    state_type: ClassVar[type] = MemFboState

    upper_server_step: Annotated[float, Gt(0)] = option(1.0, "factor of the clients' mean change of x")
    lower_server_step: Annotated[float, Gt(0)] = option(1.0, "factor of the clients' mean change of y and z")
    shared_sample: bool = option(True, "one sample of the lower level for y and z, whose noise then cancels in x")

    def init(self, fed: Federation, start: Array) -> MemFboState:
        _, y = split(start, sizes_of(fed.any_client, "xy"))
        return MemFboState(start, y)

    def round(self, state: MemFboState, fed: Federation) -> MemFboState:
        cohort = fed.sample(self.participants)
        sizes = sizes_of(fed.any_client, "xyy")
        x, y, z = split(cohort.mean(cohort.map(self._local_steps, state)), sizes)
        change = stack(self.upper_server_step * x, self.lower_server_step * y)
        return MemFboState(state.point + change, state.z + self.lower_server_step * z)

    def _local_steps(self, client: Any, rng: np.random.Generator, state: MemFboState) -> Array:
        x, y = split(state.point, sizes_of(client, "xy"))
        z, rho = state.z, self.penalty
        for _ in range(self.local_steps):
            slope = derivatives(client, draw(client, rng, self.batch, shared=self.shared_sample), x, y, z)
            x = x - self.upper_step * (slope.u1 + (slope.u2 - slope.u3) / rho)
            y = y - self.lower_step * (rho * slope.v1 + slope.v2)
            z = z - self.lower_step * slope.w
        return stack(x, y, z) - stack(state.point, state.z)
