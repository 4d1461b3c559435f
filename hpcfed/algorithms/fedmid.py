"""FedMiD: federated mirror descent, in the Euclidean geometry: local proximal gradient steps, averaged models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from hpcfed.algorithms.steps import ModelState, ProximalLocalSteps
from hpcfed.capabilities import Array
from hpcfed.errors import ConfigError
from hpcfed.federation import Federation
from hpcfed.options import option


@dataclass(frozen=True)
class FedMid(ProximalLocalSteps):
    """Minimize ``(1/N) sum_i f_i(x) + psi(x)`` (Yuan, Zaheer, Reddi: Federated composite optimization, ICML 2021).

    Round k, with the rates ``gamma_k`` of the clients and ``eta_k`` of the server: client i takes ``K = local_steps``
    steps from the server's model,

        ``w <- prox_{gamma_k psi}(w - gamma_k s_i(w))``,

    and the server sets ``x_{k+1} = prox_{eta_k gamma_k K psi}(x_k + eta_k mean (w_i - x_k))``.

    As published, with both maps, it regularizes twice: with equal clients and K = 1 the fixed point minimizes
    ``f + 2 psi``. With either map alone (``client_prox``, ``server_prox``) and K = 1 it minimizes ``f + psi``; without
    the clients' map this is FedMiD-OSP, "only server proximal". With unequal clients the mean of the clients' maps
    loses what psi is for, such as zeros, and a constant step stops away from the solution ("curse of primal
    averaging").
    """

    server_prox: bool = option(True, "the server applies the regularizer's proximal map after averaging")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.client_prox or self.server_prox):
            raise ConfigError("--no-client-prox with --no-server-prox leaves the regularizer out: give one of them")

    def round(self, state: ModelState, fed: Federation) -> ModelState:
        gamma, eta = self.decayed(state.step, fed), self.server_rate(fed)
        cohort = fed.sample(self.participants)
        changes = cohort.map(self._local_steps, state.x, gamma)
        x = state.x + eta * cohort.mean(changes, lossy=True, weighted=self.weighted)
        if self.server_prox:
            x = fed.any_client.regularizer.prox(x, eta * gamma * self.local_steps)
        return ModelState(x, state.step)

    def _local_steps(self, client: Any, rng: np.random.Generator, x: Array, gamma: float) -> Array:
        w = x
        for _ in range(self.local_steps):
            w = w - gamma * client.gradient(w, rng, self.batch)
            if self.client_prox:
                w = client.regularizer.prox(w, gamma)
        return w - x
