"""How a segment of levels travels: the first byte says in which format, the rest is the levels in that format.

=========  ===  =======================================================================================
format     tag  bits a level
=========  ===  =======================================================================================
fixed        0  ``1 + ceil(log2(s + 1))``, see `hpcfed.compressors.packing`
sparse       1  Elias's codes of the distances and magnitudes of those that are not zero, and their signs
dense        2  Elias's codes of all magnitudes plus one, and signs; see `hpcfed.compressors.elias_kernels`
entropy      3  what the frequencies allow, see `hpcfed.compressors.entropy`
bytes        4  8 or a few more for each that is not zero, see `hpcfed.compressors.byte_gaps`
narrow       5  what the largest level of each 2048 needs; before them a byte for each 2048 says how many
=========  ===  =======================================================================================

Which formats are tried is the `coding`; the shortest of them travels. All give back the same levels, so the choice,
which may depend on where a message is cut, changes no digest. No levels are no bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from hpcfed.compressors.blocks import BlockLayout, level_width
from hpcfed.errors import DataError

Coding = Literal["fast", "fixed", "elias", "entropy", "auto"]


class Format(IntEnum):
    """The tags."""

    FIXED = 0
    SPARSE = 1
    DENSE = 2
    ENTROPY = 3
    BYTES = 4
    NARROW = 5


_CHOICES: dict[Coding, tuple[Format, ...]] = {
    "fast": (Format.NARROW, Format.BYTES),
    "fixed": (Format.FIXED,),
    "elias": (Format.SPARSE, Format.DENSE),
    "entropy": (Format.ENTROPY, Format.FIXED),
    "auto": tuple(Format),
}


def encode_levels(levels: NDArray[Any], num_levels: int, coding: Coding, front: int = 0) -> NDArray[np.uint8]:
    """A segment in the shortest of the formats that `coding` tries.

    Parameters
    ----------
    levels : signed integers of 8, 16 or 32 bits, at most `num_levels` in magnitude.
    front : bytes that are left free before the tag.
    """
    if not levels.size:
        return np.empty(front, np.uint8)
    plans = sorted(_plans(levels, num_levels, _CHOICES[coding]), key=lambda plan: plan.size)
    segments = (_written(plan, front) for plan in plans)
    return next(segment for segment in segments if segment is not None)


@dataclass(frozen=True)
class _Plan:
    """A way to write levels: ``write(ahead)`` leaves so many bytes free before them, and may give up with None.

    The size is that of the levels alone; of `ENTROPY` about that, of `BYTES` a lower bound.
    """

    form: Format
    size: int
    write: Callable[[int], NDArray[np.uint8] | None]


def _written(plan: _Plan, front: int) -> NDArray[np.uint8] | None:
    data = plan.write(front + 1)
    if data is not None:
        data[front] = plan.form
    return data


def _plans(levels: NDArray[Any], num_levels: int, tried: tuple[Format, ...]) -> list[_Plan]:
    from hpcfed.compressors import byte_gaps, packing

    plans = []
    if Format.FIXED in tried:
        plans.append(_packing_plan(Format.FIXED, levels, *packing.uniform(levels.size, num_levels)))
    if Format.NARROW in tried:
        widths = np.empty(packing.num_pieces(levels.size), np.uint8)
        packing.narrowest_widths(levels, widths)
        plans.append(_packing_plan(Format.NARROW, levels, packing.bounds_of(widths), widths))
    if Format.SPARSE in tried or Format.DENSE in tried:
        from hpcfed.compressors import elias, elias_kernels

        counted = elias.count_bits(levels, BlockLayout.of(levels.shape, "all"), num_levels)[0]
        for form, column in ((Format.SPARSE, 0), (Format.DENSE, 1)):
            if form in tried:
                bits = int(counted[column]) - elias.NORM_BITS - elias.TAG_BITS
                write = partial(elias_kernels.write, levels, form is Format.SPARSE, bits)
                plans.append(_Plan(form, -(-bits // 8), write))
    if Format.ENTROPY in tried:
        from hpcfed.compressors import entropy

        counts = entropy.class_counts(levels)
        plans.append(_Plan(Format.ENTROPY, entropy.expected_bytes(counts), partial(entropy.write, levels, counts)))
    if Format.BYTES in tried:
        # How long this is shows when it is written: it stays below what is shortest so far, or gives up.
        room = min(plan.size for plan in plans) - 1
        at_least = int(byte_gaps.fewest_bytes(levels, room))
        plans.append(_Plan(Format.BYTES, at_least, partial(byte_gaps.write, levels, room)))
    return plans


def _packing_plan(form: Format, levels: NDArray[Any], bounds: NDArray[np.int32], widths: NDArray[np.uint8]) -> _Plan:
    """Levels packed in pieces; the widths travel with them where they are not the same for all."""
    from hpcfed.compressors import packing

    num_widths = widths.size if form is Format.NARROW else 0
    size = num_widths + packing.packed_bytes(levels.size, widths)

    def write(ahead: int) -> NDArray[np.uint8]:
        data = np.empty(ahead + size, np.uint8)
        data[ahead : ahead + num_widths] = widths[:num_widths]
        packing.pack(levels, bounds, widths, data[ahead + num_widths :])
        return data

    return _Plan(form, size, write)


def decode_levels(data: NDArray[np.uint8], count: int, num_levels: int) -> NDArray[np.signedinteger[Any]]:
    """The levels of a segment of so many, in the narrowest type that holds `num_levels`.

    Raises
    ------
    DataError
        If the data are no such segment.
    """
    from hpcfed.compressors import byte_gaps, packing, pieces

    levels = np.zeros(count, pieces.level_type(num_levels))
    if not count and not data.size:
        return levels
    form, payload = _open(data)
    match form:
        case Format.FIXED | Format.NARROW:
            bounds, widths, packed = _packed(form, payload, count, num_levels)
            packing.unpack(packed, bounds, widths, levels)
            whole = True
        case Format.BYTES:
            whole = byte_gaps.read(payload, num_levels, levels)
        case Format.ENTROPY:
            from hpcfed.compressors import entropy

            whole = entropy.read(payload, num_levels, levels)
        case _:
            from hpcfed.compressors import elias_kernels

            whole = elias_kernels.read(payload, form is Format.SPARSE, num_levels, levels)
    if not whole:
        raise _damaged(form, payload, count)
    return levels


def add_levels(
    data: NDArray[np.uint8],
    num_levels: int,
    coefficients: NDArray[np.float64],
    layout: BlockLayout,
    start: int,
    total: NDArray[np.float64],
) -> None:
    """Add a segment to `total`: ``total[j] += coefficients[block(start + j)] * level[j]``.

    Parameters
    ----------
    coefficients : one for each block; block and element 0 of `layout` are those that they begin with.

    Raises
    ------
    DataError
        If the data are no segment of the size of `total`; part of it may have been added.
    """
    if not total.size and not data.size:
        return
    from hpcfed.compressors import byte_gaps, packing

    form, payload = _open(data)
    blocks = (coefficients, layout.length, layout.inner, start)
    if form in (Format.FIXED, Format.NARROW):
        bounds, widths, packed = _packed(form, payload, total.size, num_levels)
        packing.unpack_accumulate(packed, bounds, widths, *blocks, total)
    elif form == Format.BYTES:
        if not byte_gaps.accumulate(payload, num_levels, *blocks, total):
            raise _damaged(form, payload, total.size)
    else:
        packing.accumulate(decode_levels(data, total.size, num_levels), *blocks, total)


def fixed_bytes(count: int, num_levels: int) -> int:
    """Size of a segment of so many levels in the format `fixed`, which is known before there are any."""
    return -(-count // 8) * level_width(num_levels) + (count > 0)


def format_of(data: NDArray[np.uint8]) -> str:
    """The name of the format of a segment that `encode_levels` wrote."""
    return Format(int(data[0])).name.lower()


def _packed(form: Format, payload: NDArray[np.uint8], count: int, num_levels: int) -> tuple[NDArray[Any], ...]:
    """Bounds and widths of the pieces, and the levels packed with them."""
    from hpcfed.compressors import packing

    bounds, widths = packing.uniform(count, num_levels)
    packed = payload
    if form == Format.NARROW and payload.size >= widths.size:
        most = widths
        widths, packed = payload[: most.size], payload[most.size :]
        if np.any(widths > most):
            raise _damaged(form, payload, count)
        bounds = packing.bounds_of(widths)
    if packed.size != packing.packed_bytes(count, widths):
        raise _damaged(form, payload, count)
    return bounds, widths, packed


def _open(data: NDArray[np.uint8]) -> tuple[Format, NDArray[np.uint8]]:
    """The format and what follows the tag."""
    tag = int(data[0]) if data.size else len(Format)
    if tag >= len(Format):
        known = ", ".join(f"{form.name.lower()} {form.value}" for form in Format)
        raise DataError(f"a segment of levels has format {tag}, not one of {known}: run the same hpcfed on all ranks")
    return Format(tag), data[1:]


def _damaged(form: Format, payload: NDArray[np.uint8], count: int) -> DataError:
    return DataError(
        f"{payload.size} bytes of format {form.name.lower()} are no segment of {count} levels: "
        "run the same hpcfed with the same options on all ranks"
    )
