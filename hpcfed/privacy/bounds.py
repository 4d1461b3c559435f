"""How far shuffled gradient methods can be from the optimum after K epochs: upper bounds with their constants.

The objective is ``G = F + psi`` with F the mean of n convex functions, an epoch takes one step on each of n functions
(private and public ones) and ends with psi's proximal map of weight ``n eta``. The results are those of Jiang, Sharma,
Wu, Joshi (arXiv 2502.03652, version 1), with one term put right.

Erratum
-------
Lemma 12 of that version, and with it Theorem 3, has ``6 eta^2 n d sigma^2 L`` for what an epoch's noise adds. It bounds
the mean of the product of a step's noise and the epoch's end with the wrong sign, and loses the derivative's leading
term: the end moves by up to ``eta`` for each unit of noise. With psi = 0 and all functions ``(L/2) x^2`` the exact
excess ``(L/2) eta^2 sigma^2 (1 - q^{2nK})/(1 - q^2)``, ``q = 1 - eta L``, a coordinate, exceeds the printed bound.
`noise_term` is ``eta d sigma^2 + 5 eta^2 n d sigma^2 L`` instead. It holds for every closed convex psi if no step
expands distances: the epoch's end is then an eta-Lipschitz function of each step's noise, and by Stein's identity
``|E <rho_i, end>| <= eta d sigma^2``. The privacy of the methods is not affected. Whether a later version of the paper
has another term was not checked (UNVERIFIED).
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray


def noise_term(
    step: float, steps: int, dimension: int, noise: ArrayLike, smoothness: ArrayLike, *, clients: int = 1
) -> NDArray[np.float64]:
    """``N_k = eta d sigma_k^2 / M + 5 eta^2 n d sigma_k^2 L_k``, what the noise of epoch k adds.

    Parameters
    ----------
    step : eta.
    steps : n, the steps of an epoch.
    dimension : d.
    noise, smoothness : ``sigma_k`` and the mean smoothness ``L_k`` of the functions used, for one epoch or for each.
    clients : M, whose ends are averaged; their noise is independent.
    """
    variance = dimension * np.square(np.asarray(noise, float))
    return np.asarray(step * variance / clients + 5 * step**2 * steps * variance * np.asarray(smoothness, float))


def surrogate_term(step: float, steps: int, dissimilarity: ArrayLike, largest_smoothness: float, beta: float) -> float:
    """``C_n^2 / (2 n^2 beta) + 5 eta^2 L* (1/n) sum_{n_d < i < n} C_i^2``, what an epoch's public functions add.

    Parameters
    ----------
    dissimilarity : ``C_i^2`` for ``i = n_d + 1 .. n``: bounds of the mean squared distance between the sums of the
        public gradients up to i and of the private gradients that they stand for; empty without public functions.
    largest_smoothness : L*, of a function used in the epoch.
    beta : any number with psi being ``L_H + beta``-strongly convex, L_H the smoothness of the difference between the
        private objective and the epoch's.
    """
    squares = np.asarray(dissimilarity, float)
    if not squares.size:
        return 0.0
    within = 5 * step**2 * largest_smoothness * float(squares[:-1].sum()) / steps
    return float(squares[-1]) / (2 * steps**2 * beta) + within


def last_iterate_bound(
    distance: float,
    step: float,
    steps: int,
    epochs: int,
    variance: float,
    smoothness: float,
    added: ArrayLike = 0.0,
) -> float:
    """Theorem 3, corrected: a bound of ``E G(x) - G(x*)`` after K epochs.

    ``D^2/(eta n K) + 10 eta^2 n^2 V (1 + log K) L + 2 max_{s <= K} sum_{k <= s} a_k / (s + 1 - k)``. Without ``a_k`` it
    is Corollary 2.

    Parameters
    ----------
    distance : D, from the start to the optimum.
    step : eta, at most `largest_step`.
    steps, epochs : n and K.
    variance : V = ``(1/n) sum |grad f_i(x*)|^2``.
    smoothness : L, the largest over epochs of the mean smoothness of the functions used.
    added : ``a_k``, what epoch k adds: `noise_term` and `surrogate_term`. One number or one for each epoch.
    """
    logarithm = 1 + math.log(epochs)
    terms = np.broadcast_to(np.asarray(added, float), epochs)
    harmonic = 1 / np.arange(1, epochs + 1)
    constant = bool((terms == terms[0]).all())
    worst = float(terms[0] * harmonic.sum() if constant else np.convolve(terms, harmonic)[:epochs].max())
    optimum = distance**2 / (step * steps * epochs)
    return optimum + 10 * (step * steps) ** 2 * variance * logarithm * smoothness + 2 * worst


def largest_step(steps: int, epochs: int, smoothness: float, largest_smoothness: float) -> float:
    """``1 / (2 n sqrt(10 L L* (1 + log K)))``, up to which the bound holds.

    ``smoothness`` is the larger of the private functions' mean and of every epoch's, ``largest_smoothness`` that of the
    worst function used.
    """
    return 1 / (2 * steps * math.sqrt(10 * smoothness * largest_smoothness * (1 + math.log(epochs))))


def best_step(
    distance: float, steps: int, epochs: int, variance: float, smoothness: float, largest_smoothness: float
) -> float:
    """The step with which `last_iterate_bound` without noise is least, within `largest_step`.

    ``(D^2 / (20 n^3 V L (1 + log K) K))^{1/3}``, which makes it ``1.5 20^{1/3} (D^4 V L (1 + log K))^{1/3} / K^{2/3}``.
    """
    cap = largest_step(steps, epochs, smoothness, largest_smoothness)
    curvature = 20 * steps**3 * variance * smoothness * (1 + math.log(epochs)) * epochs
    return min(cap, (distance**2 / curvature) ** (1 / 3)) if curvature else cap


def mean_dissimilarity(private: NDArray[np.float64], public: NDArray[np.float64]) -> NDArray[np.float64]:
    """``C_i^2`` of mean estimation, ``f(x; d) = 1/2 |x - d|^2``, with private records in random order.

    The first r of the m public records p stand for r of the n private records d, drawn without replacement:
    ``|r mean(d) - sum_{j <= r} p_j|^2 + r (n - r)/(n - 1) S^2`` with ``S^2 = (1/n) sum |d_i - mean(d)|^2``.

    Parameters
    ----------
    private, public : arrays of n and ``m <= n`` rows.

    Returns
    -------
    For ``r = 1 .. m``.
    """
    count, taken = len(private), np.arange(1, len(public) + 1)
    centre = private.mean(axis=0)
    spread = float(np.square(private - centre).sum()) / count
    drift = np.square(taken[:, None] * centre - np.cumsum(public, axis=0)).sum(axis=1)
    return np.asarray(drift + taken * (count - taken) / max(count - 1, 1) * spread)
