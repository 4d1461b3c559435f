"""Primal-dual steps in a metric, with control variates: the same minimum in every metric, whoever takes part."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from hpcfed.algorithms.vm_pdfp import VmPdfp
from hpcfed.compressors.grid import Grid
from hpcfed.compressors.qsgd import Qsgd
from hpcfed.federation import Federation
from hpcfed.operators.fourier_metric import FourierMetric
from hpcfed.operators.parallel_beam import ParallelBeam
from hpcfed.operators.total_variation import TotalVariation, differences, differences_adjoint
from hpcfed.streams import Streams

SHAPE = (5, 4, 3)
SIZE = 60
CLIENTS = 4
WEIGHT = 0.4


class Uneven:
    """A metric: a positive diagonal over two decades, as uneven as the curvature below."""

    scale = np.logspace(-1, 1, SIZE).reshape(SHAPE)
    norm_bound, unit = 10.0, 2

    def apply(self, x, piece=slice(None)):
        return (self.scale * x)[..., piece]


class SmallTv(TotalVariation):
    """Total variation of float64 arrays, which the compiled loops do not take."""

    def apply(self, x, out=None):
        return differences(x)

    def adjoint(self, v, out=None, rows=slice(None)):
        return differences_adjoint(v)[rows]

    def dual_step(self, v, x, lam, rows=slice(None)):
        raised = v + lam * differences(x)
        return (raised / np.maximum(1, np.linalg.norm(raised, axis=0) / self.weight))[:, rows]


@dataclass
class Client:
    """``1/2 |A (x - target)|^2`` with a curvature over two decades, unlike that of others."""

    number: int
    regularizer: Any
    metric: Any = field(default_factory=Uneven)

    def __post_init__(self):
        rng = np.random.default_rng(self.number)
        rotation = np.linalg.qr(rng.standard_normal((SIZE, SIZE)))[0]
        own = np.exp(0.5 * rng.standard_normal(SIZE)) * Uneven.scale.ravel() ** -0.5
        self.matrix = (np.eye(SIZE) + 0.1 * rotation) * own
        self.target = np.random.default_rng(9).standard_normal(SIZE) + 0.5 * rng.standard_normal(SIZE)

    def gradient(self, x, rng=None, batch=None):
        return (self.matrix.T @ (self.matrix @ (x.ravel() - self.target))).reshape(SHAPE)

    def curvature(self, direction):
        return (self.matrix.T @ (self.matrix @ direction.ravel())).reshape(SHAPE)

    def value(self, x):
        return 0.5 * float(np.sum((self.matrix @ (x.ravel() - self.target)) ** 2))


def federation(nonnegative=False, **kwargs):
    regularizer = SmallTv(SHAPE, WEIGHT, nonnegative)
    return Federation(CLIENTS, streams=Streams(1), **kwargs).build(lambda number, rng: Client(number, regularizer))


@pytest.fixture(scope="module", params=[False, True], ids=["free", "nonnegative"])
def minimum(request):
    """The minimizer, by an interior-point method."""
    import cvxpy

    fed, x = federation(), cvxpy.Variable(SIZE)
    field_of = np.stack([differences(each.reshape(SHAPE)).reshape(3, -1) for each in np.eye(SIZE)], axis=2)
    misfit = sum(cvxpy.sum_squares(c.matrix @ (x - c.target)) for c in fed.clients.values()) / (2 * CLIENTS)
    penalty = WEIGHT * cvxpy.sum(cvxpy.norm(cvxpy.vstack([each @ x for each in field_of]), 2, axis=0))
    problem = cvxpy.Problem(cvxpy.Minimize(misfit + penalty), [x >= 0] if request.param else [])
    problem.solve(solver="CLARABEL", tol_gap_abs=1e-10, tol_gap_rel=1e-10, tol_feas=1e-10)
    return request.param, np.asarray(x.value).reshape(SHAPE)


def run(fed, method, rounds):
    state = method.init(fed.at(0), np.zeros(SHAPE))
    for number in range(1, rounds + 1):
        state = method.round(state, fed.at(number))
    return state


@pytest.mark.parametrize(
    ("method", "compressor", "rounds"),
    [
        (VmPdfp(metric="fourier"), None, 4000),
        (VmPdfp(metric="fourier", participants=2), None, 2500),
        (VmPdfp(metric="fourier", participants=2), Qsgd(3, "all"), 2500),
        (VmPdfp(metric="fourier"), Grid(50, "all"), 4000),
    ],
    ids=["all", "two of four", "two of four, rounded", "all, on a grid"],
)
def test_it_ends_at_the_minimum(minimum, method, compressor, rounds):
    """Also with messages of three levels and half the clients: nothing but the number of rounds depends on them."""
    nonnegative, best = minimum
    state = run(federation(nonnegative, compressor=compressor), method, rounds)
    np.testing.assert_allclose(method.solution(state), best, atol=2e-5)
    assert not nonnegative or method.solution(state).min() >= 0


@pytest.mark.parametrize("compressor", [None, Qsgd(3, "all"), Grid(50, "all")], ids=["exact", "qsgd", "grid"])
def test_the_server_knows_the_mean_of_what_clients_keep(compressor):
    """The invariant that makes estimates unbiased, whatever was rounded and whoever sat out."""
    state = run(federation(compressor=compressor), VmPdfp(participants=2), 7)
    np.testing.assert_allclose(state.mean, np.mean(list(state.stored.values()), axis=0), atol=1e-10)


class TestFourierMetric:
    def test_it_is_symmetric_and_positive(self):
        metric = FourierMetric((12, 9, 2))
        rng = np.random.default_rng(0)
        x, y = rng.standard_normal((2, 12, 9, 2)).astype(np.float32)
        assert np.vdot(metric.apply(x), y) == pytest.approx(np.vdot(x, metric.apply(y)), rel=1e-4, abs=1e-4)
        assert np.vdot(x, metric.apply(x)) > 0

    def test_it_evens_the_curvature_of_projections(self):
        """Of ``A^T A`` on 16 x 16 pixels the largest eigenvalue is 30 times the median, of ``P A^T A`` less than 5;
        smaller eigenvalues gain as much."""
        shape = (16, 16, 1)
        beam = ParallelBeam(shape, np.linspace(0, np.pi, 48, endpoint=False), 24)
        units = np.eye(256, dtype=np.float32).reshape(256, *shape)
        normal = np.stack([beam.normal(each).ravel() for each in units]).astype(float)
        metric = FourierMetric(shape)
        filter_ = np.stack([metric.apply(each).ravel() for each in units]).astype(float)
        plain, even = (np.sort(np.linalg.eigvals(matrix).real) for matrix in (normal, filter_ @ normal))
        assert even[0] > 0
        assert plain[-1] / plain[128] > 25
        assert even[-1] / even[128] < 5
        assert even[-1] / even[25] < plain[-1] / plain[25] / 8

    def test_tensors_get_the_same(self):
        torch = pytest.importorskip("torch")
        x = np.random.default_rng(0).standard_normal((12, 9, 2)).astype(np.float32)
        metric = FourierMetric(x.shape)
        np.testing.assert_allclose(metric.apply(torch.from_numpy(x)).numpy(), metric.apply(x), atol=1e-6)
