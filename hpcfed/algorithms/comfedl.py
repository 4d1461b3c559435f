"""ComFedL: compositional gradients with the inner value of one batch in the place of its mean."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from hpcfed.algorithms.composition import CompositionState, DecayedSteps
from hpcfed.capabilities import Array
from hpcfed.federation import Federation


@dataclass(frozen=True)
class ComFedL(DecayedSteps):
    """Minimize ``(1/M) sum_m f_m(g_m(x))`` after Huang, Li, Huang: Compositional federated learning (2021).

    Round k, with ``eta_k = rate / (1 + k / step_decay)``: client m takes ``local_steps`` steps from the server's model,

        ``x_m <- x_m - eta_k J_m(x_m; zeta)^T grad f_m(g_m(x_m; zeta); xi)``,

    with fresh samples zeta and xi, and sends what has changed; the server adds the mean of the changes.

    UNVERIFIED: the paper could not be read; this is the method as its rates (a sample complexity of eps^-8) and what
    others say of it suggest, who also say that it communicates after every step (``local_steps = 1``).

    Clients keep no state. ``E f(g(x; zeta))`` is not ``f(E g(x; zeta))``, so noise in g biases the steps by
    O(1/sqrt(inner_batch)), whatever the rate: with ``f = exp(y/lambda)`` and a normal g of deviation s by the factor
    ``exp(s^2 / (2 lambda^2 inner_batch))``. A round costs a client d reals up and d down.
    """

    def round(self, state: CompositionState, fed: Federation) -> CompositionState:
        cohort = fed.sample(self.participants)
        changes = cohort.map(self._local_steps, state.x, self.eta(fed))
        return CompositionState(state.x + cohort.mean(changes, lossy=True))

    def _local_steps(self, client: Any, rng: np.random.Generator, x: Array, eta: float) -> Array:
        memory = self.first_value(client, rng, x)
        change = 0 * x
        for _ in range(self.local_steps):
            zeta, xi = self.draw(client, rng)
            value, pullback = self.inner(client, x + change, zeta)
            memory = self.remembered(memory, value)
            change -= eta * pullback(client.outer_gradient(memory, xi))
        return change

    def inner(self, client: Any, x: Array, sample: Any) -> tuple[Array, Callable[[Array], Array]]:
        """``g(x; sample)`` and the map ``v -> J(x; sample)^T v``."""
        pair: tuple[Array, Callable[[Array], Array]] = client.inner_pullback(x, sample)
        return pair

    def first_value(self, client: Any, rng: np.random.Generator, x: Array) -> Array | None:
        """What a client remembers of the inner map when a round begins: here nothing."""
        return None

    def remembered(self, memory: Array | None, value: Array) -> Array:
        """The inner value that a step uses: here that of its own sample."""
        return value
