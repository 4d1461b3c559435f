"""Made objects to reconstruct, known in closed form."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

# Contrast in tenths, semi-axes (x, y, z), centre (x, y, z), rotation about z in degrees; the head fits in [-1, 1]^3.
# Integers make the sums exact: 10 - 8 - 2 is nothing, and the skull is exactly 1.
_ELLIPSOIDS: tuple[tuple[int, float, float, float, float, float, float, float], ...] = (
    (10, 0.6900, 0.920, 0.810, 0.00, 0.0000, 0.00, 0.0),  # skull
    (-8, 0.6624, 0.874, 0.780, 0.00, -0.0184, 0.00, 0.0),  # brain
    (-2, 0.1100, 0.310, 0.220, 0.22, 0.0000, 0.00, -18.0),  # ventricle
    (-2, 0.1600, 0.410, 0.280, -0.22, 0.0000, 0.00, 18.0),  # ventricle
    (1, 0.2100, 0.250, 0.410, 0.00, 0.3500, -0.15, 0.0),
    (1, 0.0460, 0.046, 0.050, 0.00, 0.1000, 0.25, 0.0),
    (1, 0.0460, 0.046, 0.050, 0.00, -0.1000, 0.25, 0.0),
    (1, 0.0460, 0.023, 0.050, -0.08, -0.6050, 0.00, 0.0),
    (1, 0.0230, 0.023, 0.020, 0.00, -0.6060, 0.00, 0.0),
    (1, 0.0230, 0.046, 0.020, 0.06, -0.6050, 0.00, 0.0),
)


def shepp_logan(shape: tuple[int, int, int]) -> NDArray[np.float32]:
    r"""Sample the three-dimensional Shepp-Logan head phantom at the voxel centres of a grid over :math:`[-1, 1]^3`.

    The value at a point is the sum of the contrasts of the ten ellipsoids that contain it,

    .. math:: f(p) = \sum_k \rho_k \, [\, (x'_k/a_k)^2 + (y'_k/b_k)^2 + (z'_k/c_k)^2 \le 1 \,],

    where :math:`(x'_k, y'_k, z'_k)` are coordinates about the centre of ellipsoid k, turned by its angle about z. The
    contrasts are the modified (high) ones. Nothing is rescaled: the skull is 1 as it stands, the brain 0.2, the
    ventricles and the air 0, so a grid too coarse to have a voxel centre in the skull has a smaller maximum.

    Parameters
    ----------
    shape
        (ny, nx, nz). Row 0 is the top (y near +1), column 0 the left (x near -1), slice 0 the bottom (z near -1). The
        slices cover the whole head and the air above and below it. Unequal sides stretch the head.

    Returns
    -------
    ndarray, float32, (ny, nx, nz)
        Values in [0, 1].

    References
    ----------
    L. A. Shepp and B. F. Logan (1974), The Fourier reconstruction of a head section. A. C. Kak and M. Slaney (1988),
    Principles of Computerized Tomographic Imaging, section 3.3 (the ellipsoids). P. Toft (1996), The Radon transform,
    appendix B (the modified contrasts).
    """
    y, x, z = (2 * np.arange(count) + 1.0 - count for count in shape)
    y, x, z = -y[:, None] / shape[0], x[None, :] / shape[1], z / shape[2]
    tenths = np.zeros(shape, np.int8)
    for contrast, a, b, c, x0, y0, z0, degrees in _ELLIPSOIDS:
        cos, sin = np.cos(np.deg2rad(degrees)), np.sin(np.deg2rad(degrees))
        in_plane = ((cos * (x - x0) + sin * (y - y0)) / a) ** 2 + ((cos * (y - y0) - sin * (x - x0)) / b) ** 2
        room = 1 - ((z - z0) / c) ** 2
        rows, columns, slices = _span(in_plane.min(1) <= 1), _span(in_plane.min(0) <= 1), _span(room >= 0)
        inside = in_plane[rows, columns, None] <= room[slices]
        tenths[rows, columns, slices] += np.int8(contrast) * inside
    return np.divide(tenths, np.float32(10), dtype=np.float32)


def _span(mask: NDArray[np.bool_]) -> slice:
    """Return the smallest slice that holds every True of a vector."""
    (indices,) = np.nonzero(mask)
    return slice(indices[0], indices[-1] + 1) if indices.size else slice(0)
