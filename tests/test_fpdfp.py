"""FPDFP against closed forms and optimality conditions."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from scipy.optimize import lsq_linear

from hpcfed.algorithms.fpdfp import Fpdfp, FpdfpState
from hpcfed.compressors.qsgd import Qsgd
from hpcfed.errors import ConfigError
from hpcfed.federation import Federation
from hpcfed.lipschitz import check_step, lipschitz_constant
from hpcfed.streams import Streams


@dataclass(frozen=True)
class Norm:
    """``mu |B x|_1`` for a matrix B, in float64."""

    matrix: np.ndarray
    mu: float

    @property
    def identity(self) -> bool:
        return np.array_equal(self.matrix, np.eye(len(self.matrix)))

    @property
    def norm_bound(self) -> float:
        return float(np.linalg.norm(self.matrix, 2) ** 2)

    def apply(self, x: np.ndarray) -> np.ndarray:
        return self.matrix @ x

    def adjoint(self, v: np.ndarray) -> np.ndarray:
        return self.matrix.T @ v

    def dual_prox(self, v: np.ndarray) -> np.ndarray:
        return np.clip(v, -self.mu, self.mu)

    def value(self, x: np.ndarray) -> float:
        return float(self.mu * np.abs(self.matrix @ x).sum())

    def project(self, x: np.ndarray) -> np.ndarray:
        return x

    def step(self, x: Any, v: Any, gradient: Any, gamma: float, lam: float) -> tuple[Any, Any]:
        ahead = x - gamma * gradient
        dual = self.dual_prox(lam / gamma * self.apply(ahead - gamma * self.adjoint(v)) + v)
        return ahead - gamma * self.adjoint(dual) - x, dual


@dataclass(frozen=True)
class Denoising:
    """``f_i(x) = 1/2 |x - b_i|^2``."""

    target: np.ndarray
    regularizer: Norm

    def value(self, x: np.ndarray) -> float:
        return float(np.sum((x - self.target) ** 2) / 2)

    def gradient(self, x: np.ndarray, rng: Any = None, batch: Any = None) -> np.ndarray:
        return x - self.target

    def curvature(self, direction: np.ndarray) -> np.ndarray:
        return direction


def federation(targets: list[np.ndarray], regularizer: Norm, **options: Any) -> Federation:
    fed = Federation(len(targets), Streams(0), **options)
    return fed.build(lambda client, rng: Denoising(np.asarray(targets[client], float), regularizer))


def solve(method: Fpdfp, fed: Federation, rounds: int, size: int) -> FpdfpState:
    state = method.init(fed, np.zeros(size))
    for number in range(1, rounds + 1):
        state = method.round(state, fed.at(number))
    return state


DIFFERENCE = np.array([[-1.0, 1.0]])


def fused(size: int) -> np.ndarray:
    return np.vstack([np.diff(np.eye(size), axis=0), np.eye(size)])


def test_two_points_far_apart_move_towards_each_other_by_mu():
    b, mu = np.array([0.0, 3.0]), 0.4
    state = solve(Fpdfp(lam=0.49), federation([b], Norm(DIFFERENCE, mu)), 200, 2)
    np.testing.assert_allclose(state.x, [0.4, 2.6], atol=1e-12)
    np.testing.assert_allclose(np.abs(state.v), mu, atol=1e-12)


def test_two_points_near_each_other_become_their_mean():
    b = np.array([1.0, 1.5])
    state = solve(Fpdfp(lam=0.4, step="0.9"), federation([b], Norm(DIFFERENCE, 0.4)), 200, 2)
    np.testing.assert_allclose(state.x, 1.25, atol=1e-12)
    np.testing.assert_allclose(state.v, (b[1] - b[0]) / 2, atol=1e-12)


@pytest.mark.parametrize("gamma", [0.05, 0.7])
def test_a_step_with_the_identity_is_a_proximal_gradient_step(gamma):
    rng = np.random.default_rng(1)
    b, x, mu = rng.normal(size=6), rng.normal(size=6), 0.3
    fed = federation([b], Norm(np.eye(6), mu))
    method = Fpdfp(lam=1.0, step=str(gamma))
    after = method.round(FpdfpState(x, rng.normal(size=6), gamma), fed.at(1))
    ahead = x - gamma * (x - b)
    expected = np.sign(ahead) * np.maximum(np.abs(ahead) - gamma * mu, 0)
    np.testing.assert_allclose(after.x, expected, atol=1e-15)


def test_the_solution_does_not_depend_on_the_step():
    rng = np.random.default_rng(2)
    fed = federation([rng.normal(size=8)], Norm(fused(8), 0.2))
    method = Fpdfp(lam=0.19, step="1.0")
    state = solve(method, fed, 1500, 8)
    moved = method.round(replace(state, step=0.3), fed.at(1))
    np.testing.assert_allclose(moved.x, state.x, atol=1e-14)
    np.testing.assert_allclose(moved.v, state.v, atol=1e-14)


def test_fused_lasso_is_the_thresholded_variation_and_the_box_problem():
    rng = np.random.default_rng(3)
    b, mu = rng.normal(size=10), 0.25
    variation = solve(Fpdfp(lam=0.24, step="1.0"), federation([b], Norm(np.diff(np.eye(10), axis=0), mu)), 1500, 10)
    both = solve(Fpdfp(lam=0.19, step="1.0"), federation([b], Norm(fused(10), mu)), 1500, 10)
    np.testing.assert_allclose(both.x, np.sign(variation.x) * np.maximum(np.abs(variation.x) - mu, 0), atol=1e-12)
    box = lsq_linear(fused(10).T, b, bounds=(-mu, mu), tol=1e-14)
    np.testing.assert_allclose(both.x, b - fused(10).T @ box.x, atol=1e-4)


@pytest.mark.parametrize("lengths", [(3, 5), (6, 2)])
@pytest.mark.parametrize("mu", [0.3, 4.0])
def test_a_step_signal_is_flattened_by_mu_over_its_lengths(lengths, mu):
    first, second = lengths
    height = 1.0
    b = np.concatenate([np.zeros(first), np.full(second, height)])
    state = solve(Fpdfp(lam=0.24, step="1.0"), federation([b], Norm(np.diff(np.eye(b.size), axis=0), mu)), 1500, b.size)
    if mu * (1 / first + 1 / second) < height:
        expected = np.concatenate([np.full(first, mu / first), np.full(second, height - mu / second)])
    else:
        expected = np.full(b.size, b.mean())
    np.testing.assert_allclose(state.x, expected, atol=1e-8)


def test_optimality_conditions_of_the_limit():
    rng = np.random.default_rng(4)
    regularizer = Norm(rng.normal(size=(9, 6)), 0.3)
    b = rng.normal(size=6)
    lam = 0.99 / regularizer.norm_bound
    state = solve(Fpdfp(lam=lam, step="1.0"), federation([b] * 3, regularizer), 1500, 6)
    np.testing.assert_allclose(state.x - b + regularizer.adjoint(state.v), 0, atol=1e-12)
    assert np.abs(state.v).max() <= 0.3 + 1e-12
    image = regularizer.apply(state.x)
    firm = np.abs(image) > 1e-6
    assert firm.any()
    np.testing.assert_allclose(state.v[firm], 0.3 * np.sign(image[firm]), atol=1e-9)
    primal = np.sum((state.x - b) ** 2) / 2 + regularizer.value(state.x)
    dual = np.sum(b**2) / 2 - np.sum((b - regularizer.adjoint(state.v)) ** 2) / 2
    assert primal - dual == pytest.approx(0, abs=1e-10)


def test_equal_clients_with_any_cohort_are_one_client():
    b = np.random.default_rng(5).normal(size=8)
    regularizer = Norm(fused(8), 0.2)
    alone = solve(Fpdfp(lam=0.19, step="1.0"), federation([b], regularizer), 50, 8)
    many = solve(Fpdfp(lam=0.19, step="1.0", participants=3), federation([b] * 7, regularizer), 50, 8)
    np.testing.assert_allclose(many.x, alone.x, atol=1e-13)


def test_unequal_clients_reach_the_solution_with_a_decaying_step():
    """The mean of nonlinear steps is off by O(step): a constant step stops away, a decaying one does not."""
    rng = np.random.default_rng(6)
    targets = [rng.normal(size=5) * 2 for _ in range(6)]
    mu = 0.5
    mean = np.mean(targets, axis=0)
    exact = np.sign(mean) * np.maximum(np.abs(mean) - mu, 0)
    fed = federation(targets, Norm(np.eye(5), mu))
    errors = {
        name: np.abs(solve(method, fed, 600, 5).x - exact).max()
        for name, method in {
            "twice": Fpdfp(lam=1.0, step="0.05"),
            "once": Fpdfp(lam=1.0, step="0.025"),
            "decaying": Fpdfp(lam=1.0, step="0.9", step_decay=1.0),
        }.items()
    }
    assert errors["twice"] > 1e-3
    assert errors["once"] < 0.75 * errors["twice"]
    assert errors["decaying"] < 0.1 * errors["twice"]


def test_quantized_difference_is_exact_and_quantized_value_is_not():
    b = np.random.default_rng(7).normal(size=12)
    regularizer = Norm(fused(12), 0.2)
    exact = solve(Fpdfp(lam=0.19, step="1.0"), federation([b], regularizer), 1500, 12).x
    fed = federation([b] * 4, regularizer, compressor=Qsgd(quantize=20))
    value = solve(Fpdfp(lam=0.19, step="0.5"), fed, 600, 12)
    difference = solve(Fpdfp(lam=0.19, step="0.5", quantize_dual="difference"), fed, 600, 12)
    assert np.linalg.norm(difference.x - exact) < 1e-6
    assert np.linalg.norm(value.x - exact) > 1e-4


def test_quantization_error_shrinks_with_levels_and_with_the_step():
    b = np.random.default_rng(8).normal(size=12)
    regularizer = Norm(fused(12), 0.2)
    exact = solve(Fpdfp(lam=0.19, step="1.0"), federation([b], regularizer), 1500, 12).x

    def error(levels: int, step: str) -> float:
        fed = federation([b] * 4, regularizer, compressor=Qsgd(quantize=levels))
        method = Fpdfp(lam=0.19, step=step)
        state, errors = method.init(fed, exact), []
        for number in range(1, 801):
            state = method.round(state, fed.at(number))
            errors.append(np.sum((state.x - exact) ** 2))
        return float(np.sqrt(np.mean(errors[200:])))

    coarse, fine, slow = error(5, "0.5"), error(50, "0.5"), error(5, "0.05")
    assert fine < coarse / 5
    assert slow < coarse / 3


def test_lam_above_the_bound_is_refused():
    with pytest.raises(ConfigError, match=r"--lam 0.6 exceeds .* = 0.5"):
        Fpdfp(lam=0.6).init(federation([np.zeros(2)], Norm(DIFFERENCE, 1.0)), np.zeros(2))


@pytest.mark.parametrize("text", ["0", "-1", "x", "nan", "inf", "1/l", "2/", "1/L/2", ""])
def test_bad_steps_are_refused(text):
    with pytest.raises(ConfigError, match="--step"):
        Fpdfp(step=text)


@pytest.mark.parametrize(("text", "meaning"), [("auto", (1.0, True)), ("1.9/L", (1.9, True)), ("0.25", (0.25, False))])
def test_steps_are_understood(text, meaning):
    assert check_step(text) == meaning


@dataclass(frozen=True)
class Quadratic:
    """A client with a given curvature matrix."""

    matrix: np.ndarray

    def curvature(self, direction: np.ndarray) -> np.ndarray:
        return self.matrix @ direction


def test_lipschitz_constant_is_the_largest_eigenvalue():
    rng = np.random.default_rng(9)
    matrices = [(lambda a: a @ a.T)(rng.normal(size=(7, 3))) for _ in range(4)]
    fed = Federation(4).build(lambda client, _: Quadratic(matrices[client]))
    mean = np.linalg.eigvalsh(np.mean(matrices, axis=0))[-1]
    largest = max(np.linalg.eigvalsh(matrix)[-1] for matrix in matrices)
    like = np.zeros(7)
    assert lipschitz_constant(fed, like, tolerance=1e-10, most_steps=500) == pytest.approx(mean, rel=1e-6)
    assert lipschitz_constant(fed, like, each=True, tolerance=1e-10, most_steps=500) == pytest.approx(largest, rel=1e-6)
    assert fed.ledger.traffic["wire_bytes_up"] == 0
