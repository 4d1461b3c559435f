"""What shuffled gradient methods on private and public records have in common: a round is one pass at every client."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from annotated_types import Ge, Gt

from hpcfed.capabilities import Array, Records
from hpcfed.errors import ConfigError
from hpcfed.federation import Federation, PerClient
from hpcfed.lipschitz import check_step
from hpcfed.options import option
from hpcfed.privacy.engine import NoisySteps
from hpcfed.privacy.ledger import PrivacyLedger
from hpcfed.protocols import Report

UNACCOUNTED = "what metrics.jsonl, result.h5 and the terminal tell of private records: objectives, errors, and so on"


@dataclass(frozen=True)
class Population:
    """What is publicly known of the clients' records.

    Attributes
    ----------
    loss, smoothness : the loss's name, and the largest L of a client.
    sizes : the numbers of private and of public records of each client, in id order.
    """

    loss: str
    smoothness: float
    sizes: tuple[tuple[int, int], ...]

    def refuse_empty(self, place: int, method: str) -> None:
        """Refuse a client without private (place 0) or public (1) records.

        Raises
        ------
        ConfigError
        """
        kind = ("private", "public")[place]
        for client, sizes in enumerate(self.sizes):
            if not sizes[place]:
                raise ConfigError(
                    f"client {client} has no {kind} records, and {method} needs some: deal others, or to fewer clients"
                )


@dataclass(frozen=True)
class Plan:
    """What is fixed before the first epoch, from public knowledge alone.

    Attributes
    ----------
    samples : n, the records of an epoch at the client that has most.
    smoothness : L.
    noise : sigma of the epochs that see private records.
    eta, public_eta : step sizes of epochs that see private records, and of those that see none.
    """

    samples: int
    smoothness: float
    noise: float
    eta: float
    public_eta: float


@dataclass(frozen=True)
class ShuffledState:
    """The model, the plan, and what each client was charged (no client of a method without a budget has a ledger)."""

    x: Array
    plan: Plan
    ledgers: PerClient[PrivacyLedger] = field(default_factory=lambda: PerClient({}))


@dataclass(frozen=True)
class RecordSteps:
    """A method whose clients take a step for each batch of their records, and whose round is an epoch.

    Minimize ``1/M sum_i F_i(x) + psi(x)``, F_i the mean of a loss over client i's records. In a round client i goes
    from the server's x over its batches, of b records each,

        ``x_i <- x_i - eta (1/b sum_j clip(grad f(x_i; r_j)) + N(0, sigma^2 I))``,

    and the server sets ``x = prox_{(n/b) eta psi}(mean x_i)``: psi weighs as much as in the n/b steps of an epoch
    together. Of clients with unequal numbers of records n is the largest, and larger clients count for more. One client
    is the method on one machine.
    """

    needs: ClassVar[tuple[type, ...]] = (Records,)
    state_type: ClassVar[type] = ShuffledState

    clip: Annotated[float, Gt(0)] | None = option(
        None, "C, to which the norm of each record's gradient is clipped; private methods need it  [default: no limit]"
    )
    record_batch: Annotated[int, Ge(1)] = option(1, "records in a step; 1 is the papers', more need less noise")
    eta: str = option(
        "auto",
        "step size: a number, or one over L such as 0.5/L, L a bound of every record's curvature; "
        "auto: by n, L and the noise, at most 1/(n L)",
        metavar="auto|FLOAT|FLOAT/L",
    )

    def __post_init__(self) -> None:
        check_eta("eta", self.eta)

    def split(self, private: int, public: int, number: int) -> tuple[int, int]:
        """Of a client with so many records: how many private and then public ones it sees in round ``number``."""
        raise NotImplementedError

    def step_size(self, text: str, samples: int, smoothness: float, noise: float, size: int, count: int) -> float:
        """The step size of an option.

        ``auto`` minimizes ``D^2/(eta N) + 2 (1 + log K) eta d sigma^2``, the leading terms of the last iterate's bound
        (`hpcfed.privacy.bounds`) after K epochs of N steps in all, for the distance ``D = C/L`` at which a gradient
        reaches the clip. It is at most ``1/(n L)``, n the steps of an epoch, which is as far as one gradient step.

        Parameters
        ----------
        samples, noise, size : records of an epoch, sigma (over the root of the number of clients), and x's dimension.
        count : epochs with that noise.
        """
        steps = max(1.0, samples / self.record_batch)
        if text != "auto":
            factor, relative = check_eta("eta", text)
            return factor / _bounded(smoothness, text) if relative else factor
        largest = 1 / (steps * _bounded(smoothness, text))
        if not noise or self.clip is None:
            return largest
        spread = noise * math.sqrt(2 * (1 + math.log(count)) * size * steps * count)
        return min(largest, self.clip / smoothness / spread)

    # -- the parts of a run ----------------------------------------------------------------------------------------

    def init(self, fed: Federation, start: Array) -> ShuffledState:
        facts = fed.collect(fed.map(lambda client, rng: (client.loss, client.smoothness, _sizes(client))))
        losses, smoothness, sizes = zip(*facts, strict=True)
        try:  # from replicated values, and so alike on every rank
            plan = self.plan(Population(losses[0], max(smoothness), sizes), start.size, fed)
        except ConfigError as error:
            error.on_all_ranks()
            raise
        return ShuffledState(start, plan, self.ledgers(fed))

    def plan(self, population: Population, size: int, fed: Federation) -> Plan:
        """The plan, for a model of ``size`` numbers."""
        samples = max(sum(self.split(*sizes, 1)) for sizes in population.sizes)
        eta = self.step_size(self.eta, samples, population.smoothness, 0.0, size, 1)
        return Plan(samples, population.smoothness, 0.0, eta, eta)

    def ledgers(self, fed: Federation) -> PerClient[PrivacyLedger]:
        """The clients' ledgers before the first epoch."""
        return PerClient({})

    def charged(self, state: ShuffledState, fed: Federation) -> PerClient[PrivacyLedger]:
        """The clients' ledgers when they have paid for this round, which nothing has been sent of."""
        return state.ledgers

    def round(self, state: ShuffledState, fed: Federation) -> ShuffledState:
        ledgers = self.charged(state, fed)
        x = fed.mean(self.epochs_of(state, fed))
        plan = state.plan
        eta = plan.eta if self._sees_private(fed) else plan.public_eta
        x = fed.any_client.regularizer.prox(x, eta * plan.samples / self.record_batch)
        return ShuffledState(x, plan, ledgers)

    def epochs_of(self, state: ShuffledState, fed: Federation) -> PerClient[Array]:
        """Where each client's epoch ends."""
        raise NotImplementedError

    def _sees_private(self, fed: Federation) -> bool:
        return self.split(*_sizes(fed.any_client), fed.round)[0] > 0

    def solution(self, state: ShuffledState) -> Array:
        return state.x

    def outputs(self, state: ShuffledState) -> Mapping[str, Array]:
        return {}


@dataclass(frozen=True)
class Shuffled(RecordSteps):
    """A method whose epochs go through the private records in an order, and through public ones from the first on."""

    order: Literal["rr", "so", "ig"] = option(
        "rr", "private records in an order that is drawn in every round (rr), once (so), or as they are (ig)"
    )

    def epochs_of(self, state: ShuffledState, fed: Federation) -> PerClient[Array]:
        orders = self.orders(fed)
        return fed.map(self._epoch, state.x, orders, fed.round, state.plan)

    def orders(self, fed: Federation) -> PerClient[Array]:
        """The order of each client's private records in this round."""
        # What is drawn once comes from the stream of a round that there is only one of.
        return (fed.at(0) if self.order == "so" else fed).map(self._order)

    def _order(self, client: Any, rng: np.random.Generator) -> Array:
        return np.arange(client.num_private) if self.order == "ig" else rng.permutation(client.num_private)

    def _epoch(self, client: Any, rng: np.random.Generator, x: Array, order: Array, number: int, plan: Plan) -> Array:
        private, public = self.split(*_sizes(client), number)
        steps = NoisySteps(
            plan.eta if private else plan.public_eta, self.clip, plan.noise if private else 0.0, self.record_batch
        )
        rng = self.noise_stream(rng)
        if private:
            x = client.noisy_pass(x, "private", order[:private], steps, rng)
        if public:  # from the first again where there are too few
            x = client.noisy_pass(x, "public", np.arange(public) % client.num_public, steps, rng)
        return x

    def noise_stream(self, rng: np.random.Generator) -> np.random.Generator:
        """What draws the noise, given the client's stream of this round."""
        return rng


def unaccountable(method: str, told: str, **facts: Any) -> Report:
    """The report of a method that has no budget."""
    content = {"method": method, **facts, "told": told, "unaccounted": [UNACCOUNTED]}
    text = f"privacy: {told}\nreleased, NOT accounted for: {UNACCOUNTED}"
    return Report(text, {"privacy.json": json.dumps(content, indent=2) + "\n"})


def check_eta(name: str, text: str) -> tuple[float, bool]:
    """An option's step size as a number, and whether that is to be divided by L; for ``auto`` (1, True).

    Raises
    ------
    ConfigError
        If it is no step size.
    """
    try:
        return check_step(text)
    except ConfigError:
        raise ConfigError(f"--{name} {text}: give a positive number, one over L such as 0.5/L, or auto") from None


def _bounded(smoothness: float, text: str) -> float:
    if not 0 < smoothness < math.inf:
        raise ConfigError(f"--eta {text}: L = {smoothness:g} is no bound of the records' curvature: give a number")
    return smoothness


def _sizes(client: Any) -> tuple[int, int]:
    return client.num_private, client.num_public
