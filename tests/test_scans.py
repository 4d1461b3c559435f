from __future__ import annotations

import os
import pickle
from pathlib import Path

import h5py
import numpy as np
import pytest

from hpcfed.errors import DataError
from hpcfed.scans import MIN_TRANSMISSION, find_axis, open_dxchange

# centre x, centre y, radius in pixels, attenuation per pixel
DISCS = ((12.0, -7.0, 40.0, 0.012), (-20.0, 15.0, 9.0, 0.03), (30.0, 5.0, 5.0, 0.02))


def projections(angles, axis, num_columns, num_rows, discs=DISCS):
    """Line integrals of discs in closed form, (views, rows, columns); the rows differ by a factor."""
    s = np.arange(num_columns) - axis
    total = np.zeros((len(angles), 1, num_columns))
    for x, y, radius, density in discs:
        centre = x * np.cos(angles) + y * np.sin(angles)
        total[:, 0] += 2 * density * np.sqrt(np.maximum(radius**2 - (s - centre[:, None]) ** 2, 0))
    return total * np.linspace(1, 0.5, num_rows)[:, None]


@pytest.fixture
def write(tmp_path):
    """Write a scan with uneven flat fields, a dark level and photon noise; keywords replace or drop datasets."""

    def write(degrees, axis=70.3, *, discs=DISCS, num_columns=150, num_rows=3, photons=20000, units=None, **replaced):
        rng = np.random.default_rng(5)
        integrals = projections(np.deg2rad(degrees), axis, num_columns, num_rows, discs)
        beam = photons * (1 + 0.2 * np.sin(np.arange(num_columns) / 9)) * np.ones((num_rows, 1))
        datasets = {
            "theta": np.asarray(degrees, float),
            "data": rng.poisson(beam * np.exp(-integrals) + 100).astype(np.uint16),
            "data_white": rng.poisson(np.broadcast_to(beam + 100, (8, *beam.shape))).astype(np.uint16),
            "data_dark": rng.poisson(100, (8, *beam.shape)).astype(np.uint16),
        } | replaced
        path = tmp_path / "scan.h5"
        with h5py.File(path, "w") as file:
            for name, values in datasets.items():
                if values is not None:
                    file[f"exchange/{name}"] = values
            if units is not None:
                file["exchange/theta"].attrs["units"] = units
        return path

    return write


HALF_TURN = np.linspace(0, 180, 91)


# ---- opening


@pytest.mark.parametrize("units", [None, "degrees", "deg", b"Degrees", np.array(["degrees"], dtype="S7")])
def test_open_describes_the_scan(write, units):
    path = write(HALF_TURN, units=units)
    scan = open_dxchange(str(path))
    assert scan.path == path
    assert (scan.num_views, scan.num_rows, scan.num_columns) == (91, 3, 150)
    np.testing.assert_allclose(scan.angles, np.linspace(0, np.pi, 91))
    assert scan.angles.dtype == np.float64
    assert scan.angle_unit == "degrees"
    assert len(scan.notes) == 1
    assert ("names no unit" in scan.notes[0]) == (units is None)


@pytest.mark.parametrize("units", ["radians", "rad", b"radian"])
def test_radians_are_radians_when_the_file_says_so(write, units):
    scan = open_dxchange(write(HALF_TURN, theta=np.deg2rad(HALF_TURN), units=units))
    np.testing.assert_allclose(scan.angles, np.linspace(0, np.pi, 91))
    assert scan.angle_unit == "radians"


def test_angles_that_look_like_radians_are_not_guessed_at(write):
    with pytest.raises(DataError, match="set its attribute units to degrees or radians"):
        open_dxchange(write(HALF_TURN, theta=np.deg2rad(HALF_TURN)))
    degrees = np.linspace(0, 5, 91)
    scan = open_dxchange(write(degrees, units="degrees"))
    np.testing.assert_allclose(scan.angles, np.deg2rad(degrees))


def test_a_scan_can_be_pickled_and_read_elsewhere(write):
    scan = open_dxchange(write(HALF_TURN))
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(scan)).read([3]), scan.read([3]))


FRAME = np.ones((2, 3, 150))


@pytest.mark.parametrize(
    ("replaced", "message"),
    [
        ({"theta": None}, "exchange/theta is missing"),
        ({"data": None}, "exchange/data is missing"),
        ({"data_white": None}, "exchange/data_white is missing; counts need flat fields"),
        ({"theta": np.arange(90.0)}, "90 angles in exchange/theta for 91 views"),
        ({"theta": np.zeros((91, 1))}, r"exchange/theta has shape \(91, 1\)"),
        ({"theta": np.full(91, 3.0)}, "every angle of exchange/theta is 3"),
        ({"theta": np.where(np.arange(91) == 4, np.nan, HALF_TURN)}, "angle 4 of exchange/theta is not finite"),
        ({"theta": np.full(91, b"east")}, "exchange/theta is not an array of numbers"),
        ({"theta/group": np.zeros(3), "theta": None}, "exchange/theta is not an array of numbers"),
        ({"data": np.ones((91, 150))}, r"exchange/data has shape \(91, 150\)"),
        ({"data": np.ones((0, 3, 150))}, r"exchange/data has shape \(0, 3, 150\)"),
        ({"data": np.ones((91, 3, 150), complex)}, "exchange/data is not an array of numbers"),
        ({"data_white": FRAME[:0]}, r"exchange/data_white has shape \(0, 3, 150\)"),
        ({"data_white": FRAME[0]}, r"exchange/data_white has shape \(3, 150\)"),
        ({"data_white": FRAME[:, :, 1:]}, r"exchange/data_white are \(3, 149\), those of exchange/data \(3, 150\)"),
        ({"data_dark": FRAME[:, 1:]}, r"exchange/data_dark are \(2, 150\), those of exchange/data \(3, 150\)"),
        ({"data_white": np.where(FRAME.cumsum(2) == 5, np.nan, 1)}, "data_white is not finite in row 0, column 4"),
    ],
)
def test_bad_datasets_are_refused(write, replaced, message):
    path = write(HALF_TURN, **replaced)
    with pytest.raises(DataError, match=message) as caught:
        open_dxchange(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_bad_files_are_refused(write, tmp_path):
    path = write(HALF_TURN)
    content = path.read_bytes()
    for damaged in (content[:5], content[:100], content[: len(content) // 2], content[:-1], b"not HDF5\n" * 99):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match="cannot be read as HDF5") as caught:
            open_dxchange(path)
        assert "\n" not in str(caught.value)
    path.write_bytes(b"")
    with pytest.raises(DataError, match="empty"):
        open_dxchange(path)
    for absent in (tmp_path / "absent.h5", tmp_path):
        with pytest.raises(DataError, match="no such file"):
            open_dxchange(absent)
    with h5py.File(path, "w") as file:
        file["other"] = 1
    with pytest.raises(DataError, match=r"exchange/data is missing; is it a DXchange file\?"):
        open_dxchange(path)


def test_a_file_damaged_after_opening_is_refused_on_reading(write):
    scan = open_dxchange(write(HALF_TURN))
    scan.path.write_bytes(scan.path.read_bytes()[:3000])
    with pytest.raises(DataError, match="cannot be read as HDF5"):
        scan.read([0])


# ---- reading


def test_read_gives_the_line_integrals(write):
    scan = open_dxchange(write(HALF_TURN, photons=40000))
    expected = projections(scan.angles, 70.3, 150, 3).transpose(0, 2, 1)
    integrals = scan.read(range(91))
    assert integrals.dtype == np.float32
    assert integrals.flags.c_contiguous
    assert integrals.shape == (91, 150, 3)
    error = integrals - expected
    assert abs(error.mean()) < 1e-3
    assert error.std() < 0.02  # photon noise: exp(p / 2) / sqrt(40000) and the flat field's share
    views = [40, 2, 2, 90]
    np.testing.assert_array_equal(scan.read(views), integrals[views])
    np.testing.assert_array_equal(scan.read(np.array(views), slice(1, 3)), integrals[views][:, :, 1:3])
    np.testing.assert_array_equal(scan.read(views, slice(0, None, 2)), integrals[views][:, :, ::2])
    assert scan.read([]).shape == (0, 150, 3)


def test_without_a_dark_field_it_is_zero(write):
    counts = np.full((91, 3, 150), 50.0)
    counts[:, :, 70:] = 25
    scan = open_dxchange(write(HALF_TURN, data=counts, data_white=FRAME * 50, data_dark=None))
    assert any("data_dark is missing" in note for note in scan.notes)
    np.testing.assert_allclose(scan.read([7])[0, :, 0], np.where(np.arange(150) < 70, 0, np.log(2)), rtol=1e-6)


def test_transmission_has_a_floor(write):
    counts = np.full((91, 3, 150), 40.0)
    counts[:, 1, 5:8] = [0, -1000, 1e-6]
    scan = open_dxchange(write(HALF_TURN, data=counts, data_white=FRAME * 40, data_dark=None))
    integrals = scan.read([0])[0]
    np.testing.assert_allclose(integrals[5:8, 1], -np.log(MIN_TRANSMISSION), rtol=1e-6)
    assert np.count_nonzero(integrals) == 3


def test_blind_pixels_are_interpolated_along_their_row(write):
    counts = 1000 * np.exp(-np.linspace(0, 1, 150)) * np.ones((91, 3, 1))
    white, dark = FRAME * 1000, FRAME * 0
    white[:, 1, 60] = 0
    dark[:, 2, 80:83] = 2000
    scan = open_dxchange(write(HALF_TURN, data=counts, data_white=white, data_dark=dark))
    assert any("4 detector pixels" in note for note in scan.notes)
    np.testing.assert_allclose(scan.read([0])[0, :, 1], np.linspace(0, 1, 150), atol=1e-4)
    np.testing.assert_allclose(scan.read([0])[0, :, 2], np.linspace(0, 1, 150), atol=2e-4)
    white[:, 1] = 0
    scan = open_dxchange(write(HALF_TURN, data=counts, data_white=white, data_dark=dark))
    assert scan.read([0], slice(0, 1)).shape == (1, 150, 1)
    with pytest.raises(DataError, match="no pixel of row 1 sees the beam"):
        scan.read([0])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_counts_that_are_not_finite_are_located(write, bad):
    counts = np.random.default_rng(0).uniform(10, 20, (91, 3, 150))
    counts[17, 2, 44] = bad
    scan = open_dxchange(write(HALF_TURN, data=counts))
    with pytest.raises(DataError, match=r"view 17 has 1 counts.*row 2, column 44"):
        scan.read([16, 17])
    with pytest.raises(DataError, match=r"row 2, column 44"):
        scan.read([17], slice(2, 3))
    scan.read([16, 18])
    scan.read([17], slice(0, 2))


@pytest.mark.parametrize("count", [0, 100, 65535])
def test_dead_views_are_named(write, count):
    counts = np.random.default_rng(0).integers(5000, 6000, (91, 3, 150), np.uint16)
    counts[33] = count
    scan = open_dxchange(write(HALF_TURN, data=counts))
    with pytest.raises(DataError, match=f"view 33 is dead, every count is {count}"):
        scan.read([32, 33])


def test_an_open_beam_without_noise_is_not_dead(write):
    scan = open_dxchange(write(HALF_TURN, data=np.full((91, 3, 150), 500), data_white=FRAME * 500, data_dark=None))
    assert not scan.read([0]).any()


def test_views_and_rows_outside_the_scan_are_refused(write):
    scan = open_dxchange(write(HALF_TURN))
    for view in (-1, 91):
        with pytest.raises(DataError, match=f"has no view {view}; views are 0 to 90"):
            scan.read([0, view])
    for rows in (slice(3, 5), slice(2, 0, -1), slice(1, 1)):
        with pytest.raises(DataError, match="rows are 0 to 2"):
            scan.read([0], rows)


# ---- the axis

RANGES = {
    "half turn with its end": np.linspace(0, 180, 181),
    "half turn without its end": np.linspace(0, 180, 180, endpoint=False),
    "turn with its end": np.linspace(0, 360, 181),
    "turn, odd": np.linspace(0, 360, 181, endpoint=False),
    "turn, backwards": np.linspace(30, -330, 120, endpoint=False),
    "three fifths of a turn": np.linspace(0, 216, 151),
    "less than half a turn": np.linspace(0, 150, 151),
    "golden angle": np.arange(200) * 137.50776405 % 360,
}


@pytest.mark.parametrize("case", RANGES)
@pytest.mark.parametrize("axis", [70.3, 81.0])
def test_axis_of_made_scans(write, case, axis):
    assert find_axis(open_dxchange(write(RANGES[case], axis))) == pytest.approx(axis, abs=0.15)


@pytest.mark.parametrize("case", ["half turn with its end", "turn, odd", "half turn without its end"])
@pytest.mark.parametrize("axis", [35.7, 42.5])
def test_axis_of_an_object_wider_than_the_detector(write, case, axis):
    scan = open_dxchange(write(RANGES[case], axis, num_columns=80))
    tolerance = 0.5 if case == "half turn without its end" else 0.15
    assert find_axis(scan) == pytest.approx(axis, abs=tolerance)


def test_axis_in_bad_light(write):
    for degrees in (HALF_TURN, np.linspace(0, 150, 151)):
        assert find_axis(open_dxchange(write(degrees, photons=300))) == pytest.approx(70.3, abs=0.5)


def test_axis_far_from_the_centre(write):
    for degrees in (HALF_TURN, np.linspace(0, 150, 151)):
        scan = open_dxchange(write(degrees, 215.6, num_columns=300))
        assert find_axis(scan) == pytest.approx(215.6, abs=0.15)


def test_axis_of_a_beam_that_drifted(write):
    path = write(np.linspace(0, 150, 151))
    with h5py.File(path, "r+") as file:
        drift = 1 - 0.02 * np.linspace(0, 1, 150)
        file["exchange/data"][...] = np.round((file["exchange/data"][...] - 100) * drift + 100)
    assert find_axis(open_dxchange(path)) == pytest.approx(70.3, abs=0.3)


@pytest.mark.parametrize(
    ("degrees", "num_columns", "discs"),
    [
        (np.linspace(0, 20, 41), 150, DISCS),  # too short an arc
        (np.linspace(0, 120, 121), 80, DISCS),  # object outside the detector, no opposing views
        (np.linspace(0, 180, 91), 150, ()),  # nothing but noise
        (np.array([0.0, 40.0, 80.0]), 150, DISCS),  # as many unknowns as views
        (np.array([0.0]), 150, DISCS),
    ],
)
def test_axis_that_cannot_be_trusted_is_refused(write, degrees, num_columns, discs):
    scan = open_dxchange(write(degrees, 35.7, num_columns=num_columns, discs=discs))
    with pytest.raises(DataError, match="--axis"):
        find_axis(scan)


@pytest.mark.parametrize("shape", [(91, 3, 150), (91, 1, 1), (91, 1, 3)])
def test_axis_of_an_open_beam_is_refused(write, shape):
    scan = open_dxchange(write(HALF_TURN, data=np.full(shape, 9.0), data_white=np.full(shape, 9.0), data_dark=None))
    with pytest.raises(DataError, match="--axis"):
        find_axis(scan)


def test_axis_of_a_real_tooth():
    data = Path(os.environ.get("HPCFED_TEST_DATA", Path(__file__).parents[2] / "shared" / "data"))
    path = data / "ct" / "tomopy_tooth.h5"
    if not path.is_file():
        pytest.skip(f"{path} is missing; HPCFED_TEST_DATA names the folder of the real data")
    scan = open_dxchange(path)
    assert (scan.num_views, scan.num_rows, scan.num_columns) == (181, 2, 640)
    assert find_axis(scan) == pytest.approx(295.5, abs=0.5)
