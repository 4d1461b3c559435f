"""Noisy steps on single records, in a given order: clipped, with fresh noise inside every step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class NoisySteps:
    """``x <- x - eta (1/b sum_j clip(grad f(x; r_j)) + N(0, sigma^2 I))`` with the b records j of a batch.

    Attributes
    ----------
    eta : step size.
    clip : C, the bound of each record's gradient in the Euclidean norm; None leaves gradients as they are.
    noise : sigma, in units of the gradient; 0 draws none.
    batch : b; a short last batch is divided by b, too.
    """

    eta: float
    clip: float | None
    noise: float
    batch: int = 1
