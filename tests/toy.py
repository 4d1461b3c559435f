"""A workload and methods small enough to read at a glance, through the same doors as the real ones.

``hpcfed toy:Quadratics --algorithm toy:Momentum`` runs them from this folder.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from hpcfed.capabilities import BoundedCurvature, Proximal, Smooth
from hpcfed.federation import Federation, PerClient
from hpcfed.options import option


@dataclass(frozen=True)
class L1:
    """``psi(x) = mu |x|_1``."""

    mu: float

    def value(self, x: np.ndarray) -> float:
        return float(self.mu * np.sum(np.abs(x), dtype=float))

    def prox(self, x: np.ndarray, weight: float) -> np.ndarray:
        return np.sign(x) * np.maximum(np.abs(x) - weight * self.mu, 0)


@dataclass(frozen=True)
class Client:
    """``f_i(x) = w_i/2 |x - b_i|^2``."""

    number: int
    weight: float
    target: np.ndarray
    regularizer: L1

    def value(self, x: np.ndarray) -> float:
        return float(self.weight / 2 * np.sum((x - self.target) ** 2))

    def gradient(self, x: np.ndarray, rng: Any = None, batch: Any = None) -> np.ndarray:
        noise = 0.0 if batch is None else rng.standard_normal(x.shape) / np.sqrt(batch)
        return (self.weight * (x - self.target) + noise).astype(x.dtype)

    def curvature(self, direction: np.ndarray) -> np.ndarray:
        return self.weight * direction


@dataclass(frozen=True)
class Quadratics:
    """Minimize the mean of ``w_i/2 |x - b_i|^2``, plus ``mu |x|_1``; for mu = 0 at ``sum w_i b_i / sum w_i``."""

    offers: ClassVar[tuple[type, ...]] = (Smooth, BoundedCurvature, Proximal)
    defaults: ClassVar[Mapping[str, Any]] = {
        "algorithm": "toy:Momentum",
        "compressor": "qsgd",
        "rounds": 20,
        "device": "cpu",
    }
    pictures: ClassVar[tuple[str, ...]] = ()
    compiled: ClassVar[tuple[str, ...]] = ()

    clients: int = option(5, "number of clients")
    size: int = option(1003, "dimension")
    mu: float = option(0.0, "weight of the l1 norm")
    fail: int = option(-1, "client whose data cannot be built")

    def build(self, fed: Federation) -> Problem:
        def client(number: int, rng: np.random.Generator) -> Client:
            if number == self.fail:
                raise ValueError("cannot be built")
            target = rng.standard_normal(self.size).astype(np.float32)
            return Client(number, 1.0 + number % 3, target, L1(self.mu))

        return Problem(fed.build(client), self.size)


class Problem:
    """The quadratics in place."""

    def __init__(self, fed: Federation, size: int) -> None:
        self.fed, self.size = fed, size

    def start(self) -> np.ndarray:
        return np.zeros(self.size, np.float32)

    def metrics(self, solution: np.ndarray, fed: Federation) -> dict[str, float]:
        smooth = fed.mean(fed.map(lambda client, rng: client.value(solution)))
        return {"objective": smooth + fed.any_client.regularizer.value(solution)}

    def results(self, solution: np.ndarray) -> dict[str, Any]:
        return {"x": (solution, {})}


@dataclass(frozen=True)
class Variables:
    """The model, and a momentum that each client keeps."""

    x: np.ndarray
    momentum: PerClient
    count: int


@dataclass(frozen=True)
class Momentum:
    """Gradient descent with a momentum at each client: its clients keep state, so all of them take part."""

    needs: ClassVar[tuple[type, ...]] = (Smooth,)
    state_type: ClassVar[type] = Variables

    step: float = option(0.2, "step size")
    batch: int | None = option(None, "samples in a gradient")
    hurt: str = option("", "what goes wrong at client 1 in round 3: raise, kill, nan; in every round: slow, or hold")

    def init(self, fed: Federation, start: np.ndarray) -> Variables:
        return Variables(start, fed.map(lambda client, rng: 0 * client.gradient(start)), 0)

    def round(self, state: Variables, fed: Federation) -> Variables:
        def local(client: Client, rng: np.random.Generator, momentum: np.ndarray) -> np.ndarray:
            gradient = client.gradient(state.x, rng, self.batch)
            if self.hurt == "slow":
                time.sleep(0.1)
            if self.hurt == "hold" and Path("hold").exists():  # in the working directory
                time.sleep(0.3)
            if self.hurt and client.number == 1 and fed.round == 3:
                if self.hurt == "raise":
                    raise RuntimeError("something is wrong here")
                if self.hurt == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                if self.hurt == "nan":
                    gradient[0] = np.nan
            return 0.5 * momentum + gradient

        momentum = fed.map(local, state.momentum)
        return Variables(state.x - np.float32(self.step) * fed.mean(momentum, lossy=True), momentum, state.count + 1)

    def solution(self, state: Variables) -> np.ndarray:
        return state.x

    def outputs(self, state: Variables) -> dict[str, np.ndarray]:
        return {}


@dataclass(frozen=True)
class Model:
    """The model alone."""

    x: np.ndarray


@dataclass(frozen=True)
class Descent:
    """Gradient descent with partial participation."""

    needs: ClassVar[tuple[type, ...]] = (Smooth,)
    state_type: ClassVar[type] = Model

    participants: int | None = option(None, "clients in a round")
    step: float = option(0.2, "step size")

    def init(self, fed: Federation, start: np.ndarray) -> Model:
        return Model(start)

    def round(self, state: Model, fed: Federation) -> Model:
        cohort = fed.sample(self.participants)
        gradients = cohort.map(lambda client, rng: client.gradient(state.x))
        return Model(state.x - np.float32(self.step) * cohort.mean(gradients, lossy=True))

    def solution(self, state: Model) -> np.ndarray:
        return state.x

    def outputs(self, state: Model) -> dict[str, np.ndarray]:
        return {}
