"""Sparse levels as bytes: one byte for most levels that are not zero, none for zeros.

A level with ``g`` zeros before it is a byte: from the lowest bit up its sign (1 bit), whether its magnitude exceeds 1
(1 bit), and ``min(g, 63)`` (6 bits). If that is 63, ``g - 63`` follows; if the magnitude exceeds 1, less 2 it follows;
both in groups of 7 bits from the lowest up, the highest bit of a byte saying that more groups follow. Zeros after the
last level are not written.

A little longer than Elias's code where gaps are long, shorter where they are near 16, and as fast as memory.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import intrinsic
from numpy.typing import NDArray

from hpcfed.compressors.pieces import BYTES, COEFFICIENTS, LEVELS, PIECE, SIZE, frozen

_FAR = 63
# 64 levels take no more bytes than this.
_SPARE = 1024


@intrinsic
def _trailing_zeros(_context, _word):  # type: ignore[no-untyped-def]
    """Number of zeros below the lowest one of a number of 64 bits, which must not be zero."""

    def generate(context, builder, _signature, arguments):  # type: ignore[no-untyped-def]
        return builder.cttz(arguments[0], context.get_constant(types.boolean, True))

    return types.uint64(types.uint64), generate


@njit
def _write_number(value, out, position):  # type: ignore[no-untyped-def]
    while value >= 128:
        out[position] = np.uint8(value & 127 | 128)
        value >>= 7
        position += 1
    out[position] = np.uint8(value)
    return position + 1


@njit
def _write_rest(gap, magnitude, out, position):  # type: ignore[no-untyped-def]
    if gap >= _FAR:
        position = _write_number(gap - _FAR, out, position)
    if magnitude > 1:
        position = _write_number(magnitude - 2, out, position)
    return position


@njit
def _occupied(levels):  # type: ignore[no-untyped-def]
    """Bit ``k`` says that level ``k`` of 64 is not zero."""
    mask = np.uint64(0)
    for k in range(64):
        mask |= np.uint64(levels[k] != 0) << np.uint64(k)
    return mask


@njit([SIZE(frozen(level), SIZE, types.uint8[::1]) for level in LEVELS], cache=True)
def _write(levels, room, out):  # type: ignore[no-untyped-def]
    """Write levels to `out`, which has `_SPARE` bytes more than `room`: the bytes taken, or -1 if `room` is too few."""
    position, expected = np.int64(0), np.int64(0)
    last = np.zeros(64, levels.dtype)
    for begin in range(0, levels.size, 64):
        some = levels[begin : begin + 64]
        if some.size < 64:
            last[: some.size] = some
            some = last
        mask = _occupied(some)
        while mask:
            k = np.int64(_trailing_zeros(mask))
            mask &= mask - np.uint64(1)
            level, gap = np.int64(some[k]), begin + k - expected
            magnitude = abs(level)
            out[position] = np.uint8((gap if gap < _FAR else _FAR) << 2 | (magnitude > 1) << 1 | (level < 0))
            position += 1
            if magnitude > 1 or gap >= _FAR:
                position = _write_rest(gap, magnitude, out, position)
            expected = begin + k + 1
        if position > room:
            return -1
    return position


@njit([SIZE(frozen(level), SIZE) for level in LEVELS], cache=True)
def fewest_bytes(levels, room):  # type: ignore[no-untyped-def]
    """What `write` takes at least: a byte for each level that is not zero, one more for each beyond 1 and -1.

    Counting stops when it exceeds `room`.
    """
    total = np.int64(0)
    for begin in range(0, levels.size, PIECE):
        count = np.int32(0)
        for level in levels[begin : begin + PIECE]:
            count += np.int32(level != 0) + np.int32(level > 1) + np.int32(level < -1)
        total += count
        if total > room:
            break
    return total


def write(levels: NDArray[Any], room: int, ahead: int = 0) -> NDArray[np.uint8] | None:
    """Levels as bytes, with so many bytes left free ahead; None if they take more than `room`."""
    data = np.empty(ahead + max(room, 0) + _SPARE, np.uint8)
    written = int(_write(levels, room, data[ahead:]))
    return None if written < 0 else data[: ahead + written]


@njit
def _read_number(data, position):  # type: ignore[no-untyped-def]
    """A number and the position after it; position -1 if the data end before it does."""
    value, shift = np.int64(0), 0
    while position < data.size and shift < 56:
        byte = np.int64(data[position])
        position += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, position
        shift += 7
    return 0, -1


@njit
def _read_rest(head, data, position):  # type: ignore[no-untyped-def]
    """Gap, magnitude and the position after them of a level whose head says that more bytes follow."""
    gap, magnitude = head >> 2, 1
    if gap == _FAR:
        more, position = _read_number(data, position)
        gap += more
    if head & 2 and position >= 0:
        more, position = _read_number(data, position)
        magnitude = more + 2
    return gap, magnitude, position


@njit([types.boolean(BYTES, SIZE, level[::1]) for level in LEVELS], cache=True)
def read(data, num_levels, levels):  # type: ignore[no-untyped-def]
    """Put levels in place among zeros; False where the data are no levels."""
    position, place = np.int64(0), np.int64(-1)
    while position < data.size:
        head = np.int64(data[position])
        position += 1
        gap, magnitude = head >> 2, 1
        if head & 2 or gap == _FAR:
            gap, magnitude, position = _read_rest(head, data, position)
        place += gap + 1
        if position < 0 or place >= levels.size or magnitude > num_levels:
            return False
        levels[place] = -magnitude if head & 1 else magnitude
    return True


@njit(types.boolean(BYTES, SIZE, COEFFICIENTS, SIZE, SIZE, SIZE, types.float64[::1]), cache=True)
def accumulate(data, num_levels, per_block, length, inner, start, total):  # type: ignore[no-untyped-def]
    """Add levels: ``total[j] += per_block[block(start + j)] * level[j]``; False where the data are no levels."""
    position, place = np.int64(0), np.int64(-1)
    # The block, or where blocks are interleaved their group, that ends before element `end`.
    group, end = -1, 0
    coefficient = 0.0
    while position < data.size:
        head = np.int64(data[position])
        position += 1
        gap, magnitude = head >> 2, 1
        if head & 2 or gap == _FAR:
            gap, magnitude, position = _read_rest(head, data, position)
        place += gap + 1
        if position < 0 or place >= total.size or magnitude > num_levels:
            return False
        if place >= end:
            group = (start + place) // (length * inner)
            end = (group + 1) * length * inner - start
            coefficient = per_block[group * inner]
        if inner > 1:
            coefficient = per_block[group * inner + np.int64(np.uint64(start + place) % np.uint64(inner))]
        value = coefficient * magnitude
        total[place] += -value if head & 1 else value
    return True
