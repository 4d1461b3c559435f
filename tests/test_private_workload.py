"""`hpcfed private`: penalties, losses, minima and readers, against conditions of optimality and others' solvers."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from scipy.optimize import brentq
from sklearn.linear_model import LogisticRegression, Ridge
from test_communicator import on_ranks

from hpcfed.data import private_sets
from hpcfed.data.private_sets import RecordSets
from hpcfed.data.tables import Table, read_csv
from hpcfed.errors import ConfigError, DataError
from hpcfed.federation import Federation
from hpcfed.operators.penalties import L1, L2, Ball, Nothing
from hpcfed.privacy.engine import NoisySteps
from hpcfed.streams import Streams
from hpcfed.workloads import private_reference
from hpcfed.workloads.private import Private
from hpcfed.workloads.private_losses import LeastSquares, Logistic, Mean, Softmax

SMALL = {"records": 200, "public_records": 60, "dimension": 5}
LOSSES = [Mean(), LeastSquares(), Logistic(), Softmax(3)]
PENALTIES = [Nothing(), L1(0.05), L2(0.1), Ball(0.8)]


def build(**options):
    workload = Private(**{"clients": 3, **SMALL, **options})
    return workload.build(Federation(workload.clients, Streams(3)))


def records(loss, count, rng, bound=1.0):
    """Records of a loss with features on the sphere of radius ``bound``, and a point."""
    features = rng.standard_normal((count, 4))
    features *= bound / np.linalg.norm(features, axis=1, keepdims=True)
    targets = {
        "mean": np.zeros(count),
        "least-squares": rng.standard_normal(count),
        "logistic": rng.choice([-1.0, 1.0], count),
        "softmax": rng.integers(3, size=count).astype(float),
    }[loss.name]
    return Table(features, targets), rng.standard_normal(12 if loss.name == "softmax" else 4)


def names(value):
    return getattr(value, "name", None) or type(value).__name__


# -- penalties ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weight", [0.3, 2.0, 40.0])
class TestPenalties:
    """``prox(x, w)`` minimizes ``w psi(z) + |z - x|^2/2``: roots of its increasing slope, found by bisection."""

    x = 3 * np.random.default_rng(0).standard_normal(7)

    def minimizer(self, slope):
        """By coordinate."""
        far = 2 * np.abs(self.x).max() + 1
        return np.array([brentq(lambda z, x=x: slope(z) + z - x, -far, far, xtol=1e-14) for x in self.x])

    def test_l1(self, weight):
        found = L1(0.4).prox(self.x, weight)
        np.testing.assert_allclose(found, self.minimizer(lambda z: weight * 0.4 * np.sign(z)), atol=1e-8)

    def test_l2(self, weight):
        found = L2(0.4).prox(self.x, weight)
        np.testing.assert_allclose(found, self.minimizer(lambda z: weight * 0.4 * z), atol=1e-8)

    def test_ball(self, weight):
        """Outside: the multiplier m with ``|x/(1 + m)| = radius``; inside: x."""
        norm = np.linalg.norm(self.x)
        multiplier = brentq(lambda m: norm / (1 + m) - 2.5, 0, 1e3, xtol=1e-14)
        np.testing.assert_allclose(Ball(2.5).prox(self.x, weight), self.x / (1 + multiplier), atol=1e-8)
        np.testing.assert_array_equal(Ball(norm * 1.01).prox(self.x, weight), self.x)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_what_is_projected_is_feasible_whatever_the_rounding(dtype):
    rng = np.random.default_rng(1)
    for radius in (1e-3, 0.7, 10.0, 3e5):
        ball = Ball(radius)
        for _ in range(50):
            x = (radius * rng.uniform(0.5, 20) * rng.standard_normal(30)).astype(dtype)
            projected = ball.prox(x, 1.0)
            assert projected.dtype == dtype
            assert ball.value(projected) == 0
            assert ball.value(projected * dtype(1.001)) == (np.inf if np.linalg.norm(x) > radius else 0)


# -- losses ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", LOSSES, ids=names)
class TestLosses:
    def test_the_gradient_is_the_slope_of_the_mean_value(self, loss):
        table, x = records(loss, 20, np.random.default_rng(2))
        gradient = loss.gradient(x, table)
        for unit, slope in zip(np.eye(x.size), gradient, strict=True):
            up, down = (loss.values(x + h * unit, table).mean() for h in (1e-5, -1e-5))
            assert (up - down) / 2e-5 == pytest.approx(slope, abs=1e-8)

    @pytest.mark.parametrize("bound", [0.5, 3.0])
    def test_every_records_gradient_is_as_lipschitz_as_said_and_not_much_more(self, loss, bound):
        """A search over pairs of points, near the point of the highest curvature among others."""
        rng = np.random.default_rng(3)
        steepest = 0.0
        for trial in range(300):
            table, x = records(loss, 1, rng, bound)
            x = x * (0.0 if trial % 2 else 10 ** rng.uniform(-2, 1))
            along = np.tile(table.features[0], x.size // 4)
            if loss.name == "softmax":  # two classes of equal probability, the third far off
                x[8:] = -60 / bound**2 * table.features[0]
                along = along * np.repeat([1, -1, 0], 4)
            other = x + 1e-3 * (along if trial % 3 else rng.standard_normal(x.size))
            moved = np.linalg.norm(loss.gradient(x, table) - loss.gradient(other, table))
            steepest = max(steepest, moved / np.linalg.norm(x - other))
        assert 0.95 * loss.smoothness(bound) <= steepest <= loss.smoothness(bound) * (1 + 1e-6)

    def test_the_means_curvature_is_a_bound(self, loss):
        rng = np.random.default_rng(4)
        table, x = records(loss, 50, rng)
        assert loss.curvature(table) <= loss.smoothness(1.0) * (1 + 1e-12)
        for _ in range(100):
            other = x + rng.standard_normal(x.size)
            moved = np.linalg.norm(loss.gradient(x, table) - loss.gradient(other, table))
            assert moved <= loss.curvature(table) * np.linalg.norm(x - other) * (1 + 1e-12)

    def test_steps_of_the_engine_follow_this_gradient(self, loss):
        task = {"mean": "mean", "least-squares": "ridge", "logistic": "lasso", "softmax": "softmax"}[loss.name]
        problem = build(task=task, data="made")
        client = problem.fed.any_client
        x = np.random.default_rng(5).standard_normal(problem.start().size)
        for part, table in (("private", client.private), ("public", client.public)):
            row = np.array([7])
            moved = client.noisy_pass(x, part, row, NoisySteps(0.1, None, 0.0), np.random.default_rng(0))
            np.testing.assert_allclose((x - moved) / 0.1, client.measured.gradient(x, table.take(row)), atol=1e-12)


# -- minima ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("penalty", PENALTIES, ids=names)
@pytest.mark.parametrize("loss", LOSSES, ids=names)
def test_the_reference_satisfies_the_conditions_of_a_minimum(loss, penalty):
    """With g the gradient of the mean loss: -g is a subgradient of the penalty."""
    table, x = records(loss, 200, np.random.default_rng(6))
    found = private_reference.minimize(loss, penalty, table, np.zeros(x.size))
    g = loss.gradient(found.x, table)
    match penalty:
        case Nothing():
            np.testing.assert_allclose(g, 0, atol=1e-8)
        case L2(factor):
            np.testing.assert_allclose(g, -factor * found.x, atol=1e-8)
        case L1(factor):
            own = found.x != 0
            np.testing.assert_allclose(g[own], -factor * np.sign(found.x[own]), atol=1e-8)
            assert np.abs(g).max() <= factor + 1e-8
        case Ball(radius):
            assert np.linalg.norm(found.x) <= radius * (1 + 1e-12)
            cosine = -(g @ found.x) / (np.linalg.norm(g) * np.linalg.norm(found.x) + 1e-300)
            assert np.linalg.norm(g) < 1e-8 or cosine == pytest.approx(1, abs=1e-10)
    assert found.objective == pytest.approx(loss.values(found.x, table).mean() + penalty.value(found.x), rel=1e-14)


def pooled(problem):
    clients = problem.fed.clients.values()
    return tuple(np.concatenate([getattr(each.private, name) for each in clients]) for name in ("features", "targets"))


def test_the_ridge_agrees_with_scikit_learn():
    problem = build(task="ridge", penalty_weight=0.3)
    features, targets = pooled(problem)
    other = Ridge(alpha=0.3 * len(targets) / 2, fit_intercept=False, tol=1e-12).fit(features, targets)
    np.testing.assert_allclose(problem.reference.x, other.coef_, atol=1e-8)


def test_the_lasso_agrees_with_scikit_learn():
    problem = build(task="lasso", penalty_weight=0.01)
    features, labels = pooled(problem)
    scale = 1 / (0.01 * len(labels))
    other = LogisticRegression(C=scale, l1_ratio=1, solver="saga", fit_intercept=False, tol=1e-10, max_iter=100_000)
    np.testing.assert_allclose(problem.reference.x, other.fit(features, labels).coef_[0], atol=1e-5)


def test_softmax_agrees_with_scikit_learn():
    problem = build(task="softmax", data="made", penalty_weight=0.01)
    features, classes = pooled(problem)
    other = LogisticRegression(C=1 / (0.01 * len(classes)), fit_intercept=False, tol=1e-10, max_iter=10_000)
    np.testing.assert_allclose(problem.reference.x, other.fit(features, classes).coef_.ravel(), atol=1e-5)


def test_where_there_is_no_minimum_none_is_claimed(monkeypatch):
    """Separable classes without a penalty: the loss falls for ever."""
    monkeypatch.setattr(private_reference, "MOST_STEPS", 300)
    table = Table(np.array([[1.0], [-1.0]]), np.array([1.0, -1.0]))
    assert private_reference.minimize(Logistic(), Nothing(), table, np.zeros(1)) is None


# -- what is measured --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", ["mean", "ridge", "lasso", "softmax"])
@pytest.mark.parametrize("partition", ["iid", "quantity"])
def test_the_objective_is_the_mean_over_all_private_records_whatever_the_partition(task, partition):
    problem = build(task=task, data="made", partition=partition, alpha=0.4)
    x = 0.3 * np.random.default_rng(7).standard_normal(problem.start().size)
    features, targets = pooled(problem)
    client = problem.fed.any_client
    objective = client.measured.values(x, Table(features, targets)).mean() + client.regularizer.value(x)
    metrics = problem.metrics(x, problem.fed)
    assert metrics["objective"] == pytest.approx(objective, rel=1e-12)
    assert metrics["excess_risk"] == pytest.approx(objective - problem.reference.objective, abs=1e-12)
    assert metrics["excess_risk"] > 0
    assert metrics["public_only_risk"] > 0
    at_best = problem.metrics(problem.reference.x, problem.fed)
    assert at_best["excess_risk"] == pytest.approx(0, abs=1e-12)
    public = problem.metrics(problem.public_only.x, problem.fed)
    assert public["excess_risk"] == pytest.approx(metrics["public_only_risk"], rel=1e-9)


def test_test_metrics_are_those_of_the_records_held_out():
    problem = build(task="softmax", data="made")
    x = np.random.default_rng(8).standard_normal(problem.start().size)
    tests = [client.test for client in problem.fed.clients.values()]
    features, classes = (np.concatenate([getattr(each, name) for each in tests]) for name in ("features", "targets"))
    metrics = problem.metrics(x, problem.fed)
    scores = features @ x.reshape(3, -1).T
    assert len(classes) == 40
    assert metrics["test_accuracy"] == np.mean(scores.argmax(axis=1) == classes)
    losses = np.log(np.exp(scores).sum(axis=1)) - scores[np.arange(40), classes.astype(int)]
    assert metrics["test_loss"] == pytest.approx(losses.mean(), rel=1e-12)
    ridge = build(task="ridge")
    assert set(ridge.metrics(ridge.start(), ridge.fed)) == {"objective", "excess_risk", "public_only_risk", "test_loss"}


@pytest.mark.parametrize(
    "options", [{}, {"task": "lasso", "partition": "dirichlet"}, {"data": "digits", "records": 50}]
)
def test_any_number_of_ranks_has_the_same_clients(options):
    def built(comm):
        workload = Private(**{"clients": 4, **SMALL, **options})
        problem = workload.build(Federation(4, Streams(5), comm))
        fed = problem.fed
        sums = fed.map(lambda client, rng: (client.private.features.sum(), client.public.features.sum()))
        steps = NoisySteps(0.1, 1.0, 2.0)

        def walk(client, rng):
            return client.noisy_pass(problem.start(), "private", rng.permutation(client.num_private), steps, rng)

        moved = fed.map(walk)
        return fed.collect(sums), problem.metrics(fed.mean(moved), fed)

    alone = built(Federation(1).communicator)
    assert on_ranks(2, built) == [alone] * 2
    assert on_ranks(4, built) == [alone] * 4


# -- records -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", ["ridge", "lasso"])
def test_nothing_done_to_a_record_depends_on_private_ones(task):
    """Another private record in the place of one changes that one, and nothing else; all norms are in bounds."""
    private, public = private_sets.made(task, 50, 30, 6, 0.3, np.random.default_rng(9))
    replaced = Table(private.features.copy(), private.targets.copy())
    replaced.features[4] = 1e3
    replaced.targets[4] = 1 - replaced.targets[4]
    classes = np.array([0.0, 1.0]) if task == "lasso" else np.empty(0)
    one, other = (
        private_sets.in_bounds(RecordSets(each, public, public.take(slice(3)), classes), 0.7, standardize=True)
        for each in (private, replaced)
    )
    np.testing.assert_array_equal(one.public.features, other.public.features)
    np.testing.assert_array_equal(one.public.targets, other.public.targets)
    same = np.arange(50) != 4
    np.testing.assert_array_equal(one.private.features[same], other.private.features[same])
    assert not np.array_equal(one.private.features[4], other.private.features[4])
    for table in (other.private, other.public, other.test):
        assert np.linalg.norm(table.features, axis=1).max() <= 0.7 * (1 + 1e-12)


def test_made_means_are_where_they_should_be():
    private, public = private_sets.made("mean", 20_000, 20_000, 3, 0.5, np.random.default_rng(10))
    np.testing.assert_allclose(private.features.mean(axis=0), 1.0, atol=5 / math.sqrt(20_000))
    np.testing.assert_allclose(public.features.mean(axis=0), [1.5, 0.5, 1.5], atol=5 / math.sqrt(20_000))


def test_corrupted_records_are_public_and_as_many_as_said():
    clean, dirty = (build(task="lasso", corrupt=fraction) for fraction in (0.0, 0.3))
    a, b = clean.fed.any_client, dirty.fed.any_client
    np.testing.assert_array_equal(a.private.targets, b.private.targets)
    np.testing.assert_array_equal(a.public.features, b.public.features)
    assert (a.public.targets == -b.public.targets).sum() == 18
    assert dirty.metrics(dirty.start(), dirty.fed)["public_only_risk"] > 0


def test_corrupted_targets_of_a_ridge_change_places():
    clean, dirty = (build(task="ridge", corrupt=fraction).fed.any_client for fraction in (0.0, 0.5))
    np.testing.assert_allclose(np.sort(clean.public.targets), np.sort(dirty.public.targets))
    assert (~np.isclose(clean.public.targets, dirty.public.targets)).sum() == 30


def test_nines_on_their_heads_are_public():
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    client = build(data="digits", clients=1, records=100, public_records=90).fed.any_client
    np.testing.assert_array_equal(client.private.features, pixels[labels == 6][:100] / 16)
    np.testing.assert_array_equal(client.public.features, pixels[labels == 9][:90, ::-1] / 16)


def test_images_of_a_file(shared_data):
    problem = build(data=str(shared_data / "mnist/mnist.npz"), records=1000, public_records=1000)
    client = problem.fed.any_client
    assert client.private.features.shape[1] == 784
    assert sum(each.num_private for each in problem.fed.clients.values()) == 1000
    assert 0 <= client.public.features.min() < client.public.features.max() <= 1


@pytest.mark.parametrize(("task", "data"), [("ridge", "diabetes"), ("lasso", "breast-cancer"), ("softmax", "digits")])
def test_sets_of_scikit_learn(task, data):
    problem = build(task=task, data=data)
    total = {"diabetes": 442, "breast-cancer": 569, "digits": 1797}[data]
    public = round(0.25 * total)
    client = problem.fed.any_client
    assert client.num_public == public
    assert problem.records == total - public - round(0.2 * (total - public))
    assert problem.reference is not None


# -- files -------------------------------------------------------------------------------------------------------------


def write(path, text):
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_a_table_is_read(tmp_path):
    table, columns = read_csv(write(tmp_path / "a.csv", "\ufeffx, y ,z\n1,2,3\n\n 4,5e0,-6\n"), "y")
    assert columns == ("x", "z")
    np.testing.assert_array_equal(table.features, [[1, 3], [4, -6]])
    np.testing.assert_array_equal(table.targets, [2, 5])
    assert table.features.flags.c_contiguous


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x,y\n1,2\n3\n", "line 3: there are 1 fields for 2 columns"),
        ("x,y\n1,2\n3,four\n", "line 3: 'four' in column 'y' is no finite number"),
        ("x,y\n1,2\nnan,4\n", "line 3: 'nan' in column 'x' is no finite number"),
        ("x,y\n1,2\n3,\n", "line 3: '' in column 'y' is no finite number"),
        ("x,z\n1,2\n", "line 1: there is no column 'y'; there are x, z"),
        ("1,2\n3,4\n", "line 1: the first line must name the columns"),
        ("x,y,x\n1,2,3\n", "line 1: there are two columns 'x'"),
        ("y\n1\n", "line 1: there is no column besides 'y'"),
        ("x,y\n", "no records"),
        ("", "line 1: the first line must name the columns"),
    ],
)
def test_a_broken_table_is_refused_with_its_line(tmp_path, text, said):
    path = write(tmp_path / "a.csv", text)
    with pytest.raises(DataError) as error:
        read_csv(path, "y")
    assert str(error.value).startswith(path)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_table_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"b\.csv: cannot be read"):
        read_csv(tmp_path / "b.csv", None)


def csv_of(table, path):
    lines = ["a,b,c,y", *(",".join(map(repr, [*row, t])) for row, t in zip(*table, strict=True))]
    return write(path, "\n".join(lines) + "\n")


def test_a_table_with_a_public_one(tmp_path):
    rng = np.random.default_rng(11)
    private, public = ((rng.random((n, 3)).tolist(), rng.choice([3.0, 8.0], n).tolist()) for n in (40, 30))
    data, other = csv_of(private, tmp_path / "a.csv"), csv_of(public, tmp_path / "b.csv")
    problem = build(task="lasso", data=data, public=other, target="y", standardize=False, bound=100.0)
    client = problem.fed.any_client
    np.testing.assert_array_equal(client.public.features, public[0])
    np.testing.assert_array_equal(client.public.targets, np.where(np.array(public[1]) == 8, 1, -1))
    assert problem.records + sum(len(each.test) for each in problem.fed.clients.values()) == 40


def test_libsvm_text_is_read(tmp_path):
    lines = [f"{1 if i % 3 else -1} {i % 4 + 1}:{i / 10} 6:1" for i in range(60)]
    problem = build(task="lasso", data=write(tmp_path / "a", "\n".join(lines) + "\n"))
    assert problem.start().shape == (6,)
    assert problem.fed.any_client.num_public == 15


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"task": "mean", "partition": "dirichlet"}, "--partition dirichlet"),
        ({"task": "mean", "corrupt": 0.1}, "use --shift"),
        ({"task": "ridge", "data": "a.csv"}, "needs --target"),
        ({"task": "mean", "public": "a.csv"}, "goes with --data"),
        ({"task": "ridge", "data": "diabetes", "test_fraction": 0.001}, "--test-fraction 0.001 of"),
        ({"task": "lasso", "data": "breast-cancer", "public_fraction": 0.9999}, "--public-fraction 0.9999 of"),
        ({"records": 2}, "too few for 3 clients"),
    ],
)
def test_what_cannot_be_done_is_refused_in_a_line(options, said):
    with pytest.raises(ConfigError) as error:
        build(**options)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_classes_that_do_not_fit_are_refused(tmp_path):
    def text(targets):
        return "x,y\n" + "\n".join(f"{i},{target}" for i, target in enumerate(targets)) + "\n"

    one = write(tmp_path / "one.csv", text([5] * 30))
    with pytest.raises(DataError, match="every target is 5; --task lasso needs two classes"):
        build(task="lasso", data=one, target="y")
    with pytest.raises(DataError, match="there are 10 classes; --task lasso needs two"):
        build(task="lasso", data="digits")
    with pytest.raises(DataError, match="are no classes: use --task ridge"):
        build(task="softmax", data="diabetes")
    with pytest.raises(DataError, match="no image has the label 11"):
        build(data="digits", digits=(6, 11))
    narrow = write(tmp_path / "narrow.csv", text([0, 1] * 10))
    wide = csv_of((np.ones((20, 3)).tolist(), [0.0, 1.0] * 10), tmp_path / "wide.csv")
    with pytest.raises(DataError, match="records have 3 features, the private ones 1"):
        build(task="lasso", data=narrow, public=wide, target="y")


def test_options_are_frozen_and_files_are_found_from_any_folder():
    workload = Private(data="some.csv")
    assert workload.data.startswith("/")
    assert Private(data="digits").data == "digits"
    with pytest.raises(dataclasses.FrozenInstanceError):
        workload.data = "other"
