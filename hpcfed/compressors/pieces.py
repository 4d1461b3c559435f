"""How compiled kernels walk through a flattened array.

All kernels of the quantizers see arrays flattened in C order and blocks as `hpcfed.compressors.blocks.BlockLayout`
describes them. They work through pieces that fit the first-level cache, in which the scale of each element is first
spread out of its block; the loop that does the arithmetic is then the same for every layout, and runs over contiguous
memory.

Importing a module of kernels compiles them once for a machine (Numba keeps them on disk).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, types
from numpy.typing import NDArray

# Elements of a piece: part of the wire formats and of the random numbers' order, a multiple of 8.
PIECE = 2048


def frozen(dtype: Any) -> types.Array:
    """The Numba type of a contiguous vector that a kernel only reads."""
    return types.Array(dtype, 1, "C", readonly=True)


FLOATS = (types.float32, types.float64)
LEVELS = (types.int8, types.int16, types.int32)
SIZE = types.int64
COEFFICIENTS = frozen(types.float64)
BYTES = frozen(types.uint8)


@njit(types.void(COEFFICIENTS, SIZE, SIZE, SIZE, types.float64[::1]), cache=True)
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
