"""`hpcfed logreg`: the problem against closed forms and other people's solvers, and as its user runs it."""

from __future__ import annotations

import json

import h5py
import numpy as np
import pytest
import scipy.sparse
from scipy.optimize import lsq_linear, minimize
from sklearn.linear_model import LogisticRegression

from hpcfed.algorithms.fpdfp import Fpdfp
from hpcfed.data import libsvm
from hpcfed.errors import ConfigError, DataError
from hpcfed.federation import Federation
from hpcfed.operators.feature_graph import build_edges, graph_matrix, read_edges
from hpcfed.operators.sparse_l1 import SparseL1
from hpcfed.streams import Streams
from hpcfed.workloads.logreg import LogReg


def build(**options):
    workload = LogReg(**{"clients": 4, **options})
    return workload.build(Federation(workload.clients, Streams(3)))


@pytest.mark.parametrize("partition", ["iid", "dirichlet", "shards", "quantity"])
def test_the_mean_of_the_clients_is_the_objective_whatever_the_partition(partition):
    problem = build(partition=partition, alpha=0.3, mu1=0.1, mu2=0.05)
    x = np.random.default_rng(0).normal(size=30)
    clients = problem.fed.clients.values()
    features = np.vstack([client.features.toarray() for client in clients])
    labels = np.concatenate([client.labels for client in clients])
    smooth = np.log1p(np.exp(-labels * (features @ x))).mean() + 0.05 * (x @ x)
    i, j, sign = problem.edges.T
    norm = np.abs(x).sum() + np.abs(x[i] - sign * x[j]).sum()
    assert problem.metrics(x, problem.fed)["objective"] == pytest.approx(smooth + 0.05 * norm, rel=1e-12)
    assert problem.holdings.sum() == len(labels)


def test_test_metrics_are_those_of_the_held_out_samples():
    problem = build()
    x = np.random.default_rng(0).normal(size=30)
    clients = problem.fed.clients.values()
    features = np.vstack([client.test_features.toarray() for client in clients])
    labels = np.concatenate([client.test_labels for client in clients])
    metrics = problem.metrics(x, problem.fed)
    assert len(labels) == round(0.2 * 569)
    assert metrics["test_accuracy"] == np.mean(np.sign(features @ x) == labels)
    assert metrics["test_loss"] == pytest.approx(np.log1p(np.exp(-labels * (features @ x))).mean(), rel=1e-12)


def test_a_ridge_alone_agrees_with_scikit_learn():
    problem = build(mu1=0.02, mu2=0.0, B="identity")
    fed = problem.fed
    method = Fpdfp(step="1.9/L")
    state = method.init(fed, problem.start())
    for number in range(1, 3001):
        state = method.round(state, fed.at(number))
    clients = fed.clients.values()
    features = scipy.sparse.vstack([client.features for client in clients]).tocsr()
    labels = np.concatenate([client.labels for client in clients])
    other = LogisticRegression(C=1 / (0.02 * len(labels)), fit_intercept=False, tol=1e-10, max_iter=5000)
    np.testing.assert_allclose(state.x, other.fit(features, labels).coef_[0], atol=1e-5)


def test_the_graph_problem_agrees_with_a_general_solver():
    """The nonsmooth term as bounds: minimize f(x) + mu2 sum t, -t <= Bx <= t, x = p - q as nonnegative parts of Bx."""
    problem = build(mu1=0.05, mu2=0.02, clients=1, graph_penalty=0.5)
    client, regularizer = problem.fed.clients[0], problem.regularizer
    method = Fpdfp(step="1.0/L")
    state = method.init(problem.fed, problem.start())
    for number in range(1, 4001):
        state = method.round(state, problem.fed.at(number))
    gradient = client.gradient(state.x)
    np.testing.assert_allclose(gradient + regularizer.adjoint(state.v), 0, atol=1e-8)
    image = regularizer.apply(state.x)
    assert np.abs(state.v).max() <= 0.02 + 1e-12
    assert state.v @ image == pytest.approx(regularizer.value(state.x), rel=1e-7)

    def smoothed(x, width=1e-7):
        image = regularizer.apply(x)
        root = np.sqrt(image**2 + width**2)
        return client.value(x) + 0.02 * root.sum(), client.gradient(x) + 0.02 * regularizer.adjoint(image / root)

    other = minimize(smoothed, state.x + 0.01, jac=True, method="L-BFGS-B", options={"maxiter": 5000, "ftol": 1e-15})
    best = client.value(state.x) + regularizer.value(state.x)
    assert other.fun >= best - 1e-9
    assert other.fun == pytest.approx(best, rel=1e-3)


def test_prox_of_the_graph_norm_is_the_box_problem():
    rng = np.random.default_rng(1)
    matrix = graph_matrix(np.array([[0, 1, 1], [1, 2, -1], [0, 4, 1]]), 6)
    regularizer = SparseL1(0.3, matrix)
    x = rng.normal(size=6)
    box = lsq_linear(matrix.toarray().T, x, bounds=(-0.21, 0.21), tol=1e-14)
    np.testing.assert_allclose(regularizer.prox(x, 0.7), x - matrix.T @ box.x, atol=1e-6)
    assert regularizer.norm_bound == pytest.approx(np.linalg.norm(matrix.toarray(), 2) ** 2, rel=1e-5)


def test_edges_join_features_that_move_together():
    rng = np.random.default_rng(2)
    a, b = rng.normal(size=(2, 2000))
    columns = np.stack([a, a + 0.3 * rng.normal(size=2000), b, -b + 0.3 * rng.normal(size=2000)], axis=1)
    edges = build_edges(scipy.sparse.csr_array(columns), 0.3)
    np.testing.assert_array_equal(edges, [[0, 1, 1], [2, 3, -1]])


def test_a_graph_is_taken_from_an_earlier_run(hpcfed, tmp_path):
    first = hpcfed("logreg", "--rounds", "20", "--out", str(tmp_path / "a"))
    assert first.status == 0, first.err
    arguments = ["--rounds", "20", "--graph", str(tmp_path / "a/result.h5"), "--out", str(tmp_path / "b")]
    assert hpcfed("logreg", *arguments).status == 0
    with h5py.File(tmp_path / "a/result.h5") as one, h5py.File(tmp_path / "b/result.h5") as other:
        np.testing.assert_array_equal(one["graph"], other["graph"])
        assert one.attrs["digest"] == other.attrs["digest"]
        assert len(read_edges(tmp_path / "a/result.h5", 30)) > 10
    with pytest.raises(DataError, match="do not fit 5 features"):
        read_edges(tmp_path / "a/result.h5", 5)


def test_feddualavg_hits_the_known_minimizer_of_an_l1_problem_with_equal_clients(hpcfed, tmp_path):
    """One sample and its mirror make all clients alike; log(1 + e^-x) + mu2 |x| is least at log(1/mu2 - 1)."""
    (tmp_path / "data.txt").write_text("+1 1:1\n-1 1:-1\n" * 40)
    (tmp_path / "test.txt").write_text("+1 1:1\n-1 1:-1\n")
    finished = hpcfed(
        "logreg", "--data", str(tmp_path / "data.txt"), "--test", str(tmp_path / "test.txt"), "--B", "identity",
        "--algorithm", "feddualavg", "--mu1", "0", "--mu2", "0.1", "--clients", "4", "--rounds", "400",
        "--step", "1.0", "--out", str(tmp_path / "r"),
    )  # fmt: skip
    assert finished.status == 0, finished.err
    with h5py.File(tmp_path / "r/result.h5") as file:
        assert file["x"][0] == pytest.approx(np.log(1 / 0.1 - 1), abs=1e-6)


def test_algorithm_5_sends_no_dual_variable(hpcfed, tmp_path):
    for name in ("identity", "graph"):
        assert (
            hpcfed("logreg", "--B", name, "--rounds", "10", "--no-pictures", "--out", str(tmp_path / name)).status == 0
        )
    sent = {
        name: json.loads(hpcfed("show", str(tmp_path / name), "--json").out)["metrics"]["paper_bits_up"]
        for name in ("identity", "graph")
    }
    assert sent["identity"] == 10 * 10 * 30 * 32
    with h5py.File(tmp_path / "graph/result.h5") as file:
        assert sent["graph"] == 10 * 10 * (30 + 30 + len(file["graph"])) * 32


@pytest.mark.mpi
@pytest.mark.parametrize("algorithm", ["fpdfp", "fedavg", "fedmid", "feddualavg"])
def test_same_bits_on_any_number_of_ranks(hpcfed, mpirun, tmp_path, algorithm):
    options = ["--algorithm", algorithm, "--rounds", "6", "--participants", "4", "--quantize", "20", "--batch", "9"]
    options += ["--partition", "dirichlet", "--B", "identity", "--no-pictures"]
    assert hpcfed("logreg", *options, "--out", str(tmp_path / "1")).status == 0
    digests = {json.loads(hpcfed("show", str(tmp_path / "1"), "--json").out)["digest"]}
    for ranks in (2, 3):
        finished = mpirun(ranks, "logreg", *options, "--out", str(tmp_path / f"{ranks}"))
        assert finished.status == 0, finished.err
        digests.add(json.loads(hpcfed("show", str(tmp_path / f"{ranks}"), "--json").out)["digest"])
    assert len(digests) == 1


def test_a9a_reaches_its_known_accuracy(hpcfed, shared_data, tmp_path):
    data = shared_data / "libsvm"
    finished = hpcfed(
        "logreg", "--data", str(data / "a9a.bz2"), "--test", str(data / "a9a.t.bz2"), "--rounds", "300",
        "--record-every", "50", "--features", "123", "--step", "1.9/L", "--out", str(tmp_path / "r"),
    )  # fmt: skip
    assert finished.status == 0, finished.err
    assert json.loads(hpcfed("show", str(tmp_path / "r"), "--json").out)["metrics"]["test_accuracy"] > 0.84


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"data": "nowhere.txt"}, "nowhere.txt"),
        ({"clients": 500}, "500"),
        ({"test_fraction": 0.0001}, "0.0001"),
    ],
)
def test_what_cannot_be_done_is_said(options, words):
    with pytest.raises((ConfigError, DataError), match=words):
        build(**options)


def test_the_embedded_set_is_the_published_one():
    data = libsvm.embedded()
    assert data.features.shape == (569, 30)
    assert (data.labels > 0).sum() == 212
