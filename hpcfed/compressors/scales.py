"""Scales of blocks: Euclidean norms and largest magnitudes, in compiled kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, types
from numpy.typing import NDArray

from hpcfed.compressors.blocks import BlockLayout
from hpcfed.compressors.pieces import FLOATS, SIZE, frozen
from hpcfed.errors import DivergedError

# Partial results of a block: many, so that they are vectors; a fixed number, so that every machine adds alike.
_LANES = 64


@njit([types.void(frozen(each), SIZE, SIZE, types.float64[::1]) for each in FLOATS], cache=True)
def sum_squares(values, length, inner, sums):  # type: ignore[no-untyped-def]
    """Sum of squares of each block, in float64."""
    sums[:] = 0.0
    lanes = np.empty(_LANES)
    for begin in range(0, values.size, length * inner):
        first = begin // length
        if inner == 1:
            block = values[begin : begin + length]
            even = block.size // _LANES * _LANES
            lanes[:] = 0.0
            for place in range(0, even, _LANES):
                row = block[place : place + _LANES]
                for k in range(_LANES):
                    lanes[k] += np.float64(row[k]) ** 2
            total = 0.0
            for lane in lanes:
                total += lane
            for value in block[even:]:
                total += np.float64(value) ** 2
            sums[first] = total
        else:
            group = sums[first : first + inner]
            for place in range(begin, begin + length * inner, inner):
                row = values[place : place + inner]
                for k in range(inner):
                    group[k] += np.float64(row[k]) ** 2


@njit([types.void(frozen(each), each, SIZE, SIZE, each[::1]) for each in (types.uint32, types.uint64)], cache=True)
def largest_bits(values, mask, length, inner, largest):  # type: ignore[no-untyped-def]
    """Largest ``value & mask`` of each block of unsigned integers.

    Applied to floating-point numbers seen as integers, with all bits but the sign in the mask, this is the largest
    magnitude, where infinity is above the numbers and NaN above infinity.
    """
    lanes = np.empty(_LANES, values.dtype)
    largest[:] = 0
    for begin in range(0, values.size, length * inner):
        first = begin // length
        if inner == 1:
            block = values[begin : begin + length]
            even = block.size // _LANES * _LANES
            lanes[:] = 0
            for place in range(0, even, _LANES):
                row = block[place : place + _LANES]
                for k in range(_LANES):
                    lanes[k] = max(lanes[k], row[k] & mask)
            largest[first] = lanes.max()
            for value in block[even:]:
                largest[first] = max(largest[first], value & mask)
        else:
            group = largest[first : first + inner]
            for place in range(begin, begin + length * inner, inner):
                row = values[place : place + inner]
                for k in range(inner):
                    group[k] = max(group[k], row[k] & mask)


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
