"""FedDualAvg: federated dual averaging, in the Euclidean geometry: gradients are averaged, models only derived."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from hpcfed import devices
from hpcfed.algorithms.steps import ModelState, ProximalLocalSteps
from hpcfed.capabilities import Array
from hpcfed.federation import Federation


@dataclass(frozen=True)
class FedDualAvgState(ModelState):
    """The server's variables: ``x = prox_{travelled psi}(z)``, z in float64, and the sum of all rates so far."""

    z: Array
    travelled: float


@dataclass(frozen=True)
class FedDualAvg(ProximalLocalSteps):
    """Minimize ``(1/N) sum_i f_i(x) + psi(x)`` (Yuan, Zaheer, Reddi: Federated composite optimization, ICML 2021).

    The server keeps z, which collects gradients, and E, the sum of the rates at which it did; the model is
    ``prox_{E psi}(z)``. At first z is the starting point and E = 0. Round k, with the rates ``gamma_k`` of the clients
    and ``eta_k`` of the server: client i takes ``K = local_steps`` steps from ``z_i = z``,

        ``w = prox_{(E + j gamma_k) psi}(z_i)``,  ``z_i <- z_i - gamma_k s_i(w)``,  j = 0 .. K-1,

    and the server sets ``z <- z + eta_k mean (z_i - z)``, ``E <- E + eta_k gamma_k K``.

    It is exact for equal clients with any K and for unequal ones with K = 1, zeros included; otherwise a constant step
    stops O(step * K) away. z grows with the number of rounds, so it is kept in float64; messages have the model's type.

    Without ``client_prox`` a client takes plain steps ``w <- w - gamma_k s_i(w)`` from the server's model, and its
    ``w - x`` moves z ("only server proximal"). K = 1 is the same either way.
    """

    state_type: ClassVar[type] = FedDualAvgState

    def init(self, fed: Federation, start: Array) -> FedDualAvgState:
        z = devices.from_host(devices.to_host(start).astype(np.float64), devices.backend(start), fed.device)
        return FedDualAvgState(start, super().init(fed, start).step, z, 0.0)

    def round(self, state: FedDualAvgState, fed: Federation) -> FedDualAvgState:
        gamma, eta = self.decayed(state.step, fed), self.server_rate(fed)
        cohort = fed.sample(self.participants)
        changes = cohort.map(self._local_steps, state, gamma)
        z = state.z + eta * cohort.mean(changes, lossy=True, weighted=self.weighted)
        travelled = state.travelled + eta * gamma * self.local_steps
        return FedDualAvgState(_model(fed.any_client, z, travelled, state.x), state.step, z, travelled)

    def _local_steps(self, client: Any, rng: np.random.Generator, state: FedDualAvgState, gamma: float) -> Array:
        w, change = state.x, 0 * state.x
        for done in range(self.local_steps):
            if done and self.client_prox:
                w = _model(client, state.z + change, state.travelled + done * gamma, state.x)
            elif done:
                w = state.x + change
            change -= gamma * client.gradient(w, rng, self.batch)
        return change


def _model(client: Any, z: Array, travelled: float, like: Array) -> Array:
    """``prox_{travelled psi}(z)``, computed in the type of z, in the type of ``like``."""
    model = 0 * like
    model[...] = client.regularizer.prox(z, travelled)
    return model
