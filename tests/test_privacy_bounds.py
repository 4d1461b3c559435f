"""Bounds of convergence: what they bound is simulated or known in closed form."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.optimize import minimize_scalar

from hpcfed.privacy import bounds


def noise_excess(L, eta, sigma, n, epochs, dimension=1):
    """Exact ``E G`` for ``f_i = (L/2)|x|^2`` from 0 without psi."""
    q = 1 - eta * L
    return dimension * L / 2 * (eta * sigma) ** 2 * (1 - q ** (2 * n * epochs)) / (1 - q**2)


def test_the_exact_excess_that_follows_is_what_noisy_steps_have():
    rng = np.random.default_rng(0)
    L, eta, sigma, n, epochs, dimension = 2.0, 0.05, 3.0, 5, 4, 6
    x = np.zeros((20_000, dimension))
    for _ in range(n * epochs):
        x -= eta * (L * x + sigma * rng.standard_normal(x.shape))
    measured = L / 2 * np.square(x).sum(axis=1).mean()
    assert measured == pytest.approx(noise_excess(L, eta, sigma, n, epochs, dimension), rel=0.03)


@pytest.mark.parametrize(
    ("n", "epochs", "eta", "over_printed", "over_corrected"),
    [(10, 1000, 1e-4, 2.41, 0.0144), (100, 2000, 5e-6, 4.41, 0.0132), (1000, 5000, 2e-7, 9.90, 0.0119)],
)
def test_the_noise_term_is_the_corrected_one(n, epochs, eta, over_printed, over_corrected):
    """The term as printed, ``6 eta^2 n d sigma^2 L``, gives a bound below the exact excess; ours is above it."""
    assert eta <= bounds.largest_step(n, epochs, 1.0, 1.0)
    exact = noise_excess(1.0, eta, 1.0, n, epochs)
    harmonic = sum(1 / k for k in range(1, epochs + 1))
    printed = 2 * harmonic * 6 * eta**2 * n
    assert exact / printed == pytest.approx(over_printed, rel=2e-3)
    assert exact > printed
    corrected = bounds.last_iterate_bound(0.0, eta, n, epochs, 0.0, 1.0, bounds.noise_term(eta, n, 1, 1.0, 1.0))
    assert exact / corrected == pytest.approx(over_corrected, rel=5e-3)
    assert exact < corrected


@pytest.mark.parametrize("prox", ["none", "l1", "ball"])
def test_the_lemma_behind_it_for_every_kind_of_penalty(prox):
    """``(1/n) sum_i E <-rho_i, end> <= eta d sigma^2``; without a penalty, above the printed ``eta n L`` of that."""
    rng = np.random.default_rng(2)
    n, d, sigma, eta, runs = 20, 10, 2.0, 0.005, 40_000
    x = np.full((runs, d), 0.02)
    total = np.zeros((runs, d))
    for _ in range(n):
        rho = sigma * rng.standard_normal((runs, d))
        total += rho
        x -= eta * (x + rho)
    if prox == "l1":
        x = np.sign(x) * np.maximum(np.abs(x) - 0.02, 0)
    if prox == "ball":
        x *= np.minimum(1, 0.1 / np.linalg.norm(x, axis=1, keepdims=True))
    products = -(total * x).sum(axis=1) / n
    deviation = products.std() / runs**0.5
    limit = eta * d * sigma**2
    assert products.mean() <= limit + 4 * deviation
    if prox == "none":
        assert products.mean() > eta * n * limit
        exact = limit * np.mean((1 - eta) ** np.arange(n))
        assert products.mean() == pytest.approx(exact, abs=4 * deviation)


def test_what_epochs_add_is_summed_with_harmonic_weights():
    added = np.random.default_rng(3).random(30)
    worst = max(sum(added[k - 1] / (s + 1 - k) for k in range(1, s + 1)) for s in range(1, 31))
    free = bounds.last_iterate_bound(1.0, 0.01, 5, 30, 2.0, 3.0)
    assert bounds.last_iterate_bound(1.0, 0.01, 5, 30, 2.0, 3.0, added) == pytest.approx(free + 2 * worst)
    same = bounds.last_iterate_bound(1.0, 0.01, 5, 30, 2.0, 3.0, np.full(30, 0.5))
    assert same == pytest.approx(bounds.last_iterate_bound(1.0, 0.01, 5, 30, 2.0, 3.0, 0.5))


def test_averaging_clients_helps_against_the_noise_and_not_against_the_drift():
    alone, many = (bounds.noise_term(0.01, 10, 4, 2.0, 3.0, clients=clients) for clients in (1, 8))
    drift = 5 * 0.01**2 * 10 * 4 * 4 * 3
    assert (many - drift) / (alone - drift) == pytest.approx(1 / 8)


# -- shuffling without noise -------------------------------------------------------------------------------------------


def gap(order, targets, L, eta, epochs, rng):
    """``G(x) - G(x*)`` of ``(L/2)(x - b_i)^2`` after K epochs from 1, mean over 40 draws where order is random."""
    n, q = len(targets), 1 - eta * L
    weights = eta * L * q ** np.arange(n)[::-1]
    optimum, found = targets.mean(), []
    for _ in range(1 if order == "ig" else 40):
        x, once = 1.0, rng.permutation(n)
        for _ in range(epochs):
            sequence = {"ig": np.arange(n), "so": once, "rr": rng.permutation(n)}[order]
            x = q**n * x + weights @ targets[sequence]
        found.append(L / 2 * (x - optimum) ** 2)
    return float(np.mean(found))


@pytest.mark.parametrize("order", ["ig", "so", "rr"])
@pytest.mark.parametrize("epochs", [3, 30, 300])
def test_every_order_stays_below_the_bound(order, epochs):
    n, L = 20, 2.0
    targets = np.repeat([-1.0, 1.0], n // 2)
    variance = L**2  # at x* = 0
    for eta in (bounds.largest_step(n, epochs, L, L), bounds.best_step(1.0, n, epochs, variance, L, L)):
        found = gap(order, targets, L, eta, epochs, np.random.default_rng(4))
        assert 0 < found <= bounds.last_iterate_bound(1.0, eta, n, epochs, variance, L)


def test_fresh_orders_are_better_than_one_random_order_and_that_than_a_bad_one():
    targets, L = np.repeat([-1.0, 1.0], 50), 1.0
    gaps = [gap(order, targets, L, 0.2 / 100, 300, np.random.default_rng(5)) for order in ("ig", "so", "rr")]
    assert gaps[0] > 3 * gaps[1]
    assert gaps[1] > 3 * gaps[2]


def test_the_fixed_point_of_sorted_data_is_known():
    targets, L, eta = np.repeat([-1.0, 1.0], 5), 1.0, 0.03
    half = (1 - eta * L) ** 5
    fixed = (1 - half) / (1 + half)
    assert gap("ig", targets, L, eta, 2000, np.random.default_rng(0)) == pytest.approx(L / 2 * fixed**2, rel=1e-10)


@pytest.mark.parametrize("epochs", [10, 1000, 100_000])
def test_the_best_step_minimizes_the_bound(epochs):
    distance, n, variance, L = 2.0, 50, 30.0, 1.5

    def bound(log_step):
        return bounds.last_iterate_bound(distance, math.exp(log_step), n, epochs, variance, L)

    cap = bounds.largest_step(n, epochs, L, L)
    found = minimize_scalar(
        bound, bounds=(math.log(cap) - 15, math.log(cap)), method="bounded", options={"xatol": 1e-9}
    )
    step = bounds.best_step(distance, n, epochs, variance, L, L)
    assert step <= cap
    assert bound(math.log(step)) == pytest.approx(found.fun, rel=1e-6)
    if step < cap:
        rate = (distance**4 * variance * L * (1 + math.log(epochs))) ** (1 / 3) / epochs ** (2 / 3)
        assert bound(math.log(step)) == pytest.approx(1.5 * 20 ** (1 / 3) * rate, rel=1e-9)
    else:
        assert epochs == 10
    assert bounds.best_step(distance, n, epochs, 0.0, L, L) == cap


# -- public data -------------------------------------------------------------------------------------------------------


def test_the_dissimilarity_of_means_by_counting():
    rng = np.random.default_rng(6)
    private, public = rng.normal(size=(9, 3)), rng.normal(0.5, 2, size=(4, 3))
    draws = np.array([rng.permutation(9)[:4] for _ in range(40_000)])
    sums = np.cumsum(private[draws] - public, axis=1)
    measured = np.square(sums).sum(axis=2)
    deviation = measured.std(axis=0) / len(draws) ** 0.5
    assert (np.abs(measured.mean(axis=0) - bounds.mean_dissimilarity(private, public)) <= 4.5 * deviation).all()
    assert bounds.mean_dissimilarity(private, private)[-1] == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("shift", [0.01, 1.0])
@pytest.mark.parametrize("sigma", [0.0, 2.0])
@pytest.mark.parametrize("penalty", [0.1, 1.0])
def test_the_bound_holds_with_public_data_and_noise(shift, sigma, penalty):
    """Mean estimation with ``psi = penalty/2 |x|^2``: the surrogate differs by a constant gradient, so L_H = 0."""
    rng = np.random.default_rng(7)
    n, n_d, d, epochs, runs = 20, 12, 5, 15, 400
    private = rng.normal(1.0, 1.0, (n, d))
    public = rng.normal(1.0 + shift, 1.0, (n - n_d, d))
    eta = bounds.largest_step(n, epochs, 1.0, 1.0)
    x = np.zeros((runs, d))
    for _ in range(epochs):
        order = rng.permuted(np.tile(np.arange(n), (runs, 1)), axis=1)
        for i in range(n):
            record = private[order[:, i]] if i < n_d else public[i - n_d]
            x -= eta * (x - record + sigma * rng.standard_normal((runs, d)))
        x /= 1 + n * eta * penalty
    optimum = private.mean(axis=0) / (1 + penalty)
    measured = (1 + penalty) / 2 * np.square(x - optimum).sum(axis=1).mean()
    added = bounds.noise_term(eta, n, d, sigma, 1.0) + bounds.surrogate_term(
        eta, n, bounds.mean_dissimilarity(private, public), 1.0, penalty
    )
    variance = np.square(optimum - private).sum(axis=1).mean()
    bound = bounds.last_iterate_bound(float(np.linalg.norm(optimum)), eta, n, epochs, variance, 1.0, added)
    assert 0 < measured <= bound


def test_no_public_data_adds_nothing():
    assert bounds.surrogate_term(0.1, 10, [], 1.0, 1.0) == 0
