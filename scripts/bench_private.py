#!/usr/bin/env python3
"""Noisy steps on single records: milliseconds of a pass on one core, and how much of them is the drawing of noise.

    python scripts/bench_private.py [--records 10000] [--features 100] [--classes 10] [--repeat 7]

Each loss passes over all records in random order, for batches of 1, 10 and 100, with clipping and noise; medians of
processor time. ``secure`` draws the noise of batch 1 from ChaCha20 instead of Philox.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

from hpcfed import environment

environment.tune()  # before NumPy is loaded

import numpy as np  # noqa: E402

from hpcfed.privacy import engine, entropy  # noqa: E402

BATCHES = (1, 10, 100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--records", type=int, default=10_000)
    parser.add_argument("--features", type=int, default=100)
    parser.add_argument("--classes", type=int, default=10, help="of softmax")
    parser.add_argument("--repeat", type=int, default=7)
    options = parser.parse_args()
    rng = np.random.Generator(np.random.Philox(0))
    features = rng.standard_normal((options.records, options.features)) / options.features**0.5
    order = rng.permutation(options.records)
    print(f"{options.records} records of {options.features} features, ms a pass")
    print(f"{'loss':<15}" + "".join(f"{f'batch {batch}':>11}" for batch in BATCHES) + f"{'noise':>9}{'secure':>9}")
    for loss in engine.LOSSES:
        size = options.features * (options.classes if loss == "softmax" else 1)
        targets = {
            "mean": None,
            "least-squares": rng.standard_normal(options.records),
            "logistic": rng.choice([-1.0, 1.0], options.records),
            "softmax": rng.integers(0, options.classes, options.records).astype(float),
        }[loss]

        def go(
            batch: int, stream: np.random.Generator, size: int = size, targets: Any = targets, loss: str = loss
        ) -> None:
            steps = engine.NoisySteps(1e-3, 1.0, 1.0, batch)
            engine.run(loss, features, targets, np.zeros(size), order, steps, stream)

        times = [clocked(lambda batch=batch: go(batch, rng), options.repeat) for batch in BATCHES]  # type: ignore[misc]
        chunk = np.empty((max(1, engine.CHUNK // size), size))
        share = options.records / len(chunk)
        noise = share * clocked(lambda chunk=chunk: rng.standard_normal(out=chunk), options.repeat)  # type: ignore[misc]
        secure = clocked(lambda: go(1, entropy.fresh()), options.repeat)
        print(f"{loss:<15}" + "".join(f"{each:11.1f}" for each in times) + f"{noise:9.1f}{secure:9.1f}")


def clocked(action: Callable[[], Any], repeat: int) -> float:
    """The median of its processor time, in milliseconds; what it compiles first does not count."""
    action()
    times = []
    for _ in range(repeat):
        begin = time.process_time()
        action()
        times.append(time.process_time() - begin)
    return 1000 * statistics.median(times)


if __name__ == "__main__":
    main()
