"""The geometry of a scan from what its file names: angles in a unit, lengths, or a pose for every view."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcfed.errors import DataError
from hpcfed.scans.beam import Beam
from hpcfed.scans.model import Fields, Frames, Scan

LENGTHS = ("source_distance", "detector_distance", "pixel_size")
"""What a circular scan must tell, in mm."""
NAMES = ("angles", "unit", "vectors", *LENGTHS, "voxel_size", "axis", "middle")
"""What `named` looks for."""


@dataclass(frozen=True, eq=False)
class Geometry:
    """What a file says of the rays of its scan; the attributes are those of `hpcfed.scans.model.Scan`."""

    angles: NDArray[np.float64]
    angle_unit: str
    beam: Beam | None
    axis: float | None
    voxel: float | None
    notes: list[str]

    def scan(self, path: Path, size: tuple[int, int, int], frames: Frames, fields: Fields) -> Scan:
        """The scan with these rays, of ``size`` (views, rows, columns), ``fields`` as `model.fields` gives."""
        white, dark, assumed = fields
        notes = (*self.notes, *assumed)
        return Scan(
            path, self.angles, *size, self.angle_unit, frames, notes, white, dark, self.beam, self.axis, self.voxel
        )


def named(known: Mapping[str, Any], shape: tuple[int, int, int], path: Path, remedy: str) -> Geometry:
    """The geometry that named numbers describe.

    Parameters
    ----------
    known
        Either ``vectors`` with, if wanted, ``voxel_size`` (`posed`), or ``angles`` with their ``unit`` (`radians`) and
        the lengths of a fan or cone beam (`circular`); of a parallel beam ``axis`` may be known.
    shape
        Views, rows and columns of the projections.
    path, remedy
        For messages: the file, and how to name the unit of the angles.

    Raises
    ------
    DataError
        Neither angles nor vectors are there, there are too many or too few, or a number is not sound.
    """
    num_views, num_rows, num_columns = shape
    if "vectors" in known:
        size = _length(known, "voxel_size", path) if "voxel_size" in known else None
        posed_beam, voxel, angles = posed(known["vectors"], size, num_columns, num_rows, path)
        if len(angles) != num_views:
            raise DataError(f"{path}: {len(angles)} rows of vectors for {num_views} views; the counts must match")
        return Geometry(angles, "vectors", posed_beam, None, voxel, [])
    if "angles" not in known:
        raise DataError(f"{path}: neither angles nor vectors are there; one must say where the views were taken")
    unit = str(known["unit"]) if "unit" in known else None
    angles, angle_unit, note = radians(known["angles"], unit, num_views, path, "angles", remedy)
    beam, edge, notes = circular(known, num_columns, num_rows, path)
    axis = _number(known["axis"], "axis", path) if beam is None and "axis" in known else None
    return Geometry(angles, angle_unit, beam, axis, edge, [note, *notes])


def radians(
    values: Any, unit: str | None, num_views: int, path: Path, name: str, remedy: str
) -> tuple[NDArray[np.float64], str, str]:
    """Angles in radians, their unit in the file, and how it was told.

    A named unit is believed, but radians that span more than 6 turns are refused, and degrees that span pi or 2 pi are
    doubted. Without one, angles are in degrees, but those that could be radians (more than 10 views, all within 2 pi)
    are refused rather than guessed at.

    Parameters
    ----------
    values
        The angles, (views,).
    unit
        What the file calls their unit, None if it does not.
    num_views
        How many there must be.
    path, name, remedy
        For messages: the file, what it calls the angles, and how to name their unit.

    Raises
    ------
    DataError
    """
    angles = np.asarray(values)
    if angles.ndim != 1 or angles.dtype.kind not in "iuf":
        raise DataError(f"{path}: {name} is not a list of numbers but has shape {angles.shape}; one angle a view")
    if angles.size != num_views:
        raise DataError(f"{path}: {angles.size} angles in {name} for {num_views} views; the counts must match")
    angles = angles.astype(np.float64)
    if not np.isfinite(angles).all():
        raise DataError(f"{path}: angle {np.argmin(np.isfinite(angles))} of {name} is not finite; mend it")
    if angles.size > 1 and np.ptp(angles) == 0:
        raise DataError(f"{path}: every angle of {name} is {angles[0]:g}; the views of a scan differ in angle")
    named = (unit or "").strip().lower()
    span = f"{name} spans {angles.min():g} to {angles.max():g}"
    if named.startswith("rad"):
        if np.ptp(angles) > 12 * np.pi:
            raise DataError(f"{path}: {span} radians, {np.ptp(angles) / (2 * np.pi):.3g} turns: degrees? {remedy}")
        return angles, "radians", "angles are in radians, as the file says"
    if named.startswith("deg"):
        doubt = f", but {span}: are they radians?" if _round_in_radians(angles) else ""
        return np.deg2rad(angles), "degrees", f"angles are in degrees, as the file says{doubt}"
    if named:
        raise DataError(f"{path}: {name} is in {unit!r}, an unknown unit; {remedy}")
    if angles.size > 10 and np.abs(angles).max() <= 2 * np.pi * 1.01:
        raise DataError(f"{path}: {span} in an unnamed unit, perhaps radians; {remedy}")
    return np.deg2rad(angles), "degrees", f"angles are taken to be in degrees: {name} names no unit"


def circular(
    known: Mapping[str, Any], num_columns: int, num_rows: int, path: Path
) -> tuple[Beam | None, float | None, list[str]]:
    """The beam that a file's named numbers describe.

    Parameters
    ----------
    known
        ``source_distance`` and ``detector_distance``, from the rotation axis, and ``pixel_size``, one number or one for
        columns and one for rows: all in mm. If all three are left out the beam is parallel. Optional:
        ``axis`` and ``middle``, in pixels (in the middle by default), and ``voxel_size`` (by default the pixels' size
        as it is at the rotation axis).

    Returns
    -------
    The beam (None: parallel), the edge of a voxel in mm if it is known, and what was assumed.

    Raises
    ------
    DataError
        A length is missing, not a number or not positive.
    """
    pixels = _pixels(known, path) if "pixel_size" in known else None
    if "source_distance" not in known and "detector_distance" not in known:
        return None, _length(known, "voxel_size", path) if "voxel_size" in known else pixels and pixels[0], []
    missing = [name for name in LENGTHS if name not in known]
    if pixels is None or missing:
        raise DataError(f"{path}: {missing[0]} is missing; a fan or cone beam needs {', '.join(LENGTHS)}")
    source, detector = (_length(known, name, path) for name in LENGTHS[:2])
    voxel = _length(known, "voxel_size", path) if "voxel_size" in known else pixels[0] * source / (source + detector)
    notes = []
    centre = {}
    for name, count in (("axis", num_columns), ("middle", num_rows)):
        centre[name] = _number(known[name], name, path) if name in known else (count - 1) / 2
        if name not in known and count > 1:
            thing = "rotation axis falls on detector column" if name == "axis" else "source is level with detector row"
            notes.append(f"the file does not say {name}: the {thing} {centre[name]:g}, the middle")
    size = (pixels[0] / voxel, pixels[1] / voxel)
    return Beam(source / voxel, detector / voxel, size, centre["axis"], centre["middle"]), voxel, notes


def posed(
    vectors: Any, voxel: float | None, num_columns: int, num_rows: int, path: Path
) -> tuple[Beam, float, NDArray[np.float64]]:
    """The beam of a scan that gives source and detector for every view.

    Parameters
    ----------
    vectors
        (views, 12), as `Beam.vectors` but in mm.
    voxel
        Edge of a voxel in mm, by default the mean size of a pixel as it is at the rotation axis.

    Returns
    -------
    The beam, the edge of a voxel, and the angles of the sources in radians, unwrapped.

    Raises
    ------
    DataError
        The shape is another, a number is not finite, a source is on the axis, or a step between pixels is zero.
    """
    rows = np.asarray(vectors)
    if rows.ndim != 2 or rows.shape[1] != 12 or rows.dtype.kind not in "iuf":
        raise DataError(
            f"{path}: vectors have shape {rows.shape}; they need 12 numbers a view: source, detector centre, u, v"
        )
    rows = rows.astype(np.float64)
    if not np.isfinite(rows).all():
        raise DataError(f"{path}: vectors of view {np.argmin(np.isfinite(rows).all(axis=1))} are not finite; mend them")
    source, centre, along, upwards = rows.reshape(-1, 4, 3).transpose(1, 0, 2)
    radius, span = np.hypot(source[:, 0], source[:, 1]), np.linalg.norm(centre - source, axis=1)
    pitch = np.linalg.norm(along, axis=1), np.linalg.norm(upwards, axis=1)
    for length, what in ((radius, "source is on the rotation axis"), *((p, "pixels have no size") for p in pitch)):
        if not length.all():
            raise DataError(f"{path}: in view {np.argmin(length)} the {what}; mend its row of vectors")
    voxel = voxel if voxel is not None else float((pitch[0] * radius / span).mean())
    beam = Beam(
        source_distance=float(radius.mean()) / voxel,
        detector_distance=float((span - radius).mean()) / voxel,
        pixel_size=(float(pitch[0].mean()) / voxel, float(pitch[1].mean()) / voxel),
        axis=(num_columns - 1) / 2,
        middle=(num_rows - 1) / 2,
        vectors=rows / voxel,
    )
    return beam, voxel, np.unwrap(np.arctan2(source[:, 0], -source[:, 1]))


def _pixels(known: Mapping[str, Any], path: Path) -> tuple[float, float]:
    sizes = np.atleast_1d(np.asarray(known["pixel_size"])).ravel().tolist()
    if len(sizes) not in (1, 2):
        raise DataError(f"{path}: pixel_size has {len(sizes)} numbers; give one, or one for columns and one for rows")
    columns, rows = (_length({"pixel_size": size}, "pixel_size", path) for size in (sizes[0], sizes[-1]))
    return columns, rows


def _length(known: Mapping[str, Any], name: str, path: Path) -> float:
    value = _number(known[name], name, path)
    if value <= 0:
        raise DataError(f"{path}: {name} is {value:g}; give a positive length")
    return value


def _number(value: Any, name: str, path: Path) -> float:
    array = np.asarray(value)
    if array.size != 1 or array.dtype.kind not in "iuf" or not np.isfinite(array).all():
        raise DataError(f"{path}: {name} is {value!r}; give one number")
    return float(array.reshape(()))


def _round_in_radians(angles: NDArray[np.float64]) -> bool:
    """Whether the numbers span half a turn or a turn of radians, with or without its end, to half a percent."""
    closed = np.ptp(angles)
    spans = np.array([closed, closed * angles.size / max(angles.size - 1, 1)])
    return angles.size > 10 and bool((np.abs(spans[:, None] / (np.pi * np.array([1, 2])) - 1) < 0.005).any())
