"""Simple penalties ``psi`` of a vector: their values and their proximal maps in closed form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

Vector = Any  # a NumPy array of floating-point numbers


@dataclass(frozen=True)
class Nothing:
    """``psi(x) = 0``."""

    def value(self, x: Vector) -> float:
        """0."""
        return 0.0

    def prox(self, x: Vector, weight: float) -> Vector:
        """``x`` itself, as a copy."""
        return x.copy()


@dataclass(frozen=True)
class L1:
    """``psi(x) = factor |x|_1``."""

    factor: float

    def value(self, x: Vector) -> float:
        """``psi(x)``."""
        return float(self.factor * np.abs(x).sum(dtype=float))

    def prox(self, x: Vector, weight: float) -> Vector:
        """Soft thresholding: every entry moves towards 0 by ``weight factor``, and stops there."""
        return np.sign(x) * np.maximum(np.abs(x) - weight * self.factor, 0)


@dataclass(frozen=True)
class L2:
    """``psi(x) = factor/2 |x|^2``."""

    factor: float

    def value(self, x: Vector) -> float:
        """``psi(x)``."""
        return float(self.factor / 2 * np.square(x, dtype=float).sum())

    def prox(self, x: Vector, weight: float) -> Vector:
        """``x / (1 + weight factor)``."""
        return x / (1 + weight * self.factor)


@dataclass(frozen=True)
class Ball:
    """``psi(x) = 0`` where ``|x| <= radius``, infinite elsewhere."""

    radius: float

    def value(self, x: Vector) -> float:
        """``psi(x)``; what rounding adds to the norm of a projected point does not count as outside."""
        rounding = 100 * float(np.finfo(x.dtype).eps)
        return 0.0 if _norm(x) <= self.radius * (1 + rounding) else np.inf

    def prox(self, x: Vector, weight: float) -> Vector:
        """The nearest point of the ball, whatever the weight."""
        norm = _norm(x)
        return x.copy() if norm <= self.radius else x * x.dtype.type(self.radius / norm)


Penalty = Nothing | L1 | L2 | Ball


def _norm(x: Vector) -> float:
    return float(np.linalg.norm(x.astype(float, copy=False)))
