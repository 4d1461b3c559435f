"""FedDualAvg against closed forms, and against the method written out for one process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy.optimize import minimize
from test_fedavg import LeastSquares, federation, least_squares, pooled, solve
from test_fedmid import L1, MU, B, Ridge, denoising, soft

from hpcfed.algorithms.feddualavg import FedDualAvg
from hpcfed.compressors.qsgd import Qsgd


@pytest.mark.parametrize("local_steps", [1, 3, 10])
@pytest.mark.parametrize("server_step", [0.5, 1.0])
def test_equal_clients_are_exact_with_any_number_of_local_steps(local_steps, server_step):
    method = FedDualAvg(local_steps=local_steps, step="0.3", server_step=server_step)
    state = solve(method, denoising([B] * 3, L1(MU)), 300, np.ones(5))
    np.testing.assert_allclose(state.x, soft(B, MU), atol=1e-11)
    assert (state.x[-2:] == 0).all()


def lasso(clients: list[LeastSquares], mu: float) -> np.ndarray:
    """``argmin mean f_i + mu |x|_1`` by a bounded quasi-Newton method on the positive and negative parts of x."""
    size = clients[0].matrix.shape[1]
    hessian = np.mean([client.hessian for client in clients], axis=0)
    slope = hessian @ pooled(clients)

    def split(parts: np.ndarray) -> tuple[float, np.ndarray]:
        x = parts[:size] - parts[size:]
        gradient = hessian @ x - slope
        return x @ hessian @ x / 2 - slope @ x + mu * parts.sum(), np.concatenate([gradient, -gradient]) + mu

    options = {"ftol": 1e-16, "gtol": 1e-12, "maxiter": 10000}
    bounds = [(0, None)] * (2 * size)
    found = minimize(split, np.ones(2 * size), jac=True, bounds=bounds, method="L-BFGS-B", options=options).x
    return found[:size] - found[size:]


LASSO = [replace(client, regularizer=L1(0.7)) for client in least_squares(5, size=6, seed=3)]


def test_unequal_clients_are_exact_with_one_local_step():
    state = solve(FedDualAvg(local_steps=1), federation(LASSO), 1000, np.zeros(6))
    exact = lasso(LASSO, 0.7)
    assert 0 < np.sum(exact == 0) < 6
    np.testing.assert_allclose(state.x, exact, atol=1e-6)
    np.testing.assert_array_equal(state.x == 0, exact == 0)


def test_unequal_clients_drift_by_the_step_with_many_local_steps():
    fed, exact = federation(LASSO), lasso(LASSO, 0.7)

    def error(**options: Any) -> float:
        return float(np.abs(solve(FedDualAvg(local_steps=10, **options), fed, 300, np.zeros(6)).x - exact).max())

    large, twice, once = error(step="0.02"), error(step="0.004"), error(step="0.002")
    assert large > 2 * twice
    assert once == pytest.approx(twice / 2, rel=0.3)
    assert error(step="0.02", step_decay=10.0) < large / 10


def test_a_ridge_by_its_proximal_map():
    mu = 0.5
    clients = [replace(client, regularizer=Ridge(mu)) for client in least_squares(4)]
    state = solve(FedDualAvg(local_steps=1), federation(clients), 3000, np.zeros(4))
    stacked = np.vstack([client.matrix for client in clients])
    b = np.concatenate([client.target for client in clients])
    exact = np.linalg.solve(stacked.T @ stacked / 4 + mu * np.eye(4), stacked.T @ b / 4)
    np.testing.assert_allclose(state.x, exact, atol=1e-6)


def test_it_is_the_method_as_written_for_one_process():
    """Constant rates: the client's map at local step j of round r (from 0) has weight ``(eta r K + j) gamma``."""
    rng = np.random.default_rng(5)
    targets = [rng.normal(size=6) for _ in range(3)]
    gamma, eta, steps, start = 0.2, 0.7, 4, rng.normal(size=6)
    z = start
    for r in range(12):
        ends = []
        for b in targets:
            own = z
            for j in range(steps):
                own = own - gamma * (soft(own, (eta * r * steps + j) * gamma * MU) - b)
            ends.append(own)
        z = z + eta * (np.mean(ends, axis=0) - z)
    method = FedDualAvg(local_steps=steps, step=str(gamma), server_step=eta)
    state = solve(method, denoising(targets, L1(MU)), 12, start)
    np.testing.assert_allclose(state.z, z, atol=1e-12)
    np.testing.assert_allclose(state.x, soft(z, 12 * eta * gamma * steps * MU), atol=1e-12)


def test_schedules_add_up():
    method = FedDualAvg(local_steps=3, step="0.4", step_decay=2, server_step=0.8, server_step_decay=5)
    state = solve(method, denoising([B], L1(MU)), 4, 0 * B)
    assert state.travelled == pytest.approx(sum(3 * 0.4 / (1 + k / 2) * 0.8 / (1 + k / 5) for k in range(4)))
    np.testing.assert_allclose(state.x, soft(state.z, state.travelled * MU), atol=1e-13)


def test_the_start_is_not_thresholded():
    """The map of the first local step has weight 0: the first gradient is taken at the start itself."""
    start = np.full(5, 0.01)
    state = solve(FedDualAvg(local_steps=1, step="0.5"), denoising([B], L1(MU)), 1, start)
    np.testing.assert_allclose(state.z, start - 0.5 * (start - B), atol=1e-15)
    np.testing.assert_array_equal(FedDualAvg().init(denoising([B], L1(MU)), start).x, start)


def test_with_the_server_alone():
    """One local step: the same bits. K steps from x move by ``1 - (1 - gamma)^K``, z's threshold by ``K gamma``."""
    fed = denoising([B, B + 1], L1(MU))
    both, alone = (
        solve(FedDualAvg(local_steps=1, step="0.3", client_prox=prox), fed, 30, 0 * B) for prox in (True, False)
    )
    assert both.z.tobytes() == alone.z.tobytes()
    gamma, steps = 0.3, 4
    state = solve(
        FedDualAvg(local_steps=steps, step=str(gamma), client_prox=False), denoising([B] * 2, L1(MU)), 300, 0 * B
    )
    np.testing.assert_allclose(state.x, soft(B, MU * gamma * steps / (1 - (1 - gamma) ** steps)), atol=1e-11)


def test_a_long_run_in_single_precision_loses_nothing():
    """At z near 2^26 float32 has a spacing of 8; the solution 0.3 must stay."""
    far = float(1 << 26)
    fed = denoising([np.array([1.3])], L1(1.0))
    method = FedDualAvg(local_steps=2, step="0.25")
    state = method.init(fed, np.array([0.3], np.float32))
    assert state.z.dtype == np.float64
    state = replace(state, z=np.array([far + 0.3]), travelled=far)
    for number in range(1, 101):
        state = method.round(state, fed.at(number))
    assert (state.x.dtype, state.z.dtype) == (np.float32, np.float64)
    np.testing.assert_allclose(state.x, 0.3, atol=1e-6)


def test_messages_have_the_models_type():
    fed = denoising([B] * 2, L1(MU))
    solve(FedDualAvg(step="0.1"), fed, 1, np.zeros(5, np.float32))
    assert fed.ledger.traffic["wire_bytes_down"] == 4 * B.size


def test_equal_clients_with_any_cohort_are_one_client():
    alone = solve(FedDualAvg(), denoising([B], L1(MU)), 30, 0 * B)
    many = solve(FedDualAvg(participants=3), denoising([B] * 7, L1(MU)), 30, 0 * B)
    np.testing.assert_allclose(many.z, alone.z, atol=1e-12)


def test_weights_are_numbers_of_samples():
    targets = [B, 2 * B + 3]
    fed = denoising(targets, L1(MU), weights=(3.0, 1.0))
    state = solve(FedDualAvg(local_steps=1, step="0.5", weighted=True), fed, 300, 0 * B)
    np.testing.assert_allclose(state.x, soft(np.average(targets, axis=0, weights=(3, 1)), MU), atol=1e-11)


def test_quantized_messages_are_right_in_the_mean():
    fed = denoising([B, 2 * B], L1(MU), compressor=Qsgd(quantize=3))
    method = FedDualAvg(local_steps=2, step="0.2")
    state = method.init(fed, 0 * B)
    exact = method.round(state, denoising([B, 2 * B], L1(MU)).at(1)).z
    found = np.array([method.round(state, fed.at(number)).z for number in range(1, 601)])
    error = found.std(axis=0, ddof=1) / np.sqrt(600)
    assert error.max() > 0
    assert (np.abs(found.mean(axis=0) - exact) <= 6 * error + 1e-15).all()


def test_a_round_is_pure():
    fed = federation([LeastSquares(np.eye(5), k * B, 0.0, L1(MU)) for k in range(1, 4)])
    method = FedDualAvg(participants=2, batch=2, step="0.1")
    state = solve(method, fed, 3, np.zeros(5, np.float32))
    kept = (state.x.tobytes(), state.z.tobytes())
    after = method.round(state, fed.at(4))
    assert (state.x.tobytes(), state.z.tobytes()) == kept
    assert method.round(state, fed.at(4)).z.tobytes() == after.z.tobytes()
