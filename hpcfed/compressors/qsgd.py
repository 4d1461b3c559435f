"""QSGD: unbiased quantization to a norm, signs and small integers, in few bits.

For a block ``v`` of a message and ``s`` levels (Alistarh, Grubic, Li, Tomioka and Vojnovic, "QSGD", NeurIPS 2017),

``Q(v)_i = ||v|| sign(v_i) l_i / s``, with ``a_i = s |v_i| / ||v||`` and ``l_i = floor(a_i) + 1`` with probability
``a_i - floor(a_i)``, else ``floor(a_i)``; ``Q(0) = 0``.

It is unbiased, its variance is ``||v||^2 / s^2 * sum_i {a_i} (1 - {a_i})`` with ``{.}`` the fractional part, at most
``min(n / s^2, sqrt(n) / s) ||v||^2`` for ``n`` elements. FedPAQ and FPDFP send their messages so.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from annotated_types import Ge, Le
from numpy.typing import DTypeLike, NDArray

from hpcfed.compressors.blocks import MAX_LEVELS, BlockLayout, check_options, level_width, require_levels
from hpcfed.compressors.formats import Coding, add_levels, encode_levels, fixed_bytes, format_of
from hpcfed.errors import ConfigError
from hpcfed.options import option


@dataclass(frozen=True, eq=False)
class QsgdMessage:
    """The quantized array of a client.

    Parameters
    ----------
    norms : Euclidean norm of each block, as sent.
    levels : signed levels ``sign(v_i) l_i`` of the flattened array, at most `num_levels` in magnitude.
    layout : which element belongs to which block.
    num_levels : ``s``.
    coding : which formats the segments may have, see `hpcfed.compressors.formats`.
    formats : how many segments were made in each format so far.
    """

    norms: NDArray[np.float32]
    levels: NDArray[np.signedinteger[Any]]
    layout: BlockLayout
    num_levels: int
    coding: Coding = "fast"
    formats: Counter[str] = field(default_factory=Counter)

    def segment(self, start: int, stop: int) -> NDArray[np.uint8]:
        """What travels for elements ``[start, stop)``: the norms of the blocks they touch, then the levels."""
        first, last = self.layout.touched(start, stop)
        num_norm_bytes = 4 * (last - first)
        segment = encode_levels(self.levels[start:stop], self.num_levels, self.coding, num_norm_bytes)
        segment[:num_norm_bytes] = self.norms[first:last].view(np.uint8)
        if stop > start:
            self.formats[format_of(segment[num_norm_bytes:])] += 1
        return segment

    def decoded(self) -> NDArray[np.float64]:
        """What the receivers of all segments add up to: ``(norm / s) * level``, flattened, whatever the format."""
        from hpcfed.compressors import packing

        values = np.zeros(self.levels.size)
        coefficients = self.norms.astype(np.float64) / self.num_levels
        packing.accumulate(self.levels, coefficients, self.layout.length, self.layout.inner, 0, values)
        return values

    @cached_property
    def _bits(self) -> NDArray[np.int64]:
        from hpcfed.compressors import elias

        return elias.count_bits(self.levels, self.layout, self.num_levels)

    @property
    def paper_bits(self) -> int:
        """Length of the message in the papers' code, counted on first use; see `hpcfed.compressors.elias`."""
        return int(self._bits.min(axis=1).sum())

    @property
    def paper_formats(self) -> dict[str, int]:
        """How many blocks the papers' code would send in each format."""
        from hpcfed.compressors.elias import FORMATS

        chosen = np.bincount(self._bits.argmin(axis=1), minlength=len(FORMATS))
        return dict(zip(FORMATS, chosen.tolist(), strict=True))


@dataclass(frozen=True)
class Qsgd:
    """Quantization to the Euclidean norm of each block: each client has its own scales."""

    kind: ClassVar[str] = "ordered"
    compiled: ClassVar[tuple[str, ...]] = tuple(
        f"hpcfed.compressors.{module}"
        for module in ("scales", "rounding", "packing", "byte_gaps", "elias", "elias_kernels", "entropy")
    )

    quantize: Annotated[int, Ge(0), Le(MAX_LEVELS)] = option(0, "s, number of levels; 0 switches quantization off")
    block: str = option("slice", "slice | all | INT elements per block: what shares one norm", metavar="BLOCK")
    coding: Coding = option(
        "fast",
        "how levels travel: fast (few bits, in a fraction of the others' time), fixed (as many bits each), elias (the "
        "codes of the QSGD paper), entropy (fewest bits, slowest), auto (whichever is shortest)",
    )
    route: Literal["auto", "owners", "node", "gather"] = option(
        "auto",
        "way of quantized messages: owners: to the ranks that add up a segment each; node: the same on every node; "
        "gather: to all ranks; auto: the fastest by an estimate",
    )
    quantize_down: Annotated[int, Ge(0), Le(MAX_LEVELS)] = option(
        0, "levels of the mean on its way back from the owners; 0: not rounded"
    )

    def __post_init__(self) -> None:
        check_options("qsgd", self.quantize, self.block)
        if self.quantize_down and self.route in ("node", "gather"):
            raise ConfigError(f"--quantize-down rounds the mean that owners send back: --route {self.route} has none")

    def for_mean(self) -> Qsgd:
        """The quantizer of the parts of a mean on its way back."""
        return replace(self, quantize=self.quantize_down, quantize_down=0, block="all")

    def expected_bytes(self, shape: tuple[int, ...]) -> float:
        """About how long a message of this shape is, if the values are Gaussian, with the default coding.

        A level is not 0 with probability about ``p = min(1, s sqrt(2 / (pi n)))`` in a block of n values: a byte each;
        or as many bits for all as the largest of some thousands needs, about 4.5 standard deviations.
        """
        layout = BlockLayout.of(shape, self.block)
        if not layout.size:
            return 0.0
        ratio = self.quantize / math.sqrt(layout.length)
        narrow = max(2.0, 2 + math.log2(4.5 * ratio))
        bits = min(8 * 0.8 * ratio, narrow, level_width(self.quantize))
        return 4 * layout.num_blocks + layout.size * bits / 8

    def contraction(self, shape: tuple[int, ...]) -> float:
        """``1 / (1 + q)``, q a bound of the relative variance: ``min(n / s^2, sqrt(n) / s)`` in blocks of n values."""
        longest = BlockLayout.of(shape, self.block).length
        return 1 / (1 + min(longest / self.quantize**2, math.sqrt(longest) / self.quantize))

    def encode(self, array: NDArray[Any], rng: np.random.Generator) -> QsgdMessage:
        """Quantize a float32 or float64 array of any shape.

        Raises
        ------
        DivergedError
            If the array holds NaN, infinity, or a block whose norm is beyond float32.
        """
        require_levels("qsgd", self.quantize)
        from hpcfed.compressors import pieces, rounding, scales

        values = pieces.flatten(array)
        layout = BlockLayout.of(array.shape, self.block)
        norms = scales.block_norms(values, layout, "qsgd")
        dtype = pieces.level_type(self.quantize)
        levels = rounding.quantize(values, norms, layout, self.quantize, rng, dtype)
        return QsgdMessage(norms, levels, layout, self.quantize, self.coding)

    def segment_bytes(self, shape: tuple[int, ...], dtype: DTypeLike, start: int, stop: int) -> int | None:
        """Size of `QsgdMessage.segment` for elements ``[start, stop)`` of an array of this shape and type.

        None if that depends on the array: with every coding but ``fixed``.
        """
        if self.coding != "fixed":
            return None
        first, last = BlockLayout.of(shape, self.block).touched(start, stop)
        return 4 * (last - first) + fixed_bytes(stop - start, self.quantize)

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
        """Add ``weight`` times a received segment, whatever its format, to `total`, in float64.

        Element ``i`` adds ``(norm * weight / s) * level_i``, evaluated in this order.

        Raises
        ------
        ValueError
            If the sizes of `total` or `segment` do not fit the range.
        DataError
            If the levels are in no known format, or not as many as the range has.
        """
        layout = BlockLayout.of(shape, self.block)
        first, last = layout.touched(start, stop)
        num_norm_bytes = 4 * (last - first)
        if total.size != stop - start or segment.size < num_norm_bytes:
            raise ValueError(f"qsgd cannot add {segment.size} bytes to {total.size} elements [{start}, {stop})")
        norms = segment[:num_norm_bytes].view(np.float32).astype(np.float64)
        begin = start - first * layout.length
        coefficients = norms * weight / self.quantize
        add_levels(segment[num_norm_bytes:], self.quantize, coefficients, layout, begin, total)
