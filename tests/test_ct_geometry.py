"""`hpcfed ct` with fan and cone beams: options, simulated and measured scans, the same bits, memory."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace
from types import SimpleNamespace

import h5py
import numpy as np
import pytest
from test_ct import facts

from hpcfed import memory, scans
from hpcfed.errors import ConfigError
from hpcfed.federation import Federation
from hpcfed.scans.beam import Beam
from hpcfed.streams import Streams
from hpcfed.workloads.ct import Ct
from hpcfed.workloads.ct_geometry import Geometry

SMALL = [
    "--geometry",
    "cone",
    "--shape",
    "20,20,8",
    "--views",
    "24",
    "--detector",
    "30,18",
    "--clients",
    "5",
    "--no-pictures",
]
RUN = [*SMALL, "--rounds", "6", "--record-every", "1", "--device", "cpu"]
FEDERATED = [*RUN, "--participants", "3", "--quantize", "100", "--batch", "1"]


def build(**options):
    given = {"shape": (14, 12, 6), "views": 24, "detector": 24, "clients": 4, "geometry": "cone", **options}
    workload = Ct(**given)
    return workload.build(Federation(workload.clients, Streams(1)))


def test_defaults_see_the_whole_volume():
    """Every voxel's corner falls on the detector in every view, and hardly a pixel sees past all of them."""
    for kind in ("fan", "cone"):
        workload = Ct(geometry=kind, shape=(30, 40, 20), views=50, clients=5)
        geometry = workload.settle()
        corners = np.array([(x, y, z) for x in (-20, 20) for y in (-15, 15) for z in (-10, 10)], dtype=float)
        reach = []
        for source, middle, u, v in geometry.vectors(np.arange(50)).reshape(-1, 4, 3):
            solved = np.linalg.solve(np.stack([u, v, middle - source], axis=1), (corners - source).T)
            reach.append(np.abs(solved[:2] / solved[2]).max(axis=1))
        columns, rows = np.max(reach, axis=0)
        assert geometry.columns / 2 * 0.99 <= columns <= geometry.columns / 2 * (1 + 1e-5)
        if kind == "cone":
            assert geometry.rows / 2 * 0.95 <= rows <= geometry.rows / 2 * (1 + 1e-5)
    assert Ct(geometry="cone").detector == "512,384"
    assert Ct(geometry="fan").detector == Ct().detector == 512


def test_the_usual_weight_grows_with_the_views():
    """Of a cone as the noise in the gradient grows, with their root."""
    for kind, ratio in (("parallel", 4), ("fan", 4), ("cone", 2)):
        assert Ct(geometry=kind, views=200).mu == pytest.approx(ratio * Ct(geometry=kind, views=50).mu)


@pytest.mark.parametrize("geometry", ["fan", "cone"])
def test_the_mean_of_the_clients_is_the_data_misfit(geometry):
    problem = build(noise=0.5, geometry=geometry)
    fed, x = problem.fed, np.random.default_rng(0).random((14, 12, 6), dtype=np.float32)
    mean = fed.mean(fed.map(lambda client, rng: client.value(x)))
    residuals = [client.projector.forward(x) - client.projections for client in fed.clients.values()]
    assert mean == pytest.approx(sum(float((r.astype(float) ** 2).sum()) for r in residuals) / 2, rel=1e-6)
    assert problem.metrics(x, fed)["misfit"] == pytest.approx(mean, rel=1e-6)


@pytest.mark.parametrize("geometry", ["fan", "cone"])
def test_a_run_improves_on_filtered_back_projection(hpcfed, tmp_path, geometry):
    options = ["--geometry", geometry, "--shape", "32,32,12", "--views", "60", "--detector", "48", "--clients", "5"]
    finished = hpcfed("ct", *options, "--rounds", "40", "--device", "cpu", "--out", str(tmp_path / "r"))
    assert finished.status == 0, finished.err
    lines = [json.loads(line) for line in (tmp_path / "r" / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["psnr"] > lines[0]["psnr"] + 1
    assert lines[-1]["objective"] < lines[0]["objective"]
    with h5py.File(tmp_path / "r" / "result.h5") as file:
        attributes = dict(file["geometry"].attrs)
        assert attributes["beam"].startswith(geometry)
        assert (
            attributes["source_distance"] == attributes["detector_distance"] == pytest.approx(2 * 32 * 2**0.5, abs=0.01)
        )
        assert (attributes["detector_columns"], attributes["detector_rows"]) == (48, 36 if geometry == "cone" else 12)
        np.testing.assert_allclose(file["geometry"], np.arange(60) * 2 * np.pi / 60)
        assert np.corrcoef(file["volume"][()].ravel(), file["reference"][()].ravel())[0, 1] > 0.9


@pytest.mark.mpi
@pytest.mark.parametrize("options", [RUN, FEDERATED], ids=["all", "federated"])
def test_same_bits_on_any_number_of_ranks(hpcfed, mpirun, tmp_path, options):
    assert hpcfed("ct", *options, "--out", str(tmp_path / "0")).status == 0
    digest = facts(tmp_path / "0")["digest"]
    for ranks in (1, 2, 3):
        finished = mpirun(ranks, "ct", *options, "--out", str(tmp_path / f"{ranks}"))
        assert finished.status == 0, finished.err
        assert facts(tmp_path / f"{ranks}")["digest"] == digest
        assert facts(tmp_path / f"{ranks}")["ranks"] == ranks


def test_a_run_is_resumed_and_repeated_from_its_configuration(hpcfed, tmp_path):
    whole, parts, again = tmp_path / "whole", tmp_path / "parts", tmp_path / "again"
    assert hpcfed("ct", *FEDERATED, "--out", str(whole)).status == 0
    digest = facts(whole)["digest"]
    short = [word if word != "6" else "3" for word in FEDERATED]
    assert hpcfed("ct", *short, "--out", str(parts)).status == 0
    assert hpcfed("resume", str(parts), "--rounds", "6").status == 0
    assert facts(parts)["digest"] == digest
    assert hpcfed("run", str(whole / "config.toml"), "--out", str(again)).status == 0
    assert facts(again)["digest"] == digest
    kept = tomllib.loads((whole / "config.toml").read_text())["workload"]
    assert (kept["geometry"], kept["detector"]) == ("cone", "30,18")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"detector": "30,20,10"}, "--detector 30,20,10: give COLUMNS or COLUMNS,ROWS"),
        ({"detector": "x"}, "--detector x"),
        ({"detector": 0}, "--detector 0"),
        ({"detector": "30,20", "geometry": "fan"}, "--detector 30,20: a fan beam has a detector row for each slice"),
        ({"detector": "30,20", "geometry": "parallel"}, "--detector 30,20"),
        ({"pixel_size": "1,0"}, "--pixel-size 1,0: give WIDTH or WIDTH,HEIGHT"),
        ({"pixel_size": "inf"}, "--pixel-size inf"),
        ({"pixel_size": 2.0, "geometry": "parallel"}, "--pixel-size 2.0: leave it out with --geometry parallel"),
        ({"source_distance": 90.0, "geometry": None}, "--source-distance 90.0: leave it out"),
        ({"source_distance": 8.0}, "--source-distance 8: must exceed 9.22"),
        ({"projector": "astra"}, "--projector astra: there is none for a cone beam"),
        ({"axis": 3.0}, "--axis 3.0"),
    ],
)
def test_what_is_no_scan_is_refused(options, words):
    with pytest.raises(ConfigError) as refused:
        build(**options)
    assert words in str(refused.value)


def test_bad_options_are_one_line_and_status_2(hpcfed, tmp_path):
    for options in (
        ["--geometry", "helix"],
        ["--source-distance", "-1"],
        ["--detector", "4,"],
        ["--pixel-size", "nan"],
    ):
        finished = hpcfed("ct", *SMALL, *options, "--out", str(tmp_path / "r"))
        assert finished.status == 2
        assert " ".join(options) in finished.err
        assert finished.err.count("\n") == 1


def test_memory_is_predicted_before_anything_is_allocated(monkeypatch):
    monkeypatch.setattr(memory, "available", lambda: 8 << 30)
    with pytest.raises(ConfigError) as refused:
        build(shape=(2048, 2048, 2048), source_distance=9000.0)
    for words in ("for 1 rank on one node", "volumes", "duals", "projections", "but 8.0 GiB are available"):
        assert words in str(refused.value)


@pytest.mark.parametrize(
    ("angles", "arc"),
    [
        (np.arange(12) * 30.0, None),
        (np.arange(12) * 30.0 + 355, None),
        (np.arange(24) * 30.0, None),
        (np.arange(20) * 10.0, (-5.0, 200.0)),
        ((np.arange(20) * 10.0 + 300) % 360, (295.0, 200.0)),
        (np.arange(20)[::-1] * 10.0 + 300, (295.0, 200.0)),
        (np.array([0.0, 180.0]), None),
    ],
)
def test_a_scan_over_less_than_a_turn_is_noticed(angles, arc):
    found = Geometry("fan", np.deg2rad(angles), 5, 1, 2.0).arc
    assert (found is None) == (arc is None)
    if arc is not None:
        np.testing.assert_allclose(np.exp(1j * found[0]), np.exp(1j * np.deg2rad(arc[0])), atol=1e-9)
        assert np.rad2deg(found[1]) == pytest.approx(arc[1])


@pytest.mark.parametrize("kind", ["parallel", "fan"])
def test_what_some_views_miss(kind):
    """Of a turn in small steps, the columns whose middle falls beside the detector in any of them."""
    angles, shape, columns, axis = np.arange(0, 2 * np.pi, 0.002), (40, 30, 1), 25, 10.25
    beam = Beam(60.0, 40.0, (1.5, 1.5), axis, 0.0) if kind == "fan" else None
    geometry = Geometry(kind, angles, columns, 1, axis, beam)
    y, x = (19.5 - np.arange(40))[:, None], np.arange(30) - 14.5
    missed = np.zeros((40, 30), bool)
    for angle in angles:
        across, along = x * np.cos(angle) + y * np.sin(angle), y * np.cos(angle) - x * np.sin(angle)
        place = axis + (across if beam is None else across * 100 / (60 + along) / 1.5)
        missed |= (place < -0.5) | (place > columns - 0.5)
    assert missed.any()
    assert not missed.all()
    np.testing.assert_array_equal(geometry.unseen(shape), missed)
    assert replace(geometry, columns=200, axis=99.5, beam=beam and replace(beam, axis=99.5)).unseen(shape) is None


class MadeScan(SimpleNamespace):
    """A scan of a ball of attenuation 0.05, by its own chords."""

    @classmethod
    def make(cls, beam, num_columns, num_rows, views=48):
        angles = np.arange(views) * 2 * np.pi / views
        scan = cls(path="made", angles=angles, num_views=views, num_rows=num_rows, num_columns=num_columns)
        scan.__dict__.update(beam=beam, axis=None, voxel=0.2, notes=("made",))
        return scan

    def read(self, views, rows=None):
        poses = self.beam.poses(self.angles, self.num_columns, self.num_rows) if self.beam.vectors is None else None
        vectors = (self.beam.vectors if poses is None else poses)[views]
        source, middle, u, v = np.split(vectors[:, :, None, None], 4, axis=1)
        j, r = np.arange(self.num_columns)[:, None], np.arange(self.num_rows)
        way = middle - source + (j - (self.num_columns - 1) / 2) * u + (r - (self.num_rows - 1) / 2) * v
        start = source - np.array([3.0, -2.0, 0.0])[None, :, None, None]
        a, b, c = (way**2).sum(1), (way * start).sum(1), (start**2).sum(1) - 6.0**2
        chords = 2 * np.sqrt(np.maximum(b**2 - a * c, 0) / a)
        return np.ascontiguousarray((0.05 * chords)[:, :, rows or slice(None)], dtype=np.float32)


BEAM = Beam(60.0, 40.0, (5 / 3, 5 / 3), 19.0, 9.5)


def test_back_projection_starts_at_zero_where_views_miss(monkeypatch):
    """A ball inside what all views see, a volume that is wider: streaks in its corners would only add to the misfit."""
    scan = MadeScan.make(replace(BEAM, middle=0.0, axis=25.0), 40, 1)
    monkeypatch.setattr(scans, "open_scan", lambda path: scan)
    problem = Ct(projections="made", clients=3, shape=(60, 60, 1)).build(Federation(3, Streams(1)))
    unseen, start = problem.geometry.unseen((60, 60, 1)), problem.start()
    assert problem.filtered_backprojection[unseen].any()
    assert not start[unseen].any()
    np.testing.assert_array_equal(start[~unseen], problem.filtered_backprojection[~unseen])


@pytest.mark.parametrize("kind", ["fan", "cone", "poses"])
def test_a_measured_scan_is_reconstructed_at_its_own_scale(monkeypatch, kind):
    beam = replace(BEAM, middle=0.0) if kind == "fan" else BEAM
    if kind == "poses":
        angles = np.arange(48) * 2 * np.pi / 48
        beam = replace(BEAM, vectors=BEAM.poses(angles, 40, 20) + 0.01 * np.random.default_rng(0).random((48, 12)))
    scan = MadeScan.make(beam, 40, 1 if kind == "fan" else 20)
    monkeypatch.setattr(scans, "open_scan", lambda path: scan)
    workload = Ct(projections="made", clients=3, start="fbp")
    problem = workload.build(Federation(3, Streams(1)))
    found = problem.workload
    assert (found.shape, found.views) == ((40, 40, 1 if kind == "fan" else 20), 48)
    assert (found.geometry, found.detector) == (("fan", 40) if kind == "fan" else ("cone", "40,20"))
    volume = problem.start() * problem.geometry.scale
    y, x = np.mgrid[19.5:-20:-1, -19.5:20]
    inside = np.hypot(x - 3, y + 2) < 4
    middle = volume[:, :, volume.shape[2] // 2]
    assert middle[inside].mean() == pytest.approx(0.05, rel=0.03)
    assert np.abs(middle[np.hypot(x - 3, y + 2) > 8]).mean() < 0.003
    again = found.build(Federation(3, Streams(1)))  # as a resumed run does
    np.testing.assert_array_equal(again.start(), problem.start())
    attributes = problem.geometry.attributes()
    assert (attributes["source_distance"], attributes["rotation_axis"], attributes["voxel_edge"]) == (60.0, 19.0, 0.2)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"geometry": "parallel"}, "made has a cone beam"),
        ({"detector": "40,21"}, "40 columns and 20 rows"),
        ({"axis": 40.0}, "--axis 40"),
        ({"views": 49}, "48 views"),
        ({"projector": "astra"}, "none for a cone beam"),
        ({"source_distance": 3.0}, "leave it out with --projections"),
        ({"shape": (200, 200, 20)}, "source of view 0 is inside"),
    ],
)
def test_what_does_not_fit_a_scan(monkeypatch, options, words):
    monkeypatch.setattr(scans, "open_scan", lambda path: MadeScan.make(BEAM, 40, 20))
    with pytest.raises(ConfigError) as refused:
        Ct(projections="made", clients=3, **options).build(Federation(3, Streams(1)))
    assert words in str(refused.value)
