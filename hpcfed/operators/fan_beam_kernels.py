"""Compiled loops of `hpcfed.operators.cone_beam.FanBeam` for few slices: a matched pair of projections.

In an image the ray of a detector column is a line. It crosses the rows or the columns of the image, whichever it meets
more steeply, at places affine in their number, ``p + q major``. Joseph's weights of the two pixels beside a place are
computed in double precision, and are the same bits in both directions and in all slices.

Forward, the rays of a view read a line of the image together (`hpcfed.operators.few_slices_kernels.add_pairs`). Back,
what they add to a pixel from its left and from its right is summed apart, so that no ray waits for its neighbour's sum.

``beams`` are those of `hpcfed.operators.cone_beam_kernels`, of which the first six columns count: the source, the way
from there to the middle of the detector, and the step to the next column.
"""

from __future__ import annotations

import numpy as np
from numba import njit, types

from hpcfed.operators.few_slices_kernels import add_pairs, padded_lines, repeated

MARGIN = 2  # zeros at either end of a line

_input = types.Array(types.float32, 3, "C", readonly=True)
_beams = types.Array(types.float64, 2, "C", readonly=True)
_output = types.float32[:, :, ::1]

# Products may be fused into sums; nothing here may assume that numbers are finite.
_compile = {"cache": True, "error_model": "numpy", "fastmath": {"contract"}, "nogil": True}


@njit(**_compile)
def _room(size):  # type: ignore[no-untyped-def]
    """For what `_rays` says of so many slices of rays, and `_crossings` of their crossings of a plane."""
    columns, p, q, lengths = np.empty(size, np.int64), np.empty(size), np.empty(size), np.empty(size, np.float32)
    index, first, second = np.empty(size, np.int32), np.empty(size, np.float32), np.empty(size, np.float32)
    return columns, p, q, lengths, index, first, second


@njit(**_compile)
def _rays(beam, num_columns, nz, turned, shape, columns, p, q, lengths):  # type: ignore[no-untyped-def]
    """The rays that cross the image's columns (``turned``) or its rows: how many, their detector columns and lines.

    ``lengths`` are those of ray between two planes. All have an entry for every slice of a ray.
    """
    ny, nx = shape
    sx, sy, dx, dy, ux, uy = beam[0], beam[1], beam[2], beam[3], beam[4], beam[5]
    count = 0
    for column in range(num_columns):
        shift = column - (num_columns - 1) * 0.5
        ex, ey = dx + shift * ux, dy + shift * uy
        if (abs(ex) >= abs(ey)) != turned:
            continue
        along, across = (ex, -ey) if turned else (-ey, ex)
        slope = across / along
        first_plane = -(nx - 1) * 0.5 - sx if turned else sy - (ny - 1) * 0.5
        middle = (ny - 1) * 0.5 - sy if turned else (nx - 1) * 0.5 + sx
        for h in range(nz):
            columns[count + h] = column
            p[count + h], q[count + h] = middle + first_plane * slope, slope
            lengths[count + h] = np.float32(np.sqrt(ex * ex + ey * ey) / abs(along))
        count += nz
    return count


@njit(**_compile)
def _crossings(p, q, slices, major, low, high, nz, index, first, second):  # type: ignore[no-untyped-def]
    """Where rays cross a plane, counted from ``low - MARGIN``, and their weights of the two pixels there.

    Places outside ``low - 1`` to ``high`` are moved to these bounds, beyond which are zeros.
    """
    least, most = low - 1.0, np.float64(high)
    for j in range(index.size):
        place = p[j] + q[j] * major
        place = place if place > least else least
        place = place if place < most else most
        place += MARGIN
        pixel = np.int32(place)
        beyond = place - pixel
        index[j] = (pixel - np.int32(low)) * np.int32(nz) + slices[j]
        first[j], second[j] = np.float32(1.0 - beyond), np.float32(beyond)


@njit(types.void(_input, _beams, _output), **_compile)
def forward(volume, beams, projections):  # type: ignore[no-untyped-def]
    """Write ``A x`` to ``projections``, of shape (views, columns, slices)."""
    ny, nx, nz = volume.shape
    num_columns = projections.shape[1]
    _, slices = repeated(num_columns, nz)
    columns, p, q, lengths, index, first, second = _room(slices.size)
    sums = np.empty(slices.size, np.float32)
    for turned in (False, True):
        lines = padded_lines(volume, MARGIN, turned)
        size = ny if turned else nx
        for view in range(beams.shape[0]):
            count = _rays(beams[view], num_columns, nz, turned, (ny, nx), columns, p, q, lengths)
            index_, first_, second_, sums_ = index[:count], first[:count], second[:count], sums[:count]
            sums_[:] = np.float32(0.0)
            for major in range(lines.shape[0]):
                _crossings(p, q, slices, major, 0, size, nz, index_, first_, second_)
                add_pairs(lines[major], index_, nz, first_, second_, sums_)
            for j in range(count):
                projections[view, columns[j], slices[j]] = lengths[j] * sums_[j]


@njit(types.void(_input, _beams, types.int64, types.int64, _output), **_compile)
def adjoint(projections, beams, top, bottom, volume):  # type: ignore[no-untyped-def]
    """Add ``A^T p`` to the image rows ``top <= y < bottom`` of the volume.

    A voxel's sum has one order whatever the rows, so that they may be shared out among threads.
    """
    ny, nx, nz = volume.shape
    num_columns = projections.shape[1]
    _, slices = repeated(num_columns, nz)
    columns, p, q, lengths, index, first, second = _room(slices.size)
    rays = np.empty(slices.size, np.float32)
    # What rays add to the pixel at their left and at their right, side by side.
    sides = np.zeros(((max(nx, ny) + 2 * MARGIN) * nz, 2), np.float32)
    upright = np.zeros((nx, (bottom - top) * nz), np.float32)
    rows = volume.reshape(ny, -1)
    for turned in (False, True):
        low, high = (top, bottom) if turned else (0, nx)
        for view in range(beams.shape[0]):
            count = _rays(beams[view], num_columns, nz, turned, (ny, nx), columns, p, q, lengths)
            index_, first_, second_ = index[:count], first[:count], second[:count]
            for j in range(count):
                rays[j] = lengths[j] * projections[view, columns[j], slices[j]]
            for major in range(0 if turned else top, nx if turned else bottom):
                _crossings(p, q, slices, major, low, high, nz, index_, first_, second_)
                for j in range(count):
                    side = sides[np.uint64(index_[j])]
                    side[0] += first_[j] * rays[j]
                    side[1] += second_[j] * rays[j]
                line = upright[major] if turned else rows[major]
                left, right = sides[MARGIN * nz :], sides[(MARGIN - 1) * nz :]
                for j in range(line.size):
                    line[j] += left[j, 0] + right[j, 1]
                sides[: line.size + 2 * MARGIN * nz] = np.float32(0.0)
    for i in range(top, bottom):
        for k in range(nx):
            for h in range(nz):
                volume[i, k, h] += upright[k, (i - top) * nz + h]


@njit(types.void(_input, _beams, types.int64, types.int64, _output), **_compile)
def backproject(filtered, beams, top, bottom, volume):  # type: ignore[no-untyped-def]
    """Add, to the rows ``top <= y < bottom``, each view's value where a voxel is seen, divided by ``t^2``.

    ``t`` is the fraction of the way from the source to the detector; values are interpolated between pixels. This is
    filtered backprojection's, not a transpose.
    """
    ny, nx, nz = volume.shape
    num_columns = filtered.shape[1]
    views, rows = padded_lines(filtered, MARGIN, False), volume.reshape(ny, -1)
    numbers, slices = repeated(nx, nz)
    index = np.empty(slices.size, np.int32)
    first, second = np.empty(slices.size, np.float32), np.empty(slices.size, np.float32)
    for view in range(beams.shape[0]):
        beam = beams[view]
        sx, sy, dx, dy, ux, uy = beam[0], beam[1], beam[2], beam[3], beam[4], beam[5]
        area = dx * uy - dy * ux
        for i in range(top, bottom):
            y = (ny - 1) * 0.5 - i - sy
            for j in range(index.size):
                x = numbers[j] - (nx - 1) * 0.5 - sx
                t = (x * uy - y * ux) / area
                place = (dx * y - dy * x) / (area * t) + (num_columns - 1) * 0.5
                place = place if place > -1.0 else -1.0
                place = place if place < num_columns else np.float64(num_columns)
                place += MARGIN
                column = np.int32(place)
                beyond = place - column
                share = 1.0 / (t * t) if t > 0.0 else 0.0
                index[j] = column * np.int32(nz) + slices[j]
                first[j], second[j] = np.float32((1.0 - beyond) * share), np.float32(beyond * share)
            add_pairs(views[view], index, nz, first, second, rows[i])
