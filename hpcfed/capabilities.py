"""Capabilities: what the clients of a workload can compute, and what a method needs.

A method names the protocols that it needs, a workload those that its clients offer; they are compared before anything
is read. A protocol's methods are called on one client's own data.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import numpy as np

Array = Any  # a NumPy array on a CPU, a torch tensor on a GPU or where autograd is needed


@runtime_checkable
class Smooth(Protocol):
    """A client whose objective ``f_i`` is differentiable."""

    def value(self, x: Array) -> float:
        """``f_i(x)`` over all of the client's data."""

    def gradient(self, x: Array, rng: np.random.Generator | None = None, batch: int | None = None) -> Array:
        """``grad f_i(x)``, or an unbiased estimate from ``batch`` of the client's samples drawn by ``rng``.

        The result is the caller's: a new array that it may overwrite.
        """

    def curvature(self, direction: Array) -> Array:
        """``H_i d`` for a symmetric ``H_i`` that bounds every Hessian of ``f_i`` from above."""


@runtime_checkable
class LinearComposite(Protocol):
    """A client that knows the regularizer ``g(Bx)`` that all clients share: B is linear, g* has an easy prox."""

    regularizer: Regularizer


@runtime_checkable
class Regularizer(Protocol):
    """``g(Bx)`` by the pieces that primal-dual methods use.

    Attributes
    ----------
    norm_bound : an upper bound of ``rho_max(B B^T)``.
    identity : whether B is the identity.
    """

    norm_bound: float
    identity: bool

    def apply(self, x: Array) -> Array:
        """``B x``."""

    def adjoint(self, v: Array) -> Array:
        """``B^T v``."""

    def dual_prox(self, v: Array) -> Array:
        """``prox_{s g*}(v)``, which must not depend on s (g is a norm)."""

    def value(self, x: Array) -> float:
        """``g(B x)``."""

    def project(self, x: Array) -> Array:
        """The nearest point of the constraint set; ``x`` itself where there is no constraint."""

    def step(self, x: Array, v: Array, gradient: Array, gamma: float, lam: float) -> tuple[Array, Array]:
        """One primal-dual fixed-point step from (x, v): ``(x_new - x, v_new)``. It may overwrite ``gradient``.

        ``y = P(x - gamma gradient - gamma B^T v)``, ``v_new = dual_prox((lam/gamma) B y + v)``,
        ``x_new = P(x - gamma gradient - gamma B^T v_new)``, with P the projection on a constraint set, if any.
        """


@runtime_checkable
class Proximal(Protocol):
    """A client that knows the regularizer ``psi`` that all clients share, whose proximal map is easy.

    ``regularizer.value(x)`` is ``psi(x)``, and ``regularizer.prox(x, weight)``, of the type of x and for any weight at
    least 0, is ``argmin_z weight psi(z) + 1/2 |z - x|^2``. It may be a `Regularizer` as well, with ``psi(x) = g(Bx)``.
    """

    regularizer: Any


def explain_missing(algorithm: str, needs: tuple[type, ...], workload: str, offers: tuple[type, ...]) -> str | None:
    """Why the method cannot run on the workload, or None when it can."""
    missing = [need.__name__ for need in needs if need not in offers]
    if not missing:
        return None
    have = ", ".join(offer.__name__ for offer in offers) or "nothing"
    return f"{algorithm} needs clients that are {' and '.join(missing)}; those of {workload} are {have}"
