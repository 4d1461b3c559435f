"""The metric of a cone beam: what it evens, and that the minimum does not depend on it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hpcfed.algorithms.fpdfp import Fpdfp
from hpcfed.algorithms.vm_pdfp import VmPdfp
from hpcfed.federation import Federation
from hpcfed.operators.cone_beam import ConeBeam
from hpcfed.operators.fourier_metric import FourierMetric
from hpcfed.scans.beam import Beam
from hpcfed.streams import Streams
from hpcfed.workloads.ct import Ct
from hpcfed.workloads.ct_geometry import Geometry

SHAPE = (10, 10, 12)
SIZE = 1200


def circle(source=16.0, middle=15.5):
    """A wide cone about the volume."""
    beam = Beam(source, source, (1.2, 1.8), 15.5, middle)
    return Geometry("cone", np.linspace(0, 2 * np.pi, 24, endpoint=False), 32, 32, 15.5, beam)


def matrix(function):
    """A linear map of volumes, symmetrized against rounding."""
    units = np.eye(SIZE, dtype=np.float32).reshape(SIZE, *SHAPE)
    dense = np.stack([function(each).ravel() for each in units]).astype(float)
    return (dense + dense.T) / 2


class TestSlopes:
    def test_a_circle_of_sources_sees_a_slice_at_its_height_over_their_distance(self):
        np.testing.assert_allclose(circle().slopes(SHAPE), np.abs(np.arange(12) - 5.5) / 16)

    def test_sources_on_a_helix_see_every_slice_alike_on_average(self):
        geometry = circle()
        vectors = geometry.vectors(np.arange(24))
        vectors[:, 2] = np.where(np.arange(24) % 2, 20.0, -20.0)
        helix = replace(geometry, beam=replace(geometry.beam, vectors=vectors))
        np.testing.assert_allclose(helix.slopes(SHAPE), 20 / 16)

    def test_other_beams_are_level(self):
        assert Geometry("parallel", np.zeros(1), 4, 4, 1.5).slopes(SHAPE) is None
        assert replace(circle(), kind="fan").slopes(SHAPE) is None


class TestMetric:
    metric = FourierMetric(SHAPE, circle().slopes(SHAPE))

    def test_it_is_symmetric_and_positive_within_its_bound(self):
        units = np.eye(SIZE, dtype=np.float32).reshape(SIZE, *SHAPE)
        dense = np.stack([self.metric.apply(each).ravel() for each in units])
        np.testing.assert_allclose(dense, dense.T, atol=1e-6)
        values = np.linalg.eigvalsh(matrix(self.metric.apply))
        assert values[0] > 0
        assert values[-1] <= self.metric.norm_bound * (1 + 1e-6)
        assert self.metric.norm_bound < 1.5 * values[-1]

    def test_pieces_make_the_whole(self):
        x = np.random.default_rng(0).standard_normal(SHAPE).astype(np.float32)
        pieces = [self.metric.apply(x, slice(start, start + 5)) for start in (0, 5, 10)]
        np.testing.assert_allclose(np.concatenate(pieces, axis=2), self.metric.apply(x), atol=1e-6)

    def test_level_rays_add_nothing(self):
        x = np.random.default_rng(0).standard_normal(SHAPE).astype(np.float32)
        level = FourierMetric(SHAPE, np.zeros(12))
        assert np.array_equal(level.apply(x), FourierMetric(SHAPE).apply(x))
        assert level.norm_bound == 1.0

    def test_it_evens_the_curvature_of_a_cone(self):
        """The least eigenvalue of ``P A^T A``, over the largest, more than doubles; the middle one stays."""
        geometry = circle()
        beam = ConeBeam(SHAPE, geometry.vectors(np.arange(24)), 32, 32)
        normal = matrix(beam.normal)

        def spectrum(metric):
            factor = np.linalg.cholesky(matrix(metric.apply))
            values = np.linalg.eigvalsh(factor.T @ normal @ factor)
            return values / values[-1]

        flat, across = spectrum(FourierMetric(SHAPE)), spectrum(self.metric)
        assert across[0] > 2 * flat[0]
        assert across[SIZE // 2] > 0.9 * flat[SIZE // 2]

    def test_tensors_get_the_same(self):
        torch = pytest.importorskip("torch")
        x = np.random.default_rng(0).standard_normal(SHAPE).astype(np.float32)
        for piece in (slice(None), slice(3, 7)):
            found = self.metric.apply(torch.from_numpy(x), piece).numpy()
            np.testing.assert_allclose(found, self.metric.apply(x, piece), atol=1e-6)


def test_the_minimum_is_that_of_fpdfp():
    scan = {"shape": (8, 8, 6), "views": 12, "detector": "16,12", "source_distance": 9.0}
    workload = Ct(clients=1, geometry="cone", mu=0.08, **scan)
    problem = workload.build(Federation(1, streams=Streams(1)))

    def minimum(method, rounds):
        state = method.init(problem.fed.at(0), problem.start())
        for number in range(1, rounds + 1):
            state = method.round(state, problem.fed.at(number))
        return method.solution(state)

    found = minimum(VmPdfp(), 300)
    assert np.ptp(found) > 0.5
    np.testing.assert_allclose(found, minimum(Fpdfp(step="1.9/L"), 1000), atol=1e-5)
