"""`hpcfed ct` with constraint sets, and with pixels of a scan that draw rings."""

from __future__ import annotations

import h5py
import numpy as np
import pytest
from test_ct import SMALL, facts

from hpcfed.errors import ConfigError
from hpcfed.workloads.ct import Ct
from hpcfed.workloads.ct_geometry import inscribed

CYLINDER = [*SMALL, "--device", "cpu", "--mask", "cylinder"]
FPDFP = ["--algorithm", "fpdfp"]
METHODS = [
    FPDFP,
    [*FPDFP, "--quantize", "10", "--participants", "5"],
    [],
    ["--quantize", "10", "--participants", "5"],
    ["--nonnegative"],
]


def volume_of(folder):
    with h5py.File(folder / "result.h5") as file:
        return file["volume"][()]


def test_the_cylinder_touches_the_sides_and_has_their_area():
    disc = inscribed((100, 100, 1))
    assert disc.sum() == pytest.approx(np.pi / 4 * 100**2, rel=0.01)
    assert disc[50, 0]
    assert disc[0, 50]
    assert not disc[0, 0]
    assert np.array_equal(inscribed((101, 7, 2))[50], np.ones(7, bool))
    assert not inscribed((101, 7, 2))[:46].any()


@pytest.mark.parametrize("options", METHODS, ids=["fpdfp", "fpdfp, rounded", "vm-pdfp", "rounded", "nonnegative"])
def test_the_volume_is_zero_outside_the_cylinder(hpcfed, tmp_path, options):
    finished = hpcfed("ct", *CYLINDER, *options, "--out", str(tmp_path / "r"))
    assert finished.status == 0, finished.err
    volume, (y, x) = volume_of(tmp_path / "r"), np.mgrid[11.5:-12:-1, -11.5:12]
    inside = np.hypot(x, y) <= 12
    assert not volume[~inside].any()
    assert volume.min() >= 0 if "--nonnegative" in options else volume[inside].any(axis=1).all()


def test_fpdfp_keeps_nonnegativity_too(hpcfed, tmp_path):
    finished = hpcfed("ct", *SMALL, *FPDFP, "--nonnegative", "--out", str(tmp_path / "r"))
    assert finished.status == 0, finished.err
    assert volume_of(tmp_path / "r").min() >= 0


def test_a_mask_that_holds_improves_the_volume(hpcfed, tmp_path):
    """Few views, and a ball in the cylinder: what is known of its outside helps inside."""
    errors = []
    y, x, z = np.mgrid[-11.5:12, -11.5:12, -3.5:4]
    ball = (x**2 + y**2 + (2 * z) ** 2 < 64).astype(np.float32)
    np.save(tmp_path / "ball.npy", ball.transpose(2, 0, 1))
    for mask in ("none", "cylinder"):
        given = ["--phantom", str(tmp_path / "ball.npy"), "--mu", "0", "--algorithm", "vm-pdfp", "--mask", mask]
        finished = hpcfed("ct", *SMALL, *given, "--rounds", "60", "--out", str(tmp_path / mask))
        assert finished.status == 0, finished.err
        errors.append(np.linalg.norm((volume_of(tmp_path / mask) - ball)[inscribed((24, 24, 8))]))
    assert errors[1] < 0.97 * errors[0]


@pytest.mark.mpi
def test_same_bits_on_any_number_of_ranks(hpcfed, mpirun, tmp_path):
    assert hpcfed("ct", *CYLINDER, "--out", str(tmp_path / "1")).status == 0
    finished = mpirun(3, "ct", *CYLINDER, "--out", str(tmp_path / "3"))
    assert finished.status == 0, finished.err
    assert facts(tmp_path / "3")["digest"] == facts(tmp_path / "1")["digest"]


def write_scan(path, gains) -> None:
    """A disc of attenuation 0.02, the axis at column 79.5 of 160, seen by pixels whose counts are off by factors."""
    theta, columns = np.arange(90) * 2.0, np.arange(160)
    centre = 30 * np.cos(np.deg2rad(theta)) + 20 * np.sin(np.deg2rad(theta))
    chord = 2 * np.sqrt(np.maximum(35**2 - (columns - 79.5 - centre[:, None]) ** 2, 0))
    counts = 10_000 * np.exp(-0.02 * chord) * gains
    counts += np.random.default_rng(0).normal(0, 20, counts.shape)
    with h5py.File(path, "w") as file:
        file["exchange/data"] = counts[:, None, :].astype(np.float32)
        file["exchange/data_white"] = np.full((3, 1, 160), 10_000, np.float32)
        file["exchange/data_dark"] = np.zeros((3, 1, 160), np.float32)
        file["exchange/theta"] = theta


def test_rings_are_taken_from_a_scan(hpcfed, tmp_path):
    """A pixel that sees 4 % less adds 0.04 to its line integrals; most of what that does to the volume goes away."""
    pytest.importorskip("algotom")
    gains = np.ones(160)
    gains[[50, 66, 105]] = 0.96, 1.04, 0.95
    volumes = {}
    for name, factors, options in (("true", 1.0, []), ("with", gains, []), ("without", gains, ["--rings"])):
        write_scan(tmp_path / f"{name}.h5", factors)
        given = ["--projections", str(tmp_path / f"{name}.h5"), "--axis", "79.5", "--clients", "5", *options]
        finished = hpcfed("ct", *given, "--algorithm", "fpdfp", "--rounds", "1", "--out", str(tmp_path / name))
        assert finished.status == 0, finished.err
        assert ("rings: pixels are corrected" in finished.out + finished.err) == (name == "without")
        with h5py.File(tmp_path / name / "result.h5") as file:
            volumes[name] = file["volume"][()] * file["volume"].attrs["attenuation_scale"]
    error = {name: np.linalg.norm(volumes[name] - volumes["true"]) for name in ("with", "without")}
    assert error["without"] < 0.5 * error["with"]


def test_rings_need_algotom(hpcfed, tmp_path):
    write_scan(tmp_path / "scan.h5", 1.0)
    (tmp_path / "algotom.py").write_text("raise ImportError('not here')\n")
    given = ["--projections", str(tmp_path / "scan.h5"), "--rings", "--out", str(tmp_path / "r")]
    finished = hpcfed("ct", *given, PYTHONPATH=str(tmp_path))
    assert finished.status == 2
    assert "removing rings needs algotom; pip install 'hpcfed[rings]'" in finished.err
    assert finished.err.count("\n") == 1


def test_what_has_no_meaning_is_refused(hpcfed, tmp_path):
    with pytest.raises(ConfigError, match="--rings"):
        Ct(rings=True)
    finished = hpcfed("ct", *CYLINDER, "--algorithm", "fedavg", "--out", str(tmp_path / "r"))
    assert finished.status == 2
    assert "--mask cylinder: fedavg keeps no constraint" in finished.err
