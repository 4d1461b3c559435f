"""The minimum that private methods are measured against, by a deterministic method that knows all records.

What it returns is believed for its residual alone, which is computed anew: x minimizes ``F + psi`` if and only if
``x = prox_{s psi}(x - s grad F(x))`` for some s > 0, and then for all.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

import numpy as np

from hpcfed.data.tables import Table
from hpcfed.operators.penalties import L2, Nothing, Penalty
from hpcfed.workloads.private_losses import LeastSquares, Loss, Mean, Vector

logger = logging.getLogger(__name__)

AIM = 1e-11  # a smaller residual is not asked for
TOLERANCE = 1e-7  # a larger one is no minimum
MOST_STEPS = 50_000


@dataclass(frozen=True)
class Reference:
    """A minimizer and what vouches for it.

    Attributes
    ----------
    x : the minimizer.
    objective : ``F(x) + psi(x)``.
    kkt_residual : ``L |x - prox_{psi/L}(x - grad F(x)/L)|``, L the curvature's bound.
    """

    x: Vector
    objective: float
    kkt_residual: float


def objective(loss: Loss, penalty: Penalty, table: Table, x: Vector) -> float:
    """The mean loss over the records, and the penalty."""
    return float(loss.values(x, table).mean()) + penalty.value(x)


def residual(loss: Loss, penalty: Penalty, table: Table, x: Vector) -> float:
    """`Reference.kkt_residual` of any point."""
    curvature = loss.curvature(table)
    if curvature == 0:
        return 0.0
    moved = x - penalty.prox(x - loss.gradient(x, table) / curvature, 1 / curvature)
    return float(curvature * np.linalg.norm(moved))


def minimize(loss: Loss, penalty: Penalty, table: Table, start: Vector) -> Reference | None:
    """The minimizer over these records; None, with a line in the log, if none was found.

    The mean of the points, and a linear system for least squares with a ridge, are closed forms. All else is
    accelerated proximal gradient steps (Beck, Teboulle 2009) that restart where they turn against the gradient
    (O'Donoghue, Candes 2015).
    """
    if isinstance(loss, Mean):
        x = penalty.prox(table.features.mean(axis=0), 1.0)
    elif isinstance(loss, LeastSquares) and isinstance(penalty, (L2, Nothing)):
        x = _ridge(table, penalty.factor if isinstance(penalty, L2) else 0.0)
    else:
        x = _descend(loss, penalty, table, start)
    left = residual(loss, penalty, table, x)
    if not left <= TOLERANCE:
        logger.info("no minimizer was found to a residual of %g: %.3g is left", TOLERANCE, left)
        return None
    return Reference(x, objective(loss, penalty, table, x), left)


def _ridge(table: Table, factor: float) -> Vector:
    """``2/n A^T (A x - y) + factor x = 0``; of all solutions the shortest."""
    columns = table.features.shape[1]
    system = 2 / len(table) * (table.features.T @ table.features) + factor * np.eye(columns)
    x: Vector = np.linalg.lstsq(system, 2 / len(table) * (table.features.T @ table.targets))[0]  # type: ignore[assignment]
    return x


def _descend(loss: Loss, penalty: Penalty, table: Table, start: Vector) -> Vector:
    step = 1 / (loss.curvature(table) or 1.0)
    x: Vector = penalty.prox(start, 0.0)
    ahead = x
    momentum = 1.0
    for _ in range(MOST_STEPS):
        after: Vector = penalty.prox(ahead - step * loss.gradient(ahead, table), step)
        if np.linalg.norm(after - ahead) <= AIM * step:
            return after
        if np.dot(ahead - after, after - x) > 0:
            momentum = 1.0
        following = (1 + math.sqrt(1 + 4 * momentum**2)) / 2
        ahead = after + (momentum - 1) / following * (after - x)
        x, momentum = after, following
    return x
