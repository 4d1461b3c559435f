#!/usr/bin/env python3
"""Averaging: sums in client order, quantized or not, against one plain Allreduce of the same array.

    mpirun -n 17 python scripts/bench_exchange.py [--elements 4194304] [--seconds 3]

One client a rank. Every way is timed in turn, round after round; the table shows medians and their ratio to the
Allreduce. Bytes are those that all clients hand over.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable

from hpcfed import environment

environment.tune()  # before NumPy and MPI are loaded

import numpy as np  # noqa: E402

from hpcfed.communicator import MpiCommunicator  # noqa: E402
from hpcfed.compressors.grid import Grid  # noqa: E402
from hpcfed.compressors.qsgd import Qsgd  # noqa: E402
from hpcfed.federation import Federation, PerClient  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--elements", type=int, default=1 << 22)
    parser.add_argument("--seconds", type=float, default=3.0)
    options = parser.parse_args()

    world = MpiCommunicator()
    array = np.random.default_rng(world.rank).standard_normal(options.elements, dtype=np.float32)
    message = PerClient({world.rank: array})

    def federation(**choices: object) -> Federation:
        return Federation(world.size, communicator=world, **choices)

    ways: dict[str, tuple[Callable[[], object], Federation | None]] = {"Allreduce": (lambda: world.sum(array), None)}
    for name, choices in {
        "any order": {"sum_order": "any"},
        "client order": {},
        "qsgd, s = 20": {"compressor": Qsgd(quantize=20, block="65536")},
        "qsgd, s = 1000": {"compressor": Qsgd(quantize=1000, block="65536")},
        "grid, s = 1000": {"compressor": Grid(quantize=1000, block="65536")},
    }.items():
        fed = federation(**choices)
        ways[name] = (lambda fed=fed: fed.mean(message, lossy=True), fed)

    times: dict[str, list[float]] = {name: [] for name in ways}
    end = time.perf_counter() + options.seconds * len(ways)
    going = True
    while going:
        for name, (action, fed) in ways.items():
            world.wait()
            begin = time.perf_counter()
            if fed is None:
                action()
            else:
                with fed.ledger.uncounted() if times[name] else contextlib.nullcontext():
                    action()
            slowest = world.maximum(np.array([time.perf_counter() - begin]))[0]
            times[name].append(slowest)
        going = bool(world.broadcast(len(times["Allreduce"]) < 4 or time.perf_counter() < end))

    if world.rank == 0:
        print(f"{world.size} ranks, {options.elements:,} float32 elements, median of {len(times['Allreduce']) - 1}")
        yardstick = np.median(times["Allreduce"][1:])
        for name, (_, fed) in ways.items():
            median = np.median(times[name][1:])
            sent = "" if fed is None else f"{fed.ledger.traffic['wire_bytes_up'] / 1e6:10.1f} MB up"
            print(f"{name:16}{1e3 * median:9.1f} ms{median / yardstick:8.2f} x{sent}")


if __name__ == "__main__":
    main()
