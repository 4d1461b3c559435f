"""Compiled kernels of the quantizers: norms, stochastic rounding, packing of levels into bits, and the way back.

All kernels see arrays flattened in C order and blocks as `hpcfed.compressors.blocks.BlockLayout` describes them. They
work through pieces that fit the first-level cache, in which the scale of each element is first spread out of its
block; the loop that does the arithmetic is then the same for every layout, and runs over contiguous memory.

Importing this module compiles the kernels once for a machine (Numba keeps them on disk).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, types
from numpy.typing import NDArray

from hpcfed.compressors.blocks import BlockLayout
from hpcfed.errors import DivergedError

# Elements of a packed piece: part of the wire format, a multiple of 8.
PIECE = 2048
# Uniform numbers drawn at a time: 256 KiB, so that they are still in cache when they are used.
DRAW = 1 << 16


def _frozen(dtype: Any) -> types.Array:
    """The Numba type of a contiguous vector that a kernel only reads."""
    return types.Array(dtype, 1, "C", readonly=True)


_FLOATS = (types.float32, types.float64)
_LEVELS = (types.int8, types.int16, types.int32)
_SIZE = types.int64
_COEFFICIENTS = _frozen(types.float64)


@njit(types.void(_COEFFICIENTS, _SIZE, _SIZE, _SIZE, types.float64[::1]), cache=True)
def spread(per_block, length, inner, start, out):  # type: ignore[no-untyped-def]
    """Give every element ``start + j`` the value of its block: ``out[j] = per_block[block(start + j)]``."""
    group = start // (length * inner)
    position = start - group * length * inner
    j = 0
    while j < out.size:
        if inner == 1:
            count = min(out.size - j, length - position)
            out[j : j + count] = per_block[group]
        else:
            column = position % inner
            count = min(out.size - j, inner - column)
            target = out[j : j + count]
            row = per_block[group * inner + column : group * inner + column + count]
            for k in range(count):
                target[k] = row[k]
        j += count
        position += count
        if position == length * inner:
            position = 0
            group += 1


@njit([types.void(_frozen(each), _SIZE, _SIZE, types.float64[::1]) for each in _FLOATS], cache=True)
def sum_squares(values, length, inner, sums):  # type: ignore[no-untyped-def]
    """Sum of squares of each block, in float64."""
    sums[:] = 0.0
    for begin in range(0, values.size, length * inner):
        first = begin // length
        if inner == 1:
            total = 0.0
            for value in values[begin : begin + length]:
                total += np.float64(value) ** 2
            sums[first] = total
        else:
            group = sums[first : first + inner]
            for place in range(begin, begin + length * inner, inner):
                row = values[place : place + inner]
                for k in range(inner):
                    group[k] += np.float64(row[k]) ** 2


@njit([types.void(_frozen(each), each, _SIZE, _SIZE, each[::1]) for each in (types.uint32, types.uint64)], cache=True)
def largest_bits(values, mask, length, inner, largest):  # type: ignore[no-untyped-def]
    """Largest ``value & mask`` of each block of unsigned integers.

    Applied to floating-point numbers seen as integers, with all bits but the sign in the mask, this is the largest
    magnitude, where infinity is above the numbers and NaN above infinity.
    """
    largest[:] = 0
    for begin in range(0, values.size, length * inner):
        first = begin // length
        if inner == 1:
            for value in values[begin : begin + length]:
                largest[first] = max(largest[first], value & mask)
        else:
            group = largest[first : first + inner]
            for place in range(begin, begin + length * inner, inner):
                row = values[place : place + inner]
                for k in range(inner):
                    group[k] = max(group[k], row[k] & mask)


@njit(
    [
        types.void(
            _frozen(value), _frozen(types.float32), _COEFFICIENTS, _SIZE, _SIZE, _SIZE, types.float64, level[::1]
        )
        for value in _FLOATS
        for level in _LEVELS
    ],
    cache=True,
)
def round_up_or_down(values, uniforms, per_block, length, inner, start, bound, levels):  # type: ignore[no-untyped-def]
    """Stochastic rounding of ``x = coefficient * value``, clipped to ``[-bound, bound]``, to an integer.

    With ``a = |x|`` the magnitude is ``floor(a + u)``: ``floor(a) + 1`` with probability ``a - floor(a)``.
    """
    coefficients = np.empty(PIECE)
    for begin in range(0, values.size, PIECE):
        count = min(PIECE, values.size - begin)
        spread(per_block, length, inner, start + begin, coefficients[:count])
        source = values[begin : begin + count]
        drawn = uniforms[begin : begin + count]
        target = levels[begin : begin + count]
        for j in range(count):
            x = np.float64(source[j]) * coefficients[j]
            x = min(max(x, -bound), bound)
            u = np.float64(drawn[j])
            target[j] = np.int32(x + (u if x >= 0.0 else -u))


@njit([types.void(_frozen(level), _SIZE, _SIZE, types.uint8[::1]) for level in _LEVELS], cache=True)
def pack(levels, bound, width, packed):  # type: ignore[no-untyped-def]
    """Write ``level + bound``, in ``[0, 2 * bound]``, with `width` bits each: `packed_bytes` bytes in all.

    The levels are cut into pieces of `PIECE`, the last padded to a multiple of 8. A piece is written as planes of 8, 4,
    2 or 1 bits, from the lowest bit up: 11 bits make planes of 8, 2 and 1. A plane of ``p`` bits over ``n`` levels is
    ``n * p / 8`` bytes, and byte ``j`` holds, from its lowest bits up, levels ``j``, ``j + n * p / 8``, and so on.
    """
    codes = np.empty(PIECE, np.uint32)
    position = 0
    for begin in range(0, levels.size, PIECE):
        count = min(PIECE, levels.size - begin)
        source = levels[begin : begin + count]
        for j in range(count):
            codes[j] = np.int32(source[j] + bound)
        padded = (count + 7) // 8 * 8
        codes[count:padded] = 0
        shift = 0
        while shift < width:
            bits = 8
            while bits > width - shift:
                bits //= 2
            stride = padded * bits // 8
            mask = np.uint32((1 << bits) - 1)
            low = np.uint32(shift)
            plane = packed[position : position + stride]
            plane[:] = 0
            for part in range(8 // bits):
                high = np.uint32(part * bits)
                some = codes[part * stride : (part + 1) * stride]
                for j in range(stride):
                    plane[j] |= np.uint8((some[j] >> low & mask) << high)
            position += stride
            shift += bits


@njit(
    types.void(_frozen(types.uint8), _SIZE, _SIZE, _COEFFICIENTS, _SIZE, _SIZE, _SIZE, types.float64[::1]), cache=True
)
def unpack_accumulate(packed, bound, width, per_block, length, inner, start, total):  # type: ignore[no-untyped-def]
    """Read what `pack` wrote and add it: ``total[j] += per_block[block(start + j)] * level[j]``."""
    codes = np.empty(PIECE, np.int32)
    coefficients = np.empty(PIECE)
    position = 0
    for begin in range(0, total.size, PIECE):
        count = min(PIECE, total.size - begin)
        padded = (count + 7) // 8 * 8
        codes[:padded] = np.int32(-bound)
        shift = 0
        while shift < width:
            bits = 8
            while bits > width - shift:
                bits //= 2
            stride = padded * bits // 8
            mask = np.uint32((1 << bits) - 1)
            low = np.uint32(shift)
            plane = packed[position : position + stride]
            for part in range(8 // bits):
                high = np.uint32(part * bits)
                some = codes[part * stride : (part + 1) * stride]
                for j in range(stride):
                    some[j] += np.int32((plane[j] >> high & mask) << low)
            position += stride
            shift += bits
        spread(per_block, length, inner, start + begin, coefficients[:count])
        target = total[begin : begin + count]
        for j in range(count):
            target[j] += coefficients[j] * codes[j]


def packed_bytes(num_levels: int, width: int) -> int:
    """Bytes that `pack` writes for so many levels of `width` bits."""
    return -(-num_levels // 8) * width


def level_type(bound: int) -> np.dtype[np.signedinteger[Any]]:
    """The narrowest signed integer type that holds ``-bound`` to ``bound``."""
    for candidate in (np.int8, np.int16, np.int32):
        if bound <= np.iinfo(candidate).max:
            return np.dtype(candidate)
    raise OverflowError(f"levels up to {bound} do not fit 32 bits")


def flatten(array: NDArray[Any]) -> NDArray[Any]:
    """The elements in C order as a vector; nothing is copied if they lie so in memory.

    Raises
    ------
    TypeError
        For element types other than float32 and float64.
    """
    if array.dtype not in (np.float32, np.float64):
        raise TypeError(f"cannot quantize an array of {array.dtype}: convert it to float32 or float64")
    return np.require(array, requirements=["C", "A"]).reshape(-1)


def block_norms(values: NDArray[Any], layout: BlockLayout, name: str) -> NDArray[np.float32]:
    """Euclidean norm of each block, summed in float64, rounded to the float32 that is sent.

    Raises
    ------
    DivergedError
        If a norm is no number, or too large for float32; `name` is the compressor's.
    """
    sums = np.empty(layout.num_blocks)
    sum_squares(values, layout.length, layout.inner, sums)
    with np.errstate(over="ignore"):
        return _finite(np.sqrt(sums).astype(np.float32), name)


def block_maxima(values: NDArray[Any], layout: BlockLayout, name: str) -> NDArray[np.float32]:
    """Largest absolute value of each block, rounded up to float32.

    Raises
    ------
    DivergedError
        As for `block_norms`.
    """
    unsigned = np.dtype(f"u{values.itemsize}")
    maxima = np.empty(layout.num_blocks, values.dtype)
    all_but_sign = unsigned.type(np.iinfo(unsigned).max // 2)
    largest_bits(values.view(unsigned), all_but_sign, layout.length, layout.inner, maxima.view(unsigned))
    with np.errstate(over="ignore"):
        rounded = maxima.astype(np.float32)
    return _finite(np.where(rounded < maxima, np.nextafter(rounded, np.float32(np.inf)), rounded), name)


def _finite(scales: NDArray[np.float32], name: str) -> NDArray[np.float32]:
    finite = np.isfinite(scales)
    if not finite.all():
        block = int(np.argmin(finite))
        raise DivergedError(
            f"{name} cannot quantize block {block} of a message, which holds NaN, infinity or values beyond float32: "
            "use smaller steps, or --quantize 0 to see where the run diverges"
        )
    return scales


def quantize(
    values: NDArray[Any],
    scales: NDArray[np.float32],
    layout: BlockLayout,
    num_levels: int,
    rng: np.random.Generator,
    dtype: np.dtype[np.signedinteger[Any]],
) -> NDArray[Any]:
    """Levels of a flattened array: ``num_levels * value / scale`` of its block, rounded up or down without bias.

    A block of scale 0 has levels 0. One uniform number is used for each element, in order.

    Raises
    ------
    ValueError
        If there is not one scale for each block.
    """
    if scales.shape != (layout.num_blocks,):
        raise ValueError(f"{scales.shape} scales for {layout.num_blocks} blocks: they belong to another array")
    wide = scales.astype(np.float64)
    coefficients = np.divide(num_levels, wide, out=np.zeros_like(wide), where=wide > 0)
    levels = np.empty(values.size, dtype)
    uniforms = np.empty(min(DRAW, values.size), np.float32)
    for start in range(0, values.size, DRAW):
        piece = slice(start, start + DRAW)
        drawn = uniforms[: min(DRAW, values.size - start)]
        rng.random(dtype=np.float32, out=drawn)
        round_up_or_down(
            values[piece], drawn, coefficients, layout.length, layout.inner, start, num_levels, levels[piece]
        )
    return levels
