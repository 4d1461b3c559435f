"""LocalMOML: federated meta-learning with a memory of the adapted model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from annotated_types import Gt, Le

from hpcfed.algorithms.composition import FirstEstimates, averaged
from hpcfed.algorithms.per_fedavg import PerFedAvg
from hpcfed.capabilities import Array
from hpcfed.options import option


@dataclass(frozen=True)
class LocalMoml(FirstEstimates, PerFedAvg):
    """Minimize ``(1/M) sum_m l_m(x - a grad l_m(x))`` (Wang, Yuan, Ying, Yang: Memory-based optimization methods for
    model-agnostic meta-learning and personalized federated learning, 2021).

    A client begins a round at the server's model with ``u = x - a grad l(x; zeta_0)``, of a larger sample
    (``first_batch``), and takes ``local_steps`` steps

        ``u <- (1 - b) u + b (x - a grad l(x; zeta))``,  b = ``memory_weight``,
        ``x <- x - eta_k (I - a Hess l(x; zeta)) grad l(u; xi)``;

    the server adds the mean of the changes of x, and u is forgotten. b = 1 is Per-FedAvg. The options of `PerFedAvg`
    apply; ``hessian="first_order"`` is what the authors' program does.

    UNVERIFIED: the second formula, and that zeta is the same in both.

    Clients keep no state. A round costs a client d reals up and d down.
    """

    memory_weight: Annotated[float, Gt(0), Le(1)] = option(
        0.9, "beta, what a fresh sample weighs in the adapted model's memory"
    )

    def first_value(self, client: Any, rng: np.random.Generator, x: Array) -> Array:
        value: Array = client.inner(x, client.draw_inner(rng, self.first(2, self.inner_samples)))
        return value

    def remembered(self, memory: Array | None, value: Array) -> Array:
        return averaged(memory, self.memory_weight, value)
