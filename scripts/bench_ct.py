"""Time the operators of CT reconstruction on this machine, one core, one client.

Every ratio is taken between times of this one run; a time is the best of several calls. The goals are those of the
project: they are printed, not enforced.

    OMP_NUM_THREADS=1 python scripts/bench_ct.py --shape 256,256,64 --views 39 --columns 512
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import astra
import numpy as np
import scipy.sparse

from hpcfed.operators.parallel_beam import ParallelBeam
from hpcfed.operators.total_variation import TotalVariation

REPEATS = 7
ASTRA_SLICES = 3


@dataclass(frozen=True)
class Row:
    """A line of the table: a time, and what it is compared with."""

    name: str
    seconds: float
    remark: str = ""


@dataclass(frozen=True)
class Case:
    """One client's problem with random contents."""

    projector: ParallelBeam
    volume: np.ndarray[Any, Any]
    projections: np.ndarray[Any, Any]

    @classmethod
    def make(cls, shape: tuple[int, int, int], num_views: int, num_columns: int) -> Case:
        rng = np.random.default_rng(0)
        angles = np.sort(rng.uniform(0, np.pi, num_views))
        volume = rng.standard_normal(shape, dtype=np.float32)
        projections = rng.standard_normal((num_views, num_columns, shape[2]), dtype=np.float32)
        return cls(ParallelBeam(shape, angles, num_columns), volume, projections)


def best(functions: dict[str, Callable[[], object]], repeats: int = REPEATS) -> dict[str, float]:
    """Seconds of each function's fastest call. They take turns, so that a busy moment hits all of them alike."""
    for function in functions.values():
        function()
    seconds = dict.fromkeys(functions, float("inf"))
    for _ in range(repeats):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            seconds[name] = min(seconds[name], time.perf_counter() - start)
    return seconds


def projection_rows(case: Case) -> tuple[list[Row], float]:
    """Projections against ASTRA and SciPy; also the time of a forward and a back projection."""
    projector, volume, data = case.projector, case.volume, case.projections
    projections, image = np.empty_like(data), np.empty_like(volume)
    matrix = astra_matrix(projector)
    pixels, rays = volume.reshape(-1, volume.shape[2]), data.reshape(-1, data.shape[2])
    seconds = best(
        {
            "forward": lambda: projector.forward(volume, out=projections),
            "adjoint": lambda: projector.adjoint(data, out=image),
            "gradient": lambda: projector.gradient(volume, data, 2.0, out=image),
            "unfused": lambda: unfused_gradient(projector, volume, data, projections, image),
            "misfit": lambda: projector.misfit(volume, data),
            "filtered": lambda: projector.filtered_backprojection(data),
            "csr forward": lambda: matrix @ pixels,
            "csr adjoint": lambda: matrix.T @ rays,
        }
    )
    forward, adjoint, gradient, unfused = (seconds[key] for key in ("forward", "adjoint", "gradient", "unfused"))
    csr_forward, csr_adjoint = seconds["csr forward"], seconds["csr adjoint"]
    pair, csr_pair, astra_pair = forward + adjoint, csr_forward + csr_adjoint, astra_seconds(case)
    megabytes = (matrix.data.nbytes + matrix.indices.nbytes + matrix.indptr.nbytes) / 1e6
    return [
        Row("forward", forward, f"scipy CSR / this = {csr_forward / forward:.1f}  (goal >= 1)"),
        Row("adjoint", adjoint, f"scipy CSR / this = {csr_adjoint / adjoint:.1f}  (goal >= 1)"),
        Row("pair", pair, f"holds {projector.nbytes / 1e6:.1f} MB, scratch included"),
        Row("  ASTRA, slice by slice", astra_pair, f"/ pair = {astra_pair / pair:.0f}  (goal >= 10)"),
        Row("  scipy CSR", csr_pair, f"/ pair = {csr_pair / pair:.1f}; holds {megabytes:.0f} MB"),
        Row("gradient, fused", gradient, f"/ pair = {gradient / pair:.2f}"),
        Row("  gradient, unfused", unfused, f"fused / unfused = {gradient / unfused:.2f}  (goal < 1)"),
        Row("misfit", seconds["misfit"], f"/ forward = {seconds['misfit'] / forward:.2f}"),
        Row("filtered backprojection", seconds["filtered"], f"/ pair = {seconds['filtered'] / pair:.2f}"),
    ], pair


def unfused_gradient(projector: ParallelBeam, volume: Any, data: Any, projections: Any, image: Any) -> None:
    """What the fused gradient replaces."""
    projector.forward(volume, out=projections)
    np.subtract(projections, data, out=projections)
    projector.adjoint(projections, out=image)
    np.multiply(image, np.float32(2), out=image)


@contextmanager
def astra_projector(projector: ParallelBeam) -> Iterator[int]:
    """ASTRA's 2D CPU projector of the same slices."""
    ny, nx, _ = projector.shape
    geometry = astra.create_proj_geom("parallel", 1.0, projector.num_columns, projector.angles)
    identifier = astra.create_projector("linear", geometry, astra.create_vol_geom(ny, nx))
    yield identifier
    astra.projector.delete(identifier)


def astra_matrix(projector: ParallelBeam) -> scipy.sparse.csr_array:
    """ASTRA's weights of one slice."""
    with astra_projector(projector) as reference:
        identifier = astra.projector.matrix(reference)
        matrix = scipy.sparse.csr_array(astra.matrix.get(identifier).astype(np.float32))
        astra.matrix.delete(identifier)
    return matrix


def astra_seconds(case: Case) -> float:
    """Seconds of ASTRA's forward and back projection of all slices, scaled up from a few."""
    num_slices = min(case.projector.shape[2], ASTRA_SLICES)
    images = [np.ascontiguousarray(case.volume[:, :, z]) for z in range(num_slices)]
    sinograms = [np.ascontiguousarray(case.projections[:, :, z]) for z in range(num_slices)]
    sinogram, image = np.empty_like(sinograms[0]), np.empty_like(images[0])
    with astra_projector(case.projector) as reference:
        seconds = best(
            {
                "forward": lambda: [astra.projector.direct_FP(reference, x, out=sinogram) for x in images],
                "adjoint": lambda: [astra.projector.direct_BP(reference, p, out=image) for p in sinograms],
            },
            2,
        )
    return (seconds["forward"] + seconds["adjoint"]) * case.projector.shape[2] / num_slices


def regularizer_rows(case: Case, pair: float) -> list[Row]:
    """The TV step against the pair of projections and against plain NumPy."""
    regularizer = TotalVariation(case.volume.shape, weight=0.5, nonnegative=True)
    x, v = case.volume, regularizer.apply(case.volume)
    slope = np.random.default_rng(1).standard_normal(x.shape, dtype=np.float32)
    gamma, lam = 0.5, 1 / 12
    seconds = best(
        {
            "step": lambda: regularizer.step(x, v, slope, gamma, lam),
            "plain": lambda: numpy_step(x, v, slope, gamma, lam, regularizer.weight),
            "value": lambda: regularizer.value(x),
        }
    )
    step = seconds["step"]
    return [
        Row("TV step", step, f"/ pair = {step / pair:.2f}  (goal <= 0.4)"),
        Row("  plain NumPy", seconds["plain"], f"/ step = {seconds['plain'] / step:.1f}"),
        Row("TV value", seconds["value"], f"/ step = {seconds['value'] / step:.2f}"),
    ]


def numpy_step(x: Any, v: Any, slope: Any, gamma: float, lam: float, weight: float) -> tuple[Any, Any]:
    """The TV step as one writes it down."""

    def transpose(field: Any) -> Any:
        out = np.zeros_like(x)
        for axis in range(3):
            component, target = np.moveaxis(field[axis], axis, 0)[:-1], np.moveaxis(out, axis, 0)
            target[1:] += component
            target[:-1] -= component
        return out

    predicted = np.maximum(x - gamma * slope - gamma * transpose(v), 0)
    field = [np.diff(predicted, axis=axis, append=np.take(predicted, [-1], axis=axis)) for axis in range(3)]
    dual = np.stack(field) * (lam / gamma) + v
    dual /= np.maximum(1, np.linalg.norm(dual, axis=0) / weight)
    return np.maximum(x - gamma * slope - gamma * transpose(dual), 0) - x, dual


def show(title: str, rows: list[Row]) -> None:
    print(f"\n{title}")
    for row in rows:
        print(f"  {row.name:<26}{1e3 * row.seconds:9.1f} ms   {row.remark}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="256,256,64", metavar="NY,NX,NZ", help="voxels  [default: %(default)s]")
    parser.add_argument("--views", type=int, default=39, help="of the client  [default: %(default)s]")
    parser.add_argument("--columns", type=int, default=512, help="of the detector  [default: %(default)s]")
    arguments = parser.parse_args()
    ny, nx, nz = (int(size) for size in arguments.shape.split(","))
    case = Case.make((ny, nx, nz), arguments.views, arguments.columns)
    print(f"volume {ny} x {nx} x {nz}, {arguments.views} views of {arguments.columns} columns, best of {REPEATS}")
    rows, pair = projection_rows(case)
    show("projections", rows)
    show("total variation", regularizer_rows(case, pair))


if __name__ == "__main__":
    main()
