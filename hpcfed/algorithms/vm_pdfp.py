"""Primal-dual fixed points in a variable metric, with control variates at the clients: not a published method."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from annotated_types import Ge, Gt, Lt

from hpcfed.algorithms.steps import Batches, Sampling, Stopping, primal_dual_residual
from hpcfed.capabilities import Array, BoundedCurvature, LinearComposite, Preconditioned, Smooth
from hpcfed.federation import Federation, PerClient
from hpcfed.lipschitz import lipschitz_constant, norm
from hpcfed.operators.identity import Identity
from hpcfed.options import option


@dataclass(frozen=True)
class VmPdfpState:
    """Where a run stands.

    Attributes
    ----------
    x, feasible : the iterate, and its projection on the constraint set; of size 0 without one.
    v, u : duals of the regularizer and of the constraint; u is of size 0 without one.
    stored, mean : the clients' stored gradients and their mean over all clients; of size 0 if not needed.
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
        ``x' = x - tau P (s + B^T v' + u')``

    where the lines of y, v' and u' are repeated (`dual_steps`) with v and u replaced by v' and u'. There is a u if x is
    constrained to a set with the projection proj, a dual variable in any metric but the identity. The steps are ``tau =
    1.9/L``, L the largest eigenvalue of P times the mean curvature (with n of N clients ``1/L``, L an average over
    cohorts), and ``lam = 1/(tau rho)``, rho a bound of ``rho_max(P (B^T B + I))``, the I for u; a = 1, or less for a
    coarse Q. With exact messages of all clients s is the mean gradient, and nobody stores anything.

    Its fixed points are those of FPDFP with equal clients, whatever P and n: ``grad f(x) + B^T v = 0``,
    ``v in dg(Bx)``.
    As the ``h_i`` settle, so do the messages, and neither rounding nor sitting out leaves an error behind (Defazio,
    Bach, Lacoste-Julien 2014; Mishchenko, Gorbunov, Takac, Richtarik 2019). Batches do.

    Against FPDFP: clients send a gradient instead of x and v, and the primal-dual step is taken where their mean is
    known. With P, high frequencies converge as fast as low ones; P slows down the dual variable instead, which takes
    several steps for one exchange.
    """

    needs: ClassVar[tuple[type, ...]] = (Smooth, BoundedCurvature, LinearComposite, Preconditioned)
    state_type: ClassVar[type] = VmPdfpState
    sits_out: ClassVar[bool] = True

    metric: Literal["fourier", "plain"] = option(
        "fourier",
        "P; fourier: the inverse of the blur of projecting and backprojecting, if views span a quarter turn or more; "
        "plain: the identity",
    )
    tau_factor: Annotated[float, Gt(0), Lt(2)] | None = option(
        None, "tau is this over the estimated L  [default: 1.9, where only some clients take part 1]"
    )
    dual_steps: Annotated[int, Ge(1)] = option(2, "steps of the dual variable in a round; more: a nearer minimum")

    def init(self, fed: Federation, start: Array) -> VmPdfpState:
        regularizer, metric = fed.any_client.regularizer, self._metric(fed)
        constrained = regularizer.project(start) is not start
        everyone = self.participants in (None, fed.num_clients)
        tau = (self.tau_factor or (1.9 if everyone else 1.0)) / self._constant(fed, start, metric)
        lam = 1 / (tau * metric.norm_bound * (regularizer.norm_bound + constrained))
        zero, none = 0 * start, start[:0]
        known = none if self._exact(fed) else zero
        return VmPdfpState(
            x=start,
            feasible=regularizer.project(start) if constrained else none,
            v=0 * regularizer.apply(start),
            u=zero if constrained else none,
            stored=fed.map(lambda client, rng: 0 * known),
            mean=known,
            tau=tau,
            lam=lam,
        )

    def _constant(self, fed: Federation, start: Array, metric: Any) -> float:
        """L: of the mean of all; of n out of N the expected smoothness of Gower et al. 2019."""

        def measured(x: Array) -> Array:
            return _by_slices(fed, metric, x, lambda piece: metric.apply(x, piece))

        mean = lipschitz_constant(fed, start, metric=measured)
        clients, taking = fed.num_clients, self.participants or fed.num_clients
        if taking == clients:
            return mean
        most = lipschitz_constant(fed, start, each=True, metric=metric.apply, tolerance=1e-2)
        return (most * (clients - taking) + mean * clients * (taking - 1)) / (taking * (clients - 1))

    def _metric(self, fed: Federation) -> Any:
        return fed.any_client.metric if self.metric == "fourier" else Identity()

    def _exact(self, fed: Federation) -> bool:
        """Whether all clients send gradients as they are, in every round."""
        return fed.compressor is None and self.participants in (None, fed.num_clients)

    def round(self, state: VmPdfpState, fed: Federation) -> VmPdfpState:
        cohort = fed.sample(self.participants)
        if self._exact(fed):
            return self._step(state, cohort.mean(cohort.map(self._gradient, state.x)), fed)
        news = cohort.map(self._news, state.x, state.stored)
        mean, heard = cohort.mean_heard(news)
        share = self._share(fed, state.x)
        followed = {client: _sum(share, told, state.stored[client]) for client, told in heard.items()}
        stored = PerClient({**state.stored, **followed})
        moved = self._step(state, state.mean + mean, fed)
        known = state.mean + (share * len(cohort.cohort) / fed.num_present) * mean
        return replace(moved, stored=stored, mean=known)

    def forget(self, state: VmPdfpState, fed: Federation) -> VmPdfpState:
        """The state without the stored gradients of clients that have left."""
        return state if self._exact(fed) else replace(state, mean=fed.mean(state.stored))

    def _gradient(self, client: Any, rng: np.random.Generator, x: Array) -> Array:
        return client.gradient(x, rng, self.batch)

    def _news(self, client: Any, rng: np.random.Generator, x: Array, stored: Array) -> Array:
        news = self._gradient(client, rng, x)
        news -= stored
        return news

    def _share(self, fed: Federation, x: Array) -> float:
        """a, by which stored gradients follow: less where rounding is so coarse that they would not settle."""
        compressor = fed.compressor
        return 1.0 if compressor is None else float(compressor.contraction(tuple(x.shape)))

    def _step(self, state: VmPdfpState, gradient: Array, fed: Federation) -> VmPdfpState:
        """The server's step, which the ranks of a node share out."""
        regularizer, metric = fed.any_client.regularizer, self._metric(fed)
        constrained, x, lam = state.u.shape[0] > 0, state.x, state.lam
        v, u = state.v, state.u

        def force(v: Array, u: Array) -> Array:
            def of_rows(rows: slice) -> Array:
                total = regularizer.adjoint(v, rows=rows)
                total += gradient[rows]
                if constrained:
                    total += u[rows]
                return total

            return fed.shared_out(of_rows, x, 0, regularizer.unit)

        def descended(along: Array) -> Array:
            def moved(piece: slice) -> Array:
                step = metric.apply(along, piece)
                step *= -state.tau
                step += x[..., piece]
                return step

            return _by_slices(fed, metric, x, moved)

        def lifted(u: Array, y: Array) -> Array:
            def of_slices(piece: slice) -> Array:
                raised = u[..., piece] + lam * y[..., piece]
                return raised - lam * regularizer.project(raised / lam)

            return _by_slices(fed, metric, x, of_slices)

        def stepped(v: Array, y: Array) -> Array:
            return fed.shared_out(lambda rows: regularizer.dual_step(v, y, lam, rows), v, 1, regularizer.unit)

        total = force(v, u)
        for _ in range(self.dual_steps):
            y, before = descended(total), v
            v, u = stepped(v, y), lifted(u, y) if constrained else u
            total = force(v, u)
        moved = descended(total)
        residual = 1.0
        if self.tol is not None:
            residual = primal_dual_residual(norm(total), norm(total - gradient), norm(v - before), norm(v))
        feasible = regularizer.project(moved) if constrained else state.feasible
        return replace(state, x=moved, feasible=feasible, v=v, u=u, residual=residual)

    def solution(self, state: VmPdfpState) -> Array:
        return state.feasible if state.feasible.shape[0] else state.x

    def outputs(self, state: VmPdfpState) -> Mapping[str, Array]:
        return {"dual": state.v}


def _by_slices(fed: Federation, metric: Any, like: Array, function: Callable[[slice], Array]) -> Array:
    """An array like a model, from what a function gives of the slices that the metric treats together."""
    result: Array = fed.shared_out(function, like, len(like.shape) - 1, metric.unit)
    return result


def _sum(factor: float, own: Array, other: Array) -> Array:
    """``factor own + other``, in the place of ``own``."""
    own *= factor
    own += other
    return own
