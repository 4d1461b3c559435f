"""Losses that have a gradient at every single record: values, gradients of the mean, and bounds of the curvature.

The bounds hold for every record that there might be, given a public bound R of the features' norms: what hides a
record must not depend on the records.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hpcfed.data.tables import Table

Vector = NDArray[np.float64]


class Loss(Protocol):
    """A loss ``f(x; record)``, convex in x.

    Attributes
    ----------
    name : as `hpcfed.privacy.certify` and `hpcfed.privacy.engine` know it.
    """

    name: str

    def smoothness(self, bound: float) -> float:
        """L such that every ``grad f(.; record)`` with features of norm ``bound`` at most is L-Lipschitz."""

    def values(self, x: Vector, table: Table) -> Vector:
        """``f(x; record)`` of each record, (n,)."""

    def gradient(self, x: Vector, table: Table) -> Vector:
        """The gradient of the mean over the records, of the shape of x."""

    def curvature(self, table: Table) -> float:
        """A bound of the Lipschitz constant of `gradient`."""


class Mean:
    """``f(x; d) = 1/2 |x - d|^2``, whose Hessian is the identity: L = 1."""

    name = "mean"

    def smoothness(self, bound: float) -> float:
        return 1.0

    def values(self, x: Vector, table: Table) -> Vector:
        values: Vector = np.square(x - table.features).sum(axis=1) / 2
        return values

    def gradient(self, x: Vector, table: Table) -> Vector:
        gradient: Vector = x - table.features.mean(axis=0)
        return gradient

    def curvature(self, table: Table) -> float:
        return 1.0


class LeastSquares:
    """``f(x; a, y) = (<a, x> - y)^2``, whose Hessian is ``2 a a^T``: L = 2 R^2."""

    name = "least-squares"

    def smoothness(self, bound: float) -> float:
        return 2 * bound**2

    def values(self, x: Vector, table: Table) -> Vector:
        values: Vector = np.square(table.features @ x - table.targets)
        return values

    def gradient(self, x: Vector, table: Table) -> Vector:
        gradient: Vector = 2 / len(table) * (table.features.T @ (table.features @ x - table.targets))
        return gradient

    def curvature(self, table: Table) -> float:
        return 2 * _largest_eigenvalue(table.features)


class Logistic:
    """``f(x; a, y) = log(1 + exp(-y <a, x>))``, y = -1 or +1; the Hessian is ``s(1 - s) a a^T``: L = R^2/4."""

    name = "logistic"

    def smoothness(self, bound: float) -> float:
        return bound**2 / 4

    def values(self, x: Vector, table: Table) -> Vector:
        return np.logaddexp(0, -table.targets * (table.features @ x))

    def gradient(self, x: Vector, table: Table) -> Vector:
        slopes = -table.targets * np.exp(-np.logaddexp(0, table.targets * (table.features @ x)))
        gradient: Vector = table.features.T @ slopes / len(table)
        return gradient

    def curvature(self, table: Table) -> float:
        return _largest_eigenvalue(table.features) / 4


class Softmax:
    """``f(x; a, c) = log sum_k exp(<x_k, a>) - <x_c, a>``; x has a row for each class, one after another.

    With probabilities p the Hessian is ``(diag p - p p^T) (x) a a^T``, and ``v^T (diag p - p p^T) v`` is the variance
    of v under p, at most ``(max v - min v)^2 / 4 <= |v|^2 / 2``: L = R^2/2.

    Parameters
    ----------
    classes : their number; targets are whole numbers from 0.
    """

    name = "softmax"

    def __init__(self, classes: int) -> None:
        self.classes = classes

    def smoothness(self, bound: float) -> float:
        return bound**2 / 2

    def values(self, x: Vector, table: Table) -> Vector:
        scores = self.scores(x, table)
        own = np.take_along_axis(scores, table.targets.astype(int)[:, None], axis=1)[:, 0]
        values: Vector = np.logaddexp.reduce(scores, axis=1) - own
        return values

    def gradient(self, x: Vector, table: Table) -> Vector:
        scores = self.scores(x, table)
        slopes = np.exp(scores - np.logaddexp.reduce(scores, axis=1, keepdims=True))
        slopes[np.arange(len(table)), table.targets.astype(int)] -= 1
        gradient: Vector = (slopes.T @ table.features / len(table)).ravel()
        return gradient

    def curvature(self, table: Table) -> float:
        return _largest_eigenvalue(table.features) / 2

    def scores(self, x: Vector, table: Table) -> Vector:
        """(n, classes)."""
        scores: Vector = table.features @ x.reshape(self.classes, -1).T
        return scores


def hits(loss: Loss, x: Vector, table: Table) -> int | None:
    """How many records are classified as they should be; None if there are no classes. A score of 0 means -1."""
    if isinstance(loss, Logistic):
        return int(((table.features @ x > 0) == (table.targets > 0)).sum())
    if isinstance(loss, Softmax):
        return int((loss.scores(x, table).argmax(axis=1) == table.targets).sum())
    return None


def _largest_eigenvalue(features: Vector) -> float:
    """Of ``1/n sum a a^T``."""
    return float(np.linalg.norm(features, 2) ** 2 / len(features))
