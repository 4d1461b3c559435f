"""The cone and fan projectors against geometry, algebra, ASTRA and the parallel beam that they become."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import astra
import numpy as np
import pytest

from hpcfed.errors import ConfigError, DataError
from hpcfed.operators.cone_beam import ConeBeam, FanBeam, parker_weights
from hpcfed.operators.cone_beam_cuda import CudaConeBeam, CudaFanBeam, astra_vectors, feldkamp
from hpcfed.operators.parallel_beam import ParallelBeam
from hpcfed.workloads.ct_options import ScanOptions

TURN = 2 * np.pi


@pytest.fixture
def rng():
    return np.random.default_rng(5)


def noise(rng, *shape):
    return rng.standard_normal(shape, dtype=np.float32)


def inner(a, b):
    return float(np.vdot(a.astype(np.float64), b.astype(np.float64)))


def circle(angles, source=60.0, detector=40.0, width=1.5, height=1.25, shift=0.0, rise=0.0):
    """Vectors of a circular scan; the detector is moved by ``shift`` along its columns, ``rise`` along its rows."""
    angles = np.atleast_1d(angles).astype(float)
    zero, one = 0 * angles, 1 + 0 * angles
    away = np.stack([np.sin(angles), -np.cos(angles), zero], axis=1)
    u, v = np.stack([np.cos(angles), np.sin(angles), zero], axis=1), np.stack([zero, zero, one], axis=1)
    return np.concatenate([source * away, -detector * away + shift * u + rise * v, width * u, height * v], axis=1)


def tilted(rng, vectors):
    return vectors + 0.05 * rng.standard_normal(vectors.shape)


def make(case, rng, views=5, **options):
    """Image shapes square, wide and tall; detectors too small, off the middle, of one row; steep and tilted rays."""
    angles = rng.uniform(-np.pi, 2 * np.pi, views)
    if case == "square":
        return ConeBeam((16, 16, 8), circle(angles), 30, 20, **options)
    if case == "wide":
        return ConeBeam((9, 21, 17), circle(angles, shift=3.3, rise=-2.1), 26, 9, **options)
    if case == "small detector":
        return ConeBeam((20, 7, 35), circle(angles, width=0.9, height=0.4), 5, 37, **options)
    if case == "steep":
        return ConeBeam((8, 10, 40), circle(angles, source=9.0, detector=6.0, height=2.5), 19, 21, **options)
    if case == "one row":
        return ConeBeam((12, 12, 3), circle(angles), 24, 1, **options)
    if case == "tilted":
        return ConeBeam((12, 15, 9), tilted(rng, circle(angles)), 22, 13, **options)
    if case == "from above":  # rays along z
        vectors = np.tile([1.0, 2.0, 50.0, 0.0, 1.0, -40.0, 1.2, 0.1, 0.0, 0.1, -1.3, 0.2], (views, 1))
        return ConeBeam((10, 11, 12), vectors, 20, 21, **options)
    if case == "wide fan":  # whose rays in one view cross rows and columns of the image
        return FanBeam((10, 16, 2), circle(angles, source=10.0, detector=7.0, width=2.0), 21, **options)
    return FanBeam((14, 11, 5 if case == "fan" else 20), circle(angles, shift=1.7), 23, **options)


CASES = ["square", "wide", "small detector", "steep", "one row", "tilted", "from above", "fan", "wide fan", "many fans"]


def blocks(projector):
    return projector.num_views, projector.num_columns, projector.num_rows


@pytest.mark.parametrize("case", CASES)
def test_adjoint_is_the_transpose(rng, case):
    projector = make(case, rng)
    x, p = noise(rng, *projector.shape), noise(rng, *blocks(projector))
    forward, adjoint = projector.forward(x), projector.adjoint(p)
    scale = np.linalg.norm(forward) * np.linalg.norm(p) + np.linalg.norm(x) * np.linalg.norm(adjoint)
    assert abs(inner(forward, p) - inner(x, adjoint)) <= 1e-7 * scale
    positive, ones = np.abs(x), np.ones_like(p)
    assert inner(projector.forward(positive), ones) == pytest.approx(inner(positive, projector.adjoint(ones)), rel=1e-6)
    assert forward.any()


def test_adjoint_is_the_transpose_entry_by_entry(rng):
    """All entries of a small A, of unit volumes and of unit projections."""
    projector = ConeBeam((4, 5, 3), circle([0.3, 2.2]), 8, 6)
    voxels = np.eye(60, dtype=np.float32).reshape(60, 4, 5, 3)
    rays = np.eye(96, dtype=np.float32).reshape(96, 2, 8, 6)
    matrix = np.stack([projector.forward(voxel).ravel() for voxel in voxels], axis=1)
    transpose = np.stack([projector.adjoint(ray).ravel() for ray in rays], axis=1)
    np.testing.assert_allclose(transpose, matrix.T, atol=1e-6)
    assert (matrix >= 0).all()


@pytest.mark.parametrize("case", CASES)
def test_threads_change_no_bit(rng, case):
    state = rng.bit_generator.state
    one = make(case, rng)
    x, p, data = noise(rng, *one.shape), noise(rng, *blocks(one)), noise(rng, *blocks(one))
    for threads in (2, 3):
        rng.bit_generator.state = state
        several = make(case, rng, threads=threads)
        np.testing.assert_array_equal(several.forward(x), one.forward(x))
        np.testing.assert_array_equal(several.adjoint(p), one.adjoint(p))
        np.testing.assert_array_equal(several.gradient(x, data, 2.0), one.gradient(x, data, 2.0))
        np.testing.assert_array_equal(several.filtered_backprojection(p), one.filtered_backprojection(p))
        assert several.misfit(x, data) == one.misfit(x, data)


@pytest.mark.parametrize(("source", "columns", "width"), [(60.0, 40, 1.5), (12.0, 30, 0.4), (12.0, 9, 6.0)])
@pytest.mark.parametrize("few", [1, 2, 3])
def test_few_fans_are_those_of_many(rng, source, columns, width, few):
    """The loops across rays give what the loops along the slices give; detectors fine, coarse and short."""
    vectors = circle(np.append(rng.uniform(0, TURN, 6), [0.0, TURN / 8]), source, width=width)
    many, some = (FanBeam((17, 14, nz), vectors, columns) for nz in (20, few))
    assert many.compiled != some.compiled
    x, p = noise(rng, 17, 14, 20), noise(rng, 8, columns, 20)
    x_few, p_few = x[:, :, :few].copy(), p[:, :, :few].copy()
    views = np.array([7, 2, 3])
    for found, expected in (
        (some.forward(x_few), many.forward(x)),
        (some.adjoint(p_few), many.adjoint(p)),
        (some.gradient(x_few, p_few, 1.5, views), many.gradient(x, p, 1.5, views)),
        (some.filtered_backprojection(p_few), many.filtered_backprojection(p)),
    ):
        np.testing.assert_allclose(found, expected[:, :, :few], atol=3e-6 * (1 + np.abs(expected).max()))


def test_both_ways_to_walk_the_rays_agree(rng):
    upright = circle(rng.uniform(0, TURN, 6), shift=2.0, rise=1.0)
    nearly = upright.copy()
    nearly[0, 9] = 1e-14  # the rows of a view no longer stand on end
    shape, x, p = (15, 18, 11), noise(rng, 15, 18, 11), noise(rng, 6, 28, 17)
    fast, general = ConeBeam(shape, upright, 28, 17), ConeBeam(shape, nearly, 28, 17)
    assert fast.compiled != general.compiled
    np.testing.assert_allclose(general.forward(x), fast.forward(x), atol=2e-5)
    np.testing.assert_allclose(general.adjoint(p), fast.adjoint(p), atol=2e-5)
    np.testing.assert_allclose(general.filtered_backprojection(p), fast.filtered_backprojection(p), atol=1e-5)


@pytest.mark.parametrize("kind", [FanBeam, ConeBeam])
def test_a_source_far_away_is_the_parallel_beam(rng, kind):
    angles, far = rng.uniform(0, TURN, 7), 1e7
    shape, columns, x = (20, 24, 5), 37, noise(rng, 20, 24, 5)
    vectors = circle(angles, far, 30.0, 1.0, 1.0, shift=2.5)
    projector = kind(shape, vectors, columns) if kind is FanBeam else kind(shape, vectors, columns, 5)
    expected = ParallelBeam(shape, angles, columns, axis=(columns - 1) / 2 - 2.5).forward(x)
    np.testing.assert_allclose(projector.forward(x), expected, atol=1e-3)


@pytest.mark.skipif(importlib.util.find_spec("itk") is None, reason="needs itk-rtk")
def test_agrees_with_the_joseph_filters_of_rtk(monkeypatch):
    """A ball away from the border, where the two treat half a voxel differently; backprojections away from it."""
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "scripts")
    import rtk_joseph

    shape, views = (28, 24, 16), 5
    geometry = ScanOptions(shape=shape, geometry="cone", views=views, detector="40,24").settle()
    ours = ConeBeam(shape, geometry.vectors(np.arange(views)), 40, 24)
    forward, back = rtk_joseph.pair(shape, geometry.beam, geometry.angles, 40, 24)
    y, x, z = np.ogrid[:28, :24, :16]
    ball = ((y - 16) ** 2 + (x - 10) ** 2 + (z - 9) ** 2 < 20).astype(np.float32)
    projections = ours.forward(ball)
    np.testing.assert_allclose(projections, forward(ball), rtol=1e-4, atol=1e-5)
    inner = (slice(2, -2),) * 3
    np.testing.assert_allclose(ours.adjoint(projections)[inner], back(projections)[inner], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("source", [25.0, 80.0])
def test_the_plane_of_the_sources_agrees_with_astra(rng, source):
    """ASTRA's exact intersections with pixels, eight times finer than ours, of the same smooth image."""
    ny, nx, columns, fine = 30, 26, 41, 8

    def image(finer):
        y, x = ((np.arange(size * finer) + 0.5) / finer - size / 2 for size in (ny, nx))
        y = -y[:, None]
        blobs = np.exp(-((x - 3) ** 2 + (y + 4) ** 2) / 30) + np.exp(-((x + 4) ** 2 + (y - 5) ** 2) / 20)
        return blobs.astype(np.float32)

    vectors = circle(rng.uniform(0, TURN, 8), source, 30.0, 1.4, 1.0, shift=2.0)
    geometry = astra.create_proj_geom("fanflat_vec", columns, vectors[:, [0, 1, 3, 4, 6, 7]])
    grid = astra.create_vol_geom(ny * fine, nx * fine, -nx / 2, nx / 2, -ny / 2, ny / 2)
    reference = astra.create_projector("line_fanflat", geometry, grid)
    try:
        identifier, expected = astra.create_sino(image(fine), reference)
        astra.data2d.delete(identifier)
    finally:
        astra.projector.delete(reference)
    fan = FanBeam((ny, nx, 1), vectors, columns).forward(image(1)[:, :, None].copy())[:, :, 0]
    np.testing.assert_allclose(fan, expected, atol=0.02 * expected.max())
    assert np.linalg.norm(fan - expected) < 0.01 * np.linalg.norm(expected)
    extruded = np.repeat(image(1)[:, :, None], 7, axis=2)
    cone = ConeBeam((ny, nx, 7), vectors, columns, 5).forward(extruded)[:, :, 2]
    np.testing.assert_allclose(cone, fan, atol=1e-5 * expected.max())


def chords(vectors, columns, rows, centre, axes):
    """Lengths of the rays within an ellipsoid with axes along x, y, z, by the quadratic equation."""
    source, middle, u, v = np.split(vectors[:, :, None, None], 4, axis=1)
    j, r = np.arange(columns)[:, None] - (columns - 1) / 2, np.arange(rows) - (rows - 1) / 2
    way = middle - source + j * u + r * v
    axes, centre = (np.asarray(each)[None, :, None, None] for each in (axes, centre))
    a, b = ((way / axes) ** 2).sum(1), (way * (source - centre) / axes**2).sum(1)
    c = (((source - centre) / axes) ** 2).sum(1) - 1
    return 2 * np.sqrt(np.maximum(b**2 - a * c, 0)) / a * np.linalg.norm(way, axis=1)


def ellipsoid(shape, centre, axes, fine=4):
    """The part of each voxel that lies within."""
    ny, nx, nz = shape
    inner = (np.arange(fine) + 0.5) / fine - 0.5
    x, y, z = (
        (sign * (np.arange(size) - (size - 1) / 2)[:, None] + inner).ravel()
        for sign, size in ((1, nx), (-1, ny), (1, nz))
    )
    squares = [((place - middle) / axis) ** 2 for place, middle, axis in zip((x, y, z), centre, axes, strict=True)]
    inside = squares[1][:, None, None] + squares[0][:, None] + squares[2] <= 1
    return inside.reshape(ny, fine, nx, fine, nz, fine).mean(axis=(1, 3, 5)).astype(np.float32)


@pytest.mark.parametrize(
    ("centre", "axes"), [((0, 0, 0), (0.35, 0.35, 0.35)), ((0.14, -0.1, 0.06), (0.16, 0.3, 0.22))], ids=["ball", "egg"]
)
@pytest.mark.parametrize("tilt", [False, True])
def test_ellipsoids_have_their_chords(rng, centre, axes, tilt):
    """In units of the volume's edge, on three grids of voxels and the same rays: the error goes to zero."""
    unit = circle([0.0, 0.7, np.pi / 2, 2.0, 4.4], 1.4, 0.9, 0.045, 0.04, shift=0.05, rise=-0.04)
    unit = unit + 0.001 * rng.standard_normal(unit.shape) if tilt else unit
    columns, rows = 40, 36
    exact = chords(unit, columns, rows, centre, axes)
    assert (exact[:, [0, -1]] == 0).all()
    errors = []
    for size in (16, 32, 64):
        volume = ellipsoid((size, size, size), size * np.array(centre), size * np.array(axes))
        found = ConeBeam(volume.shape, size * unit, columns, rows).forward(volume) / size
        errors.append(np.linalg.norm(found - exact) / np.linalg.norm(exact))
    assert errors[0] > 1.8 * errors[1] > 1.8**2 * errors[2]
    long = exact > 0.5 * exact.max()
    np.testing.assert_allclose(found[long], exact[long], rtol=0.04)


@pytest.mark.parametrize("place", [(0, 0, 0), (6, -4, 3), (-5, -7, -4)])
def test_mass_is_kept(place):
    """A pixel that sees a small object at the share t of its way catches t^2 of the pixel's area, seen from the ray."""
    shape, columns, rows, width, height = (32, 32, 24), 64, 60, 1.3, 1.1
    vectors = circle([0.2, 1.3, 3.0, 5.1], width=width, height=height)
    y, x, z = np.meshgrid(15.5 - np.arange(32), np.arange(32) - 15.5, np.arange(24) - 11.5, indexing="ij")
    blob = np.exp(-((x - place[0]) ** 2 + (y - place[1]) ** 2 + (z - place[2]) ** 2) / (2 * 1.5**2)).astype(np.float32)
    found = ConeBeam(shape, vectors, columns, rows).forward(blob)
    for view, (source, middle, u, v) in enumerate(vectors.reshape(-1, 4, 3)):
        normal = np.cross(u, v) / np.linalg.norm(np.cross(u, v))
        t = (np.array(place) - source) @ normal / ((middle - source) @ normal)
        j, r = np.arange(columns) - (columns - 1) / 2, np.arange(rows) - (rows - 1) / 2
        way = middle - source + j[:, None, None] * u + r[None, :, None] * v
        cosines = np.abs(way @ normal) / np.linalg.norm(way, axis=2)
        caught = (found[view] * cosines).sum(dtype=float) * width * height * t**2
        assert caught == pytest.approx(blob.sum(dtype=float), rel=0.01)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("views", [None, np.array([4, 1, 2]), np.array([], dtype=np.int64)])
def test_gradient_is_the_composition(rng, case, views):
    projector = make(case, rng)
    x, data = noise(rng, *projector.shape), noise(rng, *blocks(projector))
    selected = data if views is None else data[views]
    forward = projector.forward(x, views)
    expected = 2.5 * projector.adjoint(forward - selected, views)
    out = np.full(projector.shape, np.nan, dtype=np.float32)
    assert projector.gradient(x, data, 2.5, views, out) is out
    np.testing.assert_allclose(out, expected, atol=1e-5 * (1 + np.abs(expected).max()))
    if views is None:
        normal = projector.adjoint(forward)
        np.testing.assert_allclose(projector.normal(x), normal, atol=1e-5 * (1 + np.abs(normal).max()))
        assert projector.misfit(x, data) == pytest.approx(0.5 * inner(forward - data, forward - data), rel=1e-6)


def test_many_views_are_taken_in_blocks_that_change_no_bit(rng, monkeypatch):
    vectors = circle(rng.uniform(0, TURN, 9))
    x, data = noise(rng, 10, 9, 8), noise(rng, 9, 21, 12)
    results = []
    for size in (1, 2**12, 2**20):
        monkeypatch.setattr("hpcfed.operators.cone_beam.SCRATCH_BYTES", size)
        projector = ConeBeam((10, 9, 8), vectors, 21, 12)
        back = projector.filtered_backprojection(data)
        results.append((projector.gradient(x, data), projector.normal(x), projector.misfit(x, data), back))
    for other in results[1:]:
        for one, two in zip(results[0], other, strict=True):
            np.testing.assert_array_equal(one, two)


def test_outputs_are_overwritten_and_inputs_may_be_read_only(rng):
    projector = make("square", rng)
    x, p = noise(rng, *projector.shape), noise(rng, *blocks(projector))
    x.flags.writeable = p.flags.writeable = False
    for out, method, given in ((np.full_like(p, np.nan), "forward", x), (np.full_like(x, np.nan), "adjoint", p)):
        assert getattr(projector, method)(given, out=out) is out
        np.testing.assert_array_equal(out, getattr(projector, method)(given))


def test_a_number_that_is_none_stays_visible(rng):
    projector = make("square", rng)
    x = noise(rng, *projector.shape)
    x[8, 8, 4] = np.nan
    data = noise(rng, *blocks(projector))
    assert np.isnan(projector.gradient(x, data)).any()
    assert np.isnan(projector.misfit(x, data))


BALL, RADIUS = (5.0, -3.0, 2.0), 10.0


def ball_scan(kind, angles, arc=None):
    """The projector, and a ball and its projections."""
    shape, columns, rows = (52, 52, 26), 84, 56
    volume = ellipsoid(shape, BALL, (RADIUS,) * 3)
    vectors = circle(angles, 150.0, 100.0, 1.5, 1.0, shift=0.7, rise=0.4)
    projector = FanBeam(shape, vectors, columns, arc=arc)
    if kind is ConeBeam:
        projector = ConeBeam(shape, vectors, columns, rows, arc=arc)
    return projector, volume, projector.forward(volume)


def check_ball(found):
    y, x, z = np.meshgrid(25.5 - np.arange(52), np.arange(52) - 25.5, np.arange(26) - 12.5, indexing="ij")
    distance = np.sqrt((x - BALL[0]) ** 2 + (y - BALL[1]) ** 2 + (z - BALL[2]) ** 2)
    assert found[distance < RADIUS - 3].mean() == pytest.approx(1, abs=0.005)
    assert found[distance < RADIUS - 3].std() < 0.05
    assert np.abs(found[distance > RADIUS + 3]).mean() < 0.01


@pytest.mark.parametrize("kind", [FanBeam, ConeBeam])
@pytest.mark.parametrize("window", ["ramp", "hann"])
def test_feldkamp_gives_a_ball_its_density(kind, window):
    projector, _, data = ball_scan(kind, np.linspace(0, TURN, 100, endpoint=False) + 0.2)
    check_ball(projector.filtered_backprojection(data, window))


@pytest.mark.parametrize("kind", [FanBeam, ConeBeam])
@pytest.mark.parametrize("first", [0.0, 2.5, -4.0])
@pytest.mark.parametrize("extent", [3.9, 5.5])
def test_feldkamp_of_an_arc(kind, first, extent):
    """Half a turn and the fan's angle, and more: every line is counted once, wherever the scan begins."""
    angles = first + (np.arange(100) + 0.5) * extent / 100
    projector, _, data = ball_scan(kind, angles, arc=(first, extent))
    check_ball(projector.filtered_backprojection(data, "ramp"))


def test_the_mean_of_the_clients_is_the_whole_back_projection():
    angles = np.linspace(0, TURN, 60, endpoint=False)
    whole, _, data = ball_scan(ConeBeam, angles)
    parts = np.random.default_rng(1).permutation(60).reshape(4, 15)
    mean = np.mean([ball_scan(ConeBeam, angles[part])[0].filtered_backprojection(data[part]) for part in parts], axis=0)
    np.testing.assert_allclose(mean, whole.filtered_backprojection(data), atol=1e-5)


def test_weights_of_the_two_directions_of_a_line_sum_to_one():
    """The ray at (angle, g) of the fan runs along that at (angle + pi - 2 g, -g)."""
    columns, source, detector, extent = 61, 100.0, 50.0, 4.2
    offsets = (np.arange(columns) - 30) * 1.5
    fan = np.arctan(offsets / (source + detector))
    assert extent > np.pi + 2 * fan.max()
    for start in (0.0, 0.3, 1.0):
        for column in (0, 12, 30, 45, 60):
            other = start + np.pi - 2 * fan[column]
            one = parker_weights(circle(start, source, detector), (0.0, extent), columns)[0, column]
            partner = parker_weights(circle(other, source, detector), (0.0, extent), columns)[0, 60 - column]
            assert one + (partner if other <= extent else 0) == pytest.approx(1)


def test_says_what_is_wrong(rng):
    vectors = circle([0.0, 0.5])
    with pytest.raises(ConfigError, match="shape = "):
        ConeBeam((0, 4, 4), vectors, 8, 8)
    with pytest.raises(ConfigError, match="vectors of shape"):
        ConeBeam((4, 4, 4), vectors[:, :9], 8, 8)
    with pytest.raises(ConfigError, match="vectors of shape"):
        FanBeam((4, 4, 4), np.full((2, 12), np.nan), 8)
    with pytest.raises(ConfigError, match="detector of 8 columns and 0 rows"):
        ConeBeam((4, 4, 4), vectors, 8, 0)
    with pytest.raises(ConfigError, match="view 0 is inside"):
        ConeBeam((130, 4, 4), vectors, 8, 8)
    with pytest.raises(ConfigError, match="parallel"):
        ConeBeam((4, 4, 4), np.tile([9.0, 0, 0, -9, 0, 0, 0, 1, 0, 0, 1, 0], (1, 1)), 8, 8)
    projector = ConeBeam((4, 4, 4), vectors, 8, 6)
    with pytest.raises(DataError, match="volume"):
        projector.forward(np.zeros((4, 4, 4)))
    with pytest.raises(DataError, match="projections"):
        projector.adjoint(np.zeros((2, 6, 8), dtype=np.float32))
    with pytest.raises(ConfigError, match="window"):
        projector.filtered_backprojection(np.zeros((2, 8, 6), dtype=np.float32), "box")


def test_memory_does_not_grow_with_the_views():
    few, many = (ConeBeam((64, 64, 64), circle(np.linspace(0, 3, n)), 96, 96) for n in (300, 3000))
    assert many.nbytes - few.nbytes < 200 * 2700
    assert few.nbytes < 2**21


@pytest.mark.skipif(astra.use_cuda(), reason="this machine has a GPU")
def test_the_gpu_projectors_refuse_a_machine_without_gpu():
    with pytest.raises(ConfigError, match=r"CudaConeBeam: .* cpu"):
        CudaConeBeam((4, 4, 4), circle(0.0), 8, 8)
    with pytest.raises(ConfigError, match=r"CudaFanBeam: .* cpu"):
        CudaFanBeam((4, 4, 1), circle(0.0), 8)
    with pytest.raises(ConfigError, match="2 slices"):
        CudaFanBeam((4, 4, 2), circle(0.0), 8)


def test_vectors_of_the_gpu_projector_describe_the_same_rays(rng):
    """In ASTRA's 3D coordinates a row of the volume grows with y: a voxel on a ray keeps its indices."""
    ny, nx = 20, 24
    for ours, theirs in zip(circle(rng.uniform(0, TURN, 4)), astra_vectors(circle(rng.uniform(0, 0, 4))), strict=True):
        theirs = astra_vectors(ours[None])[0]
        for along in (0.2, 0.6):
            (x, y, z), point = (
                source + along * (middle - source + 3 * u - 2 * v)
                for source, middle, u, v in (ours.reshape(4, 3), theirs.reshape(4, 3))
            )
            indices = (ny - 1) / 2 - y, x + (nx - 1) / 2, z
            np.testing.assert_allclose([point[1] + (ny - 1) / 2, point[0] + (nx - 1) / 2, point[2]], indices)


@pytest.mark.parametrize("case", ["square", "wide", "tilted", "one slice"])
def test_the_back_projection_of_tensors_is_the_same(rng, case, monkeypatch):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    monkeypatch.setattr("hpcfed.operators.cone_beam_cuda.CHUNK_VOXELS", 600)
    projector = make(case, rng) if case != "one slice" else FanBeam((14, 11, 1), circle([0.4, 2.0]), 23)
    data = noise(rng, *blocks(projector))
    found = feldkamp(torch.from_numpy(data), projector.vectors, projector.shape, (0.0, 4.0), "ramp")
    projector.arc = (0.0, 4.0)
    expected = projector.filtered_backprojection(data, "ramp")
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-5 * np.abs(expected).max() + 1e-6)
