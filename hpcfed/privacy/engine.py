"""Noisy steps on single records, in a given order: clipped, with fresh noise inside every step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]

LOSSES = ("mean", "least-squares", "logistic", "softmax")

# Noise is drawn for so many numbers at a time; a stream goes on where it stopped, so bits do not depend on it.
CHUNK = 1 << 15


@dataclass(frozen=True)
class NoisySteps:
    """``x <- x - eta (1/b sum_j clip(grad f(x; r_j)) + N(0, sigma^2 I))`` with the records j of a batch.

    Clipping is ``g min(1, C/|g|)``, of every record's whole gradient; one that is not finite counts as 0, and its step
    still has its noise.

    Attributes
    ----------
    eta : step size.
    clip : C, the bound of each record's gradient in the Euclidean norm; None leaves gradients as they are.
    noise : sigma, in units of the gradient; 0 draws none.
    batch : b; a short last batch is divided by b, too.
    ends : where in the order each batch ends, for batches that are not of b records each; b stays the divisor.
    """

    eta: float
    clip: float | None
    noise: float
    batch: int = 1
    ends: NDArray[np.int64] | None = None

    def bounds(self, count: int) -> NDArray[np.int64]:
        """Where ``count`` records are cut: batch s is ``bounds[s]`` to ``bounds[s + 1]``."""
        if self.ends is None:
            return np.minimum(np.arange(0, count + self.batch, self.batch), count)
        bounds = np.concatenate([[0], self.ends]).astype(np.int64)
        if bounds[-1] != count or (np.diff(bounds) < 0).any():
            raise ValueError(f"the ends of batches must rise to {count}, the number of records in the order")
        return bounds


def run(
    loss: str,
    features: Numbers,
    targets: Numbers | None,
    x: Numbers,
    order: Any,
    steps: NoisySteps,
    rng: np.random.Generator,
) -> Numbers:
    """The iterate after steps on the records in this order, one batch after another.

    ===============  ========================================================  ==================
    loss             f(x; record)                                              targets
    ===============  ========================================================  ==================
    mean             ``1/2 |x - d|^2``, d the features                         None
    least-squares    ``(<a, x> - y)^2``                                        y
    logistic         ``log(1 + exp(-y <a, x>))``                               y = -1 or +1
    softmax          ``log sum_k exp(<x_k, a>) - <x_c, a>``                    c = 0, 1, ...
    ===============  ========================================================  ==================

    Parameters
    ----------
    features : of shape (records, d).
    targets : of shape (records,).
    x : of shape (d,); for softmax one row of d for each class, end to end. It is not changed.
    order : numbers of records, in the order of the steps.
    steps : how they are taken.
    rng : draws the noise, ``x.size`` numbers a step; nothing without noise.

    Raises
    ------
    ValueError
        If the loss is unknown, or shapes or the order do not fit.
    """
    from hpcfed.privacy import engine_kernels as kernels

    order = np.ascontiguousarray(order, np.int64)
    features = np.ascontiguousarray(features, np.float64)
    bounds = steps.bounds(order.size)
    _check(loss, features, targets, x, order)
    clip = np.inf if steps.clip is None else float(steps.clip)
    x = np.array(x, np.float64)
    count = len(bounds) - 1
    chunk = max(1, CHUNK // x.size)
    drawn = np.empty((min(chunk, count), x.size))
    for first in range(0, count, chunk):
        part = bounds[first : first + chunk + 1]
        noise = drawn[: len(part) - 1]
        if steps.noise:
            rng.standard_normal(out=noise)
        how = (order, part, float(steps.eta), clip, float(steps.noise), float(steps.batch), noise, x)
        if targets is None:
            kernels.mean_steps(features, *how)
        else:
            kind = LOSSES.index(loss) - 1
            kernels.linear_steps(kind, features, np.ascontiguousarray(targets, np.float64), *how)
    return x


def _check(loss: str, features: Numbers, targets: Numbers | None, x: Numbers, order: NDArray[np.int64]) -> None:
    if loss not in LOSSES:
        raise ValueError(f"loss {loss!r} is unknown: use one of {', '.join(LOSSES)}")
    if (targets is None) != (loss == "mean"):
        raise ValueError(f"loss {loss!r} {'has no targets' if loss == 'mean' else 'needs targets'}")
    records, width = features.shape
    if targets is not None and len(targets) != records:
        raise ValueError(f"{len(targets)} targets of {records} records")
    if x.ndim != 1 or (x.size % width if loss == "softmax" else x.size != width):
        raise ValueError(f"x of shape {x.shape} does not fit records of {width} features")
    if order.size and not 0 <= order.min() <= order.max() < records:
        raise ValueError(f"the order names records {order.min()} to {order.max()} of {records}")
