"""How long the compressors take on one core, beside the same steps in plain NumPy, and what each coding gives.

    python scripts/bench_compressors.py [NY NX NZ]

Each line is the best of several runs, in milliseconds of one core's time, for one float32 volume. The NumPy column does
what its line says with array expressions; the ratio is NumPy's time over hpcfed's. The table of codings is per million
values, in blocks of 65,536: quantize, write a message, and read and add one, in parts of 2 million.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from hpcfed.compressors.formats import Coding
from hpcfed.compressors.grid import Grid
from hpcfed.compressors.qsgd import Qsgd, QsgdMessage
from hpcfed.compressors.raw import Raw

Array = NDArray[Any]
Row = tuple[str, float, float | None]


def milliseconds(function: Callable[[], Any], repeats: int = 5) -> float:
    """Shortest of several runs."""
    times = []
    for _ in range(repeats):
        start = time.thread_time()
        function()
        times.append(time.thread_time() - start)
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
    qsgd, size = Qsgd(num_levels, coding="fixed"), array.size
    message = qsgd.encode(array, rng)
    segment = message.segment(0, size)
    norms, levels = numpy_encode(array, num_levels, rng)
    packed = numpy_pack(levels, num_levels)
    total = np.zeros(size)

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
    steps = ["encode", "pack", "unpack and accumulate", "all three"]
    rows: list[Row] = list(zip(steps, [*ours, sum(ours)], [*plain, sum(plain)], strict=True))
    rows.append(("count the papers' bits", milliseconds(count), None))
    report(f"qsgd, s = {num_levels}, block slice, coding fixed", rows)
    chosen = ", ".join(f"{number} {form}" for form, number in message.paper_formats.items() if number)
    sent, coded = 8 * segment.size / size, message.paper_bits / size
    print(f"  bits an element: {sent:.2f} sent, {coded:.2f} in the papers' code ({chosen})")


def bench_codings(array: Array) -> None:
    vector, millions = array.reshape(-1), array.size / 1e6
    cuts = range(0, vector.size, 1 << 21)
    print(f"\n{'s':>6} {'coding':>8} {'quantize':>9} {'write':>7} {'read, add':>10} {'bits a value':>13}  formats")
    for num_levels in (20, 500, 1000, 5000):
        for coding in get_args(Coding):
            qsgd = Qsgd(num_levels, "65536", coding)
            message = qsgd.encode(vector, np.random.Generator(np.random.Philox(1)))
            total = np.zeros(1 << 21)

            def write(message: QsgdMessage = message) -> list[Array]:
                return [message.segment(cut, min(cut + (1 << 21), vector.size)) for cut in cuts]

            segments = write()
            formats = ", ".join(message.formats)

            def read(qsgd: Qsgd = qsgd, segments: list[Array] = segments, total: Array = total) -> None:
                for cut, segment in zip(cuts, segments, strict=True):
                    stop = min(cut + (1 << 21), vector.size)
                    qsgd.accumulate(total[: stop - cut], segment, vector.shape, vector.dtype, cut, stop)

            steps = (lambda qsgd=qsgd: qsgd.encode(vector, np.random.Generator(np.random.Philox(1))), write, read)
            quantize, written, added = (milliseconds(step, 3) / millions for step in steps)
            bits = 8 * sum(segment.size for segment in segments) / vector.size
            print(f"{num_levels:6} {coding:>8} {quantize:9.2f} {written:7.2f} {added:10.2f} {bits:13.2f}  {formats}")


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
    bench_codings(array)
    bench_grid(array, 1000, 17)
    bench_raw(array)


if __name__ == "__main__":
    main()
