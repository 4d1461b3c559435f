"""FedAvg, and with a compressor FedPAQ: averaging of models after several local gradient steps."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import numpy as np

from hpcfed.algorithms.steps import LocalSteps, ModelState
from hpcfed.capabilities import Array
from hpcfed.federation import Federation

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class FedAvg(LocalSteps):
    """Minimize ``(1/N) sum_i f_i(x)`` (McMahan et al. 2017; with ``--quantize`` FedPAQ, Reisizadeh et al. 2020).

    Round k, with step ``gamma_k = step / (1 + k / step_decay)``: the server samples n clients and sends x_k; client i
    takes ``tau = local_steps`` steps

        ``x_i <- x_i - gamma_k s_i(x_i)``,  from ``x_i = x_k``, with a fresh gradient estimate ``s_i`` each,

    and sends ``Q(x_i - x_k)``; the server sets ``x_{k+1} = x_k + mean Q(x_i - x_k)``. Without Q this is the mean of the
    clients' models. One local step without Q is gradient descent (FedSGD).

    Clients keep no state. With unequal clients, tau > 1 and a constant step it stops O(step * tau) away from the
    solution, at a point that depends on both: on ``f_i = (x - b_i)^T H_i (x - b_i) / 2`` at the mean of the b_i with
    weights ``I - (I - gamma H_i)^tau`` in the place of ``H_i``; a decaying step removes that.

    A regularizer ``g(Bx)`` that is not smooth is no part of the published method. Where clients have the method
    ``subgradient(x)`` of it, it is added to each gradient estimate, and this is *FedAvg-subgradient*, which needs a
    decaying step and gives no exact zeros; where they have not, the regularizer is left out.
    """

    def init(self, fed: Federation, start: Array) -> ModelState:
        client = fed.any_client
        if hasattr(client, "regularizer") and not hasattr(client, "subgradient"):
            logger.info("fedavg is for smooth problems: it leaves out the regularizer, which the objective includes")
        return super().init(fed, start)

    def round(self, state: ModelState, fed: Federation) -> ModelState:
        cohort = fed.sample(self.participants)
        changes = cohort.map(self._local_steps, state.x, self.decayed(state.step, fed))
        return ModelState(state.x + cohort.mean(changes, lossy=True, weighted=self.weighted), state.step)

    def _local_steps(self, client: Any, rng: np.random.Generator, x: Array, gamma: float) -> Array:
        subgradient = getattr(client, "subgradient", None)
        change = 0 * x
        for _ in range(self.local_steps):
            here = x + change
            slope = client.gradient(here, rng, self.batch)
            if subgradient is not None:
                slope += subgradient(here)
            slope *= gamma
            change -= slope
        return change
