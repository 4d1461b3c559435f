"""No compression: the bytes of the array travel."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

# Elements that are added at a time: few enough for the cache.
PIECE = 1 << 14

# The compiled kernel, once it is loaded: it halves the time, but to load it takes that of hundreds of millions of sums.
_kernel: Callable[..., None] | None = None

_NOTHING = np.empty(0)


@dataclass(frozen=True, eq=False)
class RawMessage:
    """An array on its way; a view, so the array must not change before the message is sent."""

    values: NDArray[Any]

    @property
    def paper_bits(self) -> int:
        """32 bits for each element: the papers count reals of single precision."""
        return 32 * self.values.size

    def segment(self, start: int, stop: int) -> NDArray[np.uint8]:
        """What travels for elements ``[start, stop)`` of the flattened array."""
        return self.values[start:stop].view(np.uint8)


@dataclass(frozen=True)
class Raw:
    """The compressor that leaves its message as it is."""

    kind: ClassVar[str] = "ordered"
    quantize: ClassVar[int] = 0

    def encode(self, array: NDArray[Any], rng: np.random.Generator | None = None) -> RawMessage:
        """Wrap an array; nothing is copied unless it is not C-contiguous."""
        return RawMessage(np.ascontiguousarray(array).reshape(-1))

    def segment_bytes(self, shape: tuple[int, ...], dtype: DTypeLike, start: int, stop: int) -> int:
        """Size of `RawMessage.segment` for elements ``[start, stop)`` of an array of this shape and type."""
        return (stop - start) * np.dtype(dtype).itemsize

    def accumulate(
        self,
        total: NDArray[np.float64],
        segment: NDArray[np.uint8],
        shape: tuple[int, ...],
        dtype: DTypeLike,
        start: int,
        stop: int,
        weight: float = 1.0,
    ) -> None:
        """Add ``weight`` times a received segment to `total`, in float64."""
        values = segment.view(dtype)
        for begin in range(0, values.size, PIECE):
            _add(total[begin : begin + PIECE], values[begin : begin + PIECE], weight)


def load_kernel() -> None:
    """From now on `add_up` with a compiled kernel."""
    global _kernel
    from hpcfed.compressors import adding

    _kernel = adding.add_up


def add_up(
    arrays: Sequence[NDArray[Any]],
    weights: Sequence[float],
    divisor: float,
    out: NDArray[Any],
    before: NDArray[np.float64] = _NOTHING,
) -> None:
    """Write ``(before + sum_k weights_k * arrays_k) / divisor`` to `out`, added in order, in float64.

    All are contiguous and of one size; ``before``, zero if there is none, may be `out`, which is of the arrays' type or
    float64.
    """
    if _kernel is not None and arrays and all(map(_simple, (*arrays, before, out))):
        addresses = np.array([array.ctypes.data for array in arrays])
        _kernel(before, addresses, np.array(weights), divisor, arrays[0][:0], out)
        return
    room = np.empty(min(out.size, PIECE))
    for begin in range(0, out.size, PIECE):
        piece = slice(begin, begin + PIECE)
        total = room[: out[piece].size]
        total[:] = before[piece] if before.size else 0
        for array, weight in zip(arrays, weights, strict=True):
            _add(total, array[piece], weight)
        divide(total, divisor)
        out[piece] = total


def _add(total: NDArray[np.float64], values: NDArray[Any], weight: float) -> None:
    if weight != 1.0:  # to multiply by one would change no bit and take as long as the addition
        values = np.multiply(values, weight, dtype=np.float64)
    np.add(total, values, out=total)


def _simple(array: NDArray[Any]) -> bool:
    return array.dtype.char in "fd" and array.dtype.isnative and array.flags.aligned


def divide(total: NDArray[np.float64], divisor: float) -> None:
    """Divide in place; by a power of two as a product with its inverse, of the same bits in a quarter of the time."""
    if math.frexp(divisor)[0] == 0.5:
        total *= 1 / divisor
    else:
        total /= divisor
