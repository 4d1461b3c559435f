"""Levels in as few bits as their frequencies allow: an asymmetric numeral system from the library ``constriction``.

Levels fall into classes: each of the magnitudes below 16 is a class of its own for each sign, above there are 8 classes
between a power of two and the next, and the levels of a class are taken for equally frequent. How often each class
occurs is sent ahead of the code, so that sender and receiver have the same model: the class that the first count
belongs to and the number of counts, then the counts, up to the last that is not zero, each in groups of 7 bits from the
lowest up, the highest bit of a byte saying that more groups follow. The code follows as words of 32 bits, lowest byte
first; there is none if only one level is possible.

Source: Duda, "Asymmetric numeral systems", arXiv:1311.2540; Bamler, "Understanding entropy coding with asymmetric
numeral systems (ANS): a statistician's perspective", arXiv:2201.01741.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numba import njit, types
from numpy.typing import NDArray

from hpcfed.compressors.blocks import MAX_LEVELS
from hpcfed.compressors.pieces import LEVELS, frozen

# Magnitudes below 2^4 have classes of their own; above there are 2^3 classes an octave.
_ALONE = 4
_PARTS = 3
_LARGEST = (1 << _ALONE) + ((MAX_LEVELS.bit_length() - _ALONE) << _PARTS) - 1


def _borders() -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The lowest level of each class, and how many levels it has, from the most negative class up."""
    octaves = MAX_LEVELS.bit_length() - _ALONE
    above = [((1 << _PARTS) + part) << shift for shift in range(1, octaves + 1) for part in range(1 << _PARTS)]
    starts = np.array([*range(1 << _ALONE), *above, 1 << (_ALONE + octaves)])
    widths = np.diff(starts)
    return np.concatenate([1 - starts[:1:-1], starts[:-1]]), np.concatenate([widths[:0:-1], widths])


_LOWEST, _WIDTHS = _borders()


@njit([types.void(frozen(level), types.int64[::1]) for level in LEVELS], cache=True)
def _count(levels, counts):  # type: ignore[no-untyped-def]
    """Add to `counts` how many levels are in each class."""
    for level in levels:
        magnitude = abs(np.int64(level))
        group = magnitude
        if magnitude >> _ALONE:
            shift = 1
            while magnitude >> (_PARTS + 1 + shift):
                shift += 1
            group = (shift << _PARTS) + (magnitude >> shift)
        counts[_LARGEST + (group if level >= 0 else -group)] += 1


def class_counts(levels: NDArray[Any]) -> NDArray[np.int64]:
    """How many levels are in each class."""
    counts = np.zeros(_LOWEST.size, np.int64)
    _count(levels, counts)
    return counts


def expected_bytes(counts: NDArray[np.int64]) -> int:
    """Bytes that `write` makes of levels with these counts of classes, up to some of the last word."""
    some = counts > 0
    bits = counts[some] @ np.log2(counts.sum() * _WIDTHS[some] / counts[some])
    return len(_table(counts)) + 4 * (int(bits) // 32 + 1)


def write(levels: NDArray[Any], counts: NDArray[np.int64], ahead: int = 0) -> NDArray[np.uint8]:
    """The counts of the levels' classes and the levels as bytes, with so many bytes left free ahead."""
    import constriction  # type: ignore[import-untyped]

    first, last = _span(counts)
    model = _model(first, counts[first : last + 1])
    coder = constriction.stream.stack.AnsCoder()
    if model is not None:
        coder.encode_reverse(levels - np.int32(_LOWEST[first]), model)
    code = coder.get_compressed().astype("<u4").view(np.uint8)
    return np.concatenate([np.empty(ahead, np.uint8), np.frombuffer(_table(counts), np.uint8), code])


def read(data: NDArray[np.uint8], num_levels: int, levels: NDArray[Any]) -> bool:
    """Read what `write` wrote into all of `levels`; False if the data are something else."""
    import constriction  # type: ignore[import-untyped]

    numbers = _Numbers(data)
    first, size = numbers.take(), numbers.take()
    counts = np.array([numbers.take() for _ in range(min(size, _LOWEST.size))], np.int64)
    code = data[numbers.position :]
    if numbers.ended or first + size > _LOWEST.size or size == 0 or counts.sum() != levels.size or code.size % 4:
        return False
    model = _model(first, counts)
    if model is None:
        levels[:] = _LOWEST[first]
        return not code.size
    try:
        coder = constriction.stream.stack.AnsCoder(code.view("<u4").astype(np.uint32))
    except ValueError:
        return False
    symbols = coder.decode(model, levels.size)
    symbols += np.int32(_LOWEST[first])
    levels[:] = symbols
    return bool(coder.is_empty()) and int(np.abs(symbols).max()) <= num_levels


def _span(counts: NDArray[np.int64]) -> tuple[int, int]:
    """First and last class that occurs."""
    occurring = np.flatnonzero(counts)
    return int(occurring[0]), int(occurring[-1])


def _model(first: int, counts: NDArray[np.int64]) -> Any:
    """Frequencies of the levels from the lowest of class `first` on; None if there is one level only."""
    import constriction  # type: ignore[import-untyped]

    widths = _WIDTHS[first : first + counts.size]
    if widths.sum() == 1:
        return None
    frequencies = np.repeat(counts / (widths * counts.sum()), widths)
    return constriction.stream.model.Categorical(frequencies, perfect=False)


def _table(counts: NDArray[np.int64]) -> bytes:
    first, last = _span(counts)
    return _write_numbers([first, last - first + 1, *counts[first : last + 1].tolist()])


def _write_numbers(numbers: Iterable[int]) -> bytes:
    out = bytearray()
    for number in numbers:
        while number >= 128:
            out.append(number & 127 | 128)
            number >>= 7
        out.append(number)
    return bytes(out)


class _Numbers:
    """Takes numbers off the front of bytes; beyond their end it gives zeros and says so."""

    def __init__(self, data: NDArray[np.uint8]) -> None:
        self.head = data[: 10 * (_LOWEST.size + 2)].tobytes()
        self.position = 0
        self.ended = False

    def take(self) -> int:
        value = shift = 0
        while self.position < len(self.head) and shift < 63:
            byte = self.head[self.position]
            self.position += 1
            value |= (byte & 127) << shift
            if byte < 128:
                return value
            shift += 7
        self.ended = True
        return 0
