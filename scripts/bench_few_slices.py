"""Time projections of volumes of few slices, one core, one client, in a parallel and a fan beam.

Loops that run across rays and pixels are compared with those that run along the slices. Of a parallel beam, these take
as long for few slices as for the fewest that they are used for, and that is what is timed. A time is the processor's,
the best of several calls that take turns.

    OMP_NUM_THREADS=1 python scripts/bench_few_slices.py --side 640 --views 11
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from hpcfed.operators.cone_beam import FanBeam
from hpcfed.operators.parallel_beam import FEW_SLICES, ParallelBeam
from hpcfed.workloads.ct_options import ScanOptions

REPEATS = 5


def best(functions: list[Callable[[], object]]) -> list[float]:
    """Seconds of each function's fastest call."""
    seconds = [float("inf")] * len(functions)
    for repeat in range(REPEATS + 1):
        for place, function in enumerate(functions):
            start = time.thread_time()
            function()
            if repeat:  # the first call loads compiled code
                seconds[place] = min(seconds[place], time.thread_time() - start)
    return seconds


def pair(projector: Any, num_rows: int) -> Callable[[], object]:
    """A projection and a back-projection of noise."""
    rng = np.random.default_rng(0)
    volume = rng.standard_normal(projector.shape, dtype=np.float32)
    projections = rng.standard_normal((projector.num_views, projector.num_columns, num_rows), dtype=np.float32)
    return lambda: (projector.forward(volume), projector.adjoint(projections))


def parallel(side: int, num_views: int, num_slices: int) -> Callable[[], object]:
    angles = np.random.default_rng(1).uniform(0, np.pi, num_views)
    return pair(ParallelBeam((side, side, num_slices), angles, side), num_slices)


def fan(side: int, num_views: int, num_slices: int, compiled: str | None = None) -> Callable[[], object]:
    scan = ScanOptions(shape=(side, side, num_slices), geometry="fan", views=num_views, detector=side)
    projector = FanBeam((side, side, num_slices), scan.settle().vectors(np.arange(num_views)), side)
    projector.compiled = compiled or projector.compiled
    return pair(projector, num_slices)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--side", type=int, default=640, help="of a slice, and detector columns  [default: %(default)s]"
    )
    parser.add_argument("--views", type=int, default=11, help="of the client  [default: %(default)s]")
    arguments = parser.parse_args()
    size = arguments.side, arguments.views
    print(f"{size[0]} x {size[0]} pixels and columns, {size[1]} views; ns of a pair for a pixel, slice and view")
    print(f"{'':12}{'slices':>8}{'across':>10}{'along':>10}{'ratio':>8}")
    along = "hpcfed.operators.cone_beam_kernels"
    for name, counts in (("parallel", (1, 2, 3, 4)), ("fan", (1, 2, 4, 8, 16))):
        for count in counts:
            if name == "parallel":
                mine, others = best([parallel(*size, count), parallel(*size, FEW_SLICES + 1)])
            else:
                mine, others = best([fan(*size, count), fan(*size, count, along)])
            scale = 1e9 / (size[0] ** 2 * size[1] * count)
            print(f"{name:12}{count:8}{mine * scale:10.2f}{others * scale:10.2f}{others / mine:8.1f}", flush=True)


if __name__ == "__main__":
    main()
