"""Compiled loops of `hpcfed.operators.cone_beam` for detectors whose rows are parallel to the slices.

All rays of a detector column lie in one plane that holds the direction of the axis. Joseph's method walks them through
the planes of the image axis that they cross most steeply; where the column crosses such a plane, at the fraction ``t``
of the way from the source to the detector, the two voxel columns next to it are interpolated once, to a *profile* along
z, and all detector rows read it at positions that are affine in the row,

    ``z = z0 + t z1 + row (row0 + t row1)``,

by linear interpolation. A ray's sum, times the length of ray between two planes, is its line integral. A cone has
``row0 = 0``: its rays start in one point. A stack of fans, each in its slice, has ``z1 = row1 = 0`` and ``row0 = 1``.

Positions on a profile are whole numbers in units of 2^-32 voxels, so that both directions have the very same weights.
A profile has two zeros on either side, where rays read that pass above or below the volume.

``beams`` holds a row ``(sx, sy, dx, dy, ux, uy, z0, z1, row0, row1)`` for each view: the source, the way from there to
the middle of the detector, the step to the next column, all in voxels about the axis, y up; and the four numbers above.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 16
MARGIN = 2  # zeros at either end of a profile
BLOCK = 8  # detector columns that cross an image plane together, while it is in the cache
UNIT = 4294967296.0

_input = types.Array(types.float32, 3, "C", readonly=True)
_beams = types.Array(types.float64, 2, "C", readonly=True)
_output = types.float32[:, :, ::1]

# Products may be fused into sums; nothing here may assume that numbers are finite.
_compile = {"cache": True, "error_model": "numpy", "fastmath": {"contract"}, "nogil": True}


@intrinsic
def _read_profile(_context, profile, position, slope, last, out, start):  # type: ignore[no-untyped-def]
    """Add to ``out[start:]`` what `LANES` rows read on the profile, the first at ``position``, clipped to its ends.

    LLVM cannot prove that ``out`` and ``profile`` do not overlap and would read one row after another.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        profile, position, slope, last, out, start = arguments
        source = context.make_array(signature.args[0])(context, builder, profile).data
        target = context.make_array(signature.args[4])(context, builder, out).data
        target = builder.gep(target, [start])
        real, whole, wide = (ir.VectorType(t, LANES) for t in (ir.FloatType(), ir.IntType(32), ir.IntType(64)))

        def spread(value: Any) -> Any:
            one = builder.insert_element(ir.Constant(wide, ir.Undefined), value, ir.Constant(ir.IntType(32), 0))
            return builder.shuffle_vector(one, ir.Constant(wide, ir.Undefined), ir.Constant(whole, [0] * LANES))

        lanes = ir.Constant(wide, list(range(LANES)))
        place = builder.add(spread(position), builder.mul(spread(slope), lanes))
        zero, end = ir.Constant(wide, [0] * LANES), spread(last)
        place = builder.select(builder.icmp_signed("<", place, zero), zero, place)
        place = builder.select(builder.icmp_signed(">", place, end), end, place)
        index = builder.lshr(place, ir.Constant(wide, [32] * LANES))
        share = builder.uitofp(builder.trunc(place, whole), real)
        share = builder.fmul(share, ir.Constant(real, [1 / UNIT] * LANES))

        pointers, mask = ir.VectorType(ir.PointerType(), LANES), ir.VectorType(ir.IntType(1), LANES)
        kind = ir.FunctionType(real, [pointers, ir.IntType(32), mask, real])
        gather = cgutils.get_or_insert_function(builder.module, kind, f"llvm.masked.gather.v{LANES}f32.v{LANES}p0")
        origin = spread(builder.ptrtoint(source, ir.IntType(64)))
        address = builder.add(origin, builder.shl(index, ir.Constant(wide, [2] * LANES)))
        every, nothing = ir.Constant(mask, [1] * LANES), ir.Constant(real, ir.Undefined)

        def read(offset: int) -> Any:
            where = builder.inttoptr(builder.add(address, ir.Constant(wide, [offset] * LANES)), pointers)
            return builder.call(gather, [where, ir.Constant(ir.IntType(32), 4), every, nothing])

        low, high = read(0), read(4)
        row = builder.fadd(low, builder.fmul(share, builder.fsub(high, low)))
        target = builder.bitcast(target, ir.PointerType(real))
        builder.store(builder.fadd(builder.load(target, align=4), row), target, align=4)
        return context.get_dummy_value()

    line = types.Array(types.float32, 1, "C")
    whole = types.int64
    return types.void(line, whole, whole, whole, line, whole), generate


@njit(**_compile)
def _crossing(major, along_x, ex, ey, sx, sy, ny, nx):  # type: ignore[no-untyped-def]
    """Where a detector column crosses a plane of the image: the fraction of the way, and the place on the other axis.

    Planes are columns of the image if ``along_x``, else its rows; ``(ex, ey)`` leads from the source to the detector.
    """
    if along_x:
        t = (major - (nx - 1) * 0.5 - sx) / ex
        return t, (ny - 1) * 0.5 - sy - t * ey
    t = ((ny - 1) * 0.5 - major - sy) / ey
    return t, (nx - 1) * 0.5 + sx + t * ex


@njit(**_compile)
def _rows_inside(low, slope, nz, num_rows):  # type: ignore[no-untyped-def]
    """The rows ``r`` for which ``low + slope r`` lies on a profile, from the first to the one after the last."""
    first = max(0, int(np.floor((-1 - low) / slope)) + 1)
    return first, max(first, min(num_rows, int(np.ceil((nz - low) / slope))))


@njit(**_compile)
def _blend(lines, first, second, share, profile):  # type: ignore[no-untyped-def]
    """Write the interpolated line between two of ``lines`` to the profile; a line with the number -1 is zero."""
    size = lines.shape[1]
    inner = profile[MARGIN : MARGIN + size]
    if first >= 0 and second >= 0:
        one, other = lines[first], lines[second]
        for h in range(size):
            inner[h] = one[h] + share * (other[h] - one[h])
    elif first >= 0:
        one = lines[first]
        for h in range(size):
            inner[h] = (np.float32(1.0) - share) * one[h]
    else:
        other = lines[second]
        for h in range(size):
            inner[h] = share * other[h]


@njit(**_compile)
def _read(profile, low, slope, first, last, out):  # type: ignore[no-untyped-def]
    """Add to ``out[r]``, for ``first <= r < last``, the profile at ``low + slope r``; whole lanes, so a few more."""
    begin = first - first % LANES
    step = np.int64(slope * UNIT)
    end = np.int64(profile.size - MARGIN) << 32
    place = np.int64((low + MARGIN) * UNIT) + begin * step
    for r in range(begin, last, LANES):
        _read_profile(profile, place, step, end, out, r)
        place += LANES * step


@njit(**_compile)
def _write(row, low, slope, first, last, profile):  # type: ignore[no-untyped-def]
    """The transpose of `_read`: add the rows to the profile. Four rows far apart at a time wait for no other's sum."""
    step = np.int64(slope * UNIT)
    place = np.int64((low + MARGIN) * UNIT) + first * step
    part = (last - first) // 4
    a, b, c, d = place, place + part * step, place + 2 * part * step, place + 3 * part * step
    rows = row[first : first + part], row[first + part :], row[first + 2 * part :], row[first + 3 * part : last]
    for r in range(part):
        _add(profile, a, rows[0][r])
        _add(profile, b, rows[1][r])
        _add(profile, c, rows[2][r])
        _add(profile, d, rows[3][r])
        a, b, c, d = a + step, b + step, c + step, d + step
    for r in range(part, rows[3].size):
        _add(profile, d, rows[3][r])
        d += step


@njit(**_compile)
def _add(profile, place, value):  # type: ignore[no-untyped-def]
    index = np.uint64(place >> 32)
    beyond = value * (np.float32(place & 0xFFFFFFFF) * np.float32(1 / UNIT))
    profile[index] += value - beyond
    profile[index + np.uint64(1)] += beyond


@njit(**_compile)
def _length(ex, ey, z0, z1, row):  # type: ignore[no-untyped-def]
    """Length of ray between two planes."""
    return np.float32(np.sqrt(ex * ex + ey * ey + (z0 + z1 * row) ** 2) / max(abs(ex), abs(ey)))


@njit(types.void(_input, _beams, _output), **_compile)
def forward(volume, beams, projections):  # type: ignore[no-untyped-def]
    """Write ``A x`` to ``projections``, of shape (views, columns, rows)."""
    ny, nx, nz = volume.shape
    _, num_columns, num_rows = projections.shape
    lines = volume.reshape(ny * nx, nz)
    profile = np.zeros(nz + 2 * MARGIN, np.float32)
    sums = np.empty((BLOCK, (num_rows + LANES - 1) // LANES * LANES), np.float32)
    for view in range(beams.shape[0]):
        sx, sy, dx, dy, ux, uy, z0, z1, row0, row1 = beams[view]
        for begin in range(0, num_columns, BLOCK):
            end = min(begin + BLOCK, num_columns)
            sums[:] = np.float32(0.0)
            for along_x in (True, False):
                others = ny if along_x else nx
                stride, other_stride = (1, nx) if along_x else (nx, 1)
                for major in range(nx if along_x else ny):
                    for column in range(begin, end):
                        shift = column - (num_columns - 1) * 0.5
                        ex, ey = dx + shift * ux, dy + shift * uy
                        if (abs(ex) >= abs(ey)) != along_x:
                            continue
                        t, place = _crossing(major, along_x, ex, ey, sx, sy, ny, nx)
                        minor = int(np.floor(place))
                        if minor < -1 or minor >= others:
                            continue
                        low, slope = z0 + t * z1, row0 + t * row1
                        first, last = _rows_inside(low, slope, nz, num_rows)
                        line = major * stride + minor * other_stride
                        here = line if minor >= 0 else -1
                        there = line + other_stride if minor + 1 < others else -1
                        _blend(lines, here, there, np.float32(place - minor), profile)
                        _read(profile, low, slope, first, last, sums[column - begin])
            for column in range(begin, end):
                shift = column - (num_columns - 1) * 0.5
                for row in range(num_rows):
                    length = _length(dx + shift * ux, dy + shift * uy, z1, row1, row)
                    projections[view, column, row] = length * sums[column - begin, row]


@njit(types.void(_input, _beams, types.int64, types.int64, _output), **_compile)
def adjoint(projections, beams, top, bottom, volume):  # type: ignore[no-untyped-def]
    """Add ``A^T p`` to the image rows ``top <= y < bottom`` of the volume.

    A voxel's sum has one order whatever the rows, so that they may be shared out among threads.
    """
    ny, nx, nz = volume.shape
    _, num_columns, num_rows = projections.shape
    lines = volume.reshape(ny * nx, nz)
    profile = np.empty(nz + 2 * MARGIN, np.float32)
    inner = profile[MARGIN : MARGIN + nz]
    rays = np.empty((BLOCK, num_rows), np.float32)
    for view in range(beams.shape[0]):
        sx, sy, dx, dy, ux, uy, z0, z1, row0, row1 = beams[view]
        for begin in range(0, num_columns, BLOCK):
            end = min(begin + BLOCK, num_columns)
            for column in range(begin, end):
                shift = column - (num_columns - 1) * 0.5
                for row in range(num_rows):
                    length = _length(dx + shift * ux, dy + shift * uy, z1, row1, row)
                    rays[column - begin, row] = length * projections[view, column, row]
            for along_x in (True, False):
                # The other axis' places that have a share in these rows, and the planes that meet them.
                lowest, highest = (top, bottom) if along_x else (0, nx)
                stride, other_stride = (1, nx) if along_x else (nx, 1)
                for major in range(0 if along_x else top, nx if along_x else bottom):
                    for column in range(begin, end):
                        shift = column - (num_columns - 1) * 0.5
                        ex, ey = dx + shift * ux, dy + shift * uy
                        if (abs(ex) >= abs(ey)) != along_x:
                            continue
                        t, place = _crossing(major, along_x, ex, ey, sx, sy, ny, nx)
                        minor = int(np.floor(place))
                        if minor < lowest - 1 or minor >= highest:
                            continue
                        share = np.float32(place - minor)
                        low, slope = z0 + t * z1, row0 + t * row1
                        first, last = _rows_inside(low, slope, nz, num_rows)
                        profile[:] = np.float32(0.0)
                        _write(rays[column - begin], low, slope, first, last, profile)
                        if minor >= lowest:
                            line = lines[major * stride + minor * other_stride]
                            for h in range(nz):
                                line[h] += (np.float32(1.0) - share) * inner[h]
                        if minor + 1 < highest:
                            line = lines[major * stride + (minor + 1) * other_stride]
                            for h in range(nz):
                                line[h] += share * inner[h]


@njit(types.void(_input, _beams, types.int64, types.int64, _output), **_compile)
def backproject(filtered, beams, top, bottom, volume):  # type: ignore[no-untyped-def]
    """Add, to the rows ``top <= y < bottom``, each view's value where a voxel is seen, divided by ``t^2``.

    ``t`` is the fraction of the way from the source to the detector; values are interpolated between pixels. This is
    the back-projection of Feldkamp, Davis and Kress, not a transpose.
    """
    ny, nx, nz = volume.shape
    _, num_columns, num_rows = filtered.shape
    profile = np.zeros(num_rows + 2 * MARGIN, np.float32)
    line = np.empty((nz + LANES - 1) // LANES * LANES, np.float32)
    for view in range(beams.shape[0]):
        sx, sy, dx, dy, ux, uy, z0, z1, row0, row1 = beams[view]
        area = dx * uy - dy * ux
        for i in range(top, bottom):
            for k in range(nx):
                x, y = k - (nx - 1) * 0.5 - sx, (ny - 1) * 0.5 - i - sy
                t = (x * uy - y * ux) / area
                if t <= 0:
                    continue
                place = (dx * y - dy * x) / (area * t) + (num_columns - 1) * 0.5
                column = int(np.floor(place))
                if column < -1 or column >= num_columns:
                    continue
                here = column if column >= 0 else -1
                there = column + 1 if column + 1 < num_columns else -1
                _blend(filtered[view], here, there, np.float32(place - column), profile)
                slope = 1 / (row0 + t * row1)
                low = -(z0 + t * z1) * slope
                first, last = _rows_inside(low, slope, num_rows, nz)
                line[:] = np.float32(0.0)
                _read(profile, low, slope, first, last, line)
                weight = np.float32(1 / (t * t))
                for h in range(nz):
                    volume[i, k, h] += weight * line[h]
