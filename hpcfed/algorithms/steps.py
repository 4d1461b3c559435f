"""What first-order methods have in common: options of their steps, and rates that decay."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from annotated_types import Ge, Gt, Lt

from hpcfed.capabilities import Array, Proximal, Smooth
from hpcfed.federation import Federation
from hpcfed.lipschitz import check_step, step_size
from hpcfed.options import option


@dataclass(frozen=True)
class ModelState:
    """The server's model ``x`` and the clients' step size before any decay."""

    x: Array
    step: float


@dataclass(frozen=True)
class Sampling:
    """A method that may do with some of the clients in a round."""

    participants: Annotated[int, Ge(1)] | None = option(None, "clients that take part in a round  [default: all]")


@dataclass(frozen=True)
class Batches:
    """A method whose clients evaluate some of their samples at a time."""

    batch: Annotated[int, Ge(1)] | None = option(None, "samples (views) in a local gradient  [default: all]")


@dataclass(frozen=True)
class Repetition:
    """A method whose clients take several steps in a round."""

    local_steps: Annotated[int, Ge(1)] = option(5, "steps that a client takes in a round")


@dataclass(frozen=True)
class Stopping:
    """A primal-dual method that can tell how far it is from the optimality conditions."""

    tol: Annotated[float, Gt(0), Lt(1)] | None = option(
        None,
        "stop when the relative residuals of both optimality conditions, grad f(x) + B^T v = 0 and v in dg(Bx), are at "
        "most this  [default: do all rounds]",
    )

    def residual(self, state: Any) -> float:
        """The larger of the two residuals, as the state's last round found it."""
        found: float = state.residual
        return found


def primal_dual_residual(force: float, dual_force: float, change: float, dual: float) -> float:
    """The larger of two relative residuals, at most 1 where there is nothing to compare with.

    Parameters
    ----------
    force, dual_force : ``|grad f(x) + B^T v|`` and ``|B^T v|``, which is ``|grad f(x)|`` at the optimum.
    change, dual : ``|v' - v|`` and ``|v'|``, v' the dual after another dual step.
    """
    halves = [(force, dual_force), (change, dual)]
    return max(part / (whole or part or 1.0) for part, whole in halves)


@dataclass(frozen=True)
class Decay:
    """A method whose steps may shrink from round to round."""

    step_decay: Annotated[float, Gt(0)] | None = option(
        None, "k0 in gamma_k = gamma / (1 + k/k0)  [default: constant step]", metavar="K0"
    )

    def decayed(self, step: float, fed: Federation) -> float:
        """``gamma_k`` of this round, from ``gamma_0``."""
        return decay(step, self.step_decay, fed)


@dataclass(frozen=True)
class GradientSteps(Decay, Batches, Sampling):
    """A method whose clients take gradient steps of one size, ``gamma_k`` in round k."""

    step: str = option(
        "auto",
        "step size gamma: a number, or one over L such as 1.9/L, L the gradient's Lipschitz constant (||A||^2 for CT), "
        "which the clients estimate; auto: 1/L; it converges below 2/L",
        metavar="auto|FLOAT|FLOAT/L",
    )

    def __post_init__(self) -> None:
        check_step(self.step)

    def first_step(self, fed: Federation, start: Array, *, each: bool = False) -> float:
        """``gamma_0``, from an estimate of L if need be.

        L is that of the clients' mean where a round is one step along the mean gradient of all clients. It is the
        largest of a single client where only some take part, or if ``each``: then no client overshoots.
        """
        partial = self.participants is not None and self.participants < fed.num_clients
        return step_size(self.step, fed, start, each=each or partial)


@dataclass(frozen=True)
class LocalSteps(Repetition, GradientSteps):
    """A method whose clients start from the server's model, take several steps and send what has changed."""

    needs: ClassVar[tuple[type, ...]] = (Smooth,)
    state_type: ClassVar[type] = ModelState

    weighted: bool = option(False, "weight clients by their number of samples instead of equally")

    def init(self, fed: Federation, start: Array) -> ModelState:
        return ModelState(start, self.first_step(fed, start, each=self.weighted or self.local_steps > 1))

    def solution(self, state: ModelState) -> Array:
        return state.x

    def outputs(self, state: ModelState) -> Mapping[str, Array]:
        return {}


@dataclass(frozen=True)
class ProximalLocalSteps(LocalSteps):
    """A method with local steps for ``f + psi``, psi proximable, whose server scales the clients' mean change."""

    needs: ClassVar[tuple[type, ...]] = (Smooth, Proximal)

    server_step: Annotated[float, Gt(0)] = option(1.0, "factor of the clients' mean change; above 1, reduce --step")
    server_step_decay: Annotated[float, Gt(0)] | None = option(
        None, "k0 in server_step / (1 + k/k0)  [default: constant]", metavar="K0"
    )
    client_prox: bool = option(True, "clients, too, apply the regularizer's proximal map, in every local step")

    def server_rate(self, fed: Federation) -> float:
        """``eta_k`` of this round."""
        return decay(self.server_step, self.server_step_decay, fed)


def decay(rate: float, half_time: float | None, fed: Federation) -> float:
    """``rate / (1 + k/half_time)`` in round k, counted from 0: half the rate after ``half_time`` rounds."""
    return rate if half_time is None else rate / (1 + (fed.round - 1) / half_time)
