"""The options of `hpcfed ct` that say how a volume is scanned, and the simulated scan that they describe."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated, Any

import numpy as np
from annotated_types import Ge, Gt
from numpy.typing import NDArray

from hpcfed.errors import ConfigError
from hpcfed.options import option
from hpcfed.scans.beam import Beam
from hpcfed.scans.model import Scan
from hpcfed.workloads.ct_geometry import Geometry, Kind, covering

Size = Annotated[int, Ge(1)]
Length = Annotated[float, Gt(0)]

# Distance of a simulated source from the axis, in diagonals of a slice, and detector rows for each of its columns.
FAR, TALL = 2.0, 0.75
# Weight of the total variation for each view: within a factor of two of the best for a phantom and a chest with the
# default noise, more views than needed or a few. With more rays a view, the noise in a gradient grows with their root.
MU_FOR_A_VIEW = 0.0075
# Of a cone, weight for the root of the rays through a voxel, in all views: as the noise in the whole gradient grows. Of
# 60 to 1500 rays the best of the few tried for a phantom and a chest, after 40 rounds, was 0.4 of it to once.
MU_FOR_ROOT_OF_RAYS = 0.06


@dataclass(frozen=True)
class ScanOptions:
    """How a volume is scanned. What is left out is settled by `settle`, or by the measured scan."""

    shape: tuple[Size, Size, Size] | None = option(
        None, "volume: rows, columns, slices  [default: 256,256,64; of a scan: from its detector]", metavar="NY,NX,NZ"
    )
    geometry: Kind | None = option(
        None, "the beam  [default: parallel; of a scan: its own]", metavar="parallel|fan|cone"
    )
    views: Size | None = option(
        None, "views over 360 degrees, of a parallel beam over 180  [default: 668; of a scan: all]"
    )
    detector: int | str | None = option(
        None,
        "detector columns, and rows of a cone beam's  [default: 512, and 384; of a scan: its own]",
        metavar="COLUMNS[,ROWS]",
    )
    source_distance: Length | None = option(
        None, "from the rotation axis to the source, in voxels  [default: twice a slice's diagonal]"
    )
    detector_distance: Length | None = option(
        None, "from the rotation axis to the detector, in voxels  [default: the source distance]"
    )
    pixel_size: float | str | None = option(
        None,
        "pixels of a fan or cone beam's detector, in voxels  [default: so that the whole volume is just seen]",
        metavar="WIDTH[,HEIGHT]",
    )

    def known(self, name: str) -> Any:
        """An option that has its value by now."""
        value = getattr(self, name)
        assert value is not None, name
        return value

    def fill(self, **defaults: Any) -> None:
        """Give options that were left out their value."""
        for name, default in defaults.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, default)

    def refuse_given(self, *names: str, because: str) -> None:
        """Refuse options that have no meaning here.

        Raises
        ------
        ConfigError
        """
        for name in names:
            if getattr(self, name) is not None:
                raise ConfigError(f"--{name.replace('_', '-')} {getattr(self, name)}: leave it out with {because}")

    def settle(self) -> Geometry:
        """Give every option of a simulated scan its value; the geometry that they describe.

        Raises
        ------
        ConfigError
            If options contradict each other or describe no scan from outside the volume.
        """
        self.fill(geometry="parallel", shape=(256, 256, 64), views=668)
        kind, shape, views = self.known("geometry"), self.known("shape"), self.known("views")
        self.fill(detector="512,384" if kind == "cone" else 512)
        columns, *rest = _numbers("detector", self.detector, int)
        if rest and kind != "cone":
            raise ConfigError(
                f"--detector {self.detector}: a {kind} beam has a detector row for each slice: give COLUMNS alone"
            )
        rows = shape[2] if kind != "cone" else rest[0] if rest else max(1, round(TALL * columns))
        object.__setattr__(self, "detector", f"{columns},{rows}" if kind == "cone" else columns)
        axis = (columns - 1) / 2
        if kind == "parallel":
            self.refuse_given("source_distance", "detector_distance", "pixel_size", because="--geometry parallel")
            return Geometry(kind, np.linspace(0, np.pi, views, endpoint=False), columns, rows, axis)
        radius = math.hypot(*shape[:2]) / 2
        self.fill(source_distance=round(2 * FAR * radius, 2))
        self.fill(detector_distance=self.source_distance)
        source, detector = self.known("source_distance"), self.known("detector_distance")
        if source <= radius:
            raise ConfigError(
                f"--source-distance {source:g}: must exceed {radius:.4g}, half the diagonal of a slice of --shape"
            )
        width, height = (float(f"{size:.6g}") for size in covering(shape, columns, rows, source, detector))
        self.fill(pixel_size=f"{width},{height}" if kind == "cone" else width)
        width, *rest = _numbers("pixel_size", self.pixel_size, float)
        beam = Beam(source, detector, (width, rest[0] if rest else width), axis, (rows - 1) / 2)
        angles = np.linspace(0, 2 * np.pi, views, endpoint=False)
        return Geometry(kind, angles, columns, rows, axis, beam)

    def adopt(
        self, scan: Scan, views: NDArray[np.integer], axis: float | None
    ) -> tuple[Geometry, tuple[int, int, int], slice]:
        """The geometry of some views of a measured scan, the shape of its volume, and the detector rows to read.

        ``axis`` is the detector column of the rotation axis; for a fan or cone beam None stands for the scan's own.

        Raises
        ------
        ConfigError
            On all ranks, if an option contradicts the scan.
        """
        kind: Kind = "parallel" if scan.beam is None else "fan" if scan.num_rows == 1 else "cone"
        if self.geometry not in (None, kind):
            raise ConfigError(f"--geometry {self.geometry}: {scan.path} has a {kind} beam: leave it out").on_all_ranks()
        columns, rows = scan.num_columns, scan.num_rows
        given = [columns] if self.detector is None else _numbers("detector", self.detector, int)
        if given != [columns, rows][: len(given)]:
            raise ConfigError(
                f"--detector {self.detector}: {scan.path} has {columns} columns and {rows} rows: leave it out"
            ).on_all_ranks()
        if axis is not None and not 0 <= axis <= columns - 1:
            raise ConfigError(
                f"--axis {axis:g}: {scan.path} has columns 0 to {columns - 1}: give one of them, or leave it out"
            ).on_all_ranks()
        shape = self.shape or _shown(scan)
        if kind != "cone" and shape[2] > rows:
            raise ConfigError(
                f"--shape {','.join(map(str, shape))}: {scan.path} has {rows} detector rows, one a slice"
            ).on_all_ranks()
        first = 0 if kind == "cone" else (rows - shape[2]) // 2
        span = slice(first, rows if kind == "cone" else first + shape[2])
        height = span.stop - span.start
        if scan.beam is None:
            assert axis is not None
            return Geometry(kind, scan.angles[views], columns, height, axis, voxel=scan.voxel), shape, span
        beam = scan.beam
        if beam.vectors is not None:
            if axis is not None:
                raise ConfigError(
                    f"--axis {axis:g}: {scan.path} says where each view was taken: leave it out"
                ).on_all_ranks()
            beam = replace(beam, vectors=beam.vectors[views])
        elif axis is not None:
            beam = replace(beam, axis=axis)
        return Geometry(kind, scan.angles[views], columns, height, beam.axis, beam, voxel=scan.voxel), shape, span


def usual_mu(geometry: Geometry) -> float:
    """The weight of the total variation where none is given."""
    views, density = len(geometry.angles), geometry.density
    if geometry.kind == "cone":
        return MU_FOR_ROOT_OF_RAYS * math.sqrt(views * density)
    return MU_FOR_A_VIEW * views * math.sqrt(density)


def _shown(scan: Scan) -> tuple[int, int, int]:
    """Voxels of a volume that the detector shows: as wide, as deep and as high as it is at the rotation axis."""
    if scan.beam is None:
        return scan.num_columns, scan.num_columns, scan.num_rows
    width, height = (size / scan.beam.magnification for size in scan.beam.pixel_size)
    side = max(1, round(scan.num_columns * width))
    return side, side, max(1, round(scan.num_rows * height)) if scan.num_rows > 1 else 1


def _numbers(name: str, value: Any, kind: type) -> list[Any]:
    """One or two positive numbers, separated by a comma."""
    dashed = name.replace("_", "-")
    try:
        numbers = [kind(piece) for piece in str(value).split(",")]
    except ValueError:
        numbers = []
    if not 1 <= len(numbers) <= 2 or not all(0 < number < math.inf for number in numbers):
        form = "COLUMNS or COLUMNS,ROWS" if kind is int else "WIDTH or WIDTH,HEIGHT"
        raise ConfigError(f"--{dashed} {value}: give {form}, each above 0")
    return numbers
