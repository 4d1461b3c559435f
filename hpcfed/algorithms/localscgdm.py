"""Local-SCGDM: Local-SCGD with momentum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
from annotated_types import Gt, Le

from hpcfed.algorithms.composition import averaged, paired
from hpcfed.algorithms.localscgd import LocalScgd, LocalScgdState
from hpcfed.capabilities import Array
from hpcfed.federation import Federation
from hpcfed.options import option


@dataclass(frozen=True)
class LocalScgdmState(LocalScgdState):
    """The server's model and momentum, and the inner values that clients track."""

    m: Array


@dataclass(frozen=True)
class LocalScgdm(LocalScgd):
    """Minimize ``(1/M) sum_m f_m(g_m(x))`` by `LocalScgd` with a momentum (ibid.).

    Client m takes ``local_steps`` steps a round,

        ``u_m <- (1 - c) u_m + c g_m(x_m; zeta)``,  c = ``inner_weight``,
        ``m_m <- (1 - a) m_m + a J_m(x_m; zeta)^T grad f_m(u_m; xi)``,  a = ``momentum_weight``,
        ``x_m <- x_m - eta_k m_m``,

    then x and m, which starts at 0, become the means of the clients'. What is said there of ``average_u`` and of the
    paper's form holds here.

    A round costs a client 2d reals up and 2d down, and p more each way with ``average_u``.
    """

    state_type: ClassVar[type] = LocalScgdmState

    momentum_weight: Annotated[float, Gt(0), Le(1)] = option(0.2, "what a fresh slope weighs in the momentum")

    def init(self, fed: Federation, start: Array) -> LocalScgdmState:
        return LocalScgdmState(start, super().init(fed, start).u, 0 * start)

    def round(self, state: Any, fed: Federation) -> LocalScgdmState:
        messages, u = fed.map(self._momentum_steps, state.x, state.u, state.m, self.eta(fed)).unzip(2)
        mean = fed.mean(messages, lossy=True)[0]
        return LocalScgdmState(state.x + mean[:, 0], self.shared(u, fed), state.m + mean[:, 1])

    def _momentum_steps(
        self, client: Any, rng: np.random.Generator, x: Array, u: Array, m: Array, eta: float
    ) -> tuple[Array, Array]:
        change, own = 0 * x, m
        for _ in range(self.local_steps):
            u, slope = self.step(client, rng, x + change, u)
            own = averaged(own, self.momentum_weight, slope)
            change -= eta * own
        return paired(change, own - m), u
