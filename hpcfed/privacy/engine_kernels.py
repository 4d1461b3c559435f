"""Compiled loops of `hpcfed.privacy.engine`.

A gradient of a linear model's loss is ``r a^T``, with the record's features ``a`` and the slopes ``r`` of the loss in
the model's outputs: its norm is ``|r| |a|``, and it is clipped without being formed. Records are chosen by somebody who
wants to escape clipping, so norms neither overflow nor underflow.
"""

from __future__ import annotations

import numpy as np
from numba import njit, types

LEAST_SQUARES, LOGISTIC, SOFTMAX = 0, 1, 2

_vector = types.Array(types.float64, 1, "C", readonly=True)
_matrix = types.Array(types.float64, 2, "C", readonly=True)
_places = types.Array(types.int64, 1, "C", readonly=True)
_vector_out = types.float64[::1]

# Products may be fused into sums; nothing here may assume that numbers are finite.
_compile = {"cache": True, "error_model": "numpy", "fastmath": {"contract"}, "nogil": True}
_any_order = _compile | {"fastmath": {"contract", "reassoc"}}  # sums in any order; not for what must not overflow

# Squares between these sum up without loss.
_SMALL, _LARGE = 1e-200, 1e300


@njit(types.float64(_vector, _vector), **_any_order)
def _inner(u, v):  # type: ignore[no-untyped-def]
    total = 0.0
    for i in range(v.size):
        total += u[i] * v[i]
    return total


@njit(types.float64(_vector), **_compile)
def norm(v):  # type: ignore[no-untyped-def]
    """The Euclidean norm, right also where squares are too large or too small; not finite if an element is not."""
    squares = _inner(v, v)
    if _SMALL < squares < _LARGE or np.isnan(squares):
        return np.sqrt(squares)
    largest = 0.0
    for i in range(v.size):
        largest = max(largest, abs(v[i]))
    if largest == 0.0 or largest == np.inf:
        return largest
    squares = 0.0
    for i in range(v.size):
        squares += (v[i] / largest) ** 2
    return largest * np.sqrt(squares)


@njit(types.void(types.int64, types.float64, _vector_out), inline="always", **_compile)
def _slopes(loss, target, outputs):  # type: ignore[no-untyped-def]
    """Replace the model's outputs by the loss's slopes in them."""
    if loss == LEAST_SQUARES:
        outputs[0] = 2 * (outputs[0] - target)
    elif loss == LOGISTIC:
        outputs[0] = -target / (1 + np.exp(target * outputs[0]))
    else:
        highest = outputs[0]
        for k in range(1, outputs.size):
            highest = max(highest, outputs[k])
        total = 0.0
        for k in range(outputs.size):
            outputs[k] = np.exp(outputs[k] - highest)
            total += outputs[k]
        for k in range(outputs.size):
            outputs[k] = outputs[k] / total - (k == target)


@njit(types.void(_vector, _vector, types.float64, types.float64, types.float64, _vector_out), **_compile)
def _move(total, noise, eta, sigma, divisor, x):  # type: ignore[no-untyped-def]
    if sigma == 0.0:
        for i in range(x.size):
            x[i] -= eta * (total[i] / divisor)
    else:
        for i in range(x.size):
            x[i] -= eta * (total[i] / divisor + sigma * noise[i])


@njit(
    types.void(
        types.int64,
        _matrix,
        _vector,
        _places,
        _places,
        types.float64,
        types.float64,
        types.float64,
        types.float64,
        _matrix,
        _vector_out,
    ),
    **_compile,
)
def linear_steps(loss, features, targets, order, bounds, eta, clip, sigma, divisor, noise, x):  # type: ignore[no-untyped-def]
    """Steps on a linear model's loss, one for each batch ``order[bounds[s] : bounds[s + 1]]``; x is overwritten.

    ``clip`` is infinite where gradients are left as they are.
    """
    width = features.shape[1]
    outputs = np.empty(x.size // width)
    total = np.empty(x.size)
    clips = clip < np.inf
    for step in range(bounds.size - 1):
        total[:] = 0.0
        for place in range(bounds[step], bounds[step + 1]):
            a = features[order[place]]
            for k in range(outputs.size):
                outputs[k] = _inner(x[k * width : (k + 1) * width], a)
            _slopes(loss, targets[order[place]], outputs)
            if clips:
                steepness, length = norm(outputs), norm(a)
                if not (np.isfinite(steepness) and np.isfinite(length)):
                    continue
                if steepness * length > clip:
                    for k in range(outputs.size):
                        outputs[k] = outputs[k] / steepness * (clip / length)
            for k in range(outputs.size):
                own, slope = total[k * width : (k + 1) * width], outputs[k]
                for i in range(width):
                    own[i] += slope * a[i]
        _move(total, noise[step], eta, sigma, divisor, x)


@njit(
    types.void(
        _matrix,
        _places,
        _places,
        types.float64,
        types.float64,
        types.float64,
        types.float64,
        _matrix,
        _vector_out,
    ),
    **_compile,
)
def mean_steps(features, order, bounds, eta, clip, sigma, divisor, noise, x):  # type: ignore[no-untyped-def]
    """The same for ``1/2 |x - d|^2`` with the records d."""
    total, gradient = np.empty(x.size), np.empty(x.size)
    clips = clip < np.inf
    for step in range(bounds.size - 1):
        total[:] = 0.0
        for place in range(bounds[step], bounds[step + 1]):
            d = features[order[place]]
            for i in range(x.size):
                gradient[i] = x[i] - d[i]
            if clips:
                length = norm(gradient)
                if not np.isfinite(length):
                    continue
                if length > clip:
                    for i in range(x.size):
                        gradient[i] = gradient[i] / length * clip
            for i in range(x.size):
                total[i] += gradient[i]
        _move(total, noise[step], eta, sigma, divisor, x)
