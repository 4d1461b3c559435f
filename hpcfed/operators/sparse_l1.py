"""``weight |B x|_1`` for a sparse matrix B or the identity, by the pieces that first-order methods use."""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.sparse
import scipy.sparse.linalg
from numpy.typing import NDArray

Vector = NDArray[np.float64]


class SparseL1:
    """The regularizer ``g(Bx) = weight |B x|_1`` of vectors.

    Parameters
    ----------
    weight : factor of the norm, at least 0.
    matrix : B, sparse (rows, dimension); None stands for the identity.

    Attributes
    ----------
    norm_bound : an upper bound of ``rho_max(B B^T)``: the largest eigenvalue, rounded up by a part in a million.
    identity : whether B is the identity; then ``g`` itself is proximable and primal-dual methods need no dual message.
    """

    def __init__(self, weight: float, matrix: Any | None = None) -> None:
        self.weight = float(weight)
        self.identity = matrix is None
        self._matrix = None if matrix is None else scipy.sparse.csr_array(matrix)
        self._transposed = None if self._matrix is None else self._matrix.T  # to make one takes longer than to use it
        self.norm_bound = 1.0 if self._matrix is None else _largest_eigenvalue(self._matrix) * (1 + 1e-6)

    def apply(self, x: Vector) -> Vector:
        """``B x``."""
        return x.copy() if self._matrix is None else self._matrix @ x

    def adjoint(self, v: Vector) -> Vector:
        """``B^T v``."""
        return v.copy() if self._transposed is None else self._transposed @ v

    def dual_prox(self, v: Vector) -> Vector:
        """``prox_{s g*}(v)``, each entry cut off at ``weight`` in magnitude, for any s."""
        return np.clip(v, -self.weight, self.weight)

    def value(self, x: Vector) -> float:
        """``weight |B x|_1``."""
        return float(self.weight * np.abs(self.apply(x)).sum())

    def subgradient(self, x: Vector) -> Vector:
        """``weight B^T sign(B x)``, with sign(0) = 0."""
        return self.weight * self.adjoint(np.sign(self.apply(x)))

    def project(self, x: Vector) -> Vector:
        """``x``: there is no constraint."""
        return x

    def step(self, x: Vector, v: Vector, gradient: Vector, gamma: float, lam: float) -> tuple[Vector, Vector]:
        """One primal-dual fixed-point step; see `hpcfed.capabilities.Regularizer.step`."""
        ahead = x - gamma * gradient
        dual = self.dual_prox((lam / gamma) * self.apply(ahead - gamma * self.adjoint(v)) + v)
        return ahead - gamma * self.adjoint(dual) - x, dual

    def prox(self, x: Vector, weight: float, tolerance: float = 1e-12, most_steps: int = 10_000) -> Vector:
        """``argmin_z weight g(Bz) + 1/2 |z - x|^2``, in the type of x.

        Soft thresholding for the identity. Otherwise ``z = x - B^T u`` for the u in the box ``|u| <= weight *
        self.weight`` that minimizes ``1/2 |x - B^T u|^2``, by accelerated projected gradient steps (Beck, Teboulle,
        2009) with restarts, until a step moves u by less than ``tolerance`` of the box's size.
        """
        radius = weight * self.weight
        if self._matrix is None:
            return np.sign(x) * np.maximum(np.abs(x) - radius, 0)
        if radius == 0:
            return x.copy()
        u = ahead = np.zeros(self._matrix.shape[0])
        momentum = 1.0
        for _ in range(most_steps):
            residual = x - self.adjoint(ahead)
            after = np.clip(ahead + self.apply(residual) / self.norm_bound, -radius, radius)
            moved = after - u
            if np.abs(after - ahead).max() <= tolerance * radius:
                return (x - self.adjoint(after)).astype(x.dtype)
            if np.dot(ahead - after, moved) > 0:
                momentum = 1.0
            following = (1 + np.sqrt(1 + 4 * momentum**2)) / 2
            ahead = after + (momentum - 1) / following * moved
            u, momentum = after, following
        return (x - self.adjoint(u)).astype(x.dtype)


def _largest_eigenvalue(matrix: Any) -> float:
    """``rho_max(B^T B)``, from a fixed start so that it is the same on every rank."""
    gram = (matrix.T @ matrix).astype(np.float64)
    if gram.shape[0] <= 500:
        return float(np.linalg.eigvalsh(gram.toarray())[-1])
    start = np.ones(gram.shape[0])
    return float(scipy.sparse.linalg.eigsh(gram, k=1, v0=start, return_eigenvectors=False, tol=1e-10)[0])
