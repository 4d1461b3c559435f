"""MFCGD: momentum-based federated compositional gradient descent, and its four ways with Jacobians."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from annotated_types import Ge, Gt
from array_api_compat import array_namespace

from hpcfed.algorithms.composition import (
    CompositionSteps,
    FirstEstimates,
    clipped,
    jacobian,
    paired,
    recursive,
)
from hpcfed.capabilities import Array
from hpcfed.errors import ConfigError
from hpcfed.federation import Federation, PerClient
from hpcfed.options import option

logger = logging.getLogger(__name__)

# Numbers in a Jacobian beyond which a client's estimate of it, and the two that correct it, are too much: 1 GB each.
LARGEST_JACOBIAN = 1 << 27
# Numbers in a Jacobian that are formed without being asked for: a step forms two.
EXACT_BY_DEFAULT = 1_000_000


@dataclass(frozen=True)
class Window:
    """The latest samples of the inner map, oldest first, each as what draws it again.

    Attributes
    ----------
    points : (W, d), where each sample was evaluated first; its old point is the one before.
    seeds, sizes : (W,), the seed and the number of samples (0 for all).
    kept : (W,), ``1 - beta`` of the step that the sample belongs to.
    """

    points: Array
    seeds: Array
    sizes: Array
    kept: Array

    @classmethod
    def first(cls, x: Array, seed: int, size: int | None) -> Window:
        """The window of the first sample."""
        return cls(x[None], np.array([seed]), np.array([size or 0]), np.zeros(1))

    def longer(self, x: Array, seed: int, size: int | None, kept: float, length: int) -> Window:
        """This window with one more sample, cut to the latest ``length``."""
        points = array_namespace(x).concat((self.points, x[None]))
        added = ((self.seeds, seed), (self.sizes, size or 0), (self.kept, kept))
        return Window(points[-length:], *(np.append(row, new)[-length:] for row, new in added))

    def without_newest(self, client: Any, v: Array) -> Array:
        """``u^T v`` of the step before the newest sample, by ``u_i = J(x_i; z_i) + kept_i (u_{i-1} - J(x_{i-1}; z_i))``
        from the oldest sample on, which stands for its u."""
        total, weight = 0 * self.points[0], 1.0
        for place in range(len(self.seeds) - 2, -1, -1):
            rng = np.random.default_rng(int(self.seeds[place]))
            sample = client.draw_inner(rng, int(self.sizes[place]) or None)
            total += weight * client.inner_pullback(self.points[place], sample)[1](v)
            weight *= float(self.kept[place])
            if place:
                total -= weight * client.inner_pullback(self.points[place - 1], sample)[1](v)
        return total


@dataclass(frozen=True)
class Estimates:
    """A client's estimates: h of ``g(x)``, v of ``grad f(g(x))``, w of ``J^T v``, and u of J or a window for w."""

    h: Array
    v: Array
    w: Array
    u: Array | None = None
    window: Window | None = None


@dataclass(frozen=True)
class MfcgdState:
    """The model that all clients have after a round, their estimates at it, and what an adaptive matrix is made of."""

    x: Array
    estimates: PerClient[Estimates]
    a: Array | float | None = None


@dataclass(frozen=True)
class Mfcgd(FirstEstimates, CompositionSteps):
    """Minimize ``(1/M) sum_m f_m(g_m(x))`` (Huang, Wang, Zhang, Chen: Momentum-based federated compositional
    gradient descent, Alg. 1).

    Client m estimates ``h ~ g_m(x)``, ``u ~ J_m(x)``, ``v ~ grad f_m(h)`` and ``w = u^T v``. Steps are counted by t
    over all rounds, ``eta_t = rate ((n + 1) / (n + t))^(1/3)``, n = ``rate_delay``, ``gamma = step_factor``. A round
    is ``tau = local_steps`` of them (the paper's q): tau - 1 times each client on its own,

        ``x_m <- x_m - gamma eta_t w_m``,

    then all together from the averages of models and slopes, each client's slope taken where it is,

        ``x_m <- mean x_m - gamma eta_t mean w_m``.

    After each step, with one inner sample zeta at both points and one outer sample xi, clients correct

        ``h <- g(x_new; zeta) + (1 - alpha) (h - g(x_old; zeta))``,           ``alpha  = min(1, c1 eta_t^2)``,
        ``u <- J(x_new; zeta) + (1 - beta) (u - J(x_old; zeta))``,            ``beta   = min(1, c2 eta_t^2)``,
        ``v <- grad f(h_new; xi) + (1 - varrho) (v - grad f(h_old; xi))``,    ``varrho = min(1, c3 eta_t^2)``,

    u and v clipped to norms C_g (``clip_jacobian``) and C_f (``clip_outer``). The first estimates are means over tau
    batches at the start.

    h, u and v stay with their clients, and ``x_old`` is the client's own last point, also across an average. So with
    tau = 1 and exact maps the method solves the problem exactly, whatever the clients; with tau > 1 and unequal
    clients a constant step stops O(eta tau) away. The proofs in the paper speak of averages instead:
    ``average_estimators`` averages h, u, v with x and w, which solves another problem unless clients share g, and
    ``old_point="average"`` corrects from ``mean x_m``, which leaves h and u wrong by the drift.

    u has p d numbers. ``jacobian`` says what is kept of it, and only ``exact`` is the method as published:

    - ``exact``: u itself (for p = 1 a vector; else Jacobians are formed);
    - ``product``: ``w <- J(x_new; zeta)^T v_new + (1 - beta) (w - J(x_old; zeta)^T v_old)``, the same for exact maps;
    - ``beta1``: beta = 1, ``w = J(x_new; zeta)^T v``;
    - ``replay``: u as the sum that the last ``window`` steps make of it, applied to v by 2 ``window`` - 1 products; the
      same once the window holds all steps.

    The last three clip w to ``C_f C_g`` instead of u.

    The server broadcasts the model alone: a round costs a client 2d reals up and d down.
    """

    state_type: ClassVar[type] = MfcgdState
    title: ClassVar[str] = "MFCGD"
    sends_matrix: ClassVar[bool] = False

    step_factor: Annotated[float, Gt(0)] = option(1.0, "gamma in x - gamma eta_t w: it leaves c eta_t^2 as it is")
    rate_delay: Annotated[float, Gt(0)] | None = option(
        None, "n in eta_t = k / (n + t)^(1/3), k = rate (n + 1)^(1/3)  [default: local_steps^3, at least 2]"
    )
    c1: Annotated[float, Ge(0)] | None = option(
        None, "c1 in alpha = c1 eta_t^2, what fresh samples weigh in the inner value  [default: alpha starts at 1/2]"
    )
    c2: Annotated[float, Ge(0)] | None = option(
        None, "c2 in beta = c2 eta_t^2, what fresh samples weigh in the Jacobian  [default: beta starts at 1/2]"
    )
    c3: Annotated[float, Ge(0)] | None = option(
        None, "c3 in varrho = c3 eta_t^2, what fresh samples weigh in the outer gradient  [default: it starts at 1/2]"
    )
    clip_outer: Annotated[float, Gt(0)] | None = option(
        None, "C_f, largest norm of an estimated outer gradient  [default: none]"
    )
    clip_jacobian: Annotated[float, Gt(0)] | None = option(
        None, "C_g, largest Frobenius norm of an estimated Jacobian  [default: none]"
    )
    jacobian: Literal["exact", "product", "beta1", "replay"] | None = option(
        None,
        "what clients keep of the Jacobian's estimate; the published method is exact, with p d numbers  [default: "
        "exact up to a million, else product]",
    )
    window: Annotated[int, Ge(1)] = option(5, "samples of the inner map that --jacobian replay applies again")
    average_estimators: bool = option(False, "average the estimates of both maps, too: another method")
    old_point: Literal["own", "average"] = option(
        "own", "from where estimates are corrected after an average: the client's own last point, or the average"
    )

    def __post_init__(self) -> None:
        if self.jacobian == "replay" and (self.average_estimators or self.old_point == "average"):
            raise ConfigError(
                "--jacobian replay rebuilds each client's own estimate: leave out --average-estimators and --old-point"
            )

    def init(self, fed: Federation, start: Array) -> MfcgdState:
        size, d = fed.any_client.inner_size, start.shape[0]
        if self.jacobian == "exact" and size * d > LARGEST_JACOBIAN:
            raise ConfigError(
                f"--jacobian exact keeps {size} x {d} numbers a client: use product, beta1 or replay"
            ).on_all_ranks()
        mode = self.mode(fed.any_client, start)
        kind = "as published" if mode == "exact" else "with approximate Jacobians, not as published"
        logger.info("--jacobian %s: %s %s", mode, self.title, kind)
        return MfcgdState(start, fed.map(self._first, start))

    def round(self, state: MfcgdState, fed: Federation) -> MfcgdState:
        t = (fed.round - 1) * self.local_steps + 1
        points, messages, estimates = fed.map(self._alone, state.estimates, state.x, state.a, t).unzip(3)
        # Every rank takes the step of the paper's server, so two averages go round where it broadcasts one model.
        broadcast = 0.5 if self.old_point == "own" and not self.sends_matrix else 1.0
        mean = fed.mean(messages, lossy=True, broadcast=broadcast)[0]
        average, slope = state.x + mean[:, 0], mean[:, 1]
        if self.average_estimators:
            estimates = self._averaged(estimates, self.mode(fed.any_client, state.x), fed)
        a = self.refreshed(state.a, slope)
        eta = self.eta(t + self.local_steps - 1)
        x = average - self.step_factor * eta * self.scaled(slope, a)
        old = points if self.old_point == "own" else average
        return MfcgdState(x, fed.map(self._correct, estimates, old, x, eta), a)

    def _averaged(self, estimates: PerClient[Estimates], mode: str, fed: Federation) -> PerClient[Estimates]:
        """The clients' estimates, of which those that steps correct are the averages of all clients'."""
        names = {"exact": ("h", "v", "u"), "product": ("h", "v", "w"), "beta1": ("h", "v")}[mode]
        means = {name: fed.mean(each(name, estimates)) for name in names}
        return PerClient({client: replace(own, **means) for client, own in estimates.items()})

    def mode(self, client: Any, x: Array) -> str:
        """What clients keep of the Jacobian's estimate."""
        return self.jacobian or ("exact" if client.inner_size * x.shape[0] <= EXACT_BY_DEFAULT else "product")

    def eta(self, t: int) -> float:
        """``eta_t``, t counted from 1."""
        n = max(2.0, self.local_steps**3) if self.rate_delay is None else self.rate_delay
        return self.first_rate * float(((n + 1) / (n + t)) ** (1 / 3))

    def scaled(self, w: Array, a: Array | float | None) -> Array:
        """``A^{-1} w``: here A is the identity."""
        return w

    def refreshed(self, a: Array | float | None, slope: Array) -> Array | float | None:
        """What A is made of after an average of slopes."""
        return None

    # -- at a client ---------------------------------------------------------------------------------------------

    def _first(self, client: Any, rng: np.random.Generator, x: Array) -> Estimates:
        mode, size = self.mode(client, x), self.first(self.local_steps, self.inner_samples)
        seed, zeta = _draw_inner(client, rng, size, mode)
        xi = client.draw_outer(rng, self.first(self.local_steps, self.batch))
        if mode == "exact":
            h, u = jacobian(client, x, zeta)
            v = client.outer_gradient(h, xi)
            return Estimates(h, v, v @ u, u)
        h, pullback = client.inner_pullback(x, zeta)
        v = client.outer_gradient(h, xi)
        window = Window.first(x, seed, size) if mode == "replay" else None
        return Estimates(h, v, pullback(v), window=window)

    def _alone(
        self, client: Any, rng: np.random.Generator, estimates: Estimates, x: Array, a: Array | float | None, t: int
    ) -> tuple[Array, Array, Estimates]:
        """The steps up to the next average: the client's point, its message and its estimates there."""
        here = x
        for step in range(t, t + self.local_steps - 1):
            eta = self.eta(step)
            new = here - self.step_factor * eta * self.scaled(estimates.w, a)
            estimates = self._correct(client, rng, estimates, here, new, eta)
            here = new
        return here, paired(here - x, estimates.w), estimates

    def _correct(
        self, client: Any, rng: np.random.Generator, now: Estimates, old: Array, new: Array, eta: float
    ) -> Estimates:
        """The estimates at ``new``, from those at ``old``."""
        alpha, beta, varrho = (self._weight(c, eta) for c in (self.c1, self.c2, self.c3))
        mode = self.mode(client, new)
        seed, zeta = _draw_inner(client, rng, self.inner_samples, mode)
        xi = client.draw_outer(rng, self.batch)

        if mode == "exact":
            (value, slope), (old_value, old_slope) = (jacobian(client, x, zeta) for x in (new, old))
            h, v = self._maps(client, now, value, old_value, xi, alpha, varrho)
            u = clipped(recursive(slope, 1 - beta, now.u, old_slope), self.clip_jacobian)
            return Estimates(h, v, v @ u, u)
        value, pullback = client.inner_pullback(new, zeta)
        if mode == "beta1":
            h, v = self._maps(client, now, value, client.inner(old, zeta), xi, alpha, varrho)
            return Estimates(h, v, self._clipped_slope(pullback(v)))
        old_value, old_pullback = client.inner_pullback(old, zeta)
        h, v = self._maps(client, now, value, old_value, xi, alpha, varrho)
        if now.window is None:  # product
            w = recursive(pullback(v), 1 - beta, now.w, old_pullback(now.v))
            return Estimates(h, v, self._clipped_slope(w))
        window = now.window.longer(new, seed, self.inner_samples, 1 - beta, self.window)
        w = pullback(v)
        if len(window.seeds) > 1:
            w = w + (1 - beta) * (window.without_newest(client, v) - old_pullback(v))
        return Estimates(h, v, self._clipped_slope(w), window=window)

    def _maps(
        self, client: Any, now: Estimates, value: Array, old_value: Array, xi: Any, alpha: float, varrho: float
    ) -> tuple[Array, Array]:
        """h and v at the new point, from the inner map's values at both."""
        h = recursive(value, 1 - alpha, now.h, old_value)
        v = recursive(client.outer_gradient(h, xi), 1 - varrho, now.v, client.outer_gradient(now.h, xi))
        return h, clipped(v, self.clip_outer)

    def _weight(self, c: float | None, eta: float) -> float:
        return (eta / self.first_rate) ** 2 / 2 if c is None else min(1.0, c * eta**2)

    def _clipped_slope(self, w: Array) -> Array:
        if self.clip_outer is None or self.clip_jacobian is None:
            return w
        return clipped(w, self.clip_outer * self.clip_jacobian)


def _draw_inner(client: Any, rng: np.random.Generator, size: int | None, mode: str) -> tuple[int, Any]:
    """An inner sample, and the seed that draws it again if that will be needed."""
    if mode != "replay":
        return 0, client.draw_inner(rng, size)
    seed = int(rng.integers(1 << 63))
    return seed, client.draw_inner(np.random.default_rng(seed), size)


def each(name: str, estimates: PerClient[Estimates]) -> PerClient[Array]:
    """One of the clients' estimates."""
    return PerClient({client: getattr(own, name) for client, own in estimates.items()})
