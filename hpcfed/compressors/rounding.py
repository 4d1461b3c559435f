"""Stochastic rounding: each element of an array goes up or down to an integer, without bias.

An element's random number depends on the stream and on the element's place, on nothing else: a key of 64 bits is drawn
from the stream, and ``Philox4x32-10(counter, key)`` gives four words of 32 bits (Salmon et al., "Parallel random
numbers: as easy as 1, 2, 3", SC 2011). Of the ``p``-th piece of `pieces.PIECE` elements, cut in quarters, the
``j``-th elements of the quarters have the four words of counter ``p * PIECE / 4 + j``. The numbers never leave the
cache, and the generator runs on vectors, several times as fast as one that fills an array.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, types
from numpy.typing import NDArray

from hpcfed.compressors.blocks import BlockLayout
from hpcfed.compressors.pieces import COEFFICIENTS, FLOATS, LEVELS, PIECE, SIZE, frozen, spread

_ROUNDS = 10
_QUARTER = PIECE // 4
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_FIRST_MULTIPLIER = np.uint64(0xD2511F53)
_SECOND_MULTIPLIER = np.uint64(0xCD9E8D57)
_FIRST_STEP = np.uint64(0x9E3779B9)
_SECOND_STEP = np.uint64(0xBB67AE85)


@njit(types.void(types.uint64, types.uint64, types.uint32[::1]), cache=True)
def random_words(key, counter, words):  # type: ignore[no-untyped-def]
    """Philox4x32-10 of the counters from `counter` on: word ``k`` of the ``j``-th at ``words[k * PIECE / 4 + j]``."""
    first, second = words[:_QUARTER], words[_QUARTER : 2 * _QUARTER]
    third, fourth = words[2 * _QUARTER : 3 * _QUARTER], words[3 * _QUARTER : 4 * _QUARTER]
    for j in range(_QUARTER):
        # Numbers of 32 bits in 64, so that their products are whole.
        a, b = (counter + np.uint64(j)) & _LOW, (counter + np.uint64(j)) >> _HALF
        c, d = np.uint64(0), np.uint64(0)
        first_key, second_key = key & _LOW, key >> _HALF
        for _ in range(_ROUNDS):
            left, right = _FIRST_MULTIPLIER * a, _SECOND_MULTIPLIER * c
            a, b, c, d = (right >> _HALF) ^ b ^ first_key, right & _LOW, (left >> _HALF) ^ d ^ second_key, left & _LOW
            first_key, second_key = (first_key + _FIRST_STEP) & _LOW, (second_key + _SECOND_STEP) & _LOW
        first[j], second[j], third[j], fourth[j] = a, b, c, d


@njit(
    [
        types.void(frozen(value), types.uint64, COEFFICIENTS, SIZE, SIZE, types.float64, level[::1])
        for value in FLOATS
        for level in LEVELS
    ],
    cache=True,
)
def round_up_or_down(values, key, per_block, length, inner, bound, levels):  # type: ignore[no-untyped-def]
    """Stochastic rounding of ``x = coefficient * value``, clipped to ``[-bound, bound]``, to an integer.

    With ``a = |x|`` the magnitude is ``floor(a + u)``: ``floor(a) + 1`` with probability ``a - floor(a)``.
    """
    coefficients = np.empty(PIECE)
    words = np.empty(PIECE, np.uint32)
    for begin in range(0, values.size, PIECE):
        count = min(PIECE, values.size - begin)
        spread(per_block, length, inner, begin, coefficients[:count])
        random_words(key, np.uint64(begin // 4), words)
        source = values[begin : begin + count]
        target = levels[begin : begin + count]
        for j in range(count):
            x = np.float64(source[j]) * coefficients[j]
            x = min(max(x, -bound), bound)
            u = np.float64(words[j]) * 2.0**-32
            target[j] = np.int32(x + (u if x >= 0.0 else -u))


def quantize(
    values: NDArray[Any],
    scales: NDArray[np.float32],
    layout: BlockLayout,
    num_levels: int,
    rng: np.random.Generator,
    dtype: np.dtype[np.signedinteger[Any]],
) -> NDArray[Any]:
    """Levels of a flattened array: ``num_levels * value / scale`` of its block, rounded up or down without bias.

    A block of scale 0 has levels 0. The stream gives one key, whatever the size of the array.

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
    key = rng.integers(1 << 64, dtype=np.uint64)
    round_up_or_down(values, key, coefficients, layout.length, layout.inner, num_levels, levels)
    return levels
