"""What private methods have in common: a budget, noise that keeps to it, ledgers, and a report."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
from annotated_types import Ge, Gt, Le, Lt

from hpcfed.algorithms.shuffled import UNACCOUNTED, Plan, Population, Shuffled, ShuffledState, check_eta
from hpcfed.capabilities import Array
from hpcfed.errors import ConfigError, DataError
from hpcfed.federation import Federation, PerClient
from hpcfed.options import option
from hpcfed.privacy.accountant import Cost, check_clip
from hpcfed.privacy.certify import CONTRACTIVE, Certificate, certify_contractive
from hpcfed.privacy.entropy import fresh
from hpcfed.privacy.ledger import ENTRY, PrivacyLedger
from hpcfed.privacy.report import PrivacyReport
from hpcfed.privacy.schedule import Schedule
from hpcfed.protocols import Report

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Budget:
    """A budget ``(epsilon, delta)`` of every private record for K rounds, and where the noise comes from."""

    epsilon: Annotated[float, Gt(0)] | None = option(
        None, "privacy budget that the noise is made for  [default: 1, unless --sigma is given]"
    )
    delta: Annotated[float, Gt(0), Lt(1)] = option(1e-6, "delta of the budget, well below 1 over the number of records")
    sigma: Annotated[float, Gt(0)] | None = option(
        None, "noise in each step, in units of the gradient  [default: by --epsilon]"
    )
    epochs: Annotated[int, Ge(1)] | None = option(None, "K, the rounds that the budget is for  [default: --rounds]")
    rng: Literal["seeded", "secure"] = option(
        "seeded",
        "noise from the seed, for a simulation that can be repeated and has NO privacy; or from the operating system's "
        "entropy, for a private run that cannot",
    )

    def __post_init__(self) -> None:
        if self.epsilon is not None and self.sigma is not None:
            raise ConfigError(
                f"--epsilon {self.epsilon:g} with --sigma {self.sigma:g}: one follows from the other, give one"
            )

    def settled(self, run: Any) -> Self:
        """The method with K filled in.

        Raises
        ------
        ConfigError
            If the run is longer than its budget, or would spend some on tuning.
        """
        if self.epochs is not None and run.rounds > self.epochs:
            raise ConfigError(
                f"--rounds {run.rounds} exceeds --epochs {self.epochs}, which the noise is made for: choose fewer "
                "rounds, or start a new run"
            )
        if self.rng == "secure" and run.tune is not None:
            raise ConfigError(
                f"--tune {run.tune} with --rng secure: runs that tune would spend the budget: tune seeded"
            )
        return dataclasses.replace(self, epochs=self.epochs or run.rounds)

    @property
    def horizon(self) -> int:
        """K.

        Raises
        ------
        ConfigError
            If nothing says it.
        """
        if self.epochs is None:
            raise ConfigError("epochs is missing: noise is made for a number of rounds; give --epochs")
        return self.epochs

    def target(self) -> float:
        """epsilon of the budget."""
        return 1.0 if self.epsilon is None else self.epsilon

    def refuse_overtime(self, fed: Federation) -> None:
        """Refuse a round beyond the budget's.

        Raises
        ------
        ConfigError
        """
        if fed.round > self.horizon:
            raise ConfigError(
                f"round {fed.round} exceeds --epochs {self.epochs}, which the noise is made for"
            ).on_all_ranks()

    def released(self, fed: Federation, known: int) -> list[int]:
        """The rounds to be charged now, given that ``known`` charges were made: this one, and before it what an attempt
        at this run that was interrupted has released with other noise.

        A seeded round that is repeated is the same release, bit by bit.
        """
        if self.rng == "seeded":
            return [fed.round]
        rounds = [int(entry["round"]) for entry in fed.note({"round": fed.round}, known)]
        if not rounds:
            raise DataError(
                f"the journal lacks what was charged before round {fed.round}: restore journal.jsonl in the run folder"
            ).on_all_ranks()
        if len(rounds) > 1:
            logger.warning(
                "%d rounds that an interrupted attempt had released with other noise are charged, too", len(rounds) - 1
            )
        return rounds

    def noise_stream(self, rng: np.random.Generator) -> np.random.Generator:
        """What draws the noise, given the client's stream of this round."""
        return rng if self.rng == "seeded" else fresh()


@dataclass(frozen=True)
class PrivateShuffled(Budget, Shuffled):
    """A private shuffled gradient method (Jiang, Sharma, Wu, Joshi, arXiv 2502.03652; federated as Mishchenko, Khaled,
    Richtarik, arXiv 2102.06704).

    Each client is charged for an epoch before its end is sent. Ledgers stay with their clients; as their entries follow
    from public knowledge, they are secret to nobody. All clients take part in every round.
    """

    method: ClassVar[str]

    def __post_init__(self) -> None:
        Budget.__post_init__(self)
        Shuffled.__post_init__(self)

    def schedule(self, private: int) -> Schedule:
        """What a client with so many private records sees in the K epochs."""
        return Schedule(self.method, self.horizon, private, batch=self.record_batch)

    def split(self, private: int, public: int, number: int) -> tuple[int, int]:
        return self.schedule(private).split(number)

    @property
    def public_step(self) -> str:
        """The option for step sizes of epochs that see public records only."""
        return self.eta

    def plan(self, population: Population, size: int, fed: Federation) -> Plan:
        check_clip(self.clip)
        population.refuse_empty(0, self.method)
        schedules = [self.schedule(private) for private in sorted({private for private, _ in population.sizes})]
        if any(each.split(number)[1] for each in schedules for number in (1, self.horizon)):
            population.refuse_empty(1, self.method)
        smoothness = population.smoothness
        # A step size that is chosen here will keep to 1/L, so the noise, which it depends on, can come first.
        factor, relative = check_eta("eta", self.eta)
        first = factor / smoothness if relative and smoothness else factor
        certificate = certify_contractive(population.loss, self.clip, first, smoothness)
        mixed = any(all(each.split(1)) for each in schedules)
        if mixed and population.loss in CONTRACTIVE and 2 < first * smoothness < math.inf:
            raise ConfigError(f"--eta {self.eta}: {certificate.reason}, and {self.method} needs steps that do not")
        noise = self.sigma or max(
            each.noise(self.target(), self.delta, self.clip, certificate=certificate) for each in schedules
        )
        samples, epochs = schedules[-1].samples or 1, schedules[-1].private_epochs
        averaged = noise / math.sqrt(len(population.sizes))
        eta = self.step_size(self.eta, samples, smoothness, averaged, size, epochs)
        public_eta = self.step_size(self.public_step, samples, smoothness, 0.0, size, 1)
        plan = Plan(samples, smoothness, noise, eta, public_eta)
        if self.delta * samples >= 1:
            logger.warning(
                "delta = %g is not below 1/n = %g: publishing one record in full can count as private",
                self.delta,
                1 / samples,
            )
        reason = self._cost(schedules[0], plan, certificate).reason
        logger.info("sigma = %.6g, eta = %.6g, in %d private epochs: %s", noise, eta, epochs, reason)
        return plan

    def _cost(self, schedule: Schedule, plan: Plan, certificate: Certificate) -> Cost:
        return schedule.cost(self.clip, plan.noise, certificate=certificate)

    def _certificate(self, client: Any, plan: Plan) -> Certificate:
        return certify_contractive(client.loss, self.clip, plan.eta, plan.smoothness)

    def ledgers(self, fed: Federation) -> PerClient[PrivacyLedger]:
        return fed.map(lambda client, rng: PrivacyLedger())

    def charged(self, state: ShuffledState, fed: Federation) -> PerClient[PrivacyLedger]:
        self.refuse_overtime(fed)
        known = len(next(iter(state.ledgers.values())).entries)
        rounds = self.released(fed, known)
        return fed.map(self._charge, state.ledgers, rounds, state.plan)

    def _charge(
        self, client: Any, rng: np.random.Generator, ledger: PrivacyLedger, rounds: list[int], plan: Plan
    ) -> PrivacyLedger:
        schedule, certificate = self.schedule(client.num_private), self._certificate(client, plan)
        for number in rounds:
            ledger = ledger.charge(number, schedule.epoch(number, self.clip, plan.noise, certificate=certificate))
        return ledger

    def report(self, state: ShuffledState, fed: Federation) -> Report:
        """What the run has spent, and what it may claim."""
        plan = state.plan

        def own(client: Any, rng: np.random.Generator, ledger: PrivacyLedger) -> tuple[PrivacyLedger, str]:
            return ledger, self._cost(self.schedule(client.num_private), plan, self._certificate(client, plan)).reason

        ledgers, reasons = zip(*fed.collect(fed.map(own, state.ledgers)), strict=True)
        spent = [ledger.rho for ledger in ledgers]
        extremes = (reasons[spent.index(most)] for most in (max(spent), min(spent)))
        report = PrivacyReport(
            ledgers=dict(enumerate(ledgers)),
            delta=self.delta,
            seeded=self.rng == "seeded",
            released=[
                "each client's iterate at the end of each epoch; means, proximal steps and models follow from these"
            ],
            reasons=list(dict.fromkeys(extremes)),
            unaccounted=[UNACCOUNTED],
        )
        content = {
            "method": self.method,
            **report.facts(),
            "ledgers": {str(client): json.loads(ledger.to_json()) for client, ledger in enumerate(ledgers)},
        }
        files = {"privacy.json": json.dumps(content, indent=2, allow_nan=False) + "\n"}
        return Report(report.text(), files, {"privacy": _table(ledgers)})


@dataclass(frozen=True)
class Mixed:
    """A method that sees private and public records, in shares."""

    private_fraction: Annotated[float, Gt(0), Le(1)] = option(
        0.75,
        "p, the share of private steps in an epoch (interleaved), of private epochs among all (priv-pub, pub-priv)",
    )


@dataclass(frozen=True)
class Switching(Mixed, PrivateShuffled):
    """A method whose first epochs see records of one kind, and whose last ones see the other."""

    switch: Annotated[int, Ge(0)] | None = option(
        None, "S, the last epoch before the kind of records changes  [default: by --private-fraction]"
    )
    public_eta: str | None = option(
        None,
        "step size of epochs with public records only, as --eta  [default: as --eta says]",
        metavar="auto|FLOAT|FLOAT/L",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.public_eta is not None:
            check_eta("public-eta", self.public_eta)

    def schedule(self, private: int) -> Schedule:
        switch = self.last_before() if self.switch is None else self.switch
        return Schedule(self.method, self.horizon, private, switch=switch, batch=self.record_batch)

    def last_before(self) -> int:
        """S, by the share of private epochs."""
        raise NotImplementedError

    @property
    def public_step(self) -> str:
        return self.public_eta or self.eta


def share(fraction: float, count: int) -> int:
    """``floor(fraction count)``, of the number that was meant: 0.29 times 100 is 29."""
    return math.floor(fraction * count * (1 + 1e-12))


def _table(ledgers: tuple[PrivacyLedger, ...]) -> Array:
    """All entries, with the client that was charged."""
    entries = np.concatenate([each.entries for each in ledgers])
    table = np.empty(len(entries), [("client", np.int64), *ENTRY.descr])
    table["client"] = np.repeat(np.arange(len(ledgers)), [len(each.entries) for each in ledgers])
    for name in ENTRY.names or ():
        table[name] = entries[name]
    return table
