"""Compiled loops of `hpcfed.operators.cone_beam` for detectors that stand in any way, ray by ray.

``vectors`` holds a row (source, detector middle, column step, row step) of three numbers each for a view. Directions
count in the order of a volume's axes: down the image rows, along the image columns, up the slices.
"""

from __future__ import annotations

import numpy as np
from numba import njit, types

_input = types.Array(types.float32, 3, "C", readonly=True)
_vectors = types.Array(types.float64, 2, "C", readonly=True)
_output = types.float32[:, :, ::1]

# Products may be fused into sums; nothing here may assume that numbers are finite.
_compile = {"cache": True, "error_model": "numpy", "fastmath": {"contract"}, "nogil": True}


@njit(**_compile)
def _ray(vector, column, row, shape):  # type: ignore[no-untyped-def]
    """A ray as its walk sees it.

    Returns the axis whose planes it meets most steeply and the two others, the place on those where it crosses plane 0
    and by how much it moves to the next plane, and the length of ray between two planes.
    """
    start, way = np.empty(3), np.empty(3)
    for axis in range(3):
        coordinate = 2 if axis == 2 else 1 - axis
        sign = -1.0 if axis == 0 else 1.0
        source = vector[coordinate]
        target = vector[3 + coordinate] + column * vector[6 + coordinate] + row * vector[9 + coordinate]
        start[axis] = sign * source + (shape[axis] - 1) * 0.5
        way[axis] = sign * (target - source)
    main = 0
    for axis in range(1, 3):
        if abs(way[axis]) > abs(way[main]):
            main = axis
    one, two = (1 if main == 0 else 0), (1 if main == 2 else 2)
    first, second = way[one] / way[main], way[two] / way[main]
    length = np.sqrt(1.0 + first * first + second * second)
    return main, one, two, start[one] - start[main] * first, first, start[two] - start[main] * second, second, length


@njit(**_compile)
def _steps(one, slope_one, size_one, two, slope_two, size_two, count):  # type: ignore[no-untyped-def]
    """The planes, from the first to the one after the last, where a ray may be within a voxel of the volume."""
    low, high = 0.0, float(count)
    for start, slope, size in ((one, slope_one, size_one), (two, slope_two, size_two)):
        if slope != 0.0:
            a, b = (-1.0 - start) / slope, (size - start) / slope
            low, high = max(low, min(a, b)), min(high, max(a, b) + 1.0)
        elif start <= -1.0 or start >= size:
            return 0, 0
    return int(low), max(int(low), int(np.ceil(high)) if high < count else count)


@njit(types.void(_input, _vectors, _output), **_compile)
def forward(volume, vectors, projections):  # type: ignore[no-untyped-def]
    """Write ``A x`` to ``projections``, of shape (views, columns, rows)."""
    num_views, num_columns, num_rows = projections.shape
    shape, strides = volume.shape, (volume.shape[1] * volume.shape[2], volume.shape[2], 1)
    voxels = volume.reshape(volume.size)
    for view in range(num_views):
        for column in range(num_columns):
            for row in range(num_rows):
                ray = _ray(vectors[view], column - (num_columns - 1) * 0.5, row - (num_rows - 1) * 0.5, shape)
                main, one, two, place_one, slope_one, place_two, slope_two, length = ray
                first, last = _steps(place_one, slope_one, shape[one], place_two, slope_two, shape[two], shape[main])
                total = 0.0
                stride, across, up = strides[main], strides[one], strides[two]
                for step in range(first, last):
                    a, b = place_one + step * slope_one, place_two + step * slope_two
                    i, j = int(np.floor(a)), int(np.floor(b))
                    a, b = a - i, b - j
                    index = step * stride + i * across + j * up
                    if 0 <= i < shape[one] - 1 and 0 <= j < shape[two] - 1:
                        low = (1.0 - b) * voxels[index] + b * voxels[index + up]
                        high = (1.0 - b) * voxels[index + across] + b * voxels[index + across + up]
                        total += (1.0 - a) * low + a * high
                    else:
                        for m in range(2):
                            for n in range(2):
                                if 0 <= i + m < shape[one] and 0 <= j + n < shape[two]:
                                    weight = (a if m else 1.0 - a) * (b if n else 1.0 - b)
                                    total += weight * voxels[index + m * across + n * up]
                projections[view, column, row] = length * total


@njit(types.void(_input, _vectors, types.int64, types.int64, _output), **_compile)
def adjoint(projections, vectors, top, bottom, volume):  # type: ignore[no-untyped-def]
    """Add ``A^T p`` to the image rows ``top <= y < bottom``; a voxel's sum has one order whatever the rows."""
    num_views, num_columns, num_rows = projections.shape
    shape, strides = volume.shape, (volume.shape[1] * volume.shape[2], volume.shape[2], 1)
    lowest, highest = (top, 0, 0), (bottom, shape[1], shape[2])
    voxels = volume.reshape(volume.size)
    for view in range(num_views):
        for column in range(num_columns):
            for row in range(num_rows):
                ray = _ray(vectors[view], column - (num_columns - 1) * 0.5, row - (num_rows - 1) * 0.5, shape)
                main, one, two, place_one, slope_one, place_two, slope_two, length = ray
                first, last = _steps(place_one, slope_one, shape[one], place_two, slope_two, shape[two], shape[main])
                value = length * projections[view, column, row]
                stride, across, up = strides[main], strides[one], strides[two]
                for step in range(max(first, lowest[main]), min(last, highest[main])):
                    a, b = place_one + step * slope_one, place_two + step * slope_two
                    i, j = int(np.floor(a)), int(np.floor(b))
                    a, b = a - i, b - j
                    index = step * stride + i * across + j * up
                    if lowest[one] <= i < highest[one] - 1 and 0 <= j < shape[two] - 1:
                        voxels[index] += np.float32((1.0 - a) * (1.0 - b) * value)
                        voxels[index + up] += np.float32((1.0 - a) * b * value)
                        voxels[index + across] += np.float32(a * (1.0 - b) * value)
                        voxels[index + across + up] += np.float32(a * b * value)
                    else:
                        for m in range(2):
                            for n in range(2):
                                if lowest[one] <= i + m < highest[one] and 0 <= j + n < shape[two]:
                                    weight = (a if m else 1.0 - a) * (b if n else 1.0 - b)
                                    voxels[index + m * across + n * up] += np.float32(weight * value)


@njit(types.void(_input, _vectors, types.int64, types.int64, _output), **_compile)
def backproject(filtered, vectors, top, bottom, volume):  # type: ignore[no-untyped-def]
    """Add, to the rows ``top <= y < bottom``, each view's value where a voxel is seen, divided by ``t^2``.

    ``t`` is the fraction of the way from the source to the detector; values are interpolated between pixels.
    """
    ny, nx, nz = volume.shape
    num_views, num_columns, num_rows = filtered.shape
    for view in range(num_views):
        source = vectors[view, :3]
        frame = np.empty((3, 3))
        for axis in range(3):
            frame[axis, 0], frame[axis, 1] = vectors[view, 6 + axis], vectors[view, 9 + axis]
            frame[axis, 2] = vectors[view, 3 + axis] - source[axis]
        solve = np.linalg.inv(frame)
        for i in range(top, bottom):
            for k in range(nx):
                x, y = k - (nx - 1) * 0.5 - source[0], (ny - 1) * 0.5 - i - source[1]
                for h in range(nz):
                    z = h - (nz - 1) * 0.5 - source[2]
                    t = solve[2, 0] * x + solve[2, 1] * y + solve[2, 2] * z
                    if t <= 0:
                        continue
                    a = (solve[0, 0] * x + solve[0, 1] * y + solve[0, 2] * z) / t + (num_columns - 1) * 0.5
                    b = (solve[1, 0] * x + solve[1, 1] * y + solve[1, 2] * z) / t + (num_rows - 1) * 0.5
                    column, row = int(np.floor(a)), int(np.floor(b))
                    total = 0.0
                    for near in range(2):
                        for up in range(2):
                            if 0 <= column + near < num_columns and 0 <= row + up < num_rows:
                                weight = (a - column if near else 1.0 - a + column) * (b - row if up else 1.0 - b + row)
                                total += weight * filtered[view, column + near, row + up]
                    volume[i, k, h] += np.float32(total / (t * t))
