"""What methods for federated bilevel problems have in common: options, the penalty's gradients, STORM estimates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import numpy as np
from annotated_types import Ge, Gt, Le
from array_api_compat import array_namespace

from hpcfed.algorithms.steps import Batches, Repetition, Sampling
from hpcfed.capabilities import Array, Bilevel
from hpcfed.federation import Federation, PerClient
from hpcfed.options import option


@dataclass(frozen=True)
class BilevelState:
    """The server's point: x, then y."""

    point: Array


@dataclass(frozen=True)
class BilevelMethod(Repetition, Batches):
    """A method for ``min_x mean f_i(x, y*(x))``, ``y*(x) in argmin_y mean g_i(x, y)``, whose clients take local steps.

    The lower level is that of the clients' mean: the hypergradient ``D_x f - G_xy G_yy^-1 D_y f`` has the means of the
    clients' G_xy, G_yy and D_y f, and is not the mean of the clients' own hypergradients.
    """

    needs: ClassVar[tuple[type, ...]] = (Bilevel,)

    def solution(self, state: Any) -> Array:
        """The point, x and then y."""
        return state.point

    def outputs(self, state: Any) -> Mapping[str, Array]:
        return {}


@dataclass(frozen=True)
class LevelSteps(BilevelMethod):
    """A method with one step size for each level."""

    upper_step: Annotated[float, Gt(0)] = option(0.01, "step of x along an estimate of the hypergradient")
    lower_step: Annotated[float, Gt(0)] = option(
        0.1, "step of y (and z) along the gradient of the lower level; below 2/L_g"
    )


@dataclass(frozen=True)
class Stateless(LevelSteps, Sampling):
    """A method whose clients keep nothing between rounds, so that some of them may sit a round out."""


@dataclass(frozen=True)
class Penalized:
    """A method for the penalty form ``min_{x,y} max_z mean f_i(x, y) + (g_i(x, y) - g_i(x, z)) / rho``.

    For ``g(x, .)`` that has one minimizer its solution is O(rho) away from that of the bilevel problem.
    """

    penalty: Annotated[float, Gt(0)] = option(
        0.02, "rho in f + (g(x, y) - min g(x, .)) / rho; small: near the bilevel problem", metavar="RHO"
    )


@dataclass(frozen=True)
class Recursive:
    """A method that keeps STORM estimates of its directions."""

    storm_weight: Annotated[float, Gt(0), Le(1)] = option(
        0.5, "theta = beta eta^2: how much of the past a recursive estimate forgets in a step; 1: all", metavar="THETA"
    )
    start_batch: Annotated[int, Ge(1)] | None = option(None, "samples in the first estimates  [default: all]")


def storm(estimate: Array, new: Array, old: Array, theta: float) -> Array:
    """``new + (1 - theta) (estimate - old)``: the recursive estimate (Cutkosky, Orabona 2019) at the new point.

    ``new`` and ``old`` are one map at the new and at the old point, *of one sample*.
    """
    return new + (1 - theta) * (estimate - old)


def stack(*parts: Array) -> Array:
    """One vector of several: what clients send at a synchronization."""
    return array_namespace(parts[0]).concat(parts)


def split(vector: Array, sizes: Sequence[int]) -> list[Array]:
    """The parts that `stack` put together."""
    ends = np.cumsum(sizes).tolist()
    return [vector[end - size : end] for end, size in zip(ends, sizes, strict=True)]


def sizes_of(client: Any, kinds: str) -> list[int]:
    """The sizes of vectors that are like x or like y."""
    return [client.upper_size if kind == "x" else client.lower_size for kind in kinds]


class Samples(NamedTuple):
    """Samples of f, of g at y, and of g at z."""

    upper: Any
    lower: Any
    lower_z: Any


class Derivatives(NamedTuple):
    """Partial derivatives in the penalty form, or estimates of them: in x those of ``f(x, y), g(x, y), g(x, z)``, then
    those in y, y and z."""

    u1: Array
    u2: Array
    u3: Array
    v1: Array
    v2: Array
    w: Array


def draw(client: Any, rng: np.random.Generator, batch: int | None, *, shared: bool = True) -> Samples:
    """Samples for the penalty's gradients. ``shared``: one sample of g for y and z.

    ``g(x, y) - g(x, z)`` is a difference of nearly equal terms, weighted by 1/rho: the noise of one sample cancels,
    that of two adds up.
    """
    upper, lower = client.draw_upper(rng, batch), client.draw_lower(rng, batch)
    return Samples(upper, lower, lower if shared else client.draw_lower(rng, batch))


def derivatives(client: Any, samples: Samples, x: Array, y: Array, z: Array) -> Derivatives:
    """All six partial derivatives, in three passes."""
    u1, v1 = client.upper_gradients(x, y, samples.upper)
    u2, v2 = client.lower_gradients(x, y, samples.lower)
    u3, w = client.lower_gradients(x, z, samples.lower_z)
    return Derivatives(u1, u2, u3, v1, v2, w)


@dataclass(frozen=True)
class DoubleLoop(Penalized, BilevelMethod):
    """A method for the penalty form whose step improves y and z and then moves x.

    A round is ``local_steps`` steps. *y and z are averaged before its last move of x*, and the x after it: a client's
    own y and z differ by what its own data say, a difference that 1/rho multiplies, so that x would otherwise settle
    elsewhere even with local_steps = 1. Several inner steps of unequal clients drift as local steps do.
    """

    inner: Annotated[int, Ge(1)] = option(1, "T, steps on y and z before each step on x")

    def lower(
        self, client: Any, rng: np.random.Generator, x: Array, y: Array, z: Array, rates: Any
    ) -> tuple[Array, Array]:
        """y and z after ``inner`` steps."""
        raise NotImplementedError

    def upper(self, client: Any, rng: np.random.Generator, x: Array, y: Array, z: Array, rates: Any) -> Array:
        """x after a step."""
        raise NotImplementedError

    def alternate(self, cohort: Federation, point: Array, z: Array, rates: Sequence[Any]) -> tuple[Array, Array]:
        """The point and z after a round, whose steps have these rates."""
        sizes = sizes_of(cohort.any_client, "xyy")
        x, sent = cohort.map(self._until_last, *split(point, sizes[:2]), z, rates).unzip(2)
        y, z = split(cohort.mean(sent), sizes[1:])
        return stack(cohort.mean(cohort.map(self.upper, x, y, z, rates[-1])), y), z

    def _until_last(
        self, client: Any, rng: np.random.Generator, x: Array, y: Array, z: Array, rates: Sequence[Any]
    ) -> tuple[Array, Array]:
        """x before its last move, and what y and z are then."""
        for each in rates[:-1]:
            y, z = self.lower(client, rng, x, y, z, each)
            x = self.upper(client, rng, x, y, z, each)
        return x, stack(*self.lower(client, rng, x, y, z, rates[-1]))


@dataclass(frozen=True)
class EstimatedState(BilevelState):
    """What all clients have after a synchronization, and what each keeps for itself.

    Attributes
    ----------
    rest : the other variables: z, then the method's own.
    estimates : the clients' mean estimates: the six of `Derivatives`, or u, v and w where these are combined.
    own : each client's own u1, u2, u3, v1, v2, where only what is combined of them is averaged.
    """

    rest: Array
    estimates: Array
    own: PerClient[Array]


@dataclass(frozen=True)
class EstimatedPenalty(Recursive, Penalized, BilevelMethod):
    """The penalty form by STORM estimates of all six partial derivatives: six joint gradients a step, no products.

    A step, from ``u = a u1 + b (u2 - u3)``, ``v = a v1 + b v2`` and w, is

        ``x <- x - s_x u,  y <- y - s_y v,  z <- z - s_z w``

    and then every estimate is updated with one sample of f and one of g, each at the new point and at the old one.
    After ``local_steps`` steps all variables and all estimates are averaged; so are the first estimates.
    """

    state_type: ClassVar[type] = EstimatedState
    layout: ClassVar[str] = "xyy"  # what the variables x, y, z and the method's own are like

    def weights(self) -> tuple[float, float]:
        """``a`` and ``b``."""
        raise NotImplementedError

    def steps(self) -> tuple[float, float, float]:
        """``s_x``, ``s_y`` and ``s_z``."""
        raise NotImplementedError

    @property
    def combines(self) -> bool:
        """Whether only u, v and w are averaged, not the six components."""
        return False

    def first(self, x: Array, y: Array) -> list[Array]:
        """The variables to start with."""
        return [x, y, y]

    def move(self, variables: list[Array], u: Array, v: Array, w: Array) -> list[Array]:
        """All variables after a step."""
        (x, y, z, *_), (s_x, s_y, s_z) = variables, self.steps()
        return [x - s_x * u, y - s_y * v, z - s_z * w]

    def derivatives(self, client: Any, samples: Samples, variables: list[Array]) -> Derivatives:
        """What is estimated, at these variables."""
        x, y, z, *_ = variables
        return derivatives(client, samples, x, y, z)

    def init(self, fed: Federation, start: Array) -> EstimatedState:
        x, y = split(start, sizes_of(fed.any_client, "xy"))
        variables = self.first(x, y)
        sent, own = fed.map(self._first_estimates, variables).unzip(2)
        return self._state(start, stack(*variables[2:]), fed.mean(sent), own)

    def round(self, state: EstimatedState, fed: Federation) -> EstimatedState:
        own = (state.own,) if self.combines else ()
        sent, own_after = fed.map(self._local_steps, state, *own).unzip(2)
        point, rest, estimates = split(
            fed.mean(sent), (state.point.shape[0], state.rest.shape[0], state.estimates.shape[0])
        )
        return self._state(point, rest, estimates, own_after)

    def _state(self, point: Array, rest: Array, estimates: Array, own: PerClient[Any]) -> EstimatedState:
        return EstimatedState(point, rest, estimates, own if self.combines else PerClient({}))

    def _combine(self, parts: Derivatives) -> tuple[Array, Array, Array]:
        a, b = self.weights()
        return a * parts.u1 + b * (parts.u2 - parts.u3), a * parts.v1 + b * parts.v2, parts.w

    def _first_estimates(self, client: Any, rng: np.random.Generator, variables: list[Array]) -> tuple[Array, Any]:
        parts = self.derivatives(client, draw(client, rng, self.start_batch), variables)
        return self._message([], parts)

    def _message(self, variables: list[Array], parts: Derivatives) -> tuple[Array, Any]:
        """What a client sends, and what it keeps."""
        if self.combines:
            return stack(*variables, *self._combine(parts)), stack(*parts[:-1])
        return stack(*variables, *parts), None

    def _local_steps(
        self, client: Any, rng: np.random.Generator, state: EstimatedState, own: Array | None = None
    ) -> tuple[Array, Any]:
        sizes = sizes_of(client, self.layout)
        variables = [*split(state.point, sizes[:2]), *split(state.rest, sizes[2:])]
        if own is None:
            parts = Derivatives(*split(state.estimates, sizes_of(client, "xxxyyy")))
            direction = self._combine(parts)
        else:
            # The mean u and v last one step: the next ones are made of the client's own components.
            u, v, w = split(state.estimates, sizes_of(client, "xyy"))
            parts = Derivatives(*[*split(own, sizes_of(client, "xxxyy")), w])
            direction = (u, v, w)
        for _ in range(self.local_steps):
            samples = draw(client, rng, self.batch)
            moved = self.move(variables, *direction)
            new, old = (self.derivatives(client, samples, where) for where in (moved, variables))
            parts = Derivatives(*(storm(*each, self.storm_weight) for each in zip(parts, new, old, strict=True)))
            variables, direction = moved, self._combine(parts)
        return self._message(variables, parts)


@dataclass(frozen=True)
class CommonRates(EstimatedPenalty):
    """The steps of all variables as multiples of one, and the choice of what is averaged."""

    common_step: Annotated[float, Gt(0)] = option(0.05, "eta, the common factor of the steps of all variables")
    alpha_x: Annotated[float, Gt(0)] | None = option(
        None, "the step of x is alpha_x eta  [default: 1; fedsvrbgd, whose directions are 1/rho as long: rho]"
    )
    alpha_y: Annotated[float, Gt(0)] | None = option(None, "the step of y is alpha_y eta  [default: that of alpha_x]")
    alpha_z: Annotated[float, Gt(0)] | None = option(None, "the step of z is alpha_z eta  [default: that of alpha_x]")
    sync: Literal["components", "combined"] = option(
        "components", "which estimates are averaged: all six components, or as printed u, v and w made of them"
    )

    @property
    def combines(self) -> bool:
        return self.sync == "combined"

    def multiples(self, default: float) -> tuple[float, float, float]:
        """``alpha_x eta``, ``alpha_y eta`` and ``alpha_z eta``."""
        alphas = (default if alpha is None else alpha for alpha in (self.alpha_x, self.alpha_y, self.alpha_z))
        x, y, z = (alpha * self.common_step for alpha in alphas)
        return x, y, z
