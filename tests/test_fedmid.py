"""FedMiD against the closed forms of its fixed points."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from test_fedavg import LeastSquares, federation, least_squares, solve

from hpcfed.algorithms.fedmid import FedMid
from hpcfed.capabilities import Proximal
from hpcfed.compressors.qsgd import Qsgd
from hpcfed.errors import ConfigError


@dataclass(frozen=True)
class L1:
    """``psi(x) = mu |x|_1``."""

    mu: float

    def value(self, x: np.ndarray) -> float:
        return float(self.mu * np.abs(x).sum())

    def prox(self, x: np.ndarray, weight: float) -> np.ndarray:
        return soft(x, weight * self.mu)


@dataclass(frozen=True)
class Ridge:
    """``psi(x) = mu/2 |x|^2``."""

    mu: float

    def value(self, x: np.ndarray) -> float:
        return float(self.mu / 2 * np.sum(x**2))

    def prox(self, x: np.ndarray, weight: float) -> np.ndarray:
        return x / (1 + weight * self.mu)


def soft(x: np.ndarray, threshold: float) -> np.ndarray:
    return np.sign(x) * np.maximum(np.abs(x) - threshold, 0)


def denoising(targets: list[Any], regularizer: Any, **options: Any) -> Any:
    """Clients with ``f_i(x) = 1/2 |x - b_i|^2``."""
    return federation([LeastSquares(np.eye(len(b)), np.asarray(b), 0.0, regularizer) for b in targets], **options)


MU = 0.5
B = np.array([3.0, -1.3, 0.8, 0.3, -0.2])


def test_the_client_can_what_it_needs():
    assert isinstance(denoising([B], L1(MU)).any_client, Proximal)


@pytest.mark.parametrize("server_step", [0.5, 1.0, 1.5])
def test_with_both_maps_it_regularizes_twice(server_step):
    state = solve(FedMid(local_steps=1, step="0.5", server_step=server_step), denoising([B] * 3, L1(MU)), 300, 0 * B)
    np.testing.assert_allclose(state.x, soft(B, 2 * MU), atol=1e-12)


@pytest.mark.parametrize("only", [{"client_prox": False}, {"server_prox": False}])
@pytest.mark.parametrize("server_step", [0.5, 1.0])
def test_with_one_map_it_regularizes_once(only, server_step):
    method = FedMid(local_steps=1, step="0.5", server_step=server_step, **only)
    state = solve(method, denoising([B] * 3, L1(MU)), 300, 0 * B)
    np.testing.assert_allclose(state.x, soft(B, MU), atol=1e-12)


@pytest.mark.parametrize("server_step", [0.5, 1.0])
def test_local_steps_inflate_the_threshold_of_the_server_alone(server_step):
    """K steps move by ``1 - (1 - gamma)^K`` towards b, but the server's threshold is that of ``K gamma``."""
    gamma, steps = 0.3, 4
    method = FedMid(local_steps=steps, step=str(gamma), server_step=server_step, client_prox=False)
    state = solve(method, denoising([B] * 3, L1(MU)), 300, 0 * B)
    inflation = gamma * steps / (1 - (1 - gamma) ** steps)
    np.testing.assert_allclose(state.x, soft(B, MU * inflation), atol=1e-12)


def test_many_local_steps_end_in_the_mean_of_the_clients_own_solutions():
    """The curse of primal averaging: zeros of single clients are lost, and it is not the solution."""
    targets = [B, -0.3 * B, np.roll(B, 1)]
    state = solve(FedMid(local_steps=60, step="0.5", server_prox=False), denoising(targets, L1(MU)), 2, 0 * B)
    np.testing.assert_allclose(state.x, np.mean([soft(b, MU) for b in targets], axis=0), atol=1e-12)
    assert np.abs(state.x - soft(np.mean(targets, axis=0), MU)).max() > 0.1


def test_a_ridge_by_its_proximal_map():
    (client,) = least_squares(1)
    mu = 0.7
    fed = federation([LeastSquares(client.matrix, client.target, 0.0, Ridge(mu))] * 3)
    state = solve(FedMid(local_steps=1, server_prox=False), fed, 400, np.zeros(4))
    exact = np.linalg.solve(client.hessian + mu * np.eye(4), client.matrix.T @ client.target)
    np.testing.assert_allclose(state.x, exact, atol=1e-12)


def test_unequal_clients_err_by_the_step_and_a_decaying_step_removes_it():
    rng = np.random.default_rng(1)
    targets = [2 * rng.normal(size=5) for _ in range(6)]
    fed, exact = denoising(targets, L1(MU)), soft(np.mean(targets, axis=0), MU)

    def error(**options: Any) -> float:
        state = solve(FedMid(local_steps=1, server_prox=False, **options), fed, 1000, np.zeros(5))
        return float(np.abs(state.x - exact).max())

    twice, once = error(step="0.02"), error(step="0.01")
    assert twice > 1e-3
    assert once == pytest.approx(twice / 2, rel=0.25)
    assert error(step="0.9", step_decay=1.0) < twice / 5


def test_the_rates_of_each_round_are_the_schedules():
    """One coordinate, ``f = 1/2 x^2``, far from zero: every step can be followed by hand."""
    method = FedMid(local_steps=2, step="0.5", step_decay=2, server_step=0.8, server_step_decay=4)
    state = solve(method, denoising([np.zeros(1)], L1(0.01)), 3, np.full(1, 100.0))
    x = 100.0
    for k in range(3):
        gamma, eta, w = 0.5 / (1 + k / 2), 0.8 / (1 + k / 4), x
        for _ in range(2):
            w = (1 - gamma) * w - gamma * 0.01
        x = x + eta * (w - x) - eta * gamma * 2 * 0.01
    np.testing.assert_allclose(state.x, x, rtol=1e-13)


def test_equal_clients_with_any_cohort_are_one_client():
    alone = solve(FedMid(), denoising([B], L1(MU)), 30, 0 * B)
    many = solve(FedMid(participants=3), denoising([B] * 7, L1(MU)), 30, 0 * B)
    np.testing.assert_allclose(many.x, alone.x, atol=1e-13)


def test_quantized_changes_of_equal_clients_vanish_with_the_error_unless_the_server_takes_them_back():
    """With both maps the clients' changes do not vanish at the fixed point, and neither does the rounding."""
    fed = denoising([B] * 4, L1(MU), compressor=Qsgd(quantize=20))
    once = solve(FedMid(local_steps=1, step="0.5", server_prox=False), fed, 200, 0 * B)
    np.testing.assert_allclose(once.x, soft(B, MU), atol=1e-7)
    both = solve(FedMid(local_steps=1, step="0.5"), fed, 200, 0 * B)
    assert 1e-5 < np.abs(both.x - soft(B, 2 * MU)).max() < 0.1


def test_weights_are_numbers_of_samples():
    targets = [B, 2 * B + 3]
    fed = denoising(targets, L1(MU), weights=(3.0, 1.0))
    state = solve(FedMid(local_steps=1, step="0.5", client_prox=False, weighted=True), fed, 300, 0 * B)
    np.testing.assert_allclose(state.x, soft(np.average(targets, axis=0, weights=(3, 1)), MU), atol=1e-12)


def test_a_round_is_pure_and_keeps_the_models_type():
    fed = denoising([B, 2 * B, 3 * B], L1(MU))
    method = FedMid(participants=2, batch=2, step="0.1")
    state = solve(method, fed, 3, np.zeros(5, np.float32))
    kept = state.x.tobytes()
    after = method.round(state, fed.at(4))
    assert state.x.tobytes() == kept
    assert after.x.dtype == np.float32
    assert method.round(state, fed.at(4)).x.tobytes() == after.x.tobytes()


def test_one_of_the_maps_must_stay():
    with pytest.raises(ConfigError, match=r"--no-client-prox with --no-server-prox"):
        FedMid(client_prox=False, server_prox=False)
