"""Primal-dual fixed points in a variable metric, with control variates at the clients: not a published method."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from annotated_types import Gt, Lt

from hpcfed.algorithms.steps import Batches, Sampling, Stopping, primal_dual_residual
from hpcfed.capabilities import Array, BoundedCurvature, LinearComposite, Preconditioned, Smooth
from hpcfed.federation import Federation, PerClient
from hpcfed.lipschitz import largest_eigenvalue, lipschitz_constant, norm
from hpcfed.options import option

# An eigenvalue that power iteration has found to 1e-3 is this much above what it found, at most.
ESTIMATED = 0.97


@dataclass(frozen=True)
class VmPdfpState:
    """Where a run stands.

    Attributes
    ----------
    x, feasible : the iterate, and its projection on the constraint set; of size 0 without one.
    v, u : duals of the regularizer and of the constraint; u is of size 0 without one.
    stored, mean : the clients' stored gradients and their mean over all clients.
    tau, lam : the steps.
    residual : how far the last round was from the optimality conditions, if --tol asks.
    """

    x: Array
    feasible: Array
    v: Array
    u: Array
    stored: PerClient[Array]
    mean: Array
    tau: float
    lam: float
    residual: float = 1.0


@dataclass(frozen=True)
class VmPdfp(Stopping, Batches, Sampling):
    """Minimize ``(1/N) sum_i f_i(x) + g(Bx)`` by primal-dual fixed-point steps in the metric of a linear map P.

    Client i of the round's n keeps a gradient ``h_i`` and sends ``Q(grad f_i(x) - h_i)``; with their mean d,

        ``s  = mean_i h_i + d``,  then  ``h_i <- h_i + a Q(grad f_i(x) - h_i)``  at those who took part
        ``y  = x - tau P (s + B^T v + u)``
        ``v' = prox_{g*}(v + lam B y)``,  ``u' = u + lam y - lam proj(y + u/lam)``
        ``x' = y - tau P (B^T (v' - v) + u' - u)``

    where u is there if x is constrained to a set with the projection proj, a dual variable in any metric but the
    identity. The steps are ``tau = 1/L``, L the largest eigenvalue of P times the mean curvature (with n of N clients,
    an average over cohorts), and ``lam`` below ``1/(tau rho_max(P (B^T B + I)))``, the I for u; a = 1, or less for a
    coarse Q.

    Its fixed points are those of FPDFP with equal clients, whatever P and n: ``grad f(x) + B^T v = 0``,
    ``v in dg(Bx)``.
    As the ``h_i`` settle, so do the messages, and neither rounding nor sitting out leaves an error behind (Defazio,
    Bach, Lacoste-Julien 2014; Mishchenko, Gorbunov, Takac, Richtarik 2019). Batches do.

    Against FPDFP: clients send a gradient instead of x and v, and the primal-dual step is taken where their mean is
    known. With P, high frequencies converge as fast as low ones.
    """

    needs: ClassVar[tuple[type, ...]] = (Smooth, BoundedCurvature, LinearComposite, Preconditioned)
    state_type: ClassVar[type] = VmPdfpState
    sits_out: ClassVar[bool] = True

    metric: Literal["fourier", "plain"] = option(
        "fourier", "P; fourier: the inverse of the blur of projecting and backprojecting; plain: the identity"
    )
    tau_factor: Annotated[float, Gt(0), Lt(2)] = option(1.0, "tau is this over the estimated L")

    def init(self, fed: Federation, start: Array) -> VmPdfpState:
        regularizer, metric = fed.any_client.regularizer, self._metric(fed)
        constrained = regularizer.project(start) is not start
        constant = self._constant(fed, start, metric)
        tau = self.tau_factor / constant

        def dual_product(direction: Array) -> Array:
            image = regularizer.adjoint(regularizer.apply(direction))
            return metric(image + direction if constrained else image)

        lam = ESTIMATED / (tau * largest_eigenvalue(dual_product, fed, start))
        zero, none = 0 * start, start[:0]
        return VmPdfpState(
            x=start,
            feasible=regularizer.project(start) if constrained else none,
            v=0 * regularizer.apply(start),
            u=zero if constrained else none,
            stored=fed.map(lambda client, rng: 0 * start),
            mean=zero,
            tau=tau,
            lam=lam,
        )

    def _constant(self, fed: Federation, start: Array, metric: Any) -> float:
        """L: of the mean of all; of n out of N the expected smoothness of Gower et al. 2019."""
        mean = lipschitz_constant(fed, start, metric=metric)
        clients, taking = fed.num_clients, self.participants or fed.num_clients
        if taking == clients:
            return mean
        most = lipschitz_constant(fed, start, each=True, metric=metric, tolerance=1e-2)
        return (most * (clients - taking) + mean * clients * (taking - 1)) / (taking * (clients - 1))

    def _metric(self, fed: Federation) -> Any:
        return fed.any_client.metric.apply if self.metric == "fourier" else lambda x: x

    def round(self, state: VmPdfpState, fed: Federation) -> VmPdfpState:
        cohort = fed.sample(self.participants)
        news = cohort.map(self._news, state.x, state.stored)
        mean, heard = cohort.mean_heard(news)
        share = self._share(fed, state.x)
        followed = {client: _sum(share, told, state.stored[client]) for client, told in heard.items()}
        stored = PerClient({**state.stored, **followed})
        moved = self._step(state, state.mean + mean, fed)
        known = state.mean + (share * len(cohort.cohort) / fed.num_clients) * mean
        return replace(moved, stored=stored, mean=known)

    def _news(self, client: Any, rng: np.random.Generator, x: Array, stored: Array) -> Array:
        news = client.gradient(x, rng, self.batch)
        news -= stored
        return news

    def _share(self, fed: Federation, x: Array) -> float:
        """a, by which stored gradients follow: less where rounding is so coarse that they would not settle."""
        compressor = fed.compressor
        return 1.0 if compressor is None else float(compressor.contraction(tuple(x.shape)))

    def _step(self, state: VmPdfpState, gradient: Array, fed: Federation) -> VmPdfpState:
        regularizer, metric = fed.any_client.regularizer, self._metric(fed)
        constrained, u = state.u.shape[0] > 0, state.u
        # In place where an array is this round's own: at the paper's size each one more costs 50 MB of fresh memory.
        force = regularizer.adjoint(state.v)
        force += gradient
        if constrained:
            force += u
        y = metric(force)
        y *= -state.tau
        y += state.x
        pushed = regularizer.apply(y)
        pushed *= state.lam
        pushed += state.v
        v = regularizer.dual_prox(pushed)
        change = regularizer.adjoint(v - state.v)
        if constrained:
            lifted = u + state.lam * y
            u = lifted - state.lam * regularizer.project(lifted / state.lam)
            change += u - state.u
        x = metric(change)
        x *= -state.tau
        x += y
        residual = 1.0
        if self.tol is not None:
            pull = regularizer.adjoint(v) + u if constrained else regularizer.adjoint(v)
            residual = primal_dual_residual(norm(gradient + pull), norm(pull), norm(v - state.v), norm(v))
        feasible = regularizer.project(x) if constrained else state.feasible
        return replace(state, x=x, feasible=feasible, v=v, u=u, residual=residual)

    def solution(self, state: VmPdfpState) -> Array:
        return state.feasible if state.feasible.shape[0] else state.x

    def outputs(self, state: VmPdfpState) -> Mapping[str, Array]:
        return {"dual": state.v}


def _sum(factor: float, own: Array, other: Array) -> Array:
    """``factor own + other``, in the place of ``own``."""
    own *= factor
    own += other
    return own
