"""Capabilities: what the clients of a workload can compute, and what a method needs.

A method names the protocols that it needs, a workload those that its clients offer; they are compared before anything
is read. A protocol's methods are called on one client's own data.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import numpy as np

if TYPE_CHECKING:
    from hpcfed.privacy.engine import NoisySteps

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


@runtime_checkable
class BoundedCurvature(Protocol):
    """A `Smooth` client whose Hessians have a bound that does not depend on the point: step sizes can be estimated."""

    def curvature(self, direction: Array) -> Array:
        """``H_i d`` for a symmetric ``H_i`` that bounds every Hessian of ``f_i`` from above."""


@runtime_checkable
class Compositional(Protocol):
    """A client whose objective is a composition ``f_i(g_i(x))``, ``g_i: R^d -> R^p``, both maps means over samples.

    A sample is drawn first and evaluated afterwards, so that a method can evaluate one sample at two points. Wherever
    a sample is asked for, None stands for all of the client's data: the exact map. The inner sample (zeta) and the
    outer one (xi) are independent. Every evaluation is counted in the run's ledger.

    Attributes
    ----------
    inner_size : p.
    """

    inner_size: int

    def draw_inner(self, rng: np.random.Generator, batch: int | None) -> Any:
        """A sample of the inner map; None for ``batch`` None."""

    def draw_outer(self, rng: np.random.Generator, batch: int | None) -> Any:
        """A sample of the outer map; None for ``batch`` None."""

    def inner(self, x: Array, sample: Any) -> Array:
        """``g_i(x; sample)``, of shape (p,)."""

    def inner_pullback(self, x: Array, sample: Any) -> tuple[Array, Callable[[Array], Array]]:
        """``g_i(x; sample)`` and the map ``v -> J_i(x; sample)^T v``, which shares its forward pass."""

    def inner_jacobian(self, x: Array, sample: Any) -> Array:
        """``J_i(x; sample)``, of shape (p, d)."""

    def outer_value(self, y: Array) -> float:
        """``f_i(y)`` over all of the client's data."""

    def outer_gradient(self, y: Array, sample: Any) -> Array:
        """``grad f_i(y; sample)``, of shape (p,)."""


@runtime_checkable
class Bilevel(Protocol):
    """A client of ``min_x mean f_i(x, y*(x))`` with the global lower level ``y*(x) in argmin_y mean g_i(x, y)``.

    A point of a bilevel problem, as it starts and as methods return it, is one vector: x, then y. Samples are drawn
    first and evaluated afterwards, None stands for all data, and evaluations are counted, as for `Compositional`.

    Attributes
    ----------
    upper_size, lower_size : dimensions of x and y.
    """

    upper_size: int
    lower_size: int

    def draw_upper(self, rng: np.random.Generator, batch: int | None) -> Any:
        """A sample of f_i; None for ``batch`` None."""

    def draw_lower(self, rng: np.random.Generator, batch: int | None) -> Any:
        """A sample of g_i; None for ``batch`` None."""

    def upper_value(self, x: Array, y: Array) -> float:
        """``f_i(x, y)`` over all of the client's data."""

    def lower_value(self, x: Array, y: Array) -> float:
        """``g_i(x, y)`` over all of the client's data."""

    def upper_gradients(self, x: Array, y: Array, sample: Any) -> tuple[Array, Array]:
        """``(D_x f_i, D_y f_i)`` at (x, y), from one pass."""

    def lower_gradients(self, x: Array, y: Array, sample: Any) -> tuple[Array, Array]:
        """``(D_x g_i, D_y g_i)`` at (x, y), from one pass."""

    def lower_hessian_product(self, x: Array, y: Array, sample: Any, v: Array) -> Array:
        """``(D_yy g_i) v``, of the size of y."""

    def lower_cross_product(self, x: Array, y: Array, sample: Any, v: Array) -> Array:
        """``(D_xy g_i) v``, the gradient in x of ``(D_y g_i)^T v``, of the size of x."""


@runtime_checkable
class Records(Protocol):
    """A client with private records and public ones, and a loss that has a gradient at every single one.

    What it says of itself is public knowledge: numbers of records, and bounds that hold for whatever private records
    it might have.

    Attributes
    ----------
    loss : the loss's name (`hpcfed.privacy.certify`).
    smoothness : L, a bound of the gradients' Lipschitz constants over all private and public records.
    num_private, num_public : numbers of records.
    regularizer : ``psi`` with ``value(x)`` and ``prox(x, weight)``, as for `Proximal`.
    """

    loss: str
    smoothness: float
    num_private: int
    num_public: int
    regularizer: Any

    def noisy_pass(
        self, x: Array, part: Literal["private", "public"], order: Array, steps: NoisySteps, rng: np.random.Generator
    ) -> Array:
        """The iterate after steps on the records ``order`` of a part, one batch after another; ``x`` is not changed."""


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
class Preconditioned(Protocol):
    """A client that knows a metric which all clients share, in which the objective's curvature is nearly even.

    The ranks of a node share out what all would do alike (`hpcfed.federation.Federation.shared_out`), so both the
    metric and the `Regularizer` can be applied in parts, whose cut does not change the bits.

    Attributes
    ----------
    metric : P, linear, symmetric and positive. ``metric.apply(x, piece)`` is a new array of the type of x, those slices
        of ``P x``, places along the last axis, that are a ``piece`` (a slice, by default all); ``metric.norm_bound``
        bounds the eigenvalues; ``metric.unit`` is how many slices are treated together.
    regularizer : beyond a `LinearComposite` client's: ``adjoint(v, rows=slice)`` and ``dual_step(v, x, lam, rows)``,
        which is ``prox_{lam g*}(v + lam B x)``, for some rows of the model (its first axis, the dual's second);
        ``unit``, how many rows are treated together; and ``project`` also takes some of the slices.
    """

    metric: Any
    regularizer: Any


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
