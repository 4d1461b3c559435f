#!/usr/bin/env python3
"""Tomography with total variation: hpcfed's methods against PyLops-MPI on the same problem, operators and ranks.

    pip install '.[peers]'
    mpirun -n 2 python scripts/bench_ct_peers.py [--shape 64,64,16] [--views 165] [--detector 96] [--seconds 60]

In the first table everybody minimizes ``1/2 |Ax - b|^2 + mu sum |grad x|`` with hpcfed's compiled projectors, one
client a rank, from the same filtered back-projection. PyLops-MPI's primal-dual method takes a proximal step of the
misfit by some iterations of conjugate gradients (``MPIL2`` over ``MPIVStack``) and one of the variation (``MPIL21``),
with several step sizes. It has the time until the objective is within 1e-2 and 1e-3 of the smallest that any method
found, the PSNR then, the arrays that a rank makes (a second, untimed pass), and the bytes of volumes that it hands over
in a round.

The second: what needs no MPI and knows no total variation, each rank with its share of the slices; SART of scikit-image
and SIRT of ASTRA on the CPU, by time an iteration and the best PSNR. Computing objectives is not timed.
"""

from __future__ import annotations

import argparse
import time
import tracemalloc
from collections.abc import Callable, Iterator

from hpcfed import environment

environment.tune()  # before NumPy and MPI are loaded

import numpy as np  # noqa: E402

from hpcfed.algorithms.fpdfp import Fpdfp  # noqa: E402
from hpcfed.algorithms.vm_pdfp import VmPdfp  # noqa: E402
from hpcfed.federation import Federation  # noqa: E402
from hpcfed.ranks.mpi import MpiCommunicator  # noqa: E402
from hpcfed.streams import Streams  # noqa: E402
from hpcfed.workloads.ct import Ct  # noqa: E402

Trace = list[tuple[float, float, float]]  # seconds, objective, PSNR


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="64,64,16")
    parser.add_argument("--views", type=int, default=165)
    parser.add_argument("--detector", type=int, default=96)
    parser.add_argument("--seconds", type=float, default=60.0, help="for each method at most")
    options = parser.parse_args()
    world = MpiCommunicator()
    shape = tuple(map(int, options.shape.split(",")))
    workload = Ct(shape=shape, views=options.views, detector=options.detector, clients=world.size)
    problem = workload.build(Federation(world.size, streams=Streams(0), communicator=world))
    start = problem.start()

    methods: dict[str, Callable[[], Iterator[np.ndarray]]] = {
        "fpdfp": lambda: ours(problem, Fpdfp(step="1.9/L", lam=0.05), start),
        "vm-pdfp": lambda: ours(problem, VmPdfp(), start),
        "vm-pdfp, plain metric": lambda: ours(problem, VmPdfp(metric="plain"), start),
    }
    for inner in (2, 10):
        for tau in (1e-3, 1e-2, 1e-1):
            methods[f"pylops-mpi, {inner} inner, tau = {tau:g}"] = lambda inner=inner, tau=tau: theirs(
                world, problem, start, inner, tau
            )
    traces = {name: follow(world, problem, method, options.seconds) for name, method in methods.items()}
    sizes = {name: footprint(world, problem, method) for name, method in methods.items()}
    others: dict[str, Callable[[], Iterator[np.ndarray]]] = {
        "SART, scikit-image": lambda: slicewise(world, problem, sart),
        "SIRT, ASTRA": lambda: slicewise(world, problem, sirt),
    }
    plain = {name: follow(world, problem, method, options.seconds) for name, method in others.items()}
    if world.rank == 0:
        report(traces, sizes, world.size, shape)
        print(f"\n{'':34}{'ms a round':>11}{'best PSNR':>11}{'after s':>11}")
        for name, trace in plain.items():
            seconds, _, psnr = max(trace, key=lambda point: point[2])
            print(f"{name:34}{pace(trace):11.1f}{psnr:11.2f}{seconds:11.2f}")


def follow(
    world: MpiCommunicator, problem: object, method: Callable[[], Iterator[np.ndarray]], seconds: float
) -> Trace:
    """The objective of a method's iterates over its own time, until the time is over."""
    fed, spent, trace = problem.fed, 0.0, []  # type: ignore[attr-defined]
    iterates = method()
    while spent < seconds:
        world.wait()
        begin = time.perf_counter()
        x = next(iterates)
        spent += float(world.maximum(np.array([time.perf_counter() - begin]))[0])
        metrics = problem.metrics(x, fed.beside(1))  # type: ignore[attr-defined]
        trace.append((spent, metrics["objective"], metrics["psnr"]))
    return trace


def footprint(
    world: MpiCommunicator, problem: object, method: Callable[[], Iterator[np.ndarray]], rounds: int = 3
) -> tuple[float, float]:
    """MB of arrays that a method has at most on a rank, and MB that a rank hands over in a round."""
    ledger = problem.fed.ledger  # type: ignore[attr-defined]
    tracemalloc.start()
    iterates = method()
    next(iterates)
    before = ledger.traffic["wire_bytes_up"]
    for _ in range(rounds):
        next(iterates)
    sent = (ledger.traffic["wire_bytes_up"] - before) / rounds
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return tuple((world.maximum(np.array([most, sent])) / 1e6).tolist())


def ours(problem: object, method: object, start: np.ndarray) -> Iterator[np.ndarray]:
    """A method of hpcfed, its set-up in the first iterate's time."""
    fed = problem.fed  # type: ignore[attr-defined]
    state = method.init(fed.at(0), start)  # type: ignore[attr-defined]
    number = 0
    while True:
        number += 1
        state = method.round(state, fed.at(number))  # type: ignore[attr-defined]
        yield method.solution(state)  # type: ignore[attr-defined]


def theirs(world: MpiCommunicator, problem: object, start: np.ndarray, inner: int, tau: float) -> Iterator[np.ndarray]:
    """PyLops-MPI's primal-dual method, an iteration at a time."""
    import pylops
    from pylops_mpi import DistributedArray, MPILinearOperator, Partition, StackedDistributedArray
    from pylops_mpi.basicoperators import MPIStackedVStack, MPIVStack
    from pylops_mpi.proximal import MPIL2, MPIL21

    client = problem.fed.any_client  # type: ignore[attr-defined]
    projector, shape = client.projector, start.shape

    class Projections(pylops.LinearOperator):
        def _matvec(self, x: np.ndarray) -> np.ndarray:
            return projector.forward(np.ascontiguousarray(x.reshape(shape), np.float32)).ravel()

        def _rmatvec(self, y: np.ndarray) -> np.ndarray:
            problem.fed.ledger.send(wire_bytes_up=4 * start.size)  # type: ignore[attr-defined]
            return projector.adjoint(np.ascontiguousarray(y.reshape(client.projections.shape), np.float32)).ravel()

    local = Projections(dtype=np.float32, shape=(client.projections.size, start.size))
    stack = MPIVStack([local])
    measured = DistributedArray(
        global_shape=stack.shape[0], local_shapes=stack.local_shapes_n, partition=Partition.SCATTER, dtype=np.float32
    )
    measured[:] = client.projections.ravel()

    def everywhere(values: np.ndarray) -> object:
        array = DistributedArray(global_shape=start.size, partition=Partition.BROADCAST, dtype=np.float32)
        array[:] = values
        return array

    differences = [
        MPILinearOperator(pylops.FirstDerivative(shape, axis=axis, kind="forward", dtype=np.float32))
        for axis in range(3)
    ]
    gradient = MPIStackedVStack(differences)
    misfit = MPIL2(Op=stack, b=measured, x0=everywhere(start.ravel()), niter=inner, warm=True)
    variation = MPIL21(ndim=3, sigma=problem.workload.mu)  # type: ignore[attr-defined]
    mu = 0.99 / (tau * client.regularizer.norm_bound)
    x = everywhere(start.ravel())
    extrapolated = x.copy()
    dual = StackedDistributedArray([everywhere(np.zeros(start.size, np.float32)) for _ in range(3)])
    while True:  # as in pylops_mpi.proximal.optimization.primaldual.PrimalDual, which has no way to stop in between
        dual = variation.proxdual(dual + gradient.matvec(extrapolated) * mu, mu)
        old = x.copy()
        x = misfit.prox(x - gradient.rmatvec(dual) * tau, tau)
        extrapolated = x + (x - old)
        yield x.local_array.reshape(shape).astype(np.float32)


def slicewise(
    world: MpiCommunicator, problem: object, method: Callable[[np.ndarray, np.ndarray, int], Iterator[np.ndarray]]
) -> Iterator[np.ndarray]:
    """Iterates of a method for single slices, each rank with its share of them; all views are gathered first."""
    client = problem.fed.any_client  # type: ignore[attr-defined]
    told = world.gather((client.projector.angles, client.projections))
    angles, projections = (np.concatenate(parts) for parts in zip(*told, strict=True))
    order = np.argsort(angles)
    ny, nx, nz = problem.workload.shape  # type: ignore[attr-defined]
    own = np.array_split(np.arange(nz), world.size)[world.rank]
    slices = [method(angles[order], projections[order][:, :, z], nx) for z in own]
    while True:
        volume = np.stack([next(each) for each in slices], axis=2) if slices else np.empty((ny, nx, 0), np.float32)
        yield np.ascontiguousarray(np.concatenate(world.gather(volume), axis=2), np.float32)


def sart(angles: np.ndarray, sinogram: np.ndarray, width: int) -> Iterator[np.ndarray]:
    """scikit-image reconstructs as many pixels as the detector has columns, about one of them instead of the middle."""
    from scipy.ndimage import shift
    from skimage.transform import iradon_sart

    columns = sinogram.shape[1]
    centre, image = np.arange(columns) - columns // 2 + (columns - 1) / 2, None
    shifted = np.stack([np.interp(centre, np.arange(columns), row) for row in sinogram], axis=1)
    first = (columns - width) // 2
    while True:
        image = iradon_sart(shifted, theta=np.rad2deg(angles), image=image)
        off = columns // 2 - (columns - 1) / 2
        yield shift(image, (-off, -off), order=3)[first : first + width, first : first + width]


def sirt(angles: np.ndarray, sinogram: np.ndarray, width: int) -> Iterator[np.ndarray]:
    import astra

    volumes = astra.create_vol_geom(width, width)
    rays = astra.create_proj_geom("parallel", 1.0, sinogram.shape[1], angles)
    data, image = astra.data2d.create("-sino", rays, sinogram), astra.data2d.create("-vol", volumes)
    settings = astra.astra_dict("SIRT")
    settings |= {
        "ProjectorId": astra.create_projector("linear", rays, volumes),
        "ProjectionDataId": data,
        "ReconstructionDataId": image,
    }
    algorithm = astra.algorithm.create(settings)
    while True:
        astra.algorithm.run(algorithm, 1)
        yield astra.data2d.get(image)


def pace(trace: Trace) -> float:
    """Milliseconds a round."""
    return 1e3 * (trace[-1][0] - trace[0][0]) / max(1, len(trace) - 1)


def report(traces: dict[str, Trace], sizes: dict[str, tuple[float, float]], ranks: int, shape: tuple[int, ...]) -> None:
    best = min(objective for trace in traces.values() for _, objective, _ in trace)
    print(f"\n{ranks} ranks, volume {shape}, smallest objective {best:.6g}")
    heads = ("ms a round", "s to 1e-2", "s to 1e-3", "PSNR then", "end, rel.", "MB", "MB sent")
    print(" " * 34 + "".join(f"{head:>11}" for head in heads))
    for name, trace in traces.items():
        times = []
        for gap in (1e-2, 1e-3):
            there = next((point for point in trace if point[1] <= best * (1 + gap)), None)
            times.append("-" if there is None else f"{there[0]:.2f}")
            psnr = "-" if there is None else f"{there[2]:.2f}"
        numbers = f"{pace(trace):11.1f}{times[0]:>11}{times[1]:>11}{psnr:>11}{trace[-1][1] / best - 1:11.1e}"
        print(f"{name:34}{numbers}{sizes[name][0]:11.1f}{sizes[name][1]:11.2f}")


if __name__ == "__main__":
    main()
