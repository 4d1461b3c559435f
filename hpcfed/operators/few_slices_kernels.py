"""Compiled loops of `hpcfed.operators.parallel_beam` for volumes of few slices: they run across pixels and rays.

The loops of `hpcfed.operators.parallel_beam_kernels` run along the slices of a pixel, which are too few here. What is
added to a ray where it crosses a line of the image, and to a pixel from a view, is the weighted sum of two neighbours,

    ``out[j] += first[j] source[index[j]] + second[j] source[index[j] + nz]``,

for all rays or pixels ``j`` of the line, slice by slice: no two have the same place, so that `LANES` of them are summed
together. Weights are Joseph's, as there, computed in double precision and rounded to float32; shadows and
``directions`` are the same, too. A ray is followed along the axis that it is closer to; where that is a row's, its
neighbours are those of an image column, and it reads the image turned over.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 16
MARGIN = 4  # zeros at either end of a line, where rays read that just miss the image

_input = types.Array(types.float32, 3, "C", readonly=True)
_directions = types.Array(types.float64, 2, "C", readonly=True)
_output = types.float32[:, :, ::1]

# Products may be fused into sums; nothing here may assume that numbers are finite.
_compile = {"cache": True, "error_model": "numpy", "fastmath": {"contract"}, "nogil": True}


@intrinsic
def _add_lanes(_context, source, index, stride, first, second, out, start):  # type: ignore[no-untyped-def]
    """`add_pairs` for the `LANES` places from ``start`` on.

    LLVM cannot prove that ``out`` and ``source`` do not overlap and would sum one place after another.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        stride, start = arguments[2], arguments[6]
        source, index, _, first, second, out, _ = (
            context.make_array(kind)(context, builder, argument).data if isinstance(kind, types.Array) else argument
            for kind, argument in zip(signature.args, arguments, strict=True)
        )
        real, whole, wide = (ir.VectorType(t, LANES) for t in (ir.FloatType(), ir.IntType(32), ir.IntType(64)))
        pointers, mask = ir.VectorType(ir.PointerType(), LANES), ir.VectorType(ir.IntType(1), LANES)
        kind = ir.FunctionType(real, [pointers, ir.IntType(32), mask, real])
        gather = cgutils.get_or_insert_function(builder.module, kind, f"llvm.masked.gather.v{LANES}f32.v{LANES}p0")
        every, nothing = ir.Constant(mask, [1] * LANES), ir.Constant(real, ir.Undefined)

        def at_start(array: Any, vector: Any) -> Any:
            return builder.bitcast(builder.gep(array, [start]), ir.PointerType(vector))

        def load(array: Any, vector: Any) -> Any:
            return builder.load(at_start(array, vector), align=4)

        places = builder.shl(builder.zext(load(index, whole), wide), ir.Constant(wide, [2] * LANES))

        def read(base: Any) -> Any:
            one = ir.Constant(wide, ir.Undefined)
            one = builder.insert_element(one, builder.ptrtoint(base, ir.IntType(64)), ir.Constant(ir.IntType(32), 0))
            origin = builder.shuffle_vector(one, ir.Constant(wide, ir.Undefined), ir.Constant(whole, [0] * LANES))
            where = builder.inttoptr(builder.add(origin, places), pointers)
            return builder.call(gather, [where, ir.Constant(ir.IntType(32), 4), every, nothing])

        low = builder.fmul(load(first, real), read(source))
        high = builder.fmul(load(second, real), read(builder.gep(source, [stride])))
        total = builder.fadd(load(out, real), builder.fadd(low, high))
        builder.store(total, at_start(out, real), align=4)
        return context.get_dummy_value()

    line = types.Array(types.float32, 1, "C")
    whole = types.int64
    return types.void(line, types.Array(types.int32, 1, "C"), whole, line, line, line, whole), generate


@njit(**_compile)
def add_pairs(source, index, stride, first, second, out):  # type: ignore[no-untyped-def]
    """Add ``first[j] source[index[j]] + second[j] source[index[j] + stride]`` to every ``out[j]``."""
    whole = out.size - out.size % LANES
    for start in range(0, whole, LANES):
        _add_lanes(source, index, stride, first, second, out, start)
    for j in range(whole, out.size):
        out[j] += first[j] * source[index[j]] + second[j] * source[index[j] + stride]


@njit(**_compile)
def repeated(count, nz):  # type: ignore[no-untyped-def]
    """For every slice of ``count`` places: the place's number, and the slice's."""
    numbers, slices = np.empty(count * nz), np.empty(count * nz, np.int32)
    for j in range(count * nz):
        numbers[j], slices[j] = j // nz, j % nz
    return numbers, slices


@njit(**_compile)
def padded_lines(volume, margin, turned):  # type: ignore[no-untyped-def]
    """The image's rows, or if ``turned`` its columns, with zeros at either end of each: (lines, pixels and slices)."""
    ny, nx, nz = volume.shape
    count, size = (nx, ny) if turned else (ny, nx)
    lines = np.zeros((count, (size + 2 * margin) * nz), np.float32)
    for begin in range(0, ny, LANES):  # so many rows of a column share cache lines while they are turned
        for k in range(nx):
            for i in range(begin, min(begin + LANES, ny)):
                major, minor = (k, i) if turned else (i, k)
                for h in range(nz):
                    lines[major, (minor + margin) * nz + h] = volume[i, k, h]
    return lines


@njit(**_compile)
def _along_a_line(numbers, slices, start, slope, scale, nz, index, first, second):  # type: ignore[no-untyped-def]
    """Where rays cross a line, and their weights of the two pixels there."""
    step = 1.0 / slope
    for j in range(index.size):
        place = (numbers[j] - start) * step + MARGIN
        pixel = np.int32(place)
        beyond = place - pixel
        index[j] = pixel * np.int32(nz) + slices[j]
        first[j] = np.float32((1.0 - beyond) * scale)
        second[j] = np.float32(beyond * scale)


@njit(**_compile)
def _along_a_row(numbers, slices, start, cosine, width, nz, index, first, second):  # type: ignore[no-untyped-def]
    """Where pixels of a row fall on a shadow, and their weights of the two rays there."""
    scale = 1.0 / (width * width)
    for j in range(index.size):
        position = start + numbers[j] * cosine
        ray = np.int32(position)
        beyond = position - ray
        index[j] = ray * np.int32(nz) + slices[j]
        first[j] = np.float32(max(0.0, width - beyond) * scale)
        second[j] = np.float32(max(0.0, width - 1.0 + beyond) * scale)


@njit(types.void(_input, _directions, types.float64, _output), **_compile)
def cast(volume, directions, offset, shadow):  # type: ignore[no-untyped-def]
    """Add the line integrals to the shadow; ``offset`` is the ray through the axis."""
    ny, nx, nz = volume.shape
    num_rays = shadow.shape[1]
    flat = shadow.reshape(shadow.shape[0], -1)
    numbers, slices = repeated(num_rays, nz)
    index = np.empty(numbers.size, np.int32)
    first, second = np.empty(numbers.size, np.float32), np.empty(numbers.size, np.float32)
    for turned in (False, True):
        lines = padded_lines(volume, MARGIN, turned)
        size = ny if turned else nx
        for major in range(nx if turned else ny):
            for view in range(directions.shape[0]):
                cosine, sine, width = directions[view, 0], directions[view, 1], directions[view, 2]
                if (abs(cosine) < abs(sine)) != turned:
                    continue
                # The ray through the line's first pixel, and from each pixel to the next.
                if turned:
                    start, slope = offset + (ny - 1) * 0.5 * sine + (major - (nx - 1) * 0.5) * cosine, -sine
                else:
                    start, slope = offset + ((ny - 1) * 0.5 - major) * sine - (nx - 1) * 0.5 * cosine, cosine
                before, after = start - slope, start + size * slope
                begin = nz * max(0, int(min(before, after)))
                end = nz * min(num_rays, int(max(before, after)) + 2)
                index_, first_, second_ = index[: end - begin], first[: end - begin], second[: end - begin]
                _along_a_line(
                    numbers[begin:end], slices[begin:end], start, slope, 1.0 / width, nz, index_, first_, second_
                )
                add_pairs(lines[major], index_, nz, first_, second_, flat[view, begin:end])


@njit(types.void(_input, _directions, types.float64, _output), **_compile)
def spread(shadow, directions, offset, volume):  # type: ignore[no-untyped-def]
    """Add the transpose of `cast` applied to a shadow to the volume."""
    ny, nx, nz = volume.shape
    rows, flat = volume.reshape(ny, -1), shadow.reshape(shadow.shape[0], -1)
    numbers, slices = repeated(nx, nz)
    index = np.empty(numbers.size, np.int32)
    first, second = np.empty(numbers.size, np.float32), np.empty(numbers.size, np.float32)
    for i in range(ny):
        for view in range(directions.shape[0]):
            cosine, sine, width = directions[view, 0], directions[view, 1], directions[view, 2]
            start = offset + ((ny - 1) * 0.5 - i) * sine - (nx - 1) * 0.5 * cosine
            _along_a_row(numbers, slices, start, cosine, width, nz, index, first, second)
            add_pairs(flat[view], index, nz, first, second, rows[i])
