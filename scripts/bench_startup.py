#!/usr/bin/env python3
"""Start-up: from mpirun to the first recorded round of a tiny `hpcfed ct`, against bare imports on as many ranks.

    python scripts/bench_startup.py [--ranks 17] [--repeats 3]

The yardstick imports numpy, scipy, h5py and mpi4py on every rank and meets at a barrier, with the environment that
hpcfed sets for itself. Both are started in turn; the table shows the shortest time of each and their ratio.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from hpcfed import environment
from hpcfed.run.run_folder import RunFolder

BARE = """
import numpy, scipy, scipy.sparse, h5py
from mpi4py import MPI
MPI.COMM_WORLD.Barrier()
"""
TINY = "ct --shape 32,32,8 --views 34 --detector 48 --rounds 1 --device cpu"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=17)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()

    mpirun = [str(Path(sys.executable).parent / "mpirun"), "-n", str(options.ranks), sys.executable]
    launcher = {"OMPI_COMM_WORLD_SIZE": str(options.ranks), "OMPI_COMM_WORLD_LOCAL_SIZE": str(options.ranks)}
    tuned = {**os.environ, **environment.wanted(launcher, environment.usable_cores())}

    bare, first, whole = [], [], []
    for repeat in range(options.repeats + 1):
        begin = time.perf_counter()
        subprocess.run([*mpirun, "-c", BARE], env=tuned, check=True)
        bare.append(time.perf_counter() - begin)
        with tempfile.TemporaryDirectory() as scratch:
            folder = RunFolder(Path(scratch) / "run")
            begin = time.perf_counter()
            process = subprocess.Popen(
                [*mpirun, "-m", "hpcfed", *TINY.split(), "--out", str(folder.path)],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            while len(folder.history()) < 2 and process.poll() is None:
                time.sleep(0.01)
            first.append(time.perf_counter() - begin)
            if process.wait() != 0:
                sys.exit("hpcfed ct failed: run it by hand to see why")
            whole.append(time.perf_counter() - begin)
        if repeat == 0:  # warms the kernel cache and the disk's
            bare.clear(), first.clear(), whole.clear()

    print(f"{options.ranks} ranks, shortest of {options.repeats}")
    print(f"{'bare imports, to the end':38}{min(bare):8.2f} s")
    for name, seconds in (("hpcfed ct, to the first round", first), ("hpcfed ct, to the end", whole)):
        print(f"{name:38}{min(seconds):8.2f} s{min(seconds) / min(bare):8.2f} x")


if __name__ == "__main__":
    main()
