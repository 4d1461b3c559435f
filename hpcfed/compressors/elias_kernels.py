"""Elias's codes of a segment of levels, written and read by compiled kernels.

The formats are ``sparse`` and ``dense`` of `hpcfed.compressors.elias`, for a whole segment as if it were one block and
without norm and tag: what is written has the length that is counted there. Bits fill bytes from the highest down. The
last byte is filled up with ones, of which seven are no code word yet.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, types
from numpy.typing import NDArray

from hpcfed.compressors.elias import lengths
from hpcfed.compressors.pieces import LEVELS, SIZE, frozen

_WORDS = frozen(types.uint64)
_PEEK = 11


def _table() -> NDArray[np.uint32]:
    """The value, times 16, plus length of the code word that so many bits begin with; 0 where it is longer."""
    table = np.zeros(1 << _PEEK, np.uint32)
    for value, length in enumerate(lengths(1 << _PEEK)):
        if 0 < length <= _PEEK:
            word, _ = _codeword(value)
            first = int(word) << (_PEEK - int(length))
            table[first : first + (1 << (_PEEK - int(length)))] = value << 4 | int(length)
    return table


@njit
def _bit_length(value):  # type: ignore[no-untyped-def]
    num_bits = 0
    while value >> num_bits:
        num_bits += 1
    return num_bits


@njit([types.UniTuple(SIZE, 2)(SIZE)], cache=True)
def _codeword(value):  # type: ignore[no-untyped-def]
    """A code word as a number, and how many bits it has; 61 at most for values below 2^48."""
    word, length = 0, 1
    while value > 1:
        num_bits = _bit_length(value)
        word |= value << length
        length += num_bits
        value = num_bits - 1
    return word, length


@njit
def _put(number, length, words, position):  # type: ignore[no-untyped-def]
    """Write a number of so many bits; the position after it."""
    k, room = position >> 6, 64 - (position & 63)
    if length <= room:
        words[k] |= np.uint64(number) << np.uint64(room - length)
    else:
        words[k] |= np.uint64(number) >> np.uint64(length - room)
        words[k + 1] |= np.uint64(number) << np.uint64(64 - length + room)
    return position + length


@njit([types.void(frozen(level), types.uint64[::1]) for level in LEVELS], cache=True)
def write_sparse(levels, words):  # type: ignore[no-untyped-def]
    """Distance, sign and magnitude of each level that is not zero."""
    position, last = 0, -1
    for place in range(levels.size):
        level = np.int64(levels[place])
        if level:
            word, length = _codeword(place - last)
            position = _put(word, length, words, position)
            word, length = _codeword(abs(level))
            position = _put(np.int64(level < 0) << length | word, length + 1, words, position)
            last = place


@njit([types.void(frozen(level), types.uint64[::1]) for level in LEVELS], cache=True)
def write_dense(levels, words):  # type: ignore[no-untyped-def]
    """Magnitude plus one of each level, and a sign unless it is zero."""
    position = 0
    for place in range(levels.size):
        level = np.int64(levels[place])
        word, length = _codeword(abs(level) + 1)
        if level:
            word, length = word << 1 | np.int64(level < 0), length + 1
        position = _put(word, length, words, position)


@njit
def _window(words, position):  # type: ignore[no-untyped-def]
    """The 64 bits from a position on."""
    k, offset = position >> 6, np.uint64(position & 63)
    if offset == 0:
        return words[k]
    return words[k] << offset | words[k + 1] >> (np.uint64(64) - offset)


@njit
def _get(words, position, table):  # type: ignore[no-untyped-def]
    """The code word at a position and the position after it; value 0 if there is none."""
    window = _window(words, position)
    entry = np.int64(table[window >> np.uint64(64 - _PEEK)])
    if entry:
        return entry >> 4, position + (entry & 15)
    value, used = np.int64(1), np.int64(0)
    while used < 64 and window >> np.uint64(63 - used) & np.uint64(1):
        num_bits = value + 1
        if used + num_bits > 63:
            return 0, position
        value = np.int64(window << np.uint64(used) >> np.uint64(64 - num_bits))
        used += num_bits
    return value, position + used + 1


@njit([SIZE(_WORDS, SIZE, frozen(types.uint32), SIZE, level[::1]) for level in LEVELS], cache=True)
def read_sparse(words, num_bits, table, num_levels, levels):  # type: ignore[no-untyped-def]
    """Put levels in place among zeros; where the last code word ends, -1 where the bits are no levels."""
    position, place = 0, -1
    while position < num_bits:
        gap, after = _get(words, position, table)
        if gap == 0 or after > num_bits:
            return position
        place += gap
        sign = _window(words, after) >> np.uint64(63)
        magnitude, position = _get(words, after + 1, table)
        if place >= levels.size or magnitude == 0 or magnitude > num_levels or position > num_bits:
            return -1
        levels[place] = -magnitude if sign else magnitude
    return position


@njit([SIZE(_WORDS, SIZE, frozen(types.uint32), SIZE, level[::1]) for level in LEVELS], cache=True)
def read_dense(words, num_bits, table, num_levels, levels):  # type: ignore[no-untyped-def]
    """Fill in all levels; where the last code word ends, -1 where the bits are no levels."""
    position = 0
    for place in range(levels.size):
        successor, position = _get(words, position, table)
        sign = np.int64(_window(words, position) >> np.uint64(63)) if successor > 1 else 0
        position += successor > 1
        if successor == 0 or successor - 1 > num_levels or position > num_bits:
            return -1
        levels[place] = 1 - successor if sign else successor - 1
    return position


_CODEWORDS = _table()


def write(levels: NDArray[Any], sparse: bool, num_bits: int, ahead: int = 0) -> NDArray[np.uint8]:
    """Levels, which take `num_bits`, as bytes, with so many bytes left free ahead."""
    words = np.zeros(-(-num_bits // 64), np.uint64)
    (write_sparse if sparse else write_dense)(levels, words)
    data = np.empty(ahead - (-num_bits // 8), np.uint8)
    data[ahead:] = words.astype(">u8").view(np.uint8)[: data.size - ahead]
    if num_bits % 8:
        data[-1] |= 255 >> (num_bits % 8)
    return data


def read(data: NDArray[np.uint8], sparse: bool, num_levels: int, levels: NDArray[Any]) -> bool:
    """Read what `write` wrote into levels that are zero; False if the data are something else."""
    padded = np.full(-(-data.size // 8) + 2, -1, np.int64).view(np.uint8)
    padded[: data.size] = data
    words = padded.view(">u8").astype(np.uint64)
    end = int((read_sparse if sparse else read_dense)(words, 8 * data.size, _CODEWORDS, num_levels, levels))
    left = 8 * data.size - end
    return end >= 0 and left < 8 and (left == 0 or int(data[-1]) | (255 << left & 255) == 255)
