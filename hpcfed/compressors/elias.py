"""How long a quantized message is in the code of the QSGD paper, and that code itself.

Positive integers are written in the recursive code of Elias (omega): ``0`` closes the code word; before it stands the
number in binary, before that the length of the former less one in binary, and so on down to 1, which writes nothing.

A block of a message is its norm (32 bits), a tag (2 bits) that names the format, and the levels in the format that
takes the fewest bits:

- ``sparse``: for each level that is not zero the Elias code of its distance from the one before (the first from the
  place before the block), a sign bit, and the Elias code of its magnitude;
- ``dense``: for each level the Elias code of its magnitude plus one, then a sign bit unless it is zero;
- ``fixed``: for each level a sign bit and its magnitude in ``ceil(log2(s + 1))`` bits.

As in the paper, the number of levels and where a block ends are known from outside and are not counted. What hpcfed
sends may have other formats (`hpcfed.compressors.formats`), but messages are compared by this length. The functions
here that write bits, as strings of ``0`` and ``1``, are for reading and for tests, and `count_bits` counts without
writing.

Source: Elias, "Universal codeword sets and representations of the integers", IEEE Trans. Inf. Theory 21 (1975);
Alistarh et al., "QSGD", NeurIPS 2017.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numba import njit, types
from numpy.typing import NDArray

from hpcfed.compressors.blocks import BlockLayout, level_width

FORMATS = ("sparse", "dense", "fixed")
NORM_BITS = 32
TAG_BITS = 2


def encode(values: Iterable[int]) -> str:
    """Elias omega code of integers from 1 up, one after the other."""
    return "".join(_codeword(int(value)) for value in values)


def decode(bits: str) -> list[int]:
    """The integers that `encode` wrote."""
    reader = _Reader(bits)
    values = []
    while reader.left:
        values.append(reader.integer())
    return values


def lengths(limit: int) -> NDArray[np.uint8]:
    """Length of the code word of each integer below `limit`; that of 0, which has none, is given as 0.

    A number of ``b > 1`` bits takes ``b`` bits more than the number ``b - 1``.
    """
    table = np.zeros(max(limit, 2), np.uint8)
    table[1] = 1
    for num_bits in range(2, limit.bit_length() + 1):
        table[1 << (num_bits - 1) : 1 << num_bits] = table[num_bits - 1] + num_bits
    return table[:limit]


def encode_block(norm: float, levels: NDArray[Any], num_levels: int, form: str) -> str:
    """A block in one of the `FORMATS`."""
    signed = [int(level) for level in levels]
    bits = f"{np.float32(norm).view(np.uint32):0{NORM_BITS}b}{FORMATS.index(form):0{TAG_BITS}b}"
    if form == "sparse":
        last = -1
        for place, level in enumerate(signed):
            if level:
                bits += _codeword(place - last) + _sign(level) + _codeword(abs(level))
                last = place
    elif form == "dense":
        for level in signed:
            bits += _codeword(abs(level) + 1) + (_sign(level) if level else "")
    else:
        width = num_levels.bit_length()
        for level in signed:
            bits += _sign(level) + f"{abs(level):0{width}b}"
    return bits


def decode_block(bits: str, size: int, num_levels: int) -> tuple[float, NDArray[np.int64]]:
    """Norm and levels of a block of `size` levels that `encode_block` wrote."""
    reader = _Reader(bits)
    norm = float(np.uint32(reader.number(NORM_BITS)).view(np.float32))
    form = FORMATS[reader.number(TAG_BITS)]
    levels = np.zeros(size, np.int64)
    if form == "sparse":
        place = -1
        while reader.left:
            place += reader.integer()
            sign = reader.sign()
            levels[place] = sign * reader.integer()
    elif form == "dense":
        for place in range(size):
            magnitude = reader.integer() - 1
            levels[place] = magnitude * reader.sign() if magnitude else 0
    else:
        for place in range(size):
            levels[place] = reader.sign() * reader.number(num_levels.bit_length())
    return norm, levels


def count_bits(levels: NDArray[Any], layout: BlockLayout, num_levels: int) -> NDArray[np.int64]:
    """Length of each block of a flattened array of levels in each of the `FORMATS`: shape ``(num_blocks, 3)``."""
    bits = np.empty((layout.num_blocks, len(FORMATS)), np.int64)
    _count_elias(levels, layout.length, layout.inner, lengths(max(num_levels + 2, _TABLE)), bits)
    bits[:, 2] = layout.block_sizes * level_width(num_levels)
    return bits + (NORM_BITS + TAG_BITS)


# Distances below this are looked up; larger ones are rare.
_TABLE = 1 << 12


@njit(types.int64(types.int64), cache=True)
def _length(value):  # type: ignore[no-untyped-def]
    """Length of one code word."""
    total = 1
    while value > 1:
        num_bits = 0
        while value >> num_bits:
            num_bits += 1
        total += num_bits
        value = num_bits - 1
    return total


@njit(
    [
        types.void(
            types.Array(level, 1, "C", readonly=True),
            types.int64,
            types.int64,
            types.Array(types.uint8, 1, "C", readonly=True),
            types.int64[:, ::1],
        )
        for level in (types.int8, types.int16, types.int32)
    ],
    cache=True,
)
def _count_elias(levels, length, inner, table, bits):  # type: ignore[no-untyped-def]
    """Bits of the sparse and the dense format of each block, into the first two columns of `bits`."""
    sparse = np.empty(inner, np.int64)
    dense = np.empty(inner, np.int64)
    last = np.empty(inner, np.int64)
    for begin in range(0, levels.size, length * inner):
        sparse[:] = 0
        dense[:] = 0
        last[:] = -1
        for row in range(min(length, (levels.size - begin) // inner)):
            place = begin + row * inner
            for k in range(inner):
                # Unsigned, because Numba checks signed indices for being negative.
                magnitude = np.uint64(abs(np.int64(levels[place + k])))
                gap = np.uint64(row - last[k])
                gap_bits = np.int64(table[gap]) if gap < np.uint64(table.size) else _length(gap)
                # Arithmetic instead of a branch, which the processor could not foresee.
                used = np.int64(magnitude > 0)
                last[k] += used * np.int64(gap)
                dense[k] += table[magnitude + np.uint64(1)] + used
                sparse[k] += used * (1 + table[magnitude] + gap_bits)
        first = begin // length
        for k in range(inner):
            bits[first + k, 0] = sparse[k]
            bits[first + k, 1] = dense[k]


def _codeword(value: int) -> str:
    if value < 1:
        raise ValueError(f"the Elias code has no word for {value}: it starts at 1")
    word = "0"
    while value > 1:
        group = f"{value:b}"
        word = group + word
        value = len(group) - 1
    return word


def _sign(level: int) -> str:
    return "1" if level < 0 else "0"


class _Reader:
    """Takes numbers off the front of a string of bits."""

    def __init__(self, bits: str) -> None:
        self.bits = bits
        self.position = 0

    @property
    def left(self) -> int:
        return len(self.bits) - self.position

    def number(self, width: int) -> int:
        start, self.position = self.position, self.position + width
        return int(self.bits[start : self.position], 2)

    def integer(self) -> int:
        value = 1
        while self.bits[self.position] == "1":
            value = self.number(value + 1)
        self.position += 1
        return value

    def sign(self) -> int:
        return -1 if self.number(1) else 1
