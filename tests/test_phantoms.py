from __future__ import annotations

import numpy as np
import pytest
from skimage.data import shepp_logan_phantom
from skimage.transform import resize

from hpcfed.data.phantoms import shepp_logan


@pytest.fixture(scope="module")
def phantom():
    return shepp_logan((200, 200, 100))


def at(phantom, x, y, z):
    """The voxel that holds a point of the world, y up."""
    ny, nx, nz = phantom.shape
    return phantom[int((1 - y) / 2 * ny), int((1 + x) / 2 * nx), int((1 + z) / 2 * nz)]


@pytest.mark.parametrize(
    ("point", "tenths"),
    [
        ((0.95, 0.95, 0.0), 0),  # air
        ((0.0, 0.9, 0.0), 10),  # skull above the brain, which ends at 0.874 - 0.0184
        ((0.0, -0.905, 0.0), 10),  # and below it, where it ends at -0.8924
        ((0.676, 0.0, 0.0), 10),
        ((0.5, 0.0, 0.0), 2),  # brain
        ((0.22, 0.0, 0.0), 0),  # ventricles
        ((-0.22, 0.0, 0.0), 0),
        ((-0.28, 0.18, 0.0), 0),  # in the left ellipsoid only because it is turned outwards
        ((-0.16, 0.30, 0.0), 3),  # its mirror image about the ellipsoid's axis is only in the upper ellipsoid
        ((0.0, 0.45, -0.15), 3),  # upper ellipsoid
        ((0.0, -0.45, -0.15), 2),
        ((0.0, 0.1, 0.25), 3),  # small spheres
        ((0.0, 0.1, -0.25), 2),
        ((-0.08, -0.605, 0.0), 3),
        ((0.06, -0.605, 0.0), 3),
        ((0.0, 0.0, 0.795), 10),  # the skull over the brain, z between 0.78 and 0.81
        ((0.0, 0.0, 0.9), 0),
    ],
)
def test_value_is_the_sum_of_the_contrasts(phantom, point, tenths):
    assert at(phantom, *point) == np.float32(tenths / 10)


def test_is_float32_contiguous_and_exactly_between_0_and_1(phantom):
    assert phantom.dtype == np.float32
    assert phantom.flags.c_contiguous
    assert phantom.min() == 0
    assert phantom.max() == 1


def test_the_axes_have_their_own_lengths():
    assert shepp_logan((6, 9, 4)).shape == (6, 9, 4)


def test_volumes_are_those_of_the_ellipsoids(phantom):
    voxel = 8 / phantom.size
    head = 4 / 3 * np.pi * 0.69 * 0.92 * 0.81
    brain = 4 / 3 * np.pi * 0.6624 * 0.874 * 0.78
    assert np.count_nonzero(phantom == 1) * voxel == pytest.approx(head - brain, rel=0.01)
    inner = [(-2, 0.11, 0.31, 0.22), (-2, 0.16, 0.41, 0.28), (1, 0.21, 0.25, 0.41), (1, 0.046, 0.046, 0.05)]
    inner += [(1, 0.046, 0.046, 0.05), (1, 0.046, 0.023, 0.05), (1, 0.023, 0.023, 0.02), (1, 0.023, 0.046, 0.02)]
    mass = head - 0.8 * brain + sum(rho / 10 * 4 / 3 * np.pi * a * b * c for rho, a, b, c in inner)
    assert phantom.sum(dtype=float) * voxel == pytest.approx(mass, rel=0.003)


def test_slices_differ_and_the_skull_is_symmetric(phantom):
    skull = phantom == 1
    np.testing.assert_array_equal(skull, skull[:, ::-1])
    np.testing.assert_array_equal(skull, skull[:, :, ::-1])
    assert not np.array_equal(phantom, phantom[:, ::-1])
    inside = phantom[:, :, 10:90]
    assert all(not np.array_equal(inside[:, :, k], inside[:, :, k + 1]) for k in range(79))


def test_middle_slice_looks_like_the_plane_phantom(phantom):
    plane = resize(shepp_logan_phantom(), phantom.shape[:2], anti_aliasing=True)
    middle = phantom[:, :, 50]
    alike = np.corrcoef(plane.ravel(), middle.ravel())[0, 1]
    assert alike > 0.9
    assert alike > np.corrcoef(plane.ravel(), middle[::-1].ravel())[0, 1]
    assert alike > np.corrcoef(plane.ravel(), middle[:, ::-1].ravel())[0, 1]
