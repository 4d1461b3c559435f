#!/usr/bin/env python3
"""What a sweep costs besides its runs: 100 tiny runs in one job, against the sum of the runs' own times.

    python scripts/bench_sweep.py [--runs 100] [--groups 1,2] [--rounds 50]

A run's own time is what its last record says, from reading the data to the last round; the final checkpoint, the result
and the sweep's table come on top. Each sweep is started again when it is done: what that takes is start-up, planning,
the table and the picture. The ratio is of the whole job's time to the own times divided by the groups; the last column
is the same without start-up.
"""

from __future__ import annotations

import argparse
import csv
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

FILE = """
[base.run]
rounds = {rounds}

[base.workload]
name = "logreg"
B = "identity"
clients = 10

[base.algorithm]
name = "fedavg"

[sweep]
mode = "random"
samples = {runs}
step = {{ low = 1e-3, high = 1, log = true }}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--groups", type=lambda text: [int(word) for word in text.split(",")], default=[1, 2])
    options = parser.parse_args()

    print(f"{options.runs} runs of {options.rounds} rounds, each group one rank")
    print(f"{'groups':>6}{'own times':>12}{'job':>10}{'start-up':>10}{'ratio':>8}{'without start-up':>18}")
    for groups in options.groups:
        with tempfile.TemporaryDirectory() as scratch:
            file, folder = Path(scratch) / "tiny.toml", Path(scratch) / "tiny"
            file.write_text(FILE.format(rounds=options.rounds, runs=options.runs))
            job, again = (seconds(groups, file, folder) for _ in range(2))
            with (folder / "sweep.csv").open() as table:
                own = sum(float(row["seconds"]) for row in csv.DictReader(table))
        ideal = own / groups
        print(f"{groups:6}{own:10.2f} s{job:8.2f} s{again:8.2f} s{job / ideal:8.2f}{(job - again) / ideal:18.2f}")


def seconds(groups: int, file: Path, folder: Path) -> float:
    """How long ``hpcfed sweep`` takes."""
    mpirun = [str(Path(sys.executable).parent / "mpirun"), "-n", str(groups)]
    command = [
        *mpirun,
        sys.executable,
        "-m",
        "hpcfed",
        "sweep",
        str(file),
        "--out",
        str(folder),
        "--groups",
        str(groups),
    ]
    begun = time.perf_counter()
    done = subprocess.run(command, env=os.environ, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr}")
    return time.perf_counter() - begun


if __name__ == "__main__":
    main()
