"""The minimum that relative errors are measured from, against its optimality conditions and other people's solvers."""

from __future__ import annotations

import dataclasses
import itertools
import json

import h5py
import numpy as np
import pytest
import scipy.sparse
from scipy.optimize import minimize

from hpcfed.data import libsvm
from hpcfed.errors import ConfigError, HpcfedError
from hpcfed.operators.feature_graph import build_edges, graph_matrix
from hpcfed.workloads import logreg_reference
from hpcfed.workloads.logreg_reference import Objective, cached, certify, solve


def random_problem(seed=0, samples=80, features=6, mu1=0.01, mu2=0.02, edges=((0, 1, 1), (1, 2, -1), (0, 2, -1))):
    rng = np.random.default_rng(seed)
    points = rng.normal(size=(samples, features))
    labels = np.where(points @ rng.normal(size=features) + rng.normal(size=samples) > 0, 1.0, -1.0)
    matrix = graph_matrix(np.array(edges, np.int64).reshape(-1, 3), features)
    return Objective(scipy.sparse.csr_array(points), labels, matrix, mu1, mu2)


def smooth(problem, x):
    """The loss with the ridge, and its gradient, written down once more."""
    points = problem.features.toarray()
    margins = problem.labels * (points @ x)
    value = np.log1p(np.exp(-margins)).mean() + problem.mu1 / 2 * np.sum(x**2)
    slopes = -problem.labels / (1 + np.exp(margins)) / len(margins)
    return value, points.T @ slopes + problem.mu1 * x


def assert_minimal(problem, found, tolerance=1e-10):
    """The optimality conditions, row by row: |v_j| <= mu2, and v_j = mu2 sign (Bx)_j where that is not zero."""
    image, v = problem.matrix.toarray() @ found.x, found.dual
    assert np.linalg.norm(smooth(problem, found.x)[1] + problem.matrix.toarray().T @ v) < tolerance
    assert np.abs(v).max(initial=0) <= problem.mu2 + tolerance
    away = np.abs(image) > tolerance
    np.testing.assert_allclose(v[away], problem.mu2 * np.sign(image[away]), rtol=0, atol=tolerance)
    value = smooth(problem, found.x)[0] + problem.mu2 * np.abs(image).sum()
    assert found.objective == pytest.approx(value, rel=1e-14)


@pytest.mark.parametrize("mu1", [0.0, 1e-5, 0.1])
@pytest.mark.parametrize("mu2", [0.0, 1e-5, 0.02, 1.0])
@pytest.mark.parametrize("edges", [(), ((0, 1, 1), (1, 2, -1), (0, 2, -1)), ((0, 1, 1), (1, 2, 1), (0, 2, 1))])
def test_it_is_a_minimum(mu1, mu2, edges):
    """The third graph is a cycle: where its three rows of Bx are zero they depend on each other."""
    problem = random_problem(mu1=mu1, mu2=mu2, edges=edges)
    found = solve(problem)
    assert found.kkt_residual < 1e-10
    assert_minimal(problem, found)


def test_some_rows_are_zero_and_some_are_not():
    """Or the test above would not test much."""
    problem = random_problem(mu2=0.05)
    image = np.abs(problem.matrix @ solve(problem).x)
    assert 0 < (image < 1e-9).sum() < len(image)
    assert np.all((image < 1e-9) | (image > 1e-4))


def test_the_plain_l1_problem_agrees_with_scipy():
    """In nonnegative parts, x = p - q, it is smooth with bounds."""
    problem = random_problem(edges=(), mu2=0.05)

    def parts(z):
        value, gradient = smooth(problem, z[:6] - z[6:])
        return value + 0.05 * z.sum(), np.concatenate([gradient, -gradient]) + 0.05

    options = {"maxiter": 20_000, "maxfun": 100_000, "ftol": 1e-16, "gtol": 1e-10}
    other = minimize(parts, np.zeros(12), jac=True, method="L-BFGS-B", bounds=[(0, None)] * 12, options=options)
    found = solve(problem)
    assert found.objective == pytest.approx(other.fun, rel=1e-11)
    assert found.objective <= other.fun + found.gap + 1e-15
    np.testing.assert_allclose(found.x, other.x[:6] - other.x[6:], atol=1e-6)


def test_a_graph_problem_agrees_with_scipy():
    """With variables t >= |Bx| it is smooth with linear constraints."""
    problem = random_problem(samples=40, mu2=0.05)
    matrix, rows = problem.matrix.toarray(), problem.matrix.shape[0]

    def lifted(z):
        value, gradient = smooth(problem, z[:6])
        return value + 0.05 * z[6:].sum(), np.concatenate([gradient, np.full(rows, 0.05)])

    both = np.block([[-matrix, np.eye(rows)], [matrix, np.eye(rows)]])
    constraint = {"type": "ineq", "fun": lambda z: both @ z, "jac": lambda z: both}
    options = {"maxiter": 1000, "ftol": 1e-15}
    start = np.concatenate([np.zeros(6), np.ones(rows)])
    other = minimize(lifted, start, jac=True, method="SLSQP", constraints=[constraint], options=options)
    assert other.success
    found = solve(problem)
    assert found.objective == pytest.approx(other.fun, rel=1e-9)
    np.testing.assert_allclose(found.x, other.x[:6], atol=1e-5)


def test_a_graph_problem_agrees_with_cvxpy():
    cvxpy = pytest.importorskip("cvxpy")
    problem = random_problem(samples=60, mu2=0.03)
    x = cvxpy.Variable(6)
    margins = cvxpy.multiply(problem.labels, problem.features.toarray() @ x)
    objective = (
        cvxpy.sum(cvxpy.logistic(-margins)) / len(problem.labels)
        + problem.mu1 / 2 * cvxpy.sum_squares(x)
        + problem.mu2 * cvxpy.norm1(problem.matrix.toarray() @ x)
    )
    best = cvxpy.Problem(cvxpy.Minimize(objective)).solve(solver=cvxpy.CLARABEL)
    found = solve(problem)
    assert found.objective == pytest.approx(best, rel=1e-7)
    np.testing.assert_allclose(found.x, x.value, atol=1e-4)


def test_the_certificate_bounds_how_far_a_point_is_from_the_minimum():
    problem = random_problem(mu1=0.1)
    found, rng = solve(problem), np.random.default_rng(1)
    for size in (1e-1, 1e-3, 1e-6):
        away = found.x + size * rng.normal(size=6)
        claim = certify(problem, away, found.dual + size * 0.01 * rng.normal(size=len(found.dual)))
        assert claim.kkt_residual > 1e-3 * size
        assert 0 < claim.objective - found.objective <= claim.gap
    assert found.gap < 1e-12


@pytest.mark.parametrize("B", ["identity", "graph"])
def test_the_embedded_set(B):
    data = libsvm.embedded()
    edges = build_edges(data.features, 0.2) if B == "graph" else np.empty((0, 3), np.int64)
    problem = Objective(data.features, data.labels, graph_matrix(edges, 30), 1e-5, 1e-5)
    assert_minimal(problem, solve(problem))


def test_a_real_set(shared_data):
    data = libsvm.read_libsvm(shared_data / "libsvm" / "a9a.bz2", 123)
    problem = Objective(data.features, data.labels, graph_matrix(build_edges(data.features, 0.2), 123), 1e-5, 1e-5)
    found = solve(problem)
    assert found.kkt_residual < 1e-10
    v, image = found.dual, problem.matrix @ found.x
    scores = problem.labels * (data.features @ found.x)
    slope = data.features.T @ (-problem.labels / (1 + np.exp(scores))) / len(scores) + 1e-5 * found.x
    assert np.linalg.norm(slope + problem.matrix.T @ v) < 1e-10
    assert np.abs(v - np.clip(v + image, -1e-5, 1e-5)).max() < 1e-10


def test_what_has_no_minimum_is_refused():
    points = scipy.sparse.csr_array(np.array([[1.0], [-1.0]]))
    separable = Objective(points, np.array([1.0, -1.0]), graph_matrix(np.empty((0, 3), np.int64), 1), 0.0, 0.0)
    with pytest.raises(HpcfedError, match="KKT residual"):
        solve(separable, most_steps=20)
    solve(dataclasses.replace(separable, mu1=1e-6))


def test_too_many_features_are_refused():
    many = logreg_reference.MOST_FEATURES + 1
    with pytest.raises(ConfigError, match=str(many)):
        solve(Objective(scipy.sparse.csr_array((2, many)), np.array([1.0, -1.0]), scipy.sparse.eye_array(many), 1, 1))


class TestCache:
    @pytest.fixture(autouse=True)
    def _home(self, monkeypatch, tmp_path):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        self.folder = tmp_path / "hpcfed" / "references"

    def test_a_problem_is_solved_once(self, monkeypatch):
        problem = random_problem()
        first = cached(problem)
        assert [path.name for path in self.folder.iterdir()] == [f"{problem.key()}.npz"]
        monkeypatch.setattr(logreg_reference, "solve", None)
        again = cached(problem)
        assert (again.x.tobytes(), again.dual.tobytes()) == (first.x.tobytes(), first.dual.tobytes())
        assert (again.objective, again.kkt_residual) == (first.objective, first.kkt_residual)

    @pytest.mark.parametrize("damage", ["empty", "cut", "other"])
    def test_a_damaged_file_is_computed_anew(self, damage):
        problem = random_problem()
        first = cached(problem)
        path = self.folder / f"{problem.key()}.npz"
        whole = path.read_bytes()
        if damage == "other":
            np.savez(path, x=first.x + 1e-6, dual=first.dual)
        else:
            path.write_bytes(b"" if damage == "empty" else whole[: len(whole) // 2])
        again = cached(problem)
        assert again.x.tobytes() == first.x.tobytes()
        with np.load(path) as file:
            np.testing.assert_array_equal(file["x"], first.x)

    def test_whatever_changes_the_minimum_changes_the_key(self):
        problem = random_problem()
        flipped = problem.labels.copy()
        flipped[0] *= -1
        others = [
            dataclasses.replace(problem, mu1=0.02),
            dataclasses.replace(problem, mu2=0.01),
            dataclasses.replace(problem, labels=flipped),
            dataclasses.replace(problem, features=problem.features * 2),
            random_problem(edges=((0, 1, -1), (1, 2, -1), (0, 2, -1))),
            random_problem(edges=()),
        ]
        assert len({each.key() for each in (problem, *others)}) == 7
        assert random_problem().key() == problem.key()

    def test_a_folder_that_cannot_be_written_is_no_obstacle(self, tmp_path, caplog):
        (tmp_path / "hpcfed").write_text("a file where the folder should be")
        assert cached(random_problem()).kkt_residual < 1e-10
        assert "cannot be kept" in caplog.text


def test_the_relative_error_of_a_run_falls_toward_zero(hpcfed, tmp_path):
    run = [
        "logreg", "--reference", "--mu1", "0.05", "--mu2", "0.01", "--rounds", "1500", "--record-every", "100",
        "--step", "1.9/L", "--clients", "1", "--out", str(tmp_path / "run"),
    ]  # fmt: skip
    done = hpcfed(*run, XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert done.status == 0, done.err
    assert "KKT residual" in done.err
    records = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    errors = [record["relative_error"] for record in records]
    assert errors[0] > 1
    assert abs(errors[-1]) < 1e-9
    assert all(later < earlier or later < 1e-12 for earlier, later in itertools.pairwise(errors))
    with h5py.File(tmp_path / "run/result.h5") as file:
        best = file["reference"]
        assert best.attrs["kkt_residual"] < 1e-10
        expected = (records[3]["objective"] - best.attrs["objective"]) / best.attrs["objective"]
        assert records[3]["relative_error"] == pytest.approx(expected, rel=1e-12)
        np.testing.assert_allclose(file["x"], best, atol=1e-4)


@pytest.mark.mpi
def test_ranks_share_one_reference(mpirun, hpcfed, tmp_path):
    digests = set()
    for name, go in (("one", hpcfed), ("two", lambda *args, **env: mpirun(2, *args, **env))):
        cache = str(tmp_path / name / "cache")
        out = tmp_path / f"run-{name}"
        words = ("--reference", "--B", "identity", "--rounds", "3", "--no-pictures", "--out", str(out))
        done = go("logreg", *words, XDG_CACHE_HOME=cache)
        assert done.status == 0, done.err
        with h5py.File(out / "result.h5") as file:
            digests.add((file.attrs["digest"], file["reference"][()].tobytes()))
        records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        digests.add(tuple(record["relative_error"] for record in records))
    assert len(digests) == 2
