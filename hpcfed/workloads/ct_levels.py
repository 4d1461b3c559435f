"""Coarse-to-fine starts of `hpcfed ct`: the same scan on voxels and pixels of twice the edge, and back.

A coarse voxel has the attenuation of the eight (of a single slice, four) that it stands for. Lengths count in its own
edge, so a line integral is half as long, and each client's coarse projections are half the means of its pixels. On
volumes that are constant in each coarse voxel the fine misfit is then 16 (8) times the coarse one and the fine total
variation 4 (2) times: the coarse problem is the fine one with a quarter of the mu.
"""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcfed import devices
from hpcfed.algorithms.vm_pdfp import VmPdfp, VmPdfpState
from hpcfed.capabilities import Array
from hpcfed.errors import ConfigError
from hpcfed.workloads.ct import CtProblem
from hpcfed.workloads.ct_client import CtClient
from hpcfed.workloads.ct_geometry import Shape, deal

Volume = NDArray[np.float32]

logger = logging.getLogger(__name__)

# Rounds on each coarse level, unless the optimality conditions hold before to this relative residual.
ROUNDS, TOLERANCE = 30, 0.02
# Voxels along the shorter side of the coarsest slices, at least.
LEAST_SIDE = 8
# What mu is multiplied by where voxels and pixels have twice the edge.
MU_RATIO = 0.25


def start(problem: CtProblem) -> Array:
    """The minimum on the next coarser level, nearly, where that level has started in the same way, on the fine one.

    Coarse rounds are vm-pdfp's with exact messages of all clients, and are counted among the run's costs.

    Raises
    ------
    ConfigError
        On all ranks, if the coarsest slices were smaller than `LEAST_SIDE`.
    """
    shape, levels = problem.workload.known("shape"), problem.workload.levels
    most = 1 + max(0, int(math.log2(min(shape[:2]) / LEAST_SIDE)))
    if levels > most:
        raise ConfigError(f"--levels {levels}: slices of {shape[0]} x {shape[1]} have {most} at most").on_all_ranks()
    coarse = coarser(problem)
    x, rounds = solve(coarse, coarse.start())
    logger.info("level %d: %d rounds on %s x %s x %s voxels", coarse.workload.levels, rounds, *x.shape)
    fine, centred = devices.to_host(problem.plain_start()), problem.geometry.kind == "cone"
    start = fine + prolongated(devices.to_host(x) - restricted(fine, centred), shape, centred)
    return problem.fed.any_client.regularizer.project(problem.fed.device.put(start))


def solve(problem: CtProblem, x: Array, rounds: int = ROUNDS) -> tuple[Array, int]:
    """Where vm-pdfp gets in so many rounds, or until it has settled, and after how many."""
    state, number = settled(problem, VmPdfp().init(problem.fed.at(0), x), rounds)
    return VmPdfp().solution(state), number


def settled(
    problem: CtProblem, state: VmPdfpState, rounds: int = ROUNDS, tolerance: float = TOLERANCE
) -> tuple[VmPdfpState, int]:
    """The state of vm-pdfp after so many rounds, or as soon as it has settled, and after how many."""
    method, number = VmPdfp(tol=tolerance), 0
    state = replace(state, residual=1.0)
    while number < rounds and not method.residual(state) <= tolerance:
        number += 1
        state = method.round(state, problem.fed.at(number))
    return state, number


def coarser(problem: CtProblem) -> CtProblem:
    """The problem with voxels and pixels of twice the edge, and one level less; every client bins what it has."""
    fine, fed, geometry = problem.workload, problem.fed, problem.geometry.coarser()
    workload = replace(
        fine, shape=halved(fine.known("shape")), mu=MU_RATIO * fine.known("mu"), levels=max(1, fine.levels - 1)
    )
    dealt = deal(len(geometry.angles), fed)

    def client(number: int, rng: np.random.Generator) -> CtClient:
        projector = geometry.projector(workload.known("shape"), dealt[number], fed.device, fine.projector)
        own = binned(fed.clients[number].projections)
        return CtClient(number, fed.num_clients, geometry, projector, own, workload.regularizer(), {}, fed.ledger.count)

    built = replace(fed, compressor=None).build(client)
    return CtProblem(workload, built, geometry)


def halved(shape: Shape) -> Shape:
    """Voxels of twice the edge that cover a volume."""
    ny, nx, nz = (-(-size // 2) for size in shape)
    return ny, nx, nz


def binned(projections: Array) -> Array:
    """Half the means of two by two pixels (views, columns, rows); a last one without a partner counts for both."""
    p = 0.25 * projections
    p = p[:, 0::2] + p[:, _partners(p.shape[1])]
    p = 0.5 * p
    return p[:, :, 0::2] + p[:, :, _partners(p.shape[2])]


def _partners(size: int) -> list[int]:
    return [min(place + 1, size - 1) for place in range(0, size, 2)]


def prolongated(x: Volume, shape: Shape, centred: bool = False) -> Volume:
    """A coarse volume on the voxels of a fine one of this shape, interpolated linearly.

    Both are centred on the rotation axis, and if ``centred`` on the middle slice; otherwise two slices make one.
    """
    for axis, rows in enumerate(_interpolations(shape, centred)):
        x = _along(axis, rows, x)
    return x


def restricted(x: Volume, centred: bool = False) -> Volume:
    """A fine volume on voxels of twice the edge: means, weighted as `prolongated` weights them."""
    for axis, rows in enumerate(_interpolations(x.shape, centred)):
        means = rows.T.multiply(1 / rows.sum(axis=0)[:, None]).tocsr().astype(np.float32)
        x = _along(axis, means, x)
    return x


def _interpolations(shape: tuple[int, ...], centred: bool) -> list[Any]:
    """For each axis the matrix, fine by coarse, that interpolates along it."""
    from scipy.sparse import csr_array

    matrices = []
    for axis, many in enumerate(shape):
        few = -(-many // 2)
        middle = (many - 1 if axis < 2 or centred else 2 * few - 1) / 2
        place = np.clip((np.arange(many) - middle) / 2 + (few - 1) / 2, 0, few - 1)
        before = np.minimum(place.astype(int), max(few - 2, 0))
        share, fine = place - before, np.arange(many)
        both = np.concatenate([before, np.minimum(before + 1, few - 1)])
        weights = np.concatenate([1 - share, share]).astype(np.float32)
        matrices.append(csr_array((weights, (np.tile(fine, 2), both)), shape=(many, few)))
    return matrices


def _along(axis: int, matrix: Any, x: Volume) -> Volume:
    moved = np.moveaxis(x, axis, 0)
    image = (matrix @ moved.reshape(len(moved), -1)).reshape(-1, *moved.shape[1:])
    return np.ascontiguousarray(np.moveaxis(image, 0, axis))
