"""FPDFP: the federated primal-dual fixed-point method with quantized messages and partial participation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from annotated_types import Gt

from hpcfed.algorithms.steps import GradientSteps, Stopping, primal_dual_residual
from hpcfed.capabilities import Array, LinearComposite, Smooth
from hpcfed.errors import ConfigError
from hpcfed.federation import Federation
from hpcfed.lipschitz import norm
from hpcfed.options import option


@dataclass(frozen=True)
class FpdfpState:
    """The server's variables: primal ``x``, dual ``v`` (in the range of B), the step size before any decay; and how far
    the last round was from the optimality conditions, if --tol asks."""

    x: Array
    v: Array
    step: float
    residual: float = 1.0


@dataclass(frozen=True)
class Fpdfp(Stopping, GradientSteps):
    """Minimize ``(1/N) sum_i f_i(x) + g(Bx)`` (Zhu, Liang, Zhang: Federated primal dual fixed point algorithm, Alg. 4).

    Round k, with step ``gamma_k = step / (1 + k / step_decay)``: the server samples n clients and sends (x_k, v_k);
    client i, with a gradient estimate ``s_i``, takes one primal-dual step

        ``y   = x_k - gamma_k s_i - gamma_k B^T v_k``
        ``v_i = prox_{(lam/gamma_k) g*}((lam/gamma_k) B y + v_k)``
        ``x_i = x_k - gamma_k s_i - gamma_k B^T v_i``

    and sends ``Q(x_i - x_k)`` and ``Q(v_i)``; the server sets ``x_{k+1} = x_k + mean Q(x_i - x_k)``,
    ``v_{k+1} = mean Q(v_i)``. With one client, or equal ones, and no Q this is PDFP (Chen, Huang, Zhang 2013), whose
    fixed points satisfy ``grad f(x) + B^T v = 0``, ``v in dg(Bx)`` for every step size.

    Clients keep no state. With unequal clients and a constant step the mean of the clients' nonlinear steps stops
    O(step) away from the solution; a quantized dual adds noise proportional to ``step * |v|``; a decaying step removes
    both. ``quantize_dual="difference"`` sends ``Q(v_i - v_k)`` instead, which is not the published method, but whose
    noise vanishes as the iterates settle.

    For ``B = I`` the method takes the form of Alg. 5: with lam = 1 the step is ``x_i = prox_{gamma_k g}(x_k - gamma_k
    s_i)``, which does not depend on v, so no dual variable is sent.
    """

    needs: ClassVar[tuple[type, ...]] = (Smooth, LinearComposite)
    state_type: ClassVar[type] = FpdfpState

    lam: Annotated[float, Gt(0)] | None = option(
        None, "dual step lambda, at most 1/rho_max(B B^T), which is 1/12 for 3D TV  [default: 0.99 of that]"
    )
    quantize_dual: Literal["value", "difference"] = option("value", "what --quantize rounds of the dual variable")

    def init(self, fed: Federation, start: Array) -> FpdfpState:
        regularizer = fed.any_client.regularizer
        bound = regularizer.norm_bound
        if self.lam is not None and self.lam * bound > 1:
            raise ConfigError(
                f"--lam {self.lam:.6g} exceeds 1/rho_max(B B^T) = {1 / bound:.6g}: choose at most that"
            ).on_all_ranks()
        if self.tol is not None and regularizer.identity:
            raise ConfigError(
                f"--tol {self.tol:g}: with B = identity clients send no dual variable to judge by: leave it out"
            ).on_all_ranks()
        return FpdfpState(start, 0 * regularizer.apply(start), self.first_step(fed, start))

    def round(self, state: FpdfpState, fed: Federation) -> FpdfpState:
        gamma = self.decayed(state.step, fed)
        cohort = fed.sample(self.participants)
        primal, dual = cohort.map(self._local_step, state.x, state.v, gamma).unzip(2)
        # The clients' points obey a constraint, if there is one; what rounding leaves of their mean need not.
        regularizer = fed.any_client.regularizer
        x = regularizer.project(state.x + cohort.mean(primal, lossy=True))
        del primal
        if regularizer.identity:
            return FpdfpState(x, state.v, state.step)
        v = cohort.mean(dual, lossy=True)
        v = state.v + v if self.quantize_dual == "difference" else v
        return FpdfpState(x, v, state.step, self._residual(state, x, v, gamma, regularizer))

    def _residual(self, state: FpdfpState, x: Array, v: Array, gamma: float, regularizer: Any) -> float:
        """From ``x' - x = -gamma (grad f(x) + B^T v')``, which holds for the clients' means."""
        if self.tol is None:
            return 1.0
        return primal_dual_residual(norm(x - state.x) / gamma, norm(regularizer.adjoint(v)), norm(v - state.v), norm(v))

    def _local_step(
        self, client: Any, rng: np.random.Generator, x: Array, v: Array, gamma: float
    ) -> tuple[Array, Array]:
        gradient = client.gradient(x, rng, self.batch)
        regularizer = client.regularizer
        lam = 1.0 if regularizer.identity else self.lam or 0.99 / regularizer.norm_bound
        change, dual = regularizer.step(x, v, gradient, gamma, lam)
        return change, dual - v if self.quantize_dual == "difference" else dual

    def solution(self, state: FpdfpState) -> Array:
        return state.x

    def outputs(self, state: FpdfpState) -> Mapping[str, Array]:
        return {"dual": state.v} if state.v.any() else {}
