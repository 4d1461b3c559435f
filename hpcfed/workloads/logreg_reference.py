"""The minimum of the logistic regression problem, by a method unlike those that are measured against it.

A primal-dual interior-point method (Boyd, Vandenberghe: Convex Optimization, 2004, section 11.7) solves

    ``min_x f(x) + mu2 |Bx|_1``,  ``f(x) = 1/n sum_j log(1 + exp(-b_j s_j^T x)) + mu1/2 |x|^2``.

What it returns is believed for its Karush-Kuhn-Tucker residual alone, which is computed anew from x and v: x is a
minimizer if and only if a v exists with ``grad f(x) + B^T v = 0`` and ``v = P(v + Bx)``, P the projection onto the box
``|v_j| <= mu2``. Results are kept on the disk by a hash of the problem.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import scipy.linalg
import scipy.sparse
from numpy.typing import NDArray

from hpcfed.errors import ConfigError, HpcfedError

logger = logging.getLogger(__name__)

Vector = NDArray[np.float64]

TOLERANCE = 1e-10  # a larger residual is an error
AIM = 1e-12  # a smaller one is not asked for
PATIENCE = 20  # steps without a smaller residual: rounding lets it be no smaller
MOST_FEATURES = 5000  # the Hessian is dense


@dataclass(frozen=True)
class Objective:
    """``1/n sum_j log(1 + exp(-b_j s_j^T x)) + mu1/2 |x|^2 + mu2 |Bx|_1`` over all training samples.

    Parameters
    ----------
    features : the ``s_j``, sparse (samples, features).
    labels : the ``b_j``, -1 or +1.
    matrix : B, sparse (rows, features).
    """

    features: Any
    labels: Vector
    matrix: Any
    mu1: float
    mu2: float

    def value(self, x: Vector) -> float:
        """The objective."""
        losses = np.logaddexp(0, -self.labels * (self.features @ x))
        return float(losses.mean() + self.mu1 / 2 * (x @ x) + self.mu2 * np.abs(self.matrix @ x).sum())

    def gradient(self, x: Vector) -> Vector:
        """``grad f(x)``, of the smooth part."""
        slopes = -self.labels * np.exp(-np.logaddexp(0, self.labels * (self.features @ x)))
        gradient: Vector = self.features.T @ slopes / len(slopes) + self.mu1 * x
        return gradient

    def hessian(self, x: Vector) -> Vector:
        """``Hess f(x)``, dense."""
        scores = self.features @ x
        curvature = np.exp(-np.logaddexp(0, scores) - np.logaddexp(0, -scores)) / len(scores)
        scaled = scipy.sparse.diags_array(curvature) @ self.features
        hessian: Vector = (self.features.T @ scaled).toarray() + self.mu1 * np.eye(len(x))
        return hessian

    def residuals(self, x: Vector, v: Vector) -> tuple[Vector, Vector]:
        """``grad f(x) + B^T v`` and ``v - P(v + Bx)``: both zero at a minimizer x with its dual variable v."""
        return self.gradient(x) + self.matrix.T @ v, v - np.clip(v + self.matrix @ x, -self.mu2, self.mu2)

    def key(self) -> str:
        """SHA-256 of everything that the minimum depends on."""
        digest = hashlib.sha256(np.array([self.mu1, self.mu2]).tobytes())
        for sparse in (self.features, self.matrix):
            digest.update(np.array(sparse.shape, np.int64).tobytes())
            digest.update(sparse.indptr.astype(np.int64).tobytes() + sparse.indices.astype(np.int64).tobytes())
            digest.update(sparse.data.astype(np.float64).tobytes())
        digest.update(self.labels.astype(np.float64).tobytes())
        return digest.hexdigest()


@dataclass(frozen=True)
class Reference:
    """A minimizer and what vouches for it.

    Attributes
    ----------
    x : the minimizer.
    dual : the v that proves it, in the range of B.
    objective : ``F(x)``.
    kkt_residual : the larger of ``|grad f(x) + B^T v|`` and ``|v - P(v + Bx)|``.
    gap : ``F(x) - min F`` is at most this (rounding of F itself aside); infinite for ``mu1 = 0``. With ``r`` and ``e``
        the two residuals, ``P(v + Bx)`` is a subgradient at ``Bx + e``, so that ``F(y) >= F(x) - 2 mu2 |e|_1 +
        (r - B^T e)^T (y - x) + mu1/2 |y - x|^2`` for every y.
    """

    x: Vector
    dual: Vector
    objective: float
    kkt_residual: float
    gap: float


def certify(problem: Objective, x: Vector, v: Vector) -> Reference:
    """``x`` with what ``v`` proves of it, computed from the problem alone."""
    r, e = problem.residuals(x, v)
    tilt = r - problem.matrix.T @ e
    with np.errstate(divide="ignore", invalid="ignore"):
        slack = np.float64(tilt @ tilt) / (2 * problem.mu1)
    residual = max(np.linalg.norm(r), np.linalg.norm(e))
    return Reference(x, v, problem.value(x), float(residual), float(2 * problem.mu2 * np.abs(e).sum() + slack))


def cached(problem: Objective) -> Reference:
    """The minimizer, from the disk if it has been found before: ``$XDG_CACHE_HOME/hpcfed/references/HASH.npz``.

    A file is trusted if its x and v leave a residual below 1e-10 in this problem, and computed anew otherwise.
    """
    folder = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "hpcfed" / "references"
    path = folder / f"{problem.key()}.npz"
    reference = _read(path, problem)
    if reference is None:
        reference = solve(problem)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=folder, suffix=".tmp", delete=False) as file:
                np.savez(file, x=reference.x, dual=reference.dual)
            os.replace(file.name, path)
        except OSError as error:
            logger.warning("the reference cannot be kept in %s: %s", folder, error.strerror)
    logger.info(
        "reference: F* = %.12g, KKT residual %.1e, F* - min F at most %.1e",
        reference.objective, reference.kkt_residual, reference.gap,
    )  # fmt: skip
    return reference


def _read(path: Path, problem: Objective) -> Reference | None:
    if not path.exists():
        return None
    try:
        with np.load(path) as file:
            reference = certify(problem, file["x"], file["dual"])
    except Exception as error:  # a damaged file may fail in any way
        logger.warning("the reference %s is damaged (%s) and is computed anew", path, error)
        return None
    return reference if reference.kkt_residual <= TOLERANCE else None


def solve(problem: Objective, most_steps: int = 200) -> Reference:
    """The minimizer, by interior-point steps from zero until the residual is as small as rounding lets it be.

    With bounds ``-t <= Bx <= t``, their slacks ``s = (t - Bx, t + Bx)`` and multipliers ``u = (u_1, u_2)``, where
    ``u_1 + u_2 = mu2`` and ``v = u_1 - u_2``, each Newton step aims at ``grad f(x) + B^T v = 0`` and ``u s = c`` for a
    tenth of the present mean of ``u s``. Dependent rows of B do no harm: v is not unique then, and this is one in the
    box.

    Raises
    ------
    ConfigError
        If there are too many features.
    HpcfedError
        If the residual stays above 1e-10, such as for ``mu1 = mu2 = 0`` and classes that can be separated.
    """
    num_features = problem.features.shape[1]
    if num_features > MOST_FEATURES:
        raise ConfigError(
            f"--reference: the Hessian of {num_features} features is too large, it is for at most {MOST_FEATURES}: "
            "leave --reference out"
        )
    # Without a regularizer there are no bounds, and this is Newton's method.
    matrix = problem.matrix if problem.mu2 > 0 else problem.matrix[:0]
    x = np.zeros(num_features)
    s = np.full((2, matrix.shape[0]), 100.0)  # wide, so that weights may grow at once
    u = np.full_like(s, problem.mu2 / 2)
    best, idle = certify(problem, x, np.zeros(problem.matrix.shape[0])), 0
    for _ in range(most_steps):
        if best.kkt_residual <= AIM or idle == PATIENCE:
            break
        target = 0.1 * float(np.mean(u * s)) if u.size else 0.0
        try:
            dx, du, ds = _direction(problem, matrix, x, u, s, target)
        except (np.linalg.LinAlgError, ValueError):  # singular, or no longer finite
            break

        length = min(1.0, 0.99 * _room(u, du), 0.99 * _room(s, ds))
        before, ahead = _miss(problem, matrix, x, u, s, target), (x, u, s)
        while length > 1e-10:
            ahead = x + length * dx, u + length * du, s + length * ds
            if _miss(problem, matrix, *ahead, target) <= (1 - 0.01 * length) * before:
                break
            length /= 2
        x, u, s = ahead
        here = certify(problem, x, u[0] - u[1] if u.size else best.dual)
        best, idle = (here, 0) if here.kkt_residual < best.kkt_residual else (best, idle + 1)
    if not best.kkt_residual <= TOLERANCE:
        raise HpcfedError(
            f"--reference: no minimum was found: the KKT residual is {best.kkt_residual:.1e} and should be below "
            f"{TOLERANCE}: there may be none; give --mu1 or --mu2"
        )
    return best


def _direction(
    problem: Objective, matrix: Any, x: Vector, u: Vector, s: Vector, target: float
) -> tuple[Vector, Vector, Vector]:
    """The Newton step of x, u and s. Without u, s and t one system is left, with a stiffness for each row of B."""
    v, ratio, push = u[0] - u[1], u / s, target / s
    both = ratio.sum(axis=0)
    tilt, stiffness = (ratio[0] - ratio[1]) / both, 4 * ratio[0] * ratio[1] / both
    excess = push.sum(axis=0) - problem.mu2
    shift = push[0] - push[1] - v - tilt * excess
    system = problem.hessian(x) + (matrix.T @ scipy.sparse.diags_array(stiffness) @ matrix).toarray()
    dx = scipy.linalg.cho_solve(scipy.linalg.cho_factor(system), -(problem.gradient(x) + matrix.T @ (v + shift)))
    dz = matrix @ dx
    dv = shift + stiffness * dz
    ds = excess / both + np.stack([-ratio[1], ratio[0]]) * (2 / both) * dz
    return dx, np.stack([dv, -dv]) / 2, ds


def _miss(problem: Objective, matrix: Any, x: Vector, u: Vector, s: Vector, target: float) -> float:
    """How far the point is from ``grad f(x) + B^T v = 0``, ``u s = target``."""
    slope = problem.gradient(x) + matrix.T @ (u[0] - u[1])
    return float(np.hypot(np.linalg.norm(slope), np.linalg.norm(u * s - target)))


def _room(values: Vector, change: Vector) -> float:
    """How many times the change may be added before a value is zero."""
    falling = change < 0
    return float(np.min(-values[falling] / change[falling], initial=np.inf))
