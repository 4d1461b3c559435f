"""Where the rays of a scan run: the geometries of `hpcfed ct`, and the projectors that compute with them."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from hpcfed.devices import Device
from hpcfed.federation import Federation
from hpcfed.scans.beam import Beam
from hpcfed.streams import Purpose

Shape = tuple[int, int, int]
Kind = Literal["parallel", "fan", "cone"]

# A gap of more than so many mean steps between views leaves a scan less than a turn.
WIDE_GAP = 3.0


@dataclass(frozen=True, eq=False)
class Geometry:
    """What the projections of a scan mean; lengths are in units of a voxel's edge.

    Attributes
    ----------
    kind : of a parallel or a fan beam, every slice has its detector row; a cone beam crosses the slices.
    angles : of the views, in radians.
    columns, rows : of the detector.
    axis : detector column on which the rotation axis falls.
    beam : source and detector of a fan or cone beam; its vectors, if any, are those of the views.
    scale : what the attenuations were divided by.
    voxel : edge of a voxel in the scan's own unit of length, where it is known.
    """

    kind: Kind
    angles: NDArray[np.float64]
    columns: int
    rows: int
    axis: float
    beam: Beam | None = None
    scale: float = 1.0
    voxel: float | None = None

    def projector(self, shape: Shape, views: NDArray[np.integer], device: Device, method: str) -> Any:
        """The projector of a client that has these views; ``method`` is the way to project a parallel beam on a CPU."""
        return PROJECTORS[self.kind](self, shape, views, device, method)

    def vectors(self, views: NDArray[np.integer]) -> NDArray[np.float64]:
        """Source, detector middle, column step and row step of some views of a fan or cone beam, (views, 12)."""
        assert self.beam is not None
        if self.beam.vectors is not None:
            return np.asarray(self.beam.vectors[views])
        return self.beam.poses(self.angles[views], self.columns, self.rows)

    def coarser(self) -> Geometry:
        """The same scan with voxels and pixels of twice the edge, lengths in the new voxels."""
        columns, rows = -(-self.columns // 2), -(-self.rows // 2)
        beam = self.beam
        if beam is not None:
            beam = replace(
                beam,
                source_distance=beam.source_distance / 2,
                detector_distance=beam.detector_distance / 2,
                axis=(beam.axis - 0.5) / 2,
                middle=(beam.middle - 0.5) / 2,
                vectors=None if beam.vectors is None else self._coarser_vectors(beam.vectors),
            )
        return replace(
            self,
            columns=columns,
            rows=rows,
            axis=(self.axis - 0.5) / 2,
            beam=beam,
            voxel=None if self.voxel is None else 2 * self.voxel,
        )

    def _coarser_vectors(self, vectors: NDArray[np.float64]) -> NDArray[np.float64]:
        """Half the lengths but for the steps between pixels; with odd numbers of these the middle moves."""
        source, middle, u, v = np.split(vectors, 4, axis=1)
        middle = middle + self.columns % 2 / 2 * u + self.rows % 2 / 2 * v
        return np.concatenate([source / 2, middle / 2, u, v], axis=1)

    @property
    def arc(self) -> tuple[float, float] | None:
        """First angle and extent of a scan that leaves a gap in the turn; None for a whole turn."""
        count = len(self.angles)
        turned = np.sort(self.angles % (2 * np.pi))
        gaps = np.diff(turned, append=turned[0] + 2 * np.pi)
        widest = int(gaps.argmax())
        covered = 2 * np.pi - float(gaps[widest])
        if count < 3 or gaps[widest] <= WIDE_GAP * covered / (count - 1):
            return None
        step = covered / (count - 1)
        return float(turned[(widest + 1) % count]) - step / 2, covered + step

    def slopes(self, shape: Shape) -> NDArray[np.float64] | None:
        """Of the rays through the middle of each slice, on average over the views; None where all are level."""
        if self.kind != "cone":
            return None
        x, y, z = self.vectors(np.arange(len(self.angles)))[:, :3].T
        rises = np.arange(shape[2]) - (shape[2] - 1) / 2 - z[:, None]
        return np.asarray(np.mean(np.abs(rises) / np.hypot(x, y)[:, None], axis=0))

    def unseen(self, shape: Shape) -> NDArray[np.bool_] | None:
        """Which columns (y, x) of a volume some views miss, their middle being beside the detector; None where none."""
        if self.beam is not None and self.beam.vectors is not None:
            return None  # of poses of their own this is not known
        axis = self.axis if self.beam is None else self.beam.axis
        radius = min(axis, self.columns - 1 - axis) + 0.5
        if self.beam is not None:
            way = self.beam.source_distance + self.beam.detector_distance
            radius = self.beam.source_distance * math.sin(math.atan(radius * self.beam.pixel_size[0] / way))
        missed = from_axis(shape) > radius
        return missed if missed.any() else None

    @property
    def density(self) -> float:
        """Rays of one view that meet a voxel at the rotation axis."""
        if self.beam is None:
            return 1.0
        width, height = (size / self.beam.magnification for size in self.beam.pixel_size)
        return 1 / (width * height if self.kind == "cone" else width)

    @property
    def compiled(self) -> tuple[str, ...]:
        """Modules with compiled kernels that the projectors load."""
        if self.beam is None:
            return ("hpcfed.operators.parallel_beam_kernels",)
        from hpcfed.operators.cone_beam import FEW_SLICES, is_upright

        if self.kind == "fan" and self.rows <= FEW_SLICES:
            return ("hpcfed.operators.fan_beam_kernels",)
        upright = self.kind == "fan" or is_upright(self.vectors(np.arange(len(self.angles))))
        return (f"hpcfed.operators.{'cone' if upright else 'tilted'}_beam_kernels",)

    def notes(self) -> list[str]:
        """What was found, a sentence each."""
        if self.beam is None:
            return [f"rotation axis at detector column {self.axis:.2f}"]
        arc = self.arc
        turn = "a whole turn" if arc is None else f"{np.rad2deg(arc[1]):.4g} degrees"
        source, detector = self.beam.source_distance, self.beam.detector_distance
        return [f"{self.kind} beam over {turn}, source {source:.5g} and detector {detector:.5g} voxels from the axis"]

    def attributes(self) -> dict[str, Any]:
        """For ``result.h5``."""
        attributes: dict[str, Any] = {
            "beam": BEAMS[self.kind],
            "angles": "radian, counter-clockwise, in the dataset geometry",
            "detector_columns": self.columns,
            "detector_rows": self.rows,
            "rotation_axis": self.axis,
            "voxel_size": 1.0,
            "detector_pixel_size": 1.0,
            "attenuation_scale": self.scale,
        }
        if self.beam is not None:
            attributes |= {
                "detector_pixel_size": self.beam.pixel_size,
                "source_distance": self.beam.source_distance,
                "detector_distance": self.beam.detector_distance,
                "source_row": self.beam.middle,
                "distances": "from the rotation axis, in voxels",
            }
        if self.voxel is not None:
            attributes["voxel_edge"] = self.voxel
        return attributes


BEAMS: Mapping[Kind, str] = {
    "parallel": "parallel, rotation axis parallel to the slices' axis",
    "fan": "fan in every slice, rotation axis parallel to the slices' axis",
    "cone": "cone, rotation axis parallel to the slices' axis",
}


def covering(shape: Shape, columns: int, rows: int, source: float, detector: float) -> tuple[float, float]:
    """Width and height of pixels with which a centred detector just sees the whole volume from every angle."""
    radius = np.hypot(shape[0], shape[1]) / 2
    width = 2 * (source + detector) * radius / np.sqrt(source**2 - radius**2) / columns
    height = shape[2] * (source + detector) / (source - radius) / rows
    return float(width), float(height)


def deal(num_views: int, fed: Federation) -> list[NDArray[np.int64]]:
    """The views of each client, sorted: a random permutation cut into nearly equal parts, the first ones larger."""
    order = fed.streams.generator(Purpose.SPLIT).permutation(num_views)
    return [np.sort(part) for part in np.array_split(order, fed.num_clients)]


def inscribed(shape: Shape) -> NDArray[np.bool_]:
    """Which columns (y, x) of a volume have their middle in the largest upright cylinder about its rotation axis."""
    return np.asarray(from_axis(shape) <= min(shape[:2]) / 2)


def from_axis(shape: Shape) -> NDArray[np.float64]:
    """Distances of a volume's columns (y, x) from its rotation axis."""
    ny, nx, _ = shape
    y, x = np.arange(ny)[:, None] - (ny - 1) / 2, np.arange(nx) - (nx - 1) / 2
    return np.asarray(np.hypot(y, x))


def _parallel(geometry: Geometry, shape: Shape, views: NDArray[np.integer], device: Device, method: str) -> Any:
    angles, columns, axis = geometry.angles[views], geometry.columns, geometry.axis
    if device.is_gpu:
        from hpcfed.operators.parallel_beam_cuda import CudaParallelBeam

        return CudaParallelBeam(shape, angles, columns, axis, device=device.index, memory=device.memory)
    if method == "astra":
        from hpcfed.operators.parallel_beam_astra import AstraParallelBeam

        return AstraParallelBeam(shape, angles, columns, axis)
    from hpcfed.operators.parallel_beam import ParallelBeam

    return ParallelBeam(shape, angles, columns, axis)


def _fan(geometry: Geometry, shape: Shape, views: NDArray[np.integer], device: Device, method: str) -> Any:
    if device.is_gpu:
        from hpcfed.operators.cone_beam_cuda import CudaFanBeam as OnGpu

        own = {"device": device.index, "memory": device.memory}
        return OnGpu(shape, geometry.vectors(views), geometry.columns, arc=geometry.arc, **own)
    from hpcfed.operators.cone_beam import FanBeam

    return FanBeam(shape, geometry.vectors(views), geometry.columns, arc=geometry.arc, threads=_threads())


def _cone(geometry: Geometry, shape: Shape, views: NDArray[np.integer], device: Device, method: str) -> Any:
    if device.is_gpu:
        from hpcfed.operators.cone_beam_cuda import CudaConeBeam as OnGpu

        own = {"device": device.index, "memory": device.memory}
        return OnGpu(shape, geometry.vectors(views), geometry.columns, geometry.rows, arc=geometry.arc, **own)
    from hpcfed.operators.cone_beam import ConeBeam

    vectors, detector = geometry.vectors(views), (geometry.columns, geometry.rows)
    return ConeBeam(shape, vectors, *detector, arc=geometry.arc, threads=_threads())


def _threads() -> int:
    """What OMP_NUM_THREADS allows: the bits are the same on any number."""
    first = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return max(1, int(first)) if first.isdecimal() else 1


# Another geometry takes its place here.
PROJECTORS: Mapping[Kind, Callable[[Geometry, Shape, NDArray[np.integer], Device, str], Any]] = {
    "parallel": _parallel,
    "fan": _fan,
    "cone": _cone,
}
