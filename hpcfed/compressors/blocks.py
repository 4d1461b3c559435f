"""Which elements of a message share one scale.

A quantizer with ``s`` levels errs in proportion to the norm of what it quantizes, so a large array is cut into blocks
that are quantized on their own. The `block` option says how:

- ``slice``: the planes of a volume. An array with three or more axes has one block for each index of its leading axes
  (all but the last three) and of its last axis: a volume ``(ny, nx, nz)`` has ``nz`` blocks of ``ny * nx`` elements, a
  field of vectors ``(3, ny, nx, nz)`` has ``3 * nz``. Smaller arrays are one block.
- ``all``: the whole array is one block.
- a number: so many consecutive elements of the flattened array; the last block may be shorter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hpcfed.errors import ConfigError

# Uniform numbers of 32 bits and float32 scales resolve no finer grid than this, with a margin.
MAX_LEVELS = 1 << 20


@dataclass(frozen=True)
class BlockLayout:
    """The partition of a flattened array into blocks, possibly interleaved.

    Element ``i`` belongs to block ``(i // (length * inner)) * inner + i % inner``: the array is ``outer`` groups, a
    group is ``length`` rows, and each of the ``inner`` columns of a group is a block.

    Parameters
    ----------
    size : number of elements, ``outer * length * inner`` unless the last group is incomplete (then ``inner`` is 1).
    outer, length, inner : number of groups, rows of a group, columns of a row.
    """

    size: int
    outer: int
    length: int
    inner: int

    @classmethod
    def of(cls, shape: tuple[int, ...], block: str) -> BlockLayout:
        """The layout of an array of this shape under a `block` option that `check_options` accepts."""
        size = math.prod(shape)
        if size == 0:
            return cls(0, 0, 1, 1)
        if block == "slice" and len(shape) >= 3:
            return cls(size, math.prod(shape[:-3]), shape[-3] * shape[-2], shape[-1])
        length = size if block in ("slice", "all") else int(block)
        return cls(size, -(-size // length), length, 1)

    @property
    def num_blocks(self) -> int:
        return self.outer * self.inner

    @property
    def block_sizes(self) -> NDArray[np.int64]:
        """Number of elements of each block."""
        sizes = np.full(self.num_blocks, self.length, np.int64)
        if self.inner == 1 and self.size:
            sizes[-1] = self.size - (self.outer - 1) * self.length
        return sizes

    def touched(self, start: int, stop: int) -> tuple[int, int]:
        """First and one past the last block of the groups that elements ``[start, stop)`` lie in."""
        group = self.length * self.inner
        first = start // group
        last = first if stop <= start else (stop - 1) // group + 1
        return first * self.inner, last * self.inner


def level_width(num_levels: int) -> int:
    """Bits of a level with its sign in a fixed-width format: ``1 + ceil(log2(s + 1))``."""
    return 1 + num_levels.bit_length()


def check_options(name: str, quantize: int, block: str) -> None:
    """Refuse values of the options `quantize` and `block` that compressor `name` cannot work with.

    Raises
    ------
    ConfigError
    """
    if not 0 <= quantize <= MAX_LEVELS:
        raise ConfigError(f"--quantize {quantize} is no number of levels for {name}: give 0 (off) to {MAX_LEVELS}")
    if block not in ("slice", "all") and not (block.isascii() and block.isdigit() and int(block) > 0):
        raise ConfigError(f"--block {block!r} is unknown to {name}: give slice, all or a positive number of elements")


def require_levels(name: str, quantize: int) -> None:
    """Refuse to quantize with no levels.

    Raises
    ------
    ConfigError
    """
    if quantize == 0:
        raise ConfigError(f"compressor {name} has no levels (--quantize 0): give --quantize 1 or more")
