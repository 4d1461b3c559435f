"""Time the cone-beam projector on this machine, one client, beside RTK's, and measure how exact its transpose is.

Times are those of the processor (on one thread), the best of several calls, so that a busy machine disturbs them less.
The goals are those of the project: they are printed, not enforced. RTK's Joseph filters (pip install itk-rtk) are timed
in turn with ours where they are installed.

    OMP_NUM_THREADS=1 python scripts/bench_cone.py --shape 128,128,128 --detector 192,192
"""

from __future__ import annotations

import argparse
import importlib.util
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import rtk_joseph

from hpcfed.operators.cone_beam import ConeBeam
from hpcfed.workloads.ct_options import ScanOptions

REPEATS = 5
GOALS = {"forward": 5.8, "adjoint": 6.9}  # ms a view, 128^3 voxels and 192^2 pixels


def best(function: Callable[[], object], threads: int, repeats: int = REPEATS) -> float:
    """Seconds of the fastest call."""
    clock = time.process_time if threads == 1 else time.perf_counter
    function()
    seconds = []
    for _ in range(repeats):
        start = clock()
        function()
        seconds.append(clock() - start)
    return min(seconds)


def adjoint_error(projector: ConeBeam, volume: np.ndarray, projections: np.ndarray) -> float:
    """``|<A x, p> - <x, A^T p>| / (|A x| |p|)``."""
    forward, back = projector.forward(volume), projector.adjoint(projections)
    left, right = (np.vdot(a.astype(float), b.astype(float)) for a, b in ((forward, projections), (volume, back)))
    return float(abs(left - right) / (np.linalg.norm(forward) * np.linalg.norm(projections)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="128,128,128", metavar="NY,NX,NZ", help="voxels  [default: %(default)s]")
    parser.add_argument("--detector", default="192,192", metavar="COLUMNS,ROWS", help="[default: %(default)s]")
    parser.add_argument("--views", type=int, default=8, help="of the client  [default: %(default)s]")
    parser.add_argument("--threads", type=int, default=1, help="[default: %(default)s]")
    arguments = parser.parse_args()
    default = (arguments.shape, arguments.detector) == ("128,128,128", "192,192")
    ny, nx, nz = (int(size) for size in arguments.shape.split(","))
    scan = ScanOptions(shape=(ny, nx, nz), geometry="cone", views=arguments.views, detector=arguments.detector)
    geometry = scan.settle()
    vectors = geometry.vectors(np.arange(arguments.views))
    projector = ConeBeam((ny, nx, nz), vectors, geometry.columns, geometry.rows, threads=arguments.threads)
    rng = np.random.default_rng(0)
    volume = rng.standard_normal(projector.shape, dtype=np.float32)
    projections = rng.standard_normal((arguments.views, geometry.columns, geometry.rows), dtype=np.float32)
    work: dict[str, Callable[[], object]] = {
        "forward": lambda: projector.forward(volume),
        "adjoint": lambda: projector.adjoint(projections),
        "gradient": lambda: projector.gradient(volume, projections),
        "filtered backprojection": lambda: projector.filtered_backprojection(projections),
    }
    print(f"volume {arguments.shape}, detector {scan.detector}, {arguments.views} views, {arguments.threads} threads")
    print(f"pixels {scan.pixel_size} voxels, source and detector {scan.source_distance} voxels from the axis")
    for name, function in work.items():
        milliseconds = 1e3 * best(function, arguments.threads) / arguments.views
        goal = f"   (goal: {GOALS[name]} ms)" if name in GOALS and default else ""
        print(f"  {name:<26}{milliseconds:8.1f} ms a view{goal}")
    if importlib.util.find_spec("itk") is not None:
        assert geometry.beam is not None
        by_rtk = rtk_joseph.pair((ny, nx, nz), geometry.beam, geometry.angles, geometry.columns, geometry.rows)
        for (name, own), function, array in zip(work.items(), by_rtk, (volume, projections), strict=False):
            both = partial(function, array), own
            # in turn, so that both meet the same load
            times = [[best(each, arguments.threads, 1) for each in both] for _ in range(REPEATS)]
            ratios = [theirs / ours for theirs, ours in times]
            print(f"  RTK's {name} takes {np.median(ratios):.1f} times as long (goal: 3)")
    print(f"  adjoint error {adjoint_error(projector, volume, projections):.1e}")


if __name__ == "__main__":
    main()
