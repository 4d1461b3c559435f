"""`hpcfed hyperopt`: derivatives against finite differences and autograd, the hypergradient against other solvers."""

from __future__ import annotations

import json

import numpy as np
import pytest
import scipy.sparse
from scipy.optimize import approx_fprime, minimize

from hpcfed.errors import ConfigError, DataError
from hpcfed.federation import Federation
from hpcfed.streams import Streams
from hpcfed.workloads import hyperopt_hypergradient as exact
from hpcfed.workloads.hyperopt import Hyperopt, Samples
from hpcfed.workloads.hyperopt_models import ColumnRidge, Softmax, TwoLayer


def build(**options):
    workload = Hyperopt(**{"clients": 3, "hidden": 3, "first_exponent": -0.5, **options})
    return workload.build(Federation(workload.clients, Streams(3)))


def point(problem, seed=0):
    """A random (x, y) at which nothing is small, and the clients."""
    rng = np.random.default_rng(seed)
    client = problem.fed.any_client
    x, y = rng.normal(size=client.upper_size), 0.5 * rng.normal(size=client.lower_size)
    return x, y, list(problem.fed.clients.values())


LOWER = pytest.mark.parametrize("lower", ["mlp", "logistic"])


@LOWER
class TestDerivatives:
    def test_gradients_are_the_slopes_of_the_values(self, lower):
        """Central differences of length 1e-5, whose error is 1e-10 times a third derivative."""
        problem = build(lower=lower)
        x, y, clients = point(problem)
        rng = np.random.default_rng(1)
        for client in (clients[0], clients[-1]):
            for value, gradients in (
                (client.upper_value, client.upper_gradients),
                (client.lower_value, client.lower_gradients),
            ):
                in_x, in_y = gradients(x, y, None)
                for _ in range(5):
                    dx, dy = rng.normal(size=x.size), rng.normal(size=y.size)
                    up, down = (value(x + h * dx, y + h * dy) for h in (1e-5, -1e-5))
                    assert (up - down) / 2e-5 == pytest.approx(in_x @ dx + in_y @ dy, rel=1e-6, abs=1e-7)

    def test_products_are_the_slopes_of_gradients(self, lower):
        """On all samples and on a batch: the sample of a product is the sample of its gradients."""
        problem = build(lower=lower)
        x, y, (client, *_) = point(problem)
        v, dx = np.random.default_rng(1).normal(size=y.size), np.random.default_rng(2).normal(size=x.size)
        for sample in (None, client.draw_lower(np.random.default_rng(4), 7)):
            up, down = (client.lower_gradients(x, y + h * v, sample)[1] for h in (1e-5, -1e-5))
            product = client.lower_hessian_product(x, y, sample, v)
            np.testing.assert_allclose(product, (up - down) / 2e-5, rtol=1e-6, atol=1e-7)
            up, down = (client.lower_gradients(x + h * dx, y, sample)[1] @ v for h in (1e-5, -1e-5))
            assert client.lower_cross_product(x, y, sample, v) @ dx == pytest.approx((up - down) / 2e-5, rel=1e-6)

    def test_the_hessian_is_symmetric(self, lower):
        x, y, (client, *_) = point(build(lower=lower))
        hessian = np.array([client.lower_hessian_product(x, y, None, unit) for unit in np.eye(y.size)])
        assert np.abs(hessian).max() > 0.01
        np.testing.assert_allclose(hessian, hessian.T, atol=1e-13)

    def test_a_batch_gives_the_gradient_in_the_mean(self, lower):
        """400 draws, five standard errors along one direction; of both levels."""
        x, y, (client, *_) = point(build(lower=lower))
        d = np.random.default_rng(1).normal(size=y.size)
        for draw, gradients in (
            (client.draw_upper, client.upper_gradients),
            (client.draw_lower, client.lower_gradients),
        ):
            found = [gradients(x, y, draw(np.random.default_rng(seed), 5))[1] @ d for seed in range(400)]
            error = np.std(found, ddof=1) / 20
            assert error > 0
            assert np.mean(found) == pytest.approx(gradients(x, y, None)[1] @ d, abs=5 * error)

    def test_gradients_are_the_callers(self, lower):
        x, y, (client, *_) = point(build(lower=lower))
        before = x.copy(), y.copy()
        for gradients in (client.upper_gradients, client.lower_gradients):
            first = gradients(x, y, None)
            kept = [part.copy() for part in first]
            for part in first:
                part[:] = 7
            for again, expected in zip(gradients(x, y, None), kept, strict=True):
                np.testing.assert_array_equal(again, expected)
        np.testing.assert_array_equal((*x, *y), np.concatenate(before))


def differentiate(torch, loss, y, v):
    """The value, gradient and Hessian product of a loss by autograd."""
    leaf = torch.from_numpy(y).requires_grad_()
    value = loss(leaf)
    (slope,) = torch.autograd.grad(value, leaf, create_graph=True)
    (product,) = torch.autograd.grad(slope, leaf, torch.from_numpy(v))
    return value.item(), slope.detach().numpy(), product.numpy()


def test_two_layers_agree_with_autograd():
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    model = TwoLayer(6, 4)
    inputs, targets = rng.normal(size=(9, 6)), rng.choice([-1.0, 1.0], 9)
    y, v = rng.normal(size=(2, 28))
    tensors = [torch.from_numpy(each) for each in (inputs, targets)]

    def loss(parameters):
        hidden = torch.tanh(tensors[0] @ parameters[:24].reshape(6, 4))
        return 0.3 * torch.nn.functional.softplus(-tensors[1] * (hidden @ parameters[24:])).sum()

    value, slope, product = differentiate(torch, loss, y, v)
    np.testing.assert_allclose(model.gradient(y, inputs, targets, 0.3), slope, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(model.hessian_product(y, v, inputs, targets, 0.3), product, rtol=1e-12, atol=1e-14)
    assert 0.3 * model.judge(y, inputs, targets)[0] == pytest.approx(value, rel=1e-13)


def test_softmax_agrees_with_autograd_for_many_classes():
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    model = Softmax(5, classes=3)
    inputs, targets = rng.normal(size=(9, 5)), rng.integers(3, size=9)
    y, v = rng.normal(size=(2, 15))
    tensors = [torch.from_numpy(each) for each in (inputs, targets)]

    def loss(parameters):
        scores = tensors[0] @ parameters.reshape(3, 5).T
        return 0.3 * torch.nn.functional.cross_entropy(scores, tensors[1], reduction="sum")

    value, slope, product = differentiate(torch, loss, y, v)
    np.testing.assert_allclose(model.gradient(y, inputs, targets, 0.3), slope, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(model.hessian_product(y, v, inputs, targets, 0.3), product, rtol=1e-12, atol=1e-14)
    assert 0.3 * model.judge(y, inputs, targets)[0] == pytest.approx(value, rel=1e-13)


def test_the_ridge_is_its_formula():
    """Entry by entry: column q of the matrix i weighs ``exp(x_iq) / (rows_i columns_i)``."""
    x, y = np.array([0.3, -1.0, 2.0, 0.5]), np.arange(1.0, 10.0)
    first, second = y[:6].reshape(2, 3), y[6:].reshape(3, 1)
    expected = sum(np.exp(x[q]) / 6 * (first[:, q] ** 2).sum() for q in range(3))
    expected += np.exp(x[3]) / 3 * (second**2).sum()
    assert ColumnRidge(((2, 3), (3, 1))).value(x, y) == pytest.approx(expected, rel=1e-14)


def test_a_batch_holds_rows_of_the_samples():
    """Rows without entries and drawn first or last included."""
    rng = np.random.default_rng(0)
    dense = rng.normal(size=(12, 5)) * (rng.random((12, 5)) < 0.4)
    dense[[0, 5, 11]] = 0
    samples = Samples(scipy.sparse.csr_array(dense), np.arange(12), 0.5)
    for seed in range(20):
        drawn = samples.draw(np.random.default_rng(seed), 8)
        assert len(set(drawn.targets.tolist())) == len(drawn) == 8
        np.testing.assert_array_equal(drawn.features, dense[drawn.targets])
        assert drawn.weight * 8 == 0.5 * 12
    assert samples.draw(rng, None) is samples.draw(rng, 12) is None


@pytest.mark.parametrize("partition", ["iid", "dirichlet", "shards", "quantity"])
class TestSplits:
    def test_every_sample_is_in_one_part(self, partition):
        labels = np.random.default_rng(0).choice([-1.0, 1.0], 1000)
        split = Hyperopt(partition=partition, alpha=5.0).split(labels, Federation(8, Streams(5)))
        rows = np.concatenate([split.test, *split.train, *split.validation])
        np.testing.assert_array_equal(np.sort(rows), np.arange(1000))
        assert len(split.test) == 100
        for train, validation in zip(split.train, split.validation, strict=True):
            assert len(validation) == max(1, round(0.3 * (len(train) + len(validation))))

    def test_the_mean_of_the_clients_is_the_objective(self, partition):
        problem = build(partition=partition, lower="mlp", alpha=5.0)
        x, y, clients = point(problem)
        first, second = y[:-3].reshape(30, 3), y[-3:]

        def mean_loss(parts):
            features = np.vstack([part.features.toarray() for part in parts])
            labels = np.concatenate([part.targets for part in parts])
            losses = np.log1p(np.exp(-labels * (np.tanh(features @ first) @ second)))
            return losses.mean(), np.mean(np.sign(np.tanh(features @ first) @ second) == labels)

        metrics = problem.metrics(np.concatenate([x, y]), problem.fed)
        assert metrics["objective"] == pytest.approx(mean_loss([c.validation for c in clients])[0], rel=1e-12)
        train = mean_loss([c.train for c in clients])[0] + clients[0].ridge.value(x, y)
        assert metrics["lower_loss"] == pytest.approx(train, rel=1e-12)
        loss, accuracy = mean_loss([c.test for c in clients])
        assert metrics["test_loss"] == pytest.approx(loss, rel=1e-12)
        assert metrics["test_accuracy"] == pytest.approx(accuracy, rel=1e-12)


class TestHypergradient:
    def test_it_is_the_slope_of_the_bilevel_objective(self):
        """The lower level solved by another program at shifted x; unequal clients, whose own slopes differ."""
        problem = build(lower="logistic", partition="shards", first_exponent=0.0)
        x, y, clients = point(problem)
        x *= 0.3

        def inner(shifted):
            value = lambda z: np.mean([c.lower_value(shifted, z) for c in clients])  # noqa: E731
            slope = lambda z: np.mean([c.lower_gradients(shifted, z, None)[1] for c in clients], axis=0)  # noqa: E731
            return minimize(value, 0 * y, jac=slope, method="BFGS", options={"gtol": 1e-9, "maxiter": 2000}).x

        def objective(shifted):
            return np.mean([c.upper_value(shifted, inner(shifted)) for c in clients])

        z = exact.lower_minimizer(problem.fed, x, y)
        np.testing.assert_allclose(z, inner(x), atol=1e-5)
        found = exact.hypergradient(problem.fed, x, z)
        some = np.argsort(-np.abs(found))[:2]
        for entry in some:
            unit = np.eye(x.size)[entry]
            slope = (objective(x + 1e-3 * unit) - objective(x - 1e-3 * unit)) / 2e-3
            assert found[entry] == pytest.approx(slope, rel=1e-3, abs=1e-7)

    def test_the_penalized_gradient_tends_to_it(self):
        """With y minimizing the penalized lower level, its part in x is the hypergradient + O(rho)."""
        problem = build(lower="logistic", first_exponent=0.0)
        x, y, clients = point(problem)
        x *= 0.3
        z = exact.lower_minimizer(problem.fed, x, y)
        truth = exact.hypergradient(problem.fed, x, z)
        errors = []
        for rho in (1e-2, 1e-3):

            def value(y, rho=rho):
                return np.mean([rho * c.upper_value(x, y) + c.lower_value(x, y) for c in clients])

            def slope(y, rho=rho):
                parts = [(c.upper_gradients(x, y, None)[1], c.lower_gradients(x, y, None)[1]) for c in clients]
                return np.mean([rho * f + g for f, g in parts], axis=0)

            found = minimize(value, z, jac=slope, method="BFGS", options={"gtol": 1e-10, "maxiter": 2000}).x
            gradient = exact.penalized_gradient(problem.fed, x, found, z, rho)
            errors.append(np.linalg.norm(gradient[: x.size] - truth))
            assert np.linalg.norm(gradient[x.size :]) < 1e-3
        assert errors[1] < 0.3 * errors[0] < 0.1 * np.linalg.norm(truth)

    @LOWER
    def test_it_is_recorded_where_it_is_asked_for(self, lower):
        options = {"lower": lower, "hidden": 2, "first_exponent": 1.0}
        problem = build(hypergradient=True, **options)
        start = problem.start()
        exact_norms = {"hypergradient_norm", "penalized_gradient_norm"}
        recorded = problem.metrics(start, problem.fed)
        assert set(recorded) - set(build(**options).metrics(start, problem.fed)) == exact_norms
        assert all(recorded[name] > 0 for name in exact_norms)

    def test_a_saddle_is_left_and_a_flat_minimum_refused(self):
        """``1/4 (y_0^2 - 1)^2 + 1/2 y_1^2`` from near its saddle at 0; and ``y_0^4``."""

        class Own:
            def __init__(self, value):
                self.lower_value = lambda x, y: value(y)
                self.lower_gradients = lambda x, y, sample: (x, approx_fprime(y, value, 1e-7))

            def lower_hessian_product(self, x, y, sample, v):
                raise NotImplementedError

        class Wells(Own):
            def __init__(self):
                super().__init__(lambda y: (y[0] ** 2 - 1) ** 2 / 4 + y[1] ** 2 / 2)
                self.lower_gradients = lambda x, y, sample: (x, np.array([y[0] ** 3 - y[0], y[1]]))

            def lower_hessian_product(self, x, y, sample, v):
                return np.array([(3 * y[0] ** 2 - 1) * v[0], v[1]])

        class Flat(Own):
            def __init__(self):
                super().__init__(lambda y: y[0] ** 4 / 4 + y[1] ** 2 / 2)
                self.lower_gradients = lambda x, y, sample: (x, np.array([y[0] ** 3, y[1]]))

            def lower_hessian_product(self, x, y, sample, v):
                return np.array([3 * y[0] ** 2 * v[0], v[1]])

        wells, flat = (Federation(2).build(lambda number, rng, kind=kind: kind()) for kind in (Wells, Flat))
        start = np.array([0.01, 0.5])
        np.testing.assert_allclose(exact.lower_minimizer(wells, np.zeros(1), start), [1, 0], atol=1e-9)
        assert exact.lower_minimizer(flat, np.zeros(1), np.array([0.0, 0.5])) is None


def test_what_cannot_be_done_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"--hypergradient: the lower level has 3,100 parameters"):
        build(hypergradient=True, hidden=100)
    with pytest.raises(DataError, match="there is no such file"):
        build(data=str(tmp_path / "none.libsvm"))
    few = tmp_path / "few.libsvm"
    few.write_text("".join(f"{label} 1:{label}\n" for label in (1, -1, 1, -1, 1)))
    with pytest.raises(DataError, match="has 1 sample, for training or for validation"):
        build(data=str(few), clients=4, test_fraction=0.2)
    with pytest.raises(DataError, match=r"--test-fraction 0.05 of 5 samples is 0"):
        build(data=str(few), test_fraction=0.05)


@pytest.mark.mpi
def test_a_user_on_two_ranks_gets_the_bits_of_one(hpcfed, mpirun, tmp_path):
    options = ("hyperopt", "--rounds", "3", "--record-every", "1", "--clients", "3", "--hidden", "3", "--no-pictures")
    alone = hpcfed(*options, "--out", str(tmp_path / "one"))
    two = mpirun(2, *options, "--out", str(tmp_path / "two"))
    assert (alone.status, two.status) == (0, 0), alone.err + two.err
    records = [
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("one", "two")
    ]
    names = ("objective", "lower_loss", "lower_gradient_norm", "test_loss", "test_accuracy", "gradients", "samples")
    assert [[one[name] for name in names] for one in records[0]] == [
        [two[name] for name in names] for two in records[1]
    ]


def test_real_data_are_read(shared_data):
    """a9a: 32,561 samples of 123 features are published."""
    problem = build(data=str(shared_data / "libsvm" / "a9a.bz2"), clients=4)
    client = problem.fed.any_client
    assert client.lower_size == 123 * 3 + 3
    assert problem.holdings.sum() == 32_561 - round(0.1 * 32_561)
