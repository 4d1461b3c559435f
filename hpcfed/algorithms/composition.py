"""What methods for compositions ``(1/M) sum_m f_m(g_m(x))`` have in common: options, samples, estimates of maps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
from annotated_types import Ge, Gt
from array_api_compat import array_namespace

from hpcfed.algorithms.steps import Batches, Decay, Repetition, Sampling
from hpcfed.capabilities import Array, Compositional
from hpcfed.federation import Federation
from hpcfed.lipschitz import norm
from hpcfed.options import option


@dataclass(frozen=True)
class CompositionState:
    """The server's model."""

    x: Array


@dataclass(frozen=True)
class CompositionSteps(Repetition, Batches, Sampling):
    """A method whose clients take steps of their own along estimates of ``J_m(x)^T grad f_m(g_m(x))``."""

    needs: ClassVar[tuple[type, ...]] = (Compositional,)
    state_type: ClassVar[type] = CompositionState

    inner_batch: Annotated[int, Ge(1)] | None = option(None, "samples of the inner map  [default: as many as --batch]")
    rate: Annotated[float, Gt(0)] | None = option(
        None, "size of the first step, before any decay  [default: 0.05; adamfcgd: 0.05 of --matrix-floor]"
    )

    def init(self, fed: Federation, start: Array) -> Any:
        return CompositionState(start)

    @property
    def first_rate(self) -> float:
        """The size of the first step."""
        return self.rate or 0.05

    @property
    def inner_samples(self) -> int | None:
        """The size of an inner sample; None for all of a client's data."""
        return self.inner_batch or self.batch

    def draw(self, client: Any, rng: np.random.Generator) -> tuple[Any, Any]:
        """A sample of the inner map and an independent one of the outer map."""
        return client.draw_inner(rng, self.inner_samples), client.draw_outer(rng, self.batch)

    def solution(self, state: Any) -> Array:
        model: Array = state.x
        return model

    def outputs(self, state: Any) -> Mapping[str, Array]:
        return {}


@dataclass(frozen=True)
class DecayedSteps(Decay, CompositionSteps):
    """A method with steps of one size in a round, ``eta_k`` in round k."""

    def eta(self, fed: Federation) -> float:
        """``rate / (1 + k/k0)``, k counted from 0."""
        return self.decayed(self.first_rate, fed)


@dataclass(frozen=True)
class FirstEstimates:
    """A method whose clients begin with estimates of their maps."""

    first_batch: Annotated[int, Ge(1)] | None = option(
        None,
        "samples of a map that its first estimate is made of  [default: local_steps batches; localmoml: 2 batches]",
    )

    def first(self, batches: int, usual: int | None) -> int | None:
        """The size of a first sample: ``first_batch``, or so many times the usual size."""
        return self.first_batch if self.first_batch or usual is None else batches * usual


def jacobian(client: Any, x: Array, sample: Any) -> tuple[Array, Array]:
    """``(g(x; sample), J(x; sample))``; a Jacobian of one row comes from the pass that gives the value."""
    if client.inner_size > 1:
        return client.inner(x, sample), client.inner_jacobian(x, sample)
    value, pullback = client.inner_pullback(x, sample)
    return value, pullback(value**0)[None]


def recursive(new: Array, kept: float, memory: Array, old: Array) -> Array:
    """The recursive momentum estimate ``new + kept (memory - old)`` (STORM, Cutkosky and Orabona 2019)."""
    estimate = memory - old
    estimate *= kept
    estimate += new
    return estimate


def averaged(memory: Array, weight: float, fresh: Array) -> Array:
    """The moving average ``(1 - weight) memory + weight fresh``."""
    return (1 - weight) * memory + weight * fresh


def clipped(value: Array, radius: float | None) -> Array:
    """The nearest point to ``value`` of Euclidean (Frobenius) norm at most ``radius``; None does not clip."""
    if radius is None:
        return value
    size = norm(value)
    return value if size <= radius else value * (radius / size)


def paired(change: Array, slope: Array) -> Array:
    """A model's change and a slope as one message, (1, d, 2): a quantizer takes each of the two for a block."""
    pair: Array = array_namespace(change).stack((change, slope), axis=-1)[None]
    return pair
