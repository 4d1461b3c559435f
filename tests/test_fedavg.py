"""FedAvg and FedPAQ against closed forms."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from hpcfed.algorithms.fedavg import FedAvg
from hpcfed.compressors.qsgd import Qsgd
from hpcfed.errors import ConfigError
from hpcfed.federation import Federation
from hpcfed.streams import Streams


@dataclass(frozen=True)
class LeastSquares:
    """``f_i(x) = 1/2 |A x - b|^2 + ridge/2 |x|^2``; ``asked`` notes each batch that is drawn."""

    matrix: np.ndarray
    target: np.ndarray
    ridge: float = 0.0
    regularizer: Any = None
    asked: list[Any] = field(default_factory=list)

    def value(self, x: np.ndarray) -> float:
        return float(np.sum((self.matrix @ x - self.target) ** 2) / 2 + self.ridge / 2 * np.sum(x**2))

    def gradient(self, x: np.ndarray, rng: Any = None, batch: int | None = None) -> np.ndarray:
        total = len(self.target)
        rows = np.arange(total) if batch is None else rng.choice(total, batch, replace=False)
        self.asked.append(rows)
        matrix = self.matrix[rows]
        slope = total / len(rows) * matrix.T @ (matrix @ x - self.target[rows]) + self.ridge * x
        return slope.astype(x.dtype)

    def curvature(self, direction: np.ndarray) -> np.ndarray:
        return self.matrix.T @ (self.matrix @ direction) + self.ridge * direction

    @property
    def hessian(self) -> np.ndarray:
        return self.matrix.T @ self.matrix + self.ridge * np.eye(self.matrix.shape[1])

    @property
    def minimizer(self) -> np.ndarray:
        return np.linalg.solve(self.hessian, self.matrix.T @ self.target)


def federation(clients: list[Any], **options: Any) -> Federation:
    return Federation(len(clients), Streams(0), **options).build(lambda client, rng: clients[client])


def least_squares(number: int, size: int = 4, ridge: float = 0.0, seed: int = 0) -> list[LeastSquares]:
    rng = np.random.default_rng(seed)
    return [LeastSquares(rng.normal(size=(7, size)), rng.normal(size=7), ridge) for _ in range(number)]


def solve(method: Any, fed: Federation, rounds: int, start: np.ndarray) -> Any:
    state = method.init(fed.at(0), start)
    for number in range(1, rounds + 1):
        state = method.round(state, fed.at(number))
    return state


def pooled(clients: list[LeastSquares]) -> np.ndarray:
    """The minimizer of the mean."""
    slopes = [client.matrix.T @ client.target for client in clients]
    return np.linalg.solve(sum(client.hessian for client in clients), sum(slopes))


def test_one_local_step_solves_ridge_regression():
    mu, count = 0.7, 5
    clients = least_squares(count, ridge=mu / count)
    stacked = np.vstack([client.matrix for client in clients])
    b = np.concatenate([client.target for client in clients])
    exact = np.linalg.solve(stacked.T @ stacked + mu * np.eye(4), stacked.T @ b)
    state = solve(FedAvg(local_steps=1), federation(clients), 200, np.zeros(4))
    np.testing.assert_allclose(state.x, exact, atol=1e-12)


def test_one_local_step_is_gradient_descent():
    clients = least_squares(3)
    x = start = np.ones(4)
    for _ in range(20):
        x = x - 0.05 * np.mean([client.hessian @ (x - client.minimizer) for client in clients], axis=0)
    state = solve(FedAvg(local_steps=1, step="0.05"), federation(clients), 20, start)
    np.testing.assert_allclose(state.x, x, atol=1e-13)


@pytest.mark.parametrize("local_steps", [2, 10])
def test_unequal_clients_stop_where_their_local_steps_balance(local_steps):
    """``sum_i (I - (I - gamma H_i)^tau) (x - b_i) = 0``, not the solution, which it nears with the step."""
    clients = least_squares(4)

    def balance(gamma: float) -> np.ndarray:
        maps = [np.eye(4) - np.linalg.matrix_power(np.eye(4) - gamma * c.hessian, local_steps) for c in clients]
        pulls = [own @ client.minimizer for own, client in zip(maps, clients, strict=True)]
        return np.linalg.solve(sum(maps), sum(pulls))

    found = solve(FedAvg(local_steps=local_steps, step="0.04"), federation(clients), 250, np.zeros(4)).x
    np.testing.assert_allclose(found, balance(0.04), atol=1e-9)
    assert np.linalg.norm(found - pooled(clients)) > 1e-3
    distances = []
    for gamma in (0.002, 0.001):
        stays = solve(FedAvg(local_steps=local_steps, step=str(gamma)), federation(clients), 5, balance(gamma)).x
        np.testing.assert_allclose(stays, balance(gamma), atol=1e-13)
        distances.append(np.linalg.norm(stays - pooled(clients)))
    assert distances[1] == pytest.approx(distances[0] / 2, rel=0.15)


def test_a_decaying_step_removes_the_drift():
    clients = least_squares(4)
    constant = solve(FedAvg(local_steps=5, step="0.02"), federation(clients), 400, np.zeros(4))
    decaying = solve(FedAvg(local_steps=5, step="0.02", step_decay=20), federation(clients), 1000, np.zeros(4))
    exact = pooled(clients)
    assert np.linalg.norm(decaying.x - exact) < np.linalg.norm(constant.x - exact) / 20


def test_the_step_of_each_round_is_the_schedules():
    """With ``f = 1/2 |x|^2`` a round multiplies x by ``(1 - gamma_k)^tau``."""
    fed = federation([LeastSquares(np.eye(2), np.zeros(2))])
    state = solve(FedAvg(local_steps=3, step="0.5", step_decay=2), fed, 4, np.ones(2))
    expected = np.prod([(1 - 0.5 / (1 + k / 2)) ** 3 for k in range(4)])
    np.testing.assert_allclose(state.x, expected, rtol=1e-12)
    assert state.step == 0.5


def test_equal_clients_with_any_cohort_are_one_client():
    (client,) = least_squares(1)
    alone = solve(FedAvg(), federation([client]), 20, np.zeros(4))
    many = solve(FedAvg(participants=3), federation([client] * 7), 20, np.zeros(4))
    np.testing.assert_allclose(many.x, alone.x, atol=1e-13)


def test_only_the_cohort_works_and_every_local_step_draws_a_batch():
    clients = least_squares(6)
    fed = federation(clients)
    FedAvg(participants=2, local_steps=8, batch=3, step="0.01").round(
        FedAvg(step="0.01").init(fed, np.zeros(4)), fed.at(1)
    )
    asked = [len(client.asked) for client in clients]
    assert sorted(asked) == [0, 0, 0, 0, 8, 8]
    busy = clients[asked.index(8)].asked
    assert all(len(set(rows)) == 3 for rows in busy)
    assert len({tuple(rows) for rows in busy}) > 1


def test_the_cohort_is_right_in_the_mean():
    """Over rounds from one state, the mean of partial rounds is the full round."""
    fed = federation(least_squares(6))
    method = FedAvg(participants=2, local_steps=3, step="0.02")
    state = method.init(fed, np.ones(4))
    full = replace(method, participants=None).round(state, fed.at(1)).x
    found = np.array([method.round(state, fed.at(number)).x for number in range(1, 401)])
    error = found.std(axis=0, ddof=1) / 20
    assert error.min() > 0
    assert (np.abs(found.mean(axis=0) - full) < 5 * error).all()


def test_weights_are_numbers_of_samples():
    clients, samples = least_squares(3), (5.0, 1.0, 2.0)
    fed = federation(clients, weights=samples)
    hessians = [n * client.hessian for n, client in zip(samples, clients, strict=True)]
    exact = np.linalg.solve(sum(hessians), sum(h @ c.minimizer for h, c in zip(hessians, clients, strict=True)))
    weighted = solve(FedAvg(local_steps=1, weighted=True), fed, 400, np.zeros(4))
    equal = solve(FedAvg(local_steps=1), fed, 400, np.zeros(4))
    np.testing.assert_allclose(weighted.x, exact, atol=1e-10)
    np.testing.assert_allclose(equal.x, pooled(clients), atol=1e-10)


def test_quantized_changes_are_right_in_the_mean_and_vary_as_they_must():
    """QSGD's exact variance ``(|c|/s)^2 sum_j {a_j}(1 - {a_j})``, ``a = s |c_j| / |c|``, over N^2 clients."""
    clients = least_squares(3, size=40)
    method = FedAvg(local_steps=2, step="0.01")
    start = np.ones(40)
    exact = method.round(method.init(federation(clients), start), federation(clients).at(1)).x
    changes = [solve(method, federation([client]), 1, start).x - start for client in clients]
    variances = []
    for levels in (2, 20):
        fed = federation(clients, compressor=Qsgd(quantize=levels))
        state = method.init(fed, start)
        found = np.array([method.round(state, fed.at(number)).x for number in range(1, 601)])
        error = found.std(axis=0, ddof=1) / np.sqrt(600)
        assert (np.abs(found.mean(axis=0) - exact) < 6 * error).all()
        variance = np.mean(np.sum((found - exact) ** 2, axis=1))
        expected = 0.0
        for change in changes:
            a = levels * np.abs(change) / np.linalg.norm(change)
            expected += np.sum((a % 1) * (1 - a % 1)) * (np.linalg.norm(change) / levels) ** 2 / len(clients) ** 2
        assert variance == pytest.approx(expected, rel=0.1)
        variances.append(variance)
    assert variances[1] < variances[0] / 5


def test_quantized_changes_of_equal_clients_vanish_with_the_error():
    clients = [*least_squares(1, size=12, ridge=1.0)] * 4
    fed = federation(clients, compressor=Qsgd(quantize=20))
    state = solve(FedAvg(local_steps=2), fed, 400, np.zeros(12))
    np.testing.assert_allclose(state.x, clients[0].minimizer, atol=1e-7)
    assert fed.ledger.traffic["paper_bits_up"] < 400 * 4 * 32 * 12


def test_auto_is_safe_where_one_client_is_far_steeper_than_the_mean():
    """The mean of 20 clients with curvature 1 and one with 100 would allow a step of 1/5.7: the one diverges there."""
    clients = [LeastSquares(np.eye(1) * np.sqrt(h), np.ones(1) * np.sqrt(h)) for h in [1.0] * 20 + [100.0]]
    fed = federation(clients)
    mean = FedAvg(local_steps=1).init(fed, np.zeros(1)).step
    assert mean == pytest.approx(1 / (120 / 21), rel=1e-2)
    for method in (FedAvg(local_steps=40), FedAvg(local_steps=1, participants=2), FedAvg(local_steps=1, weighted=True)):
        state = solve(method, fed, 50, np.full(1, 5.0))
        assert state.step == pytest.approx(1 / 100, rel=1e-2)
        assert abs(state.x[0] - 1) < 4


def test_without_a_subgradient_the_regularizer_is_left_out_and_with_one_it_is_found(
    caplog: pytest.LogCaptureFixture,
) -> None:
    b, mu = np.array([3.0, -2.0, 0.1]), 0.5

    @dataclass(frozen=True)
    class Lasso(LeastSquares):
        def subgradient(self, x: np.ndarray) -> np.ndarray:
            return mu * np.sign(x)

    caplog.set_level("INFO")
    plain = solve(FedAvg(step="0.1"), federation([LeastSquares(np.eye(3), b)] * 2), 100, np.zeros(3))
    np.testing.assert_allclose(plain.x, b, atol=1e-12)
    assert "leaves out the regularizer" in caplog.text
    caplog.clear()
    method = FedAvg(step="0.1", step_decay=5)
    found = solve(method, federation([Lasso(np.eye(3), b)] * 2), 3000, np.zeros(3))
    np.testing.assert_allclose(found.x, [2.5, -1.5, 0.0], atol=1e-3)


def test_a_round_is_pure_and_remembers_nothing():
    fed = federation(least_squares(5))
    method = FedAvg(participants=3, batch=2, step="0.01")
    state = solve(method, fed, 3, np.zeros(4, np.float32))
    kept = state.x.tobytes()
    after = method.round(state, fed.at(4))
    assert state.x.tobytes() == kept
    assert after.x.dtype == np.float32
    assert method.round(state, federation(least_squares(5)).at(4)).x.tobytes() == after.x.tobytes()
    assert method.round(state, fed.at(5)).x.tobytes() != after.x.tobytes()


def test_a_step_that_is_none_is_refused():
    with pytest.raises(ConfigError, match="--step"):
        FedAvg(step="fast")
