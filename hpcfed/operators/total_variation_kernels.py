"""Compiled loops of `hpcfed.operators.total_variation`.

A client's whole step is one sweep over the image rows: the predicted volume is needed in two neighbouring rows only,
which stay in the cache, so that each array is read or written once. Row i of the volume is ``y = i``; the loops over z,
the contiguous axis, hold no test and no dependence.
"""

from __future__ import annotations

import numpy as np
from numba import njit, types

_volume = types.Array(types.float32, 3, "C", readonly=True)
_field = types.Array(types.float32, 4, "C", readonly=True)
_volume_out = types.float32[:, :, ::1]
_field_out = types.float32[:, :, :, ::1]
_row_out = types.float32[::1]
_plane_out = types.float32[:, ::1]
_mask = types.Array(types.boolean, 2, "C", readonly=True)

# Products may be fused into sums; nothing here may assume that numbers are finite.
_compile = {"cache": True, "error_model": "numpy", "fastmath": {"contract"}, "nogil": True}


@njit(types.void(_volume, _volume_out, _volume_out, _volume_out), **_compile)
def differences(x, along_y, along_x, along_z):  # type: ignore[no-untyped-def]
    """Write the forward differences of x, zero at the last index of each axis."""
    ny, nx, nz = x.shape
    for i in range(ny):
        for k in range(nx):
            row, below, right = x[i, k], x[min(i + 1, ny - 1), k], x[i, min(k + 1, nx - 1)]
            to_y, to_x, to_z = along_y[i, k], along_x[i, k], along_z[i, k]
            for h in range(nz):
                to_y[h] = below[h] - row[h]
                to_x[h] = right[h] - row[h]
            for h in range(nz - 1):
                to_z[h] = row[h + 1] - row[h]
            to_z[nz - 1] = 0.0


@njit(types.void(_field, types.int64, types.int64, _row_out), inline="always", **_compile)
def _adjoint_row(v, i, k, out):  # type: ignore[no-untyped-def]
    """Write row (i, k) of ``B^T v``: minus the divergence, with no flux through the faces of the volume."""
    _, ny, nx, nz = v.shape
    above, left = max(i - 1, 0), max(k - 1, 0)
    # An axis ends at its last index, whose difference is zero whatever v holds there.
    from_y, to_y = np.float32(i > 0), np.float32(i < ny - 1)
    from_x, to_x = np.float32(k > 0), np.float32(k < nx - 1)
    y, y_above, x, x_left, z = v[0, i, k], v[0, above, k], v[1, i, k], v[1, i, left], v[2, i, k]
    for h in range(nz):
        out[h] = from_y * y_above[h] - to_y * y[h] + from_x * x_left[h] - to_x * x[h]
    for h in range(nz - 1):
        out[h] -= z[h]
    for h in range(1, nz):
        out[h] += z[h - 1]


@njit(types.void(_field, types.int64, _volume_out), **_compile)
def adjoint(v, first, out):  # type: ignore[no-untyped-def]
    """Write the rows of ``B^T v`` from the first on that out has room for."""
    for i in range(out.shape[0]):
        for k in range(out.shape[1]):
            _adjoint_row(v, first + i, k, out[i, k])


@njit(types.void(_field, types.float32, _field_out), **_compile)
def project(v, radius, out):  # type: ignore[no-untyped-def]
    """Write the projection of each voxel's 3-vector on the ball of this radius."""
    _, ny, nx, nz = v.shape
    for i in range(ny):
        for k in range(nx):
            y, x, z = v[0, i, k], v[1, i, k], v[2, i, k]
            to_y, to_x, to_z = out[0, i, k], out[1, i, k], out[2, i, k]
            for h in range(nz):
                norm = np.sqrt(y[h] * y[h] + x[h] * x[h] + z[h] * z[h])
                shrink = radius / norm if norm > radius else np.float32(1.0)
                to_y[h] = shrink * y[h]
                to_x[h] = shrink * x[h]
                to_z[h] = shrink * z[h]


@njit(types.void(_field, _volume, types.float32, types.float32, types.int64, _field_out), **_compile)
def dual_step(v, x, lam, radius, first, out):  # type: ignore[no-untyped-def]
    """Write the rows of ``prox_{g*}(v + lam B x)`` from the first on that out has room for."""
    ny, nx, nz = x.shape
    for row in range(out.shape[1]):
        i = first + row
        for k in range(nx):
            here, below, right = x[i, k], x[min(i + 1, ny - 1), k], x[i, min(k + 1, nx - 1)]
            y, along_x, z = v[0, i, k], v[1, i, k], v[2, i, k]
            to_y, to_x, to_z = out[0, row, k], out[1, row, k], out[2, row, k]
            to_z[: nz - 1] = here[1:]
            to_z[nz - 1] = here[nz - 1]
            for h in range(nz):
                dy = y[h] + lam * (below[h] - here[h])
                dx = along_x[h] + lam * (right[h] - here[h])
                dz = z[h] + lam * (to_z[h] - here[h])
                norm = np.sqrt(dy * dy + dx * dx + dz * dz)
                shrink = radius / norm if norm > radius else np.float32(1.0)
                to_y[h] = shrink * dy
                to_x[h] = shrink * dx
                to_z[h] = shrink * dz


@njit(types.void(_volume, _field, _volume, types.int64, types.float32, types.float32, _mask, _plane_out), **_compile)
def _predict(x, v, gradient, i, gamma, lowest, inside, plane):  # type: ignore[no-untyped-def]
    """Write row i of ``P(x - gamma (gradient + B^T v))``, with its last column and slice written twice."""
    _, nx, nz = x.shape
    for k in range(nx):
        row = plane[k, :nz]
        _adjoint_row(v, i, k, row)
        start, slope = x[i, k], gradient[i, k]
        for h in range(nz):
            value = start[h] - gamma * (slope[h] + row[h])
            row[h] = lowest if value < lowest else value
        if not inside[i, k]:
            row[:] = 0.0
        plane[k, nz] = plane[k, nz - 1]
    for h in range(nz + 1):
        plane[nx, h] = plane[nx - 1, h]


@njit(
    types.void(
        _volume,
        _field,
        _volume,
        types.float32,
        types.float32,
        types.float32,
        types.float32,
        _mask,
        _volume_out,
        _field_out,
    ),
    **_compile,
)
def step(x, v, gradient, gamma, lam, radius, lowest, inside, difference, dual):  # type: ignore[no-untyped-def]
    """The whole client step of `TotalVariation.step`.

    ``lowest`` is the lower bound of x, -inf without one; of the columns (y, x) that are not ``inside`` all is 0.
    """
    ny, nx, nz = x.shape
    sigma = lam / gamma
    planes = np.empty((2, nx + 1, nz + 1), dtype=np.float32)
    _predict(x, v, gradient, 0, gamma, lowest, inside, planes[0])
    for i in range(ny):
        here, below = planes[i % 2], planes[i % 2]
        if i + 1 < ny:
            below = planes[(i + 1) % 2]
            _predict(x, v, gradient, i + 1, gamma, lowest, inside, below)
        for k in range(nx):
            row, row_below, right = here[k], below[k], here[k + 1]
            y, along_x, z = v[0, i, k], v[1, i, k], v[2, i, k]
            to_y, to_x, to_z = dual[0, i, k], dual[1, i, k], dual[2, i, k]
            for h in range(nz):
                dy = y[h] + sigma * (row_below[h] - row[h])
                dx = along_x[h] + sigma * (right[h] - row[h])
                dz = z[h] + sigma * (row[h + 1] - row[h])
                norm = np.sqrt(dy * dy + dx * dx + dz * dz)
                shrink = radius / norm if norm > radius else np.float32(1.0)
                to_y[h] = shrink * dy
                to_x[h] = shrink * dx
                to_z[h] = shrink * dz
            moved = difference[i, k]
            _adjoint_row(dual, i, k, moved)
            start, slope = x[i, k], gradient[i, k]
            for h in range(nz):
                value = start[h] - gamma * (slope[h] + moved[h])
                moved[h] = (lowest if value < lowest else value) - start[h]
            if not inside[i, k]:
                for h in range(nz):
                    moved[h] = -start[h]


@njit(types.float64(_volume, types.int64, types.int64), **(_compile | {"fastmath": {"contract", "reassoc"}}))
def value(x, first, last):  # type: ignore[no-untyped-def]
    """Sum of the length of the gradient over the rows first <= y < last, in double precision."""
    ny, nx, nz = x.shape
    total = 0.0
    for i in range(first, last):
        for k in range(nx):
            row, below, right = x[i, k], x[min(i + 1, ny - 1), k], x[i, min(k + 1, nx - 1)]
            length = 0.0
            for h in range(nz - 1):
                dy, dx, dz = below[h] - row[h], right[h] - row[h], row[h + 1] - row[h]
                length += np.float64(np.sqrt(dy * dy + dx * dx + dz * dz))
            dy, dx = below[nz - 1] - row[nz - 1], right[nz - 1] - row[nz - 1]
            total += length + np.float64(np.sqrt(dy * dy + dx * dx))
    return total
