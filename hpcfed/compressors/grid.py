"""Quantization of all clients to one common grid, whose levels are summed as integers.

The clients agree on a scale for each block, the largest magnitude that any of them holds, and round each value
without bias to a multiple of ``scale / s``:

``l_i = floor(a_i) + 1`` with probability ``a_i - floor(a_i)``, else ``floor(a_i)``, with ``a_i = s |v_i| / scale``.

The mean over clients is the integer sum of the signed levels times ``scale / (s * count)``. Integer sums are exact in
any order, so one integer reduction gives the same bits on any number of ranks. The variance of an element is
``(scale / s)^2 {a_i} (1 - {a_i})``, at most ``(scale / s)^2 / 4``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
from annotated_types import Ge, Le
from numpy.typing import DTypeLike, NDArray

from hpcfed.compressors.blocks import MAX_LEVELS, BlockLayout, check_options, level_width, require_levels
from hpcfed.errors import ConfigError
from hpcfed.options import option

# Elements that are decoded at a time: few enough for the cache.
_DECODED = 1 << 14


@dataclass(frozen=True)
class Grid:
    """Quantization to the largest magnitude of each block over all clients."""

    kind: ClassVar[str] = "integer"
    compiled: ClassVar[tuple[str, ...]] = ("hpcfed.compressors.scales", "hpcfed.compressors.rounding")

    quantize: Annotated[int, Ge(0), Le(MAX_LEVELS)] = option(0, "s, number of levels; 0 switches quantization off")
    block: str = option("slice", "slice | all | INT elements per block: what shares one norm", metavar="BLOCK")

    def __post_init__(self) -> None:
        check_options("grid", self.quantize, self.block)

    def scales(self, array: NDArray[Any]) -> NDArray[np.float32]:
        """Largest magnitude of each block of one client's array; the clients' elementwise maximum is the grid's scale.

        Raises
        ------
        DivergedError
            If the array holds NaN, infinity or values beyond float32.
        """
        from hpcfed.compressors.pieces import flatten
        from hpcfed.compressors.scales import block_maxima

        return block_maxima(flatten(array), BlockLayout.of(array.shape, self.block), "grid")

    def level_type(self, count: int) -> np.dtype[np.signedinteger[Any]]:
        """The narrowest integer type in which the levels of `count` clients can be summed.

        Raises
        ------
        ConfigError
            If 32 bits are too few.
        """
        from hpcfed.compressors.pieces import level_type

        try:
            return level_type(self.quantize * count)
        except OverflowError:
            raise ConfigError(
                f"grid cannot sum --quantize {self.quantize} levels of {count} clients in 32 bits: "
                f"give --quantize {(2**31 - 1) // count} or fewer"
            ) from None

    def contraction(self, shape: tuple[int, ...]) -> float:
        """``1 / (1 + q)``, q a bound of the relative variance: ``n / (4 s^2)`` in blocks of n values."""
        return 1 / (1 + BlockLayout.of(shape, self.block).length / (4 * self.quantize**2))

    def encode(
        self, array: NDArray[Any], scales: NDArray[np.float32], rng: np.random.Generator, count: int
    ) -> NDArray[np.signedinteger[Any]]:
        """Signed levels of a float32 or float64 array on the common grid, in the array's shape and `level_type`.

        Parameters
        ----------
        scales : the common scale of each block.
        count : number of clients whose levels will be summed.
        """
        require_levels("grid", self.quantize)
        from hpcfed.compressors.pieces import flatten
        from hpcfed.compressors.rounding import quantize

        layout = BlockLayout.of(array.shape, self.block)
        levels = quantize(flatten(array), scales, layout, self.quantize, rng, self.level_type(count))
        return levels.reshape(array.shape)

    def decode(
        self, total: NDArray[Any], scales: NDArray[np.float32], count: int, dtype: DTypeLike = np.float32
    ) -> NDArray[Any]:
        """The mean over clients, in the type of their arrays: ``total * scale / (s * count)``, computed in float64.

        Parameters
        ----------
        total : sum of the clients' levels.
        """
        mean = np.empty(total.shape, dtype)
        self.decode_part(np.ascontiguousarray(total).reshape(-1), 0, mean.reshape(-1), total.shape, scales, count)
        return mean

    def decode_part(
        self,
        total: NDArray[Any],
        start: int,
        out: NDArray[Any],
        shape: tuple[int, ...],
        scales: NDArray[np.float32],
        count: int,
    ) -> None:
        """Write to `out` what `decode` makes of the elements from ``start`` on of a flattened sum of that shape."""
        from hpcfed.compressors.pieces import spread

        layout = BlockLayout.of(shape, self.block)
        coefficients = scales.astype(np.float64) / (self.quantize * count)
        steps = np.empty(min(_DECODED, out.size))
        for begin in range(0, out.size, _DECODED):
            piece = slice(begin, begin + _DECODED)
            here = steps[: out[piece].size]
            spread(coefficients, layout.length, layout.inner, start + begin, here)
            np.multiply(total[piece], here, out=out[piece], casting="same_kind")

    def paper_bits(self, shape: tuple[int, ...]) -> int:
        """Bits of one client's message: 32 for each block, ``1 + ceil(log2(s + 1))`` for each element."""
        layout = BlockLayout.of(shape, self.block)
        return 32 * layout.num_blocks + layout.size * level_width(self.quantize)
