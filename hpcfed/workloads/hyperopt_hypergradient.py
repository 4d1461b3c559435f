"""The true hypergradient of a small bilevel problem: what methods approximate, for those who watch them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcfed.federation import Federation

Vector = NDArray[np.float64]

MOST_EXACT = 1000
"""The largest y for which Hessians are made as matrices."""

TOLERANCE = 1e-9
MOST_STEPS = 50
FLATTEST = 1e-10
"""Of the largest curvature, the least that counts as one."""


def lower_minimizer(fed: Federation, x: Vector, y: Vector) -> Vector | None:
    """A minimizer z of the clients' mean ``g(x, .)``, from y downhill by Newton's method.

    Along directions of negative curvature a step is as long as if it were positive, and steps are halved until they
    descend; so the minimizer is a local one, near y, where g(x, .) is not convex.

    Returns
    -------
    ndarray or None
        None if 50 steps do not bring the gradient below 1e-9, or what is found is no strict minimizer.
    """
    z = y
    for _ in range(MOST_STEPS):
        slope = _lower_slope(fed, x, z)
        curvatures, directions = np.linalg.eigh(_lower_hessian(fed, x, z))
        flattest = FLATTEST * float(np.abs(curvatures).max())
        if np.linalg.norm(slope) <= TOLERANCE:
            return z if curvatures[0] > flattest else None
        step = directions @ ((directions.T @ slope) / np.maximum(np.abs(curvatures), flattest))
        moved = _descend(fed, x, z, step, float(slope @ step))
        if moved is None:
            return None
        z = moved
    return None


def hypergradient(fed: Federation, x: Vector, z: Vector) -> Vector:
    """``D_x f - G_xy G_yy^{-1} D_y f`` at (x, z), z a minimizer of ``g(x, .)``, all of them the clients' means.

    The mean of the clients' own hypergradients would be another vector.
    """
    upper = fed.mean(fed.map(lambda client, rng: np.concatenate(client.upper_gradients(x, z, None))))
    v = np.linalg.solve(_lower_hessian(fed, x, z), upper[x.size :])
    cross = fed.mean(fed.map(lambda client, rng: client.lower_cross_product(x, z, None, v)))
    result: Vector = upper[: x.size] - cross
    return result


def penalized_gradient(fed: Federation, x: Vector, y: Vector, z: Vector, penalty: float) -> Vector:
    """The gradient in (x, y, z) of ``f(x, y) + (g(x, y) - g(x, z)) / penalty``."""

    def own(client: Any, rng: np.random.Generator) -> Vector:
        (u1, v1), (u2, v2), (u3, w) = (
            client.upper_gradients(x, y, None),
            client.lower_gradients(x, y, None),
            client.lower_gradients(x, z, None),
        )
        return np.concatenate([u1 + (u2 - u3) / penalty, v1 + v2 / penalty, -w / penalty])

    result: Vector = fed.mean(fed.map(own))
    return result


def _descend(fed: Federation, x: Vector, z: Vector, step: Vector, slope: float) -> Vector | None:
    """The first of ``z - step / 2^k`` that lowers g by a part of what the slope promises; None if none does."""
    value = _lower_value(fed, x, z)
    rounding = 1e-14 * abs(value)  # near the minimizer, values no longer tell
    for length in 0.5 ** np.arange(30):
        moved = z - length * step
        if _lower_value(fed, x, moved) <= value - 1e-4 * length * slope + rounding:
            return np.asarray(moved)
    return None


def _lower_value(fed: Federation, x: Vector, z: Vector) -> float:
    return float(fed.mean(fed.map(lambda client, rng: client.lower_value(x, z))))


def _lower_slope(fed: Federation, x: Vector, z: Vector) -> Vector:
    slope: Vector = fed.mean(fed.map(lambda client, rng: client.lower_gradients(x, z, None)[1]))
    return slope


def _lower_hessian(fed: Federation, x: Vector, z: Vector) -> NDArray[np.float64]:
    def own(client: Any, rng: np.random.Generator) -> NDArray[np.float64]:
        return np.array([client.lower_hessian_product(x, z, None, unit) for unit in np.eye(z.size)])

    hessian = fed.mean(fed.map(own))
    symmetric: NDArray[np.float64] = (hessian + hessian.T) / 2
    return symmetric
