"""Coarser levels of `hpcfed ct`: grids that lie where they should, the same objective, starts that are nearer."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from test_ct import SMALL, facts

from hpcfed.devices import Device
from hpcfed.errors import ConfigError
from hpcfed.federation import Federation
from hpcfed.scans.beam import Beam
from hpcfed.streams import Streams
from hpcfed.workloads.ct import Ct
from hpcfed.workloads.ct_geometry import Geometry
from hpcfed.workloads.ct_levels import MU_RATIO, ROUNDS, binned, coarser, halved, prolongated, restricted

SHAPES = [(8, 8, 4), (9, 7, 5), (8, 9, 1), (1, 1, 1), (2, 3, 2)]


def build(**options):
    given = {"shape": (32, 32, 8), "views": 45, "detector": 48, "clients": 3, **options}
    return Ct(**given).build(Federation(given["clients"], Streams(1)))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("centred", [False, True])
def test_constants_stay_what_they_are(shape, centred):
    coarse = np.full(halved(shape), 0.7, np.float32)
    np.testing.assert_allclose(prolongated(coarse, shape, centred), np.full(shape, 0.7), rtol=1e-6)
    np.testing.assert_allclose(restricted(np.full(shape, 0.7, np.float32), centred), coarse, rtol=1e-6)


def positions(shape, edge, centred):
    """Middles (y, x, z) of voxels in fine voxels; two slices make one, or all are centred."""
    axes = [edge * (np.arange(size) - (size - 1) / 2) for size in shape]
    if not centred:
        axes[2] = edge * np.arange(shape[2]) + (edge - 1) / 2
    return np.meshgrid(*axes, indexing="ij")


@pytest.mark.parametrize("shape", [(12, 12, 8), (13, 11, 9)])
@pytest.mark.parametrize("centred", [False, True])
def test_linear_volumes_are_interpolated_exactly(shape, centred):
    def linear(y, x, z):
        return (1 + 2 * y - 3 * x + 0.5 * z).astype(np.float32)

    coarse = linear(*positions(halved(shape), 2, centred))
    found, expected = prolongated(coarse, shape, centred), linear(*positions(shape, 1, centred))
    inside = (slice(1, -1),) * 3
    np.testing.assert_allclose(found[inside], expected[inside], atol=1e-5)
    np.testing.assert_allclose(restricted(expected, centred)[inside], coarse[inside], atol=1e-4)


def blob(y, x, z, middle):
    """A smooth ball that is off the axis."""
    return np.exp(-((y - 3) ** 2 + (x + 5) ** 2 + (z - middle - 1) ** 2) / (2 * 4.0**2)).astype(np.float32)


def geometry_of(kind, columns, rows, shift):
    axis = (columns - 1) / 2 + shift
    angles = np.linspace(0, 2 * np.pi, 12, endpoint=False)
    if kind == "parallel":
        return Geometry("parallel", angles, columns, rows, axis)
    beam = Beam(90.0, 60.0, (1.6, 1.5), axis, (rows - 1) / 2 + shift)
    if kind == "poses":
        beam = replace(beam, vectors=beam.poses(angles, columns, rows))
    return Geometry("fan" if kind == "fan" else "cone", angles, columns, rows, axis, beam)


@pytest.mark.parametrize("kind", ["parallel", "fan", "cone", "poses"])
@pytest.mark.parametrize(("side", "columns", "rows"), [(32, 54, 24), (33, 55, 25)])
def test_coarse_projections_are_those_of_the_coarse_volume(kind, side, columns, rows):
    """A smooth volume, sampled on both grids: a grid, axis or detector that is off by half a pixel shows."""
    centred = kind in ("cone", "poses")
    shape, middle = (side, side, rows), 0 if centred else (rows - 1) / 2
    geometry = geometry_of(kind, columns, rows, 0.8)
    volumes = [blob(*positions(each, edge, centred), middle) for each, edge in ((shape, 1), (halved(shape), 2))]
    views = np.arange(12)
    fine = geometry.projector(shape, views, Device(), "joseph").forward(volumes[0])
    coarse = geometry.coarser().projector(halved(shape), views, Device(), "joseph").forward(volumes[1])
    shifted = np.roll(coarse, 1, axis=1)
    error, by_a_column = (np.linalg.norm(binned(fine) - each) / np.linalg.norm(coarse) for each in (coarse, shifted))
    assert error < 0.03
    assert error < 0.15 * by_a_column


@pytest.mark.parametrize(("slices", "ratio"), [(8, 16), (1, 8)])
def test_the_coarse_objective_is_a_fraction_of_the_fine_one(slices, ratio):
    """On a smooth volume misfit and penalty are the same part of the fine ones, with a quarter of the mu."""
    fine = build(shape=(32, 32, slices), noise=0.0, mu=1.0)
    coarse = coarser(fine)
    assert coarse.workload.mu == MU_RATIO == 0.25
    y, x, _ = positions((16, 16, max(1, slices // 2)), 2, False)
    volume = np.exp(-(x**2 + y**2) / 72).astype(np.float32)
    terms = []
    for problem, sample in ((coarse, volume), (fine, prolongated(volume, (32, 32, slices)))):
        fed = problem.fed
        energy = fed.total(fed.map(lambda client, rng, s=sample: float((client.projector.forward(s) ** 2).sum())))
        terms.append((energy, fed.any_client.regularizer.value(sample)))
    assert terms[1][0] == pytest.approx(ratio * terms[0][0], rel=0.06)
    assert terms[1][1] == pytest.approx(ratio * terms[0][1], rel=0.06)


@pytest.mark.parametrize("geometry", ["parallel", "cone"])
def test_a_start_from_zero_is_nearer_with_levels(geometry):
    detector = 48 if geometry == "parallel" else "48,20"
    objectives = []
    for levels in (1, 2, 3):
        problem = build(start="zero", levels=levels, geometry=geometry, detector=detector)
        objectives.append(problem.metrics(problem.start(), problem.fed)["objective"])
    assert max(objectives[1:]) < 0.15 * objectives[0]


def test_what_coarse_levels_send_is_counted():
    sent = []
    for levels in (1, 2):
        problem = build(levels=levels)
        problem.start()
        sent.append(problem.fed.ledger.traffic["wire_bytes_up"])
    volumes = 3 * 4 * 32 * 32 * 8
    messages, rest = divmod(sent[1] - sent[0], volumes // 8)
    assert rest == 0
    assert 2 <= messages <= 1 + ROUNDS  # a back-projection, then gradients


def test_too_many_levels_are_refused():
    assert build(levels=3).start().shape == (32, 32, 8)
    with pytest.raises(ConfigError, match="--levels 4: slices of 32 x 32 have 3 at most"):
        build(levels=4).start()


@pytest.mark.mpi
def test_same_bits_on_any_number_of_ranks(hpcfed, mpirun, tmp_path):
    given = ["ct", *SMALL, "--device", "cpu", "--levels", "2", "--mu", "auto", "--clients", "5", "--rounds", "2"]
    assert hpcfed(*given, "--out", str(tmp_path / "1")).status == 0
    for ranks in (2, 3):
        finished = mpirun(ranks, *given, "--out", str(tmp_path / f"{ranks}"))
        assert finished.status == 0, finished.err
        assert facts(tmp_path / f"{ranks}")["digest"] == facts(tmp_path / "1")["digest"]
    lines = [(tmp_path / f"{ranks}/journal.jsonl").read_text() for ranks in (1, 2, 3)]
    assert lines[0] == lines[1] == lines[2]
    assert json.loads(lines[0])["found"] > 0
