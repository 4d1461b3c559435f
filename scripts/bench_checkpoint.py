#!/usr/bin/env python3
"""Checkpoints: how fast they are written, against dd, and how long they hold up a round.

    python scripts/bench_checkpoint.py [--shape 256,256,64] [--folder .] [--repeats 9]
    mpirun -n 2 python scripts/bench_checkpoint.py

The state is that of FPDFP: a volume and its dual, three times as large, of which rank 0 writes all. `dd conv=fsync`
writes as many zeros to the same folder; all ways take turns, and the table has medians. A round is half a second of
NumPy on every rank, about what the disk needs. Its pause is the longest time that a rank spends in calls of `Writer`
in the round with the checkpoint and the one after; the rounds' own slowing down by the thread is in the last column.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from hpcfed import environment

environment.tune()  # before NumPy and MPI are loaded

import numpy as np  # noqa: E402

from hpcfed import hdf5  # noqa: E402
from hpcfed.algorithms.fpdfp import FpdfpState  # noqa: E402
from hpcfed.federation import Federation  # noqa: E402
from hpcfed.ranks import communicator  # noqa: E402
from hpcfed.run import checkpoint, state_hdf5  # noqa: E402
from hpcfed.run.checkpoint import Checkpoint, Writer  # noqa: E402

ROUND_SECONDS = 0.5
ROUNDS = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="256,256,64", metavar="NY,NX,NZ", help="voxels  [default: %(default)s]")
    parser.add_argument("--folder", default=".", help="where to write  [default: %(default)s]")
    parser.add_argument("--repeats", type=int, default=9, help="[default: %(default)s]")
    options = parser.parse_args()
    world = communicator.connect()
    fed = Federation(world.size, communicator=world)
    shape = tuple(int(size) for size in options.shape.split(","))
    rng = np.random.default_rng(0)
    state = FpdfpState(
        rng.standard_normal(shape, dtype=np.float32), rng.standard_normal((3, *shape), dtype=np.float32), 0.1
    )
    megabytes = (state.x.nbytes + state.v.nbytes) / 1e6
    made = tempfile.mkdtemp(dir=options.folder, prefix="bench-") if world.rank == 0 else None
    folder = Path(world.broadcast(made))
    try:
        if world.rank == 0:
            print(f"state of {megabytes:.0f} MB, {world.size} rank(s), medians of {options.repeats}\n")
            speed(folder, state, megabytes, options.repeats)
        pauses(folder, state, fed, options.repeats)
    finally:
        world.wait()
        if world.rank == 0:
            subprocess.run(["rm", "-r", str(folder)], check=True)


def speed(folder: Path, state: FpdfpState, megabytes: float, repeats: int) -> None:
    """Rank 0 alone: a whole checkpoint, its parts, and dd."""
    alone = Federation(1)
    number = iter(range(1 << 30))
    path = folder / "state.h5"

    def write() -> None:
        with hdf5.new_file(path) as file:
            state_hdf5.write(file, "state", state, replicated=True)
        hdf5.sync(path)

    ways: dict[str, Callable[[], object]] = {
        "dd conv=fsync": lambda: dd(folder / "zeros", megabytes),
        "checkpoint": lambda: checkpoint.save(folder, Checkpoint(next(number), state, {}, {}), alone),
        "  HDF5, flushed": write,
        "  its SHA-256": lambda: checkpoint._sha256(path),
    }
    write()
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, action in ways.items():
            seconds[name].append(timed(action))
    print(f"{'':20}{'ms':>8}{'MB/s':>8}{'of dd':>8}")
    yardstick = np.median(seconds["dd conv=fsync"])
    for name, own in seconds.items():
        median = np.median(own)
        print(f"{name:20}{1e3 * median:8.0f}{megabytes / median:8.0f}{yardstick / median:8.2f}", flush=True)


def pauses(folder: Path, state: FpdfpState, fed: Federation, repeats: int) -> None:
    """Rounds with a checkpoint after the first, written at once or beside them."""
    world = fed.communicator
    matrix = np.random.default_rng(1).standard_normal((400, 400))
    threshold = checkpoint.WORTH_A_THREAD
    paused: dict[str, list[float]] = {"none": [], "at once": [], "beside": []}
    lasted: dict[str, list[float]] = {name: [] for name in paused}
    products = calibrate(matrix)
    for repeat in range(repeats):
        for name in paused:
            checkpoint.WORTH_A_THREAD = threshold if name == "beside" else 1 << 62
            writer = Writer(folder / name, fed)
            held_up = [0.0] * ROUNDS
            world.wait()
            begin = time.perf_counter()
            for number in range(ROUNDS):
                for _ in range(products):
                    matrix @ matrix
                world.maximum(np.zeros(1))
                if number == 0 and name != "none":
                    saved = Checkpoint(repeat, state, {}, {})
                    held_up[number] += timed(lambda writer=writer, saved=saved: writer.begin(saved))  # type: ignore[misc]
                held_up[number] += timed(writer.settle)
            lasted[name].append(world.maximum(np.array([time.perf_counter() - begin]))[0])
            paused[name].append(world.maximum(np.array([max(held_up)]))[0])
            writer.finish()
    checkpoint.WORTH_A_THREAD = threshold
    if world.rank == 0:
        print(f"\n{'written':20}{'pause ms':>10}{f'{ROUNDS} rounds ms':>15}")
        for name in paused:
            print(f"{name:20}{1e3 * np.median(paused[name]):10.1f}{1e3 * np.median(lasted[name]):15.0f}")


def calibrate(matrix: np.ndarray) -> int:
    """How many products a round has."""
    return max(1, int(ROUND_SECONDS / min(timed(lambda: matrix @ matrix) for _ in range(20))))


def timed(action: Callable[[], object]) -> float:
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def dd(path: Path, megabytes: float) -> None:
    command = ["dd", "if=/dev/zero", f"of={path}", "bs=1M", f"count={round(megabytes * 1e6 / (1 << 20))}", "conv=fsync"]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)


if __name__ == "__main__":
    main()
