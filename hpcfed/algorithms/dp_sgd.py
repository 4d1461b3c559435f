"""DP-SGD: noisy steps on Poisson samples of the private records, for reference."""

from __future__ import annotations

import json
import logging
import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from hpcfed.algorithms.budget import Budget
from hpcfed.algorithms.shuffled import UNACCOUNTED, Plan, Population, RecordSteps, ShuffledState
from hpcfed.capabilities import Array
from hpcfed.federation import Federation, PerClient
from hpcfed.privacy import poisson
from hpcfed.privacy.accountant import check_clip
from hpcfed.privacy.engine import NoisySteps
from hpcfed.privacy.report import NOT_CLAIMED, SECURE, SEEDED, THREAT_MODEL
from hpcfed.protocols import Report

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DpSgdState(ShuffledState):
    """The model and the plan, and how many epochs the clients were charged for."""

    charged: int = 0


@dataclass(frozen=True)
class DpSgd(Budget, RecordSteps):
    """Steps of which each sees every private record with probability b/n (Abadi et al.: Deep learning with differential
    privacy, 2016), ``ceil(n/b)`` in an epoch.

    Samples amplify privacy because they are secret, so they come from the same stream as the noise. The accounting is
    dp-accounting's, for a record that is added or removed: compare its epsilon with that of the other methods, for a
    record that is replaced, with care.
    """

    state_type: ClassVar[type] = DpSgdState

    def __post_init__(self) -> None:
        Budget.__post_init__(self)
        RecordSteps.__post_init__(self)

    def split(self, private: int, public: int, number: int) -> tuple[int, int]:
        return private, 0

    def plan(self, population: Population, size: int, fed: Federation) -> Plan:
        check_clip(self.clip)
        assert self.clip is not None
        population.refuse_empty(0, "dp-sgd")
        counts = sorted({private for private, _ in population.sizes})
        noise = self.sigma
        if noise is None:  # on one rank: another library version must not give another rank other bits
            noise = fed.once(lambda: max(self._noise(count) for count in counts))
        samples = counts[-1]
        averaged = noise / math.sqrt(len(population.sizes))
        eta = self.step_size(self.eta, samples, population.smoothness, averaged, size, self.horizon)
        logger.info("sigma = %.6g, eta = %.6g, steps on Poisson samples", noise, eta)
        return Plan(samples, population.smoothness, noise, eta, eta)

    def _noise(self, count: int) -> float:
        """sigma for a client with so many private records."""
        assert self.clip is not None
        steps = self.horizon * self._steps(count)
        return poisson.multiplier(self._rate(count), steps, self.target(), self.delta) * self.clip / self.record_batch

    def _rate(self, count: int) -> float:
        return min(1.0, self.record_batch / count)

    def _steps(self, count: int) -> int:
        return -(-count // self.record_batch)

    def init(self, fed: Federation, start: Array) -> DpSgdState:
        first = super().init(fed, start)
        return DpSgdState(first.x, first.plan, first.ledgers)

    def round(self, state: ShuffledState, fed: Federation) -> DpSgdState:
        assert isinstance(state, DpSgdState)
        self.refuse_overtime(fed)
        charged = state.charged + len(self.released(fed, state.charged))
        after = super().round(state, fed)
        return DpSgdState(after.x, after.plan, after.ledgers, charged)

    def epochs_of(self, state: ShuffledState, fed: Federation) -> PerClient[Array]:
        return fed.map(self._epoch, state.x, state.plan)

    def _epoch(self, client: Any, rng: np.random.Generator, x: Array, plan: Plan) -> Array:
        rng = self.noise_stream(rng)
        count = client.num_private
        sizes = rng.binomial(count, self._rate(count), size=self._steps(count))
        samples = [rng.choice(count, size, replace=False, shuffle=False) for size in sizes]
        steps = NoisySteps(plan.eta, self.clip, plan.noise, self.record_batch, np.cumsum(sizes))
        return client.noisy_pass(x, "private", np.concatenate(samples), steps, rng)

    def report(self, state: DpSgdState, fed: Federation) -> Report:
        """What the run has spent, and what it may claim."""
        counts = fed.collect(fed.map(lambda client, rng: client.num_private))
        assert self.clip is not None
        multiplier = state.plan.noise * self.record_batch / self.clip
        spent = {
            count: poisson.epsilon(self._rate(count), multiplier, state.charged * self._steps(count), self.delta)
            for count in set(counts)
        }
        seeded = self.rng == "seeded"
        facts = {
            "method": "dp-sgd",
            "private": not seeded,
            "noise": SEEDED if seeded else SECURE,
            "adjacency": poisson.ADJACENCY,
            "threat_model": THREAT_MODEL,
            "delta": self.delta,
            "epsilon": max(spent.values()),
            "noise_multiplier": multiplier,
            "epochs": state.charged,
            "clients": [
                {"client": client, "records": count, "rate": self._rate(count), "epsilon": spent[count]}
                for client, count in enumerate(counts)
            ],
            "released": ["each client's iterate at the end of each epoch"],
            "unaccounted": [UNACCOUNTED],
            "not_claimed": list(NOT_CLAIMED[:2] + NOT_CLAIMED[3:]),
        }
        text = "\n".join(
            [
                f"privacy: every record is ({facts['epsilon']:.6g}, {self.delta:g})-private at most",
                f"{'WARNING' if seeded else 'noise'}: {facts['noise']}",
                f"neighbours: {poisson.ADJACENCY}, not replaced as for the other methods; by dp-accounting",
                f"threat model: {THREAT_MODEL}",
                f"amplification: by secret Poisson samples; noise multiplier {multiplier:.6g}",
                "released: each client's iterate at the end of each epoch",
                f"released, NOT accounted for: {UNACCOUNTED}",
                *(f"not claimed: {each}" for each in NOT_CLAIMED[:2] + NOT_CLAIMED[3:]),
            ]
        )
        return Report(text, {"privacy.json": json.dumps(facts, indent=2, allow_nan=False) + "\n"})
