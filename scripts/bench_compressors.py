"""How long the compressors take on one core, beside the same steps in plain NumPy.

    python scripts/bench_compressors.py [NY NX NZ]

Each line is the best of several runs, in milliseconds, for one float32 volume. The NumPy column does what its line
says with array expressions; the ratio is NumPy's time over hpcfed's.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcfed.compressors.grid import Grid
from hpcfed.compressors.qsgd import Qsgd, QsgdMessage
from hpcfed.compressors.raw import Raw

Array = NDArray[Any]
Row = tuple[str, float, float | None]


def milliseconds(function: Callable[[], Any], repeats: int = 5) -> float:
    """Shortest of several runs."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return 1e3 * min(times)


def numpy_quantize(array: Array, scales: Array, num_levels: int, rng: np.random.Generator) -> Array:
    """Stochastic rounding to the grid of each slice."""
    position = np.abs(array) * (num_levels / scales.astype(np.float64))
    levels = np.floor(np.minimum(position, num_levels) + rng.random(array.shape, np.float32))
    signed: Array = np.copysign(levels, array).astype(np.int16 if num_levels > 127 else np.int8)
    return signed


def numpy_encode(array: Array, num_levels: int, rng: np.random.Generator) -> tuple[Array, Array]:
    norms = np.sqrt(np.sum(np.square(array, dtype=np.float64), axis=(0, 1))).astype(np.float32)
    return norms, numpy_quantize(array, norms, num_levels, rng)


def numpy_pack(levels: Array, num_levels: int) -> Array:
    codes = (levels.reshape(-1) + np.int32(num_levels)).astype("<u2")
    bits = np.unpackbits(codes.view(np.uint8).reshape(-1, 2), axis=1, bitorder="little")
    return np.packbits(bits[:, : 1 + num_levels.bit_length()], bitorder="little")


def numpy_accumulate(total: Array, packed: Array, norms: Array, num_levels: int) -> None:
    width = 1 + num_levels.bit_length()
    bits = np.zeros((total.size, 16), np.uint8)
    bits[:, :width] = np.unpackbits(packed, count=total.size * width, bitorder="little").reshape(-1, width)
    levels = np.packbits(bits, axis=1, bitorder="little").view("<u2").reshape(-1, norms.size).astype(np.int32)
    total += ((levels - num_levels) * (norms.astype(np.float64) / num_levels)).reshape(-1)


def report(title: str, rows: list[Row]) -> None:
    print(f"\n{title:38} {'hpcfed':>9} {'NumPy':>9} {'ratio':>7}")
    for name, ours, plain in rows:
        other = "" if plain is None else f"{plain:9.1f} {plain / ours:7.1f}"
        print(f"  {name:36} {ours:9.1f} {other}")


def bench_qsgd(array: Array, num_levels: int) -> None:
    rng = np.random.Generator(np.random.Philox(1))
    qsgd, size = Qsgd(num_levels), array.size
    message = qsgd.encode(array, rng)
    segment = message.segment(0, size)
    norms, levels = numpy_encode(array, num_levels, rng)
    packed = numpy_pack(levels, num_levels)
    total, uniforms = np.zeros(size), np.empty(size, np.float32)

    def accumulate() -> None:
        qsgd.accumulate(total, segment, array.shape, array.dtype, 0, size)

    def count() -> int:
        return QsgdMessage(message.norms, message.levels, message.layout, num_levels).paper_bits

    ours = [
        milliseconds(lambda: qsgd.encode(array, rng)),
        milliseconds(lambda: message.segment(0, size)),
        milliseconds(accumulate),
    ]
    plain = [
        milliseconds(lambda: numpy_encode(array, num_levels, rng), 2),
        milliseconds(lambda: numpy_pack(levels, num_levels), 2),
        milliseconds(lambda: numpy_accumulate(total, packed, norms, num_levels), 2),
    ]
    draw = milliseconds(lambda: rng.random(dtype=np.float32, out=uniforms))
    steps = ["encode", "pack", "unpack and accumulate", "all three"]
    rows: list[Row] = list(zip(steps, [*ours, sum(ours)], [*plain, sum(plain)], strict=True))
    rows += [("count the papers' bits", milliseconds(count), None), ("uniform numbers, a part of encode", draw, None)]
    report(f"qsgd, s = {num_levels}, block slice", rows)
    chosen = ", ".join(f"{number} {form}" for form, number in message.formats.items() if number)
    sent, coded = 8 * segment.size / size, message.paper_bits / size
    print(f"  bits an element: {sent:.2f} sent, {coded:.2f} in the papers' code ({chosen})")


def bench_grid(array: Array, num_levels: int, count: int) -> None:
    rng = np.random.Generator(np.random.Philox(1))
    grid = Grid(num_levels)
    scales = grid.scales(array)
    levels = grid.encode(array, scales, rng, count)
    step = scales.astype(np.float64) / (num_levels * count)
    ours = [
        milliseconds(lambda: grid.scales(array)),
        milliseconds(lambda: grid.encode(array, scales, rng, count)),
        milliseconds(lambda: grid.decode(levels, scales, count)),
    ]
    plain = [
        milliseconds(lambda: np.abs(array).max(axis=(0, 1))),
        milliseconds(lambda: numpy_quantize(array, scales, num_levels, rng), 2),
        milliseconds(lambda: (levels * step).astype(np.float32)),
    ]
    rows: list[Row] = list(zip(["scales", "encode", "decode"], ours, plain, strict=True))
    report(f"grid, s = {num_levels}, {count} clients, {levels.dtype}", rows)


def bench_raw(array: Array) -> None:
    total = np.zeros(array.size)
    segment = Raw().encode(array).segment(0, array.size)

    def accumulate(weight: float) -> None:
        Raw().accumulate(total, segment, array.shape, array.dtype, 0, array.size, weight)

    plain = milliseconds(lambda: accumulate(1.0))
    weighted = milliseconds(lambda: accumulate(0.3))
    report("raw", [("accumulate", plain, None), ("accumulate, weighted", weighted, None)])


def main() -> None:
    shape = tuple(int(each) for each in sys.argv[1:]) or (256, 256, 64)
    array = np.random.default_rng(0).standard_normal(shape, dtype=np.float32)
    print(f"float32 {shape}, {array.size / 1e6:.1f} million elements; milliseconds")
    for num_levels in (20, 1000, 30000):
        bench_qsgd(array, num_levels)
    bench_grid(array, 1000, 17)
    bench_raw(array)


if __name__ == "__main__":
    main()
