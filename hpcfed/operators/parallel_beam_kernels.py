"""Compiled loops of `hpcfed.operators.parallel_beam`: a matched pair of projections without a stored matrix.

Rays are numbered by detector column. The ray of a view that passes a pixel centre lies at the fractional column
``position``, and only the two whole columns next to it get a share of the pixel. With ``m = max(|cos|, |sin|)``, the
distance between neighbouring pixels of a grid line as the detector sees it, Joseph's weight of a pixel at the distance
``d`` from a ray is ``max(0, m - d) / m^2``: linear interpolation on the grid line, times the length ``1/m`` of ray
between two lines.

Three things make the loops fast. All slices of a pixel share one pair of weights and lie next to each other in memory.
A block of views is swept over one image row at a time, so that the row and the block's rays stay in the cache. And
rays go to a *shadow*: an array with a place for every ray that meets the image, on the detector or not, which spares
the inner loops every test. Shadows are (views, rays, slices); ray ``r`` of a shadow is detector column ``r + first``.

``directions`` holds a row (cos, sin, m) for each view. ``m = 1`` turns Joseph's weights into plain interpolation of a
view between its columns, as filtered backprojection wants it.
"""

from __future__ import annotations

import numpy as np
from numba import njit, types

from hpcfed.operators import few_slices_kernels as few
from hpcfed.operators.parallel_beam import FEW_SLICES

_volume = types.Array(types.float32, 3, "C", readonly=True)
_directions = types.Array(types.float64, 2, "C", readonly=True)
_indices = types.Array(types.int64, 1, "C", readonly=True)
_output = types.float32[:, :, ::1]

# Products may be fused into sums; nothing here may assume that numbers are finite.
_compile = {"cache": True, "error_model": "numpy", "fastmath": {"contract"}, "nogil": True}


@njit(types.void(_volume, _directions, types.float64, types.int64, _output), **_compile)
def _cast(volume, directions, offset, z, shadow):  # type: ignore[no-untyped-def]
    """Add the line integrals of the slices from ``z`` on to the shadow; ``offset`` is the ray through the axis."""
    ny, nx, nz = volume.shape
    if nz <= FEW_SLICES:
        few.cast(volume, directions, offset, shadow)
        return
    depth = min(shadow.shape[2], nz - z)
    for i in range(ny):
        for view in range(directions.shape[0]):
            cosine, sine, width = directions[view, 0], directions[view, 1], directions[view, 2]
            scale = 1.0 / (width * width)
            start = offset + ((ny - 1) * 0.5 - i) * sine - (nx - 1) * 0.5 * cosine
            for k in range(nx):
                position = start + k * cosine
                ray = int(position)
                beyond = position - ray
                weight = np.float32(max(0.0, width - beyond) * scale)
                next_weight = np.float32(max(0.0, width - 1.0 + beyond) * scale)
                pixel, here, there = volume[i, k, z : z + depth], shadow[view, ray], shadow[view, ray + 1]
                for h in range(depth):
                    here[h] += weight * pixel[h]
                for h in range(depth):
                    there[h] += next_weight * pixel[h]


@njit(types.void(_volume, _directions, types.float64, types.int64, _output), **_compile)
def _spread(shadow, directions, offset, z, volume):  # type: ignore[no-untyped-def]
    """Add the transpose of `_cast` applied to a shadow to the slices from ``z`` on."""
    ny, nx, nz = volume.shape
    if nz <= FEW_SLICES:
        few.spread(shadow, directions, offset, volume)
        return
    depth = min(shadow.shape[2], nz - z)
    for i in range(ny):
        for view in range(directions.shape[0]):
            cosine, sine, width = directions[view, 0], directions[view, 1], directions[view, 2]
            scale = 1.0 / (width * width)
            start = offset + ((ny - 1) * 0.5 - i) * sine - (nx - 1) * 0.5 * cosine
            for k in range(nx):
                position = start + k * cosine
                ray = int(position)
                beyond = position - ray
                weight = np.float32(max(0.0, width - beyond) * scale)
                next_weight = np.float32(max(0.0, width - 1.0 + beyond) * scale)
                pixel, here, there = volume[i, k, z : z + depth], shadow[view, ray], shadow[view, ray + 1]
                for h in range(depth):
                    pixel[h] += weight * here[h] + next_weight * there[h]


@njit(types.void(_volume, _directions, types.float64, types.int64, _output, _output), **_compile)
def forward(volume, directions, offset, first, projections, shadow):  # type: ignore[no-untyped-def]
    """Write ``A x`` to ``projections``; ``shadow`` is scratch, its shape sets the block of views and of slices."""
    num_views, num_columns, nz = projections.shape
    block, num_rays, slab = shadow.shape
    for z in range(0, nz, slab):
        depth = min(slab, nz - z)
        for begin in range(0, num_views, block):
            end = min(begin + block, num_views)
            shadow[:] = np.float32(0.0)
            _cast(volume, directions[begin:end], offset, z, shadow)
            for view in range(begin, end):
                for column in range(num_columns):
                    row = projections[view, column, z : z + depth]
                    ray = column - first
                    if 0 <= ray < num_rays:
                        for h in range(depth):
                            row[h] = shadow[view - begin, ray, h]
                    else:
                        for h in range(depth):
                            row[h] = 0.0


@njit(types.void(_volume, _directions, types.float64, types.int64, _output, _output), **_compile)
def adjoint(projections, directions, offset, first, volume, shadow):  # type: ignore[no-untyped-def]
    """Add ``A^T p`` to ``volume``; ``shadow`` is scratch."""
    num_views, num_columns, nz = projections.shape
    block, num_rays, slab = shadow.shape
    for z in range(0, nz, slab):
        depth = min(slab, nz - z)
        for begin in range(0, num_views, block):
            end = min(begin + block, num_views)
            for view in range(begin, end):
                for ray in range(num_rays):
                    column = ray + first
                    row = shadow[view - begin, ray]
                    if 0 <= column < num_columns:
                        for h in range(depth):
                            row[h] = projections[view, column, z + h]
                    else:
                        for h in range(depth):
                            row[h] = 0.0
            _spread(shadow, directions[begin:end], offset, z, volume)


@njit(
    types.void(_volume, _volume, _indices, _directions, types.float64, types.int64, types.float32, _output, _output),
    **_compile,
)
def gradient(volume, projections, views, directions, offset, first, scale, out, shadow):  # type: ignore[no-untyped-def]
    """Add ``scale * A^T (A x - b)`` to ``out``, where row i of A belongs to ``projections[views[i]]``.

    The residual exists for one block of views at a time, in the scratch ``shadow``.
    """
    _, num_columns, nz = projections.shape
    block, num_rays, slab = shadow.shape
    for z in range(0, nz, slab):
        depth = min(slab, nz - z)
        for begin in range(0, views.size, block):
            end = min(begin + block, views.size)
            shadow[:] = np.float32(0.0)
            _cast(volume, directions[begin:end], offset, z, shadow)
            for view in range(begin, end):
                for ray in range(num_rays):
                    column = ray + first
                    row = shadow[view - begin, ray]
                    if 0 <= column < num_columns:
                        data = projections[views[view], column, z : z + depth]
                        for h in range(depth):
                            row[h] = scale * (row[h] - data[h])
                    else:
                        for h in range(depth):
                            row[h] = 0.0
            _spread(shadow, directions[begin:end], offset, z, out)


@njit(
    types.float64(_volume, _volume, _directions, types.float64, types.int64, _output),
    **(_compile | {"fastmath": {"contract", "reassoc"}}),
)
def misfit(volume, projections, directions, offset, first, shadow):  # type: ignore[no-untyped-def]
    """``1/2 ||A x - b||^2``, summed in double precision in an order that depends on the shapes only."""
    num_views, num_columns, nz = projections.shape
    block, num_rays, slab = shadow.shape
    total = 0.0
    for z in range(0, nz, slab):
        depth = min(slab, nz - z)
        for begin in range(0, num_views, block):
            end = min(begin + block, num_views)
            shadow[:] = np.float32(0.0)
            _cast(volume, directions[begin:end], offset, z, shadow)
            for view in range(begin, end):
                for column in range(num_columns):
                    data = projections[view, column, z : z + depth]
                    ray = column - first
                    square = 0.0
                    if 0 <= ray < num_rays:
                        row = shadow[view - begin, ray]
                        for h in range(depth):
                            square += np.float64(row[h] - data[h]) ** 2
                    else:
                        for h in range(depth):
                            square += np.float64(data[h]) ** 2
                    total += square
    return 0.5 * total
