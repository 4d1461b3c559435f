#!/usr/bin/env python3
"""Averaging: sums in client order, quantized or not, against one plain Allreduce of the same array.

    mpirun -n 17 python scripts/bench_exchange.py [--elements 100000,4194304,16777216] [--seconds 2]

One client a rank, standard normal values. Every way is timed in turn, round after round, the slowest rank counts. The
table gives medians, their ratio to the Allreduce, the megabytes that a rank hands over and gets back (for the Allreduce
what its best algorithm moves), and the relative error |mean - exact| / |exact| in the Euclidean norm.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import socket
import time
from collections.abc import Callable

from hpcfed import environment

environment.tune()  # before NumPy and MPI are loaded
environment.return_freed_memory()  # as in a run

import numpy as np  # noqa: E402

from hpcfed.compressors.grid import Grid  # noqa: E402
from hpcfed.compressors.qsgd import Qsgd  # noqa: E402
from hpcfed.compressors.raw import load_kernel  # noqa: E402
from hpcfed.federation import Federation, PerClient  # noqa: E402
from hpcfed.ranks.mpi import MpiCommunicator  # noqa: E402

BLOCK = "65536"


class Apart(MpiCommunicator):
    """Ranks that share no memory, so that uncompressed arrays go to the ranks that own them."""

    def shared(self) -> None:
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--elements", default="100000,4194304,16777216", help="sizes of the array, comma-separated")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each way and size")
    parser.add_argument("--only", default="", help="ways whose name contains this, beside the Allreduce")
    options = parser.parse_args()
    world = MpiCommunicator()
    with world.first_on_node():
        load_kernel()  # as a run does after a while
    if world.rank == 0:
        logging.basicConfig(format="%(message)s")
        logging.getLogger("hpcfed").setLevel(logging.INFO)
    for elements in map(int, options.elements.split(",")):
        compare(world, elements, options.seconds, options.only)


def compressors(ranks: int) -> dict[str, dict[str, object]]:
    """What is compared, as options of a federation."""
    int8 = 127 // ranks
    return {
        "any order": {"sum_order": "any"},
        "client order": {},
        "client order by messages": {"communicator": Apart()},
        "qsgd s=1": {"compressor": Qsgd(quantize=1, block=BLOCK)},
        "qsgd s=20": {"compressor": Qsgd(quantize=20, block=BLOCK)},
        "qsgd s=20 by owners": {"compressor": Qsgd(quantize=20, block=BLOCK, route="owners")},
        "qsgd s=20 on each node": {"compressor": Qsgd(quantize=20, block=BLOCK, route="node")},
        "qsgd s=20 by gathering": {"compressor": Qsgd(quantize=20, block=BLOCK, route="gather")},
        "qsgd s=20 down s=20": {"compressor": Qsgd(quantize=20, block=BLOCK, quantize_down=20)},
        "qsgd s=1000": {"compressor": Qsgd(quantize=1000, block=BLOCK)},
        f"grid int8 s={int8}": {"compressor": Grid(quantize=int8, block=BLOCK)},
        "grid int16 s=1000": {"compressor": Grid(quantize=1000, block=BLOCK)},
    }


def compare(world: MpiCommunicator, elements: int, seconds: float, only: str) -> None:
    array = np.random.default_rng(world.rank).standard_normal(elements, dtype=np.float32)
    message = PerClient({world.rank: array})
    federations = {
        name: Federation(world.size, **{"communicator": world, **choices})  # type: ignore[arg-type]
        for name, choices in compressors(world.size).items()
        if only in name
    }
    exact = Federation(world.size, communicator=world).mean(message).astype(float)
    errors = {"Allreduce": float(np.linalg.norm(world.sum(array) / world.size - exact) / np.linalg.norm(exact))}
    ways: dict[str, Callable[[], object]] = {"Allreduce": lambda: world.sum(array)}
    for name, fed in federations.items():
        errors[name] = float(np.linalg.norm(fed.mean(message, lossy=True) - exact) / np.linalg.norm(exact))
        ways[name] = lambda fed=fed: fed.mean(message, lossy=True)  # type: ignore[misc]

    times: dict[str, list[float]] = {name: [] for name in ways}
    end = time.perf_counter() + seconds * len(ways)
    going = True
    while going:
        for name, action in ways.items():
            silent = federations[name].ledger.uncounted() if name in federations else contextlib.nullcontext()
            with silent:
                world.wait()  # asleep, so that whoever is slow has the cores
                world.barrier()  # begin together: from sleep ranks wake at different times
                begin = time.perf_counter()
                action()
                times[name].append(world.maximum(np.array([time.perf_counter() - begin]))[0])
        going = bool(world.broadcast(len(times["Allreduce"]) < 3 or time.perf_counter() < end))

    best = 4e-6 * elements * (world.size - 1) / world.size
    moved = {"Allreduce": (best, best)}
    for name, fed in federations.items():
        totals = fed.ledger.totals(world)
        moved[name] = (
            totals["wire_bytes_up"] / 1e6 / world.size,
            totals["wire_bytes_down"] / 1e6 / world.size,
        )
    nodes = len(set(world.gather(socket.gethostname())))
    if world.rank == 0:
        print(f"\n{world.size} ranks on {nodes} node(s), {elements:,} float32 values, medians of {len(times[name])}")
        print(f"{'':24}{'ms':>9}{'x':>7}{'MB up':>9}{'MB down':>9}{'error':>10}")
        yardstick = np.median(times["Allreduce"])
        for name in ways:
            median = np.median(times[name])
            up, down = moved[name]
            print(
                f"{name:24}{1e3 * median:9.1f}{median / yardstick:7.2f}{up:9.2f}{down:9.2f}{errors[name]:10.1e}",
                flush=True,
            )


if __name__ == "__main__":
    main()
