"""Clients with private and public records, small enough to know all about them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np

from hpcfed.algorithms.dp_sgd import DpSgd
from hpcfed.algorithms.dp_shuffle import DpShuffle
from hpcfed.algorithms.interleaved import Interleaved
from hpcfed.algorithms.priv_pub import PrivPub
from hpcfed.algorithms.pub_priv import PubPriv
from hpcfed.federation import Federation
from hpcfed.privacy import engine
from hpcfed.run.journal import Journal
from hpcfed.streams import Streams

METHODS = [DpShuffle, PrivPub, PubPriv, Interleaved]
PRIVATE = [*METHODS, DpSgd]
DELTA = 1e-6


class Free:
    """``psi = 0``."""

    def value(self, x):
        return 0.0

    def prox(self, x, weight):
        return x


@dataclass
class Ridge:
    """``psi = lam/2 |x|^2``, and the weights that its proximal map was called with."""

    lam: float
    weights: list = dataclasses.field(default_factory=list)

    def value(self, x):
        return self.lam / 2 * float(x @ x)

    def prox(self, x, weight):
        self.weights.append(weight)
        return x / (1 + weight * self.lam)


@dataclass
class Holder:
    """A client by its records; ``passes`` tells what it was asked for."""

    private: np.ndarray
    public: np.ndarray
    loss: str = "mean"
    smoothness: float = 1.0
    regularizer: Any = dataclasses.field(default_factory=Free)
    passes: list = dataclasses.field(default_factory=list)

    @property
    def num_private(self):
        return len(self.private)

    @property
    def num_public(self):
        return len(self.public)

    def noisy_pass(self, x, part, order, steps, rng):
        self.passes.append((part, np.array(order), steps))
        records = getattr(self, part)
        targets = None if self.loss == "mean" else np.zeros(len(records))
        return engine.run(self.loss, records, targets, x, order, steps, rng)


def points(count, size=3, seed=0):
    return np.random.default_rng(seed).standard_normal((count, size))


def federation(*clients, seed=1, journal=None):
    fed = Federation(len(clients), Streams(seed), journal=journal or Journal())
    return fed.build(lambda number, rng: clients[number])


def silent(private, public=1, size=20_000):
    """A client without gradients."""
    return Holder(np.zeros((private, size)), np.zeros((public, size)), "least-squares")


def go(method, fed, start, rounds, state=None, first=1):
    state = method.init(fed.at(0), start) if state is None else state
    for number in range(first, first + rounds):
        state = method.round(state, fed.at(number))
    return state
