"""Small models with exact first and second derivatives in NumPy, and the ridge whose weights are to be found.

Networks of this size spend a tenth of a millisecond on a batch of ten; autograd would spend ten times that on itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit

Vector = NDArray[np.float64]
Matrix = NDArray[np.float64]
Shapes = tuple[tuple[int, int], ...]


class Model(Protocol):
    """A classifier whose parameters y are the matrices of ``shapes``, row by row, one after the other.

    Inputs are (n, features), dense or CSR; the derivatives are those of ``weight sum_j loss(y; input_j, target_j)``.
    """

    @property
    def shapes(self) -> Shapes:
        """Rows and columns of each matrix."""

    def targets(self, labels: Vector) -> NDArray[Any]:
        """Labels -1 and +1 as the losses want them."""

    def initial(self, rng: np.random.Generator) -> Vector:
        """Parameters to start with."""

    def judge(self, y: Vector, inputs: Any, targets: NDArray[Any]) -> tuple[float, int]:
        """The sum of the losses, and how many samples are classified rightly."""

    def gradient(self, y: Vector, inputs: Any, targets: NDArray[Any], weight: float) -> Vector:
        """The gradient in y."""

    def hessian_product(self, y: Vector, v: Vector, inputs: Any, targets: NDArray[Any], weight: float) -> Vector:
        """The Hessian in y times v."""


@dataclass(frozen=True)
class TwoLayer:
    r"""``o(a) = w^T tanh(W^T a)`` with the loss ``log(1 + exp(-b o))`` for labels b of -1 and +1; no biases.

    The matrices are W, of (features, hidden), and w, of (hidden, 1).
    """

    features: int
    hidden: int

    @property
    def shapes(self) -> Shapes:
        return (self.features, self.hidden), (self.hidden, 1)

    def targets(self, labels: Vector) -> Vector:
        return labels

    def initial(self, rng: np.random.Generator) -> Vector:
        """Normal numbers of variance 1 / rows."""
        return np.concatenate([rng.standard_normal(rows * columns) / np.sqrt(rows) for rows, columns in self.shapes])

    def judge(self, y: Vector, inputs: Any, targets: Vector) -> tuple[float, int]:
        first, second = self._split(y)
        outputs = np.tanh(inputs @ first) @ second
        return float(np.logaddexp(0, -targets * outputs).sum()), int(((outputs > 0) == (targets > 0)).sum())

    def gradient(self, y: Vector, inputs: Any, targets: Vector, weight: float) -> Vector:
        first, second = self._split(y)
        hidden = np.tanh(inputs @ first)
        slopes = -weight * targets * expit(-targets * (hidden @ second))
        back = np.multiply.outer(slopes, second)
        back *= 1 - hidden * hidden
        return np.concatenate([(inputs.T @ back).ravel(), slopes @ hidden])

    def hessian_product(self, y: Vector, v: Vector, inputs: Any, targets: Vector, weight: float) -> Vector:
        """By the R-operator: each line of the gradient differentiated along v (B. Pearlmutter 1994)."""
        (first, second), (first_v, second_v) = self._split(y), self._split(v)
        hidden = np.tanh(inputs @ first)
        outputs = hidden @ second
        slopes = -weight * targets * expit(-targets * outputs)
        tangent = 1 - hidden * hidden

        hidden_v = tangent * (inputs @ first_v)
        slopes_v = weight * expit(outputs) * expit(-outputs) * (hidden_v @ second + hidden @ second_v)
        back_v = np.multiply.outer(slopes_v, second) + np.multiply.outer(slopes, second_v)
        back_v *= tangent
        back_v -= 2 * hidden * hidden_v * np.multiply.outer(slopes, second)
        return np.concatenate([(inputs.T @ back_v).ravel(), slopes_v @ hidden + slopes @ hidden_v])

    def _split(self, y: Vector) -> tuple[Matrix, Vector]:
        end = self.features * self.hidden
        return y[:end].reshape(self.features, self.hidden), y[end:]


@dataclass(frozen=True)
class Softmax:
    """Softmax regression, convex in y: scores ``Y a`` with the cross-entropy loss.

    The one matrix is Y, of (classes, features): its columns belong to features.
    """

    features: int
    classes: int = 2

    @property
    def shapes(self) -> Shapes:
        return ((self.classes, self.features),)

    def targets(self, labels: Vector) -> NDArray[np.int64]:
        return (labels > 0).astype(np.int64)

    def initial(self, rng: np.random.Generator) -> Vector:
        """Zeros: the problem is convex."""
        return np.zeros(self.classes * self.features)

    def judge(self, y: Vector, inputs: Any, targets: NDArray[np.int64]) -> tuple[float, int]:
        scores = self._scores(y, inputs)
        losses = np.logaddexp.reduce(scores, axis=1) - scores[np.arange(len(targets)), targets]
        return float(losses.sum()), int((scores.argmax(axis=1) == targets).sum())

    def gradient(self, y: Vector, inputs: Any, targets: NDArray[np.int64], weight: float) -> Vector:
        slopes = _shares(self._scores(y, inputs))
        slopes[np.arange(len(targets)), targets] -= 1
        slopes *= weight
        return self._gather(inputs, slopes)

    def hessian_product(self, y: Vector, v: Vector, inputs: Any, targets: NDArray[np.int64], weight: float) -> Vector:
        shares = _shares(self._scores(y, inputs))
        slopes_v = shares * self._scores(v, inputs)
        slopes_v -= shares * slopes_v.sum(axis=1, keepdims=True)
        slopes_v *= weight
        return self._gather(inputs, slopes_v)

    def _scores(self, y: Vector, inputs: Any) -> Matrix:
        scores: Matrix = inputs @ y.reshape(self.classes, self.features).T
        return scores

    def _gather(self, inputs: Any, slopes: Matrix) -> Vector:
        gathered: Vector = (inputs.T @ slopes).T.ravel()
        return gathered


def _shares(scores: Matrix) -> Matrix:
    """The softmax of each row."""
    shares = np.exp(scores - scores.max(axis=1, keepdims=True))
    shares /= shares.sum(axis=1, keepdims=True)
    return np.asarray(shares)


@dataclass(frozen=True)
class ColumnRidge:
    """``sum_i 1/columns_i sum_q exp(x_iq) 1/rows_i sum_p (Y_i)_pq^2``: a weight for each column of y's matrices.

    x has the exponents of all columns, matrix after matrix.
    """

    shapes: Shapes

    @property
    def size(self) -> int:
        """The size of x."""
        return sum(columns for _, columns in self.shapes)

    @cached_property
    def _factors(self) -> Vector:
        """``1 / (rows columns)`` for each entry of x."""
        return np.concatenate([np.full(columns, 1 / (rows * columns)) for rows, columns in self.shapes])

    def value(self, x: Vector, y: Vector) -> float:
        return float(self._weights(x) @ self._column_sums(y, y))

    def gradients(self, x: Vector, y: Vector) -> tuple[Vector, Vector]:
        """``(D_x R, D_y R)``."""
        weights = self._weights(x)
        return weights * self._column_sums(y, y), self._scale_columns(2 * weights, y)

    def hessian_product(self, x: Vector, v: Vector) -> Vector:
        """``(D_yy R) v``."""
        return self._scale_columns(2 * self._weights(x), v)

    def cross_product(self, x: Vector, y: Vector, v: Vector) -> Vector:
        """``(D_xy R) v``."""
        return 2 * self._weights(x) * self._column_sums(y, v)

    def _weights(self, x: Vector) -> Vector:
        return self._factors * np.exp(x)

    def _matrices(self, y: Vector) -> list[Matrix]:
        matrices, end = [], 0
        for shape in self.shapes:
            begin, end = end, end + shape[0] * shape[1]
            matrices.append(y[begin:end].reshape(shape))
        return matrices

    def _column_sums(self, y: Vector, v: Vector) -> Vector:
        """The sums of ``y v`` over each column."""
        pairs = zip(self._matrices(y), self._matrices(v), strict=True)
        return np.concatenate([np.einsum("pq,pq->q", a, b) for a, b in pairs])

    def _scale_columns(self, weights: Vector, y: Vector) -> Vector:
        scaled, end = [], 0
        for matrix in self._matrices(y):
            begin, end = end, end + matrix.shape[1]
            scaled.append((matrix * weights[begin:end]).ravel())
        return np.concatenate(scaled)
