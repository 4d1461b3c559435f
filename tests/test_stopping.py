"""Stopping by the optimality conditions, and objectives beyond hope."""

from __future__ import annotations

import numpy as np
import pytest

from hpcfed.algorithms.steps import primal_dual_residual
from hpcfed.operators.total_variation import TotalVariation
from hpcfed.run.result import read_attributes
from hpcfed.run.run_folder import RunFolder

CT = [
    "ct",
    "--shape",
    "16,16,4",
    "--views",
    "24",
    "--detector",
    "24",
    "--clients",
    "3",
    "--rounds",
    "400",
    "--no-pictures",
]


@pytest.mark.parametrize("method", ["fpdfp", "vm-pdfp"])
def test_it_stops_where_both_conditions_hold(hpcfed, tmp_path, method):
    """The conditions, worked out anew from the result, hold to the tolerance; a round before they did not."""
    import h5py

    from hpcfed.workloads.ct import Ct

    done = hpcfed(*CT, "--algorithm", method, "--tol", "0.01", "--out", str(tmp_path / "run"))
    assert done.status == 0, done.err
    history = RunFolder(tmp_path / "run").history()
    last = history[-1]
    assert 1 < last["round"] < 400
    assert "is at most --tol 0.01" in read_attributes(tmp_path / "run" / "result.h5")["ended"]
    assert last["residual"] <= 0.01
    assert all(record["residual"] > 0.01 for record in history[1:-1])

    from hpcfed.federation import Federation
    from hpcfed.streams import Streams

    problem = Ct(shape=(16, 16, 4), views=24, detector=24, clients=3).build(Federation(3, streams=Streams(0)))
    with h5py.File(tmp_path / "run" / "result.h5") as file:
        x, v = file["volume"][()], file["dual"][()]
    regularizer = TotalVariation((16, 16, 4), problem.workload.mu)
    gradient = problem.fed.mean(problem.fed.map(lambda client, rng: client.gradient(x)))
    pull = regularizer.adjoint(v)
    assert np.linalg.norm(gradient + pull) < 0.05 * np.linalg.norm(pull)
    # v in dg(Bx): |v| <= mu, and <v, Bx> = g(Bx)
    assert np.linalg.norm(v, axis=0).max() <= problem.workload.mu * (1 + 1e-5)
    assert np.vdot(v, regularizer.apply(x)) == pytest.approx(regularizer.value(x), rel=0.02)


def test_a_stopped_run_is_finished(hpcfed, tmp_path):
    run = ["--algorithm", "vm-pdfp", "--tol", "0.05", "--out", str(tmp_path / "run")]
    assert hpcfed(*CT, *run).status == 0
    assert "is finished" in hpcfed("resume", str(tmp_path / "run")).out


def test_nothing_to_judge_by_is_refused(hpcfed, tmp_path):
    done = hpcfed("logreg", "--B", "identity", "--tol", "0.01", "--out", str(tmp_path / "run"))
    assert done.status == 2
    assert "send no dual variable" in done.err


def test_an_objective_beyond_hope_is_divergence(hpcfed, tmp_path):
    """With twice the largest step that converges, the objective of ten empty volumes is passed long before overflow."""
    done = hpcfed(*CT, "--algorithm", "fpdfp", "--step", "4/L", "--record-every", "1", "--out", str(tmp_path / "run"))
    assert done.status == 1
    assert "diverged: objective" in done.err
    assert len(RunFolder(tmp_path / "run").history()) < 30


@pytest.mark.parametrize(
    ("norms", "residual"),
    [
        ((3.0, 4.0, 1.0, 10.0), 0.75),
        ((0.1, 1.0, 5.0, 10.0), 0.5),
        ((0.0, 0.0, 0.0, 0.0), 0.0),
        ((1.0, 0.0, 0.0, 1.0), 1.0),
    ],
)
def test_the_worse_half_counts(norms, residual):
    assert primal_dual_residual(*norms) == residual
