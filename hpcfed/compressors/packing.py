"""Levels packed into a fixed number of bits each, that of a whole segment or that of each piece of it.

Levels are cut into pieces of `pieces.PIECE`, the last padded to a multiple of 8. A piece of ``n`` levels with bound
``b`` and width ``w`` holds ``level + b``, in ``[0, 2 b]``, with ``w`` bits each, as planes of 8, 4, 2 or 1 bits, from
the lowest bit up: 11 bits make planes of 8, 2 and 1. A plane of ``p`` bits is ``n * p / 8`` bytes, and byte ``j``
holds, from its lowest bits up, levels ``j``, ``j + n * p / 8``, and so on.
"""

from __future__ import annotations

import numpy as np
from numba import njit, types
from numpy.typing import NDArray

from hpcfed.compressors.blocks import level_width
from hpcfed.compressors.pieces import BYTES, COEFFICIENTS, LEVELS, PIECE, SIZE, frozen, spread

_BOUNDS = frozen(types.int32)


@njit([types.void(frozen(level), _BOUNDS, BYTES, types.uint8[::1]) for level in LEVELS], cache=True)
def pack(levels, bounds, widths, packed):  # type: ignore[no-untyped-def]
    """Write the levels with the bound and width of each piece: `packed_bytes` bytes in all."""
    codes = np.empty(PIECE, np.uint32)
    position = 0
    for begin in range(0, levels.size, PIECE):
        count = min(PIECE, levels.size - begin)
        bound, width = bounds[begin // PIECE], np.int64(widths[begin // PIECE])
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


@njit(SIZE(BYTES, SIZE, types.int32, SIZE, SIZE, types.int32[::1]), cache=True)
def _unpack_piece(packed, position, bound, width, padded, codes):  # type: ignore[no-untyped-def]
    """Signed levels of the piece that lies at this position; the position after it."""
    codes[:padded] = -bound
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
    return position


@njit([types.void(BYTES, _BOUNDS, BYTES, level[::1]) for level in LEVELS], cache=True)
def unpack(packed, bounds, widths, levels):  # type: ignore[no-untyped-def]
    """Read what `pack` wrote."""
    codes = np.empty(PIECE, np.int32)
    position = 0
    for begin in range(0, levels.size, PIECE):
        count = min(PIECE, levels.size - begin)
        piece = begin // PIECE
        padded = (count + 7) // 8 * 8
        position = _unpack_piece(packed, position, bounds[piece], np.int64(widths[piece]), padded, codes)
        target = levels[begin : begin + count]
        for j in range(count):
            target[j] = codes[j]


@njit(types.void(BYTES, _BOUNDS, BYTES, COEFFICIENTS, SIZE, SIZE, SIZE, types.float64[::1]), cache=True)
def unpack_accumulate(packed, bounds, widths, per_block, length, inner, start, total):  # type: ignore[no-untyped-def]
    """Read what `pack` wrote and add it: ``total[j] += per_block[block(start + j)] * level[j]``."""
    codes = np.empty(PIECE, np.int32)
    coefficients = np.empty(PIECE)
    position = 0
    for begin in range(0, total.size, PIECE):
        count = min(PIECE, total.size - begin)
        piece = begin // PIECE
        if widths[piece] == 0:
            continue
        padded = (count + 7) // 8 * 8
        position = _unpack_piece(packed, position, bounds[piece], np.int64(widths[piece]), padded, codes)
        spread(per_block, length, inner, start + begin, coefficients[:count])
        target = total[begin : begin + count]
        for j in range(count):
            target[j] += coefficients[j] * codes[j]


@njit([types.void(frozen(level), COEFFICIENTS, SIZE, SIZE, SIZE, types.float64[::1]) for level in LEVELS], cache=True)
def accumulate(levels, per_block, length, inner, start, total):  # type: ignore[no-untyped-def]
    """Add levels: ``total[j] += per_block[block(start + j)] * level[j]``."""
    coefficients = np.empty(PIECE)
    for begin in range(0, total.size, PIECE):
        count = min(PIECE, total.size - begin)
        spread(per_block, length, inner, start + begin, coefficients[:count])
        source = levels[begin : begin + count]
        target = total[begin : begin + count]
        for j in range(count):
            target[j] += coefficients[j] * source[j]


@njit([types.void(frozen(level), types.uint8[::1]) for level in LEVELS], cache=True)
def narrowest_widths(levels, widths):  # type: ignore[no-untyped-def]
    """The fewest bits that hold the levels of each piece with their signs; 0 where all are zero."""
    for begin in range(0, levels.size, PIECE):
        together = np.int32(0)
        for level in levels[begin : begin + PIECE]:
            together |= abs(np.int32(level))
        width = 0
        while together >> width:
            width += 1
        widths[begin // PIECE] = width + (width > 0)


def num_pieces(count: int) -> int:
    """Into how many pieces so many levels are cut."""
    return -(-count // PIECE)


def uniform(count: int, num_levels: int) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
    """Bounds and widths of the pieces when all hold levels up to `num_levels`."""
    pieces = num_pieces(count)
    return np.full(pieces, num_levels, np.int32), np.full(pieces, level_width(num_levels), np.uint8)


def bounds_of(widths: NDArray[np.uint8]) -> NDArray[np.int32]:
    """The largest magnitude that each width holds with a sign: ``2^(w - 1) - 1``."""
    bounds: NDArray[np.int32] = (np.left_shift(1, widths, dtype=np.int32) >> 1) - 1
    return np.maximum(bounds, 0)


def packed_bytes(count: int, widths: NDArray[np.uint8]) -> int:
    """Bytes that `pack` writes for so many levels in pieces of these widths."""
    if not widths.size:
        return 0
    last = -(-(count - PIECE * (widths.size - 1)) // 8)
    return PIECE // 8 * int(widths[:-1].sum(dtype=np.int64)) + last * int(widths[-1])
