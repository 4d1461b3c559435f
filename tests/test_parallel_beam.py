"""The CPU projector against geometry, algebra and ASTRA."""

from __future__ import annotations

import astra
import numpy as np
import pytest

from hpcfed.errors import ConfigError, DataError
from hpcfed.operators.parallel_beam import ParallelBeam, ramp_response
from hpcfed.operators.parallel_beam_cuda import CudaParallelBeam, projection_vectors


@pytest.fixture
def rng():
    return np.random.default_rng(5)


def noise(rng, *shape):
    return rng.standard_normal(shape, dtype=np.float32)


def inner(a, b):
    return float(np.vdot(a.astype(np.float64), b.astype(np.float64)))


def centres(shape):
    """x to the right and y up, of every pixel of a slice."""
    ny, nx = shape[:2]
    y, x = np.meshgrid((ny - 1) / 2 - np.arange(ny), np.arange(nx) - (nx - 1) / 2, indexing="ij")
    return x, y


# Square, wide and tall images; slices that fill no slab, one slab, and more; detectors too small and not centred.
CASES = [
    ((16, 16, 8), 24, None),
    ((9, 21, 1), 26, 11.3),
    ((20, 7, 70), 5, 2.0),
    ((1, 6, 3), 40, 50.5),
    ((12, 12, 64), 30, -3.25),
]


@pytest.mark.parametrize(("shape", "columns", "axis"), CASES)
def test_adjoint_is_the_transpose(rng, shape, columns, axis):
    projector = ParallelBeam(shape, rng.uniform(-np.pi, 2 * np.pi, 7), columns, axis)
    x, p = noise(rng, *shape), noise(rng, 7, columns, shape[2])
    forward, adjoint = projector.forward(x), projector.adjoint(p)
    scale = np.linalg.norm(forward) * np.linalg.norm(p) + np.linalg.norm(x) * np.linalg.norm(adjoint)
    assert abs(inner(forward, p) - inner(x, adjoint)) <= 1e-7 * scale
    positive, ones = np.abs(x), np.ones_like(p)
    assert inner(projector.forward(positive), ones) == pytest.approx(inner(positive, projector.adjoint(ones)), rel=1e-5)


@pytest.mark.parametrize("angle", [0.0, np.pi / 2, np.pi, -np.pi / 2, np.pi / 4, 3 * np.pi / 4])
def test_adjoint_is_the_transpose_along_the_axes_and_diagonals(rng, angle):
    projector = ParallelBeam((10, 13, 2), np.array([angle]), 20)
    x, p = noise(rng, 10, 13, 2), noise(rng, 1, 20, 2)
    assert inner(projector.forward(x), p) == pytest.approx(inner(x, projector.adjoint(p)), rel=1e-4, abs=1e-4)


def test_is_linear(rng):
    projector = ParallelBeam((11, 12, 5), rng.uniform(0, np.pi, 4), 18)
    x, y = noise(rng, 11, 12, 5), noise(rng, 11, 12, 5)
    combined = projector.forward(2 * x - 3 * y)
    np.testing.assert_allclose(combined, 2 * projector.forward(x) - 3 * projector.forward(y), atol=1e-4)


@pytest.mark.parametrize(("shape", "columns", "axis"), CASES)
def test_agrees_with_astra(rng, shape, columns, axis):
    """ASTRA's 2D linear projector, slice by slice; its own weights are good to about 1e-3."""
    angles = rng.uniform(-np.pi, 2 * np.pi, 6)
    projector = ParallelBeam(shape, angles, columns, axis)
    x = np.abs(noise(rng, *shape))
    cosine, sine = np.cos(angles), np.sin(angles)
    shift = (columns - 1) / 2 - projector.axis
    vectors = np.stack([sine, -cosine, shift * cosine, shift * sine, cosine, sine], axis=1)
    geometry = astra.create_proj_geom("parallel_vec", columns, vectors)
    reference = astra.create_projector("linear", geometry, astra.create_vol_geom(shape[0], shape[1]))
    try:
        for z in {0, shape[2] - 1}:
            identifier, expected = astra.create_sino(np.ascontiguousarray(x[:, :, z]), reference)
            astra.data2d.delete(identifier)
            np.testing.assert_allclose(projector.forward(x)[:, :, z], expected, rtol=2e-3, atol=4e-3)
    finally:
        astra.projector.delete(reference)


@pytest.mark.parametrize("axis", [None, 40.75])
def test_disc_has_the_chords_of_a_disc(axis):
    """A disc of radius r at (a, b): the chord at the distance d of a ray from its centre is 2 sqrt(r^2 - d^2)."""
    shape, columns, radius, a, b = (96, 80, 2), 101, 17.0, 14.0, 9.5
    angles = np.radians([0, 20, 45, 77, 90, 130, 180, 200, 290])
    projector = ParallelBeam(shape, angles, columns, axis)
    x, y = centres(shape)
    fine = (np.arange(8) + 0.5) / 8 - 0.5
    covered = np.mean([(x + u - a) ** 2 + (y + v - b) ** 2 <= radius**2 for u in fine for v in fine], axis=0)
    disc = np.repeat(covered[:, :, None], 2, axis=2).astype(np.float32)
    column_axis = (columns - 1) / 2 if axis is None else axis
    rays = np.arange(columns)[None] - column_axis
    distance = rays - (a * np.cos(angles) + b * np.sin(angles))[:, None]
    chords = 2 * np.sqrt(np.maximum(radius**2 - distance**2, 0))
    inside = np.abs(distance) < radius - 2
    found = projector.forward(disc)[:, :, 1]
    assert inside.sum() > 150
    np.testing.assert_allclose(found[inside], chords[inside], atol=0.6)
    assert np.abs(found[np.abs(distance) > radius + 2]).max() == 0
    # Mass and centroid of a view, to a hundredth of a pixel: sensitive to the sign of the angle and of the axis.
    whole = (rays[0, 0] < distance.min(axis=1)) & (np.abs(found[:, [0, -1]]).max(axis=1) == 0)
    mass = found[whole].sum(axis=1)
    np.testing.assert_allclose(mass, np.pi * radius**2, rtol=1e-2)
    centroid = (found[whole] * np.arange(columns)).sum(axis=1) / mass
    expected = column_axis + a * np.cos(angles[whole]) + b * np.sin(angles[whole])
    np.testing.assert_allclose(centroid, expected, atol=0.02)


def test_slices_are_independent(rng):
    projector = ParallelBeam((10, 11, 67), rng.uniform(0, np.pi, 3), 17)
    x = np.zeros((10, 11, 67), dtype=np.float32)
    x[:, :, 65] = noise(rng, 10, 11)
    found = projector.forward(x)
    assert not found[:, :, np.arange(67) != 65].any()
    single = ParallelBeam((10, 11, 1), projector.angles, 17)
    alone = single.forward(x[:, :, 65:66].copy())[:, :, 0]  # by other loops, which sum in another order
    np.testing.assert_allclose(found[:, :, 65], alone, rtol=1e-6, atol=1e-6 * np.abs(alone).max())


@pytest.mark.parametrize(("shape", "columns", "axis"), [*((c[0][:2], *c[1:]) for c in CASES), ((40, 37), 60, None)])
@pytest.mark.parametrize("few", [1, 2, 3, 4])
def test_few_slices_are_those_of_many(rng, shape, columns, axis, few):
    """The loops across rays and pixels give what the loops along the slices give, to rounding."""
    angles = np.concatenate([rng.uniform(-np.pi, 2 * np.pi, 5), np.arange(4) * np.pi / 4])
    many, some = (ParallelBeam((*shape, nz), angles, columns, axis) for nz in (8, few))
    x, p = noise(rng, *shape, 8), noise(rng, 9, columns, 8)
    x_few, p_few = x[:, :, :few].copy(), p[:, :, :few].copy()
    views = np.array([7, 2, 3])
    for found, expected in (
        (some.forward(x_few), many.forward(x)),
        (some.forward(x_few, views), many.forward(x, views)),
        (some.adjoint(p_few), many.adjoint(p)),
        (some.gradient(x_few, p_few, 1.5, views), many.gradient(x, p, 1.5, views)),
        (some.filtered_backprojection(p_few), many.filtered_backprojection(p)),
    ):
        np.testing.assert_allclose(found, expected[:, :, :few], atol=3e-6 * (1 + np.abs(expected).max()))


@pytest.mark.parametrize(("shape", "columns", "axis"), CASES)
@pytest.mark.parametrize("views", [None, np.array([5, 1, 2]), np.array([], dtype=np.int64)])
def test_gradient_is_the_composition(rng, shape, columns, axis, views):
    projector = ParallelBeam(shape, rng.uniform(0, np.pi, 6), columns, axis)
    x, data = noise(rng, *shape), noise(rng, 6, columns, shape[2])
    selected = data if views is None else data[views]
    residual = projector.forward(x, views) - selected
    expected = 2.5 * projector.adjoint(residual, views)
    out = np.full(shape, np.nan, dtype=np.float32)
    assert projector.gradient(x, data, 2.5, views, out) is out
    np.testing.assert_allclose(out, expected, atol=1e-5 * (1 + np.abs(expected).max()))


def test_gradient_is_the_derivative_of_the_misfit(rng):
    shape = (8, 9, 3)
    projector = ParallelBeam(shape, rng.uniform(0, np.pi, 5), 14)
    x, direction, data = noise(rng, *shape), noise(rng, *shape), noise(rng, 5, 14, 3)
    rise = projector.misfit(x + direction, data) - projector.misfit(x - direction, data)  # exact for a quadratic
    assert rise / 2 == pytest.approx(inner(projector.gradient(x, data), direction), rel=1e-4)


@pytest.mark.parametrize(("shape", "columns", "axis"), CASES)
def test_normal_and_misfit(rng, shape, columns, axis):
    projector = ParallelBeam(shape, rng.uniform(0, np.pi, 6), columns, axis)
    x, data = noise(rng, *shape), noise(rng, 6, columns, shape[2])
    forward = projector.forward(x)
    expected = projector.adjoint(forward)
    np.testing.assert_allclose(projector.normal(x), expected, atol=1e-5 * (1 + np.abs(expected).max()))
    assert projector.misfit(x, data) == pytest.approx(0.5 * inner(forward - data, forward - data), rel=1e-6)
    assert projector.misfit(x, data) == projector.misfit(x.copy(), data.copy())


def test_outputs_are_overwritten_and_inputs_may_be_read_only(rng):
    projector = ParallelBeam((8, 8, 2), np.array([0.3, 1.0]), 12)
    x, p = noise(rng, 8, 8, 2), noise(rng, 2, 12, 2)
    x.flags.writeable = p.flags.writeable = False
    out = np.full_like(p, np.nan)
    assert projector.forward(x, out=out) is out
    np.testing.assert_array_equal(out, projector.forward(x))
    out = np.full_like(x, np.nan)
    assert projector.adjoint(p, out=out) is out
    np.testing.assert_array_equal(out, projector.adjoint(p))


def test_a_number_that_is_none_stays_visible(rng):
    projector = ParallelBeam((8, 8, 2), np.array([0.3, 1.0]), 12)
    x = noise(rng, 8, 8, 2)
    x[4, 4, 0] = np.nan
    assert np.isnan(projector.gradient(x, noise(rng, 2, 12, 2))).any()
    assert np.isnan(projector.misfit(x, noise(rng, 2, 12, 2)))


@pytest.mark.parametrize(("window", "tolerance"), [("ramp", 0.01), ("hann", 0.02)])
def test_filtered_backprojection_restores_a_smooth_object(window, tolerance):
    shape, columns, axis = (64, 72, 3), 121, 57.5
    angles = np.linspace(0, np.pi, 120, endpoint=False) + 0.2
    projector = ParallelBeam(shape, angles, columns, axis)
    x, y = centres(shape)
    blob = np.exp(-((x - 6) ** 2 + (y + 4) ** 2) / (2 * 7.0**2))
    volume = (blob[:, :, None] * np.array([1.0, 0.5, 2.0])).astype(np.float32)
    found = projector.filtered_backprojection(projector.forward(volume), window)
    assert np.abs(found - volume)[8:-8, 8:-8].max() < tolerance * volume.max()
    # The level far from the edges of a wide flat object has no bias.
    disc = np.repeat((x**2 + y**2 < 28**2)[:, :, None], 3, axis=2).astype(np.float32)
    found = projector.filtered_backprojection(projector.forward(disc), window)
    assert found[24:40, 28:44].mean() == pytest.approx(1, abs=0.003)


def test_ramp_is_a_ramp():
    """|f| away from its cut-off, and no mean but for what the finite length leaves."""
    response = ramp_response(1024, "ramp")
    frequency = np.fft.rfftfreq(1024)
    np.testing.assert_allclose(response, frequency, atol=1e-3)
    np.testing.assert_allclose(ramp_response(1024), response * np.cos(np.pi * frequency) ** 2, atol=1e-6)


def test_says_what_is_wrong(rng):
    angles = np.array([0.0, 0.5])
    with pytest.raises(ConfigError, match="shape = "):
        ParallelBeam((0, 4, 4), angles, 8)
    with pytest.raises(ConfigError, match="angles"):
        ParallelBeam((4, 4, 4), np.array([]), 8)
    with pytest.raises(ConfigError, match="num_columns"):
        ParallelBeam((4, 4, 4), angles, 0)
    with pytest.raises(ConfigError, match="axis"):
        ParallelBeam((4, 4, 4), angles, 8, np.nan)
    projector = ParallelBeam((4, 4, 4), angles, 8)
    with pytest.raises(DataError, match="volume"):
        projector.forward(np.zeros((4, 4, 4)))
    with pytest.raises(DataError, match="projections"):
        projector.adjoint(np.zeros((2, 4, 8), dtype=np.float32).swapaxes(1, 2))
    with pytest.raises(ConfigError, match="window"):
        projector.filtered_backprojection(np.zeros((2, 8, 4), dtype=np.float32), "box")


def test_memory_does_not_grow_with_the_views():
    few, many = (ParallelBeam((64, 64, 64), np.linspace(0, 3, n), 96) for n in (300, 3000))
    assert many.nbytes - few.nbytes < 100 * 2700
    assert (few.num_views, few.num_columns, few.shape) == (300, 96, (64, 64, 64))


@pytest.mark.skipif(astra.use_cuda(), reason="this machine has a GPU")
def test_the_gpu_projector_refuses_a_machine_without_gpu():
    with pytest.raises(ConfigError, match="cpu"):
        CudaParallelBeam((4, 4, 4), np.array([0.0]), 8)


def test_vectors_of_the_gpu_projector_describe_the_same_rays(rng):
    """Voxels on a ray (centre + column step + ray), in ASTRA's 3D coordinates, satisfy the equation of that ray."""
    angles, columns, axis, (ny, nx) = rng.uniform(0, np.pi, 5), 31, 12.5, (20, 24)
    for angle, vector in zip(angles, projection_vectors(angles, columns, axis), strict=True):
        ray, centre, column, row = vector.reshape(4, 3)
        for j, along in ((0, -3.0), (17, 8.0), (30, 2.5)):
            point = centre + (j - (columns - 1) / 2) * column + along * ray
            k, i = point[0] + (nx - 1) / 2, point[1] + (ny - 1) / 2  # in 3D, the row grows with y
            x, y = k - (nx - 1) / 2, (ny - 1) / 2 - i
            assert x * np.cos(angle) + y * np.sin(angle) == pytest.approx(j - axis)
        np.testing.assert_allclose(row, [0, 0, 1])
