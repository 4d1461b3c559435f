"""What a measured scan is, wherever it was read from, and what every reader checks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hpcfed.errors import DataError
from hpcfed.scans.beam import Beam

MIN_TRANSMISSION = 1e-4
"""Smaller transmissions, and negative ones, count as this one: no line integral exceeds -log(1e-4) = 9.2."""
VALUES = ("counts", "transmission", "integrals")
"""What projections may hold: detector counts, counts divided by those of the open beam, or -log of that."""

Fields = tuple[NDArray[np.float32] | None, NDArray[np.float32] | None, list[str]]
"""Mean flat and dark field, None where there are none, and what was assumed."""
Views = Sequence[int] | NDArray[np.integer[Any]]
Frame = Callable[[int, slice], NDArray[Any]]
"""``frame(view, rows)``: these detector rows of one view as they are stored, (rows, columns)."""


class Frames(Protocol):
    """Where the projections of a scan lie. Picklable: nothing is open until a client reads."""

    def open(self) -> AbstractContextManager[Frame]:
        """Read frames for a while.

        Raises
        ------
        DataError
            The file cannot be read.
        """


@dataclass(frozen=True, eq=False)
class Scan:
    """A scan on disk: what surrounds the projections is in memory, they are read when asked for.

    Attributes
    ----------
    path
        The file or folder.
    angles
        Angle of every view in radians, counter-clockwise, (views,).
    num_views, num_rows, num_columns
        Size of the scan; rows run along the rotation axis. A fan-beam scan has one row.
    angle_unit
        What the angles of the file were taken to be: "degrees", "radians", or "vectors" where they follow from those.
    frames
        Where the projections are.
    notes
        One sentence for everything that was assumed or mended.
    white, dark
        Mean flat field and mean dark field, float32 (rows, columns); None where the projections are line integrals.
    beam
        Of a fan or cone beam, where its rays run; None for a parallel beam.
    axis
        Detector column of the rotation axis where the file of a parallel-beam scan tells; `find_axis` finds it.
    voxel
        Edge of a voxel in mm where it is known.
    offsets
        What `hpcfed.scans.rings` found that each pixel adds to its line integrals, float32 (rows, columns); NaN
        where a pixel cannot be trusted, which is interpolated between its neighbours in the row then.
    """

    path: Path
    angles: NDArray[np.float64]
    num_views: int
    num_rows: int
    num_columns: int
    angle_unit: str
    frames: Frames
    notes: tuple[str, ...]
    white: NDArray[np.float32] | None = None
    dark: NDArray[np.float32] | None = None
    beam: Beam | None = None
    axis: float | None = None
    voxel: float | None = None
    offsets: NDArray[np.float32] | None = None

    def read(self, views: Views, rows: slice | None = None) -> NDArray[np.float32]:
        """Read the line integrals of some views, one view at a time.

        Of counts, ``p = -log(max((data - dark) / (white - dark), MIN_TRANSMISSION))`` with the means of the flat and
        dark fields. A detector pixel whose white is not above its dark is blind: its transmission is interpolated
        between its neighbours in the row.

        Parameters
        ----------
        views
            Indices of views in the file, in any order.
        rows
            Detector rows, by default all.

        Returns
        -------
        ndarray, float32, (views, columns, rows), C-contiguous

        Raises
        ------
        DataError
            A view or row that the scan lacks, values that are not finite, a dead view (one constant value that is not
            the open beam's), a row without a seeing pixel, or a file that cannot be read.
        """
        chosen = np.asarray(views, dtype=np.int64)
        outside = chosen[(chosen < 0) | (chosen >= self.num_views)]
        if outside.size:
            raise DataError(f"{self.path}: has no view {outside[0]}; views are 0 to {self.num_views - 1}")
        start, stop, step = (rows or slice(None)).indices(self.num_rows)
        if step < 1 or start >= stop:
            raise DataError(f"{self.path}: rows {rows} select nothing; rows are 0 to {self.num_rows - 1}, in order")
        span = slice(start, stop, step)
        integrate = self._integrals(start, span)
        integrals = np.empty((chosen.size, self.num_columns, len(range(start, stop, step))), np.float32)
        with self.frames.open() as frame:
            for view, integral in zip(chosen.tolist(), integrals, strict=True):
                values = frame(view, span)
                if values.shape != integral.shape[::-1]:
                    raise DataError(
                        f"{self.path}: view {view} has {values.shape} rows and columns instead of "
                        f"{integral.shape[::-1]}; remove it or write it again"
                    )
                self._check_finite(values, view, start, step)
                found = integrate(values)
                if values.size > 1 and values.min() == values.max() and np.abs(found).max() > 0.05:
                    thing = "count" if self.white is not None else "value"
                    raise DataError(f"{self.path}: view {view} is dead, every {thing} is {values.flat[0]:g}; remove it")
                integral[:] = found.T
        if self.offsets is not None:
            integrals -= self.offsets[span].T
            for row in np.flatnonzero(np.isnan(self.offsets[span]).any(axis=1)):
                _bridge(integrals[:, :, row], np.isnan(self.offsets[span][row]))
        return integrals

    def poses(self, views: Views) -> NDArray[np.float64]:
        """Source, detector centre, and steps between columns and rows, in each of these views of a fan or cone beam.

        Returns
        -------
        ndarray, float64, (views, 12)
            In voxels; the layout is that of `Beam.vectors`.

        Raises
        ------
        ValueError
            If the beam is parallel.
        """
        if self.beam is None:
            raise ValueError("a parallel beam has no source")
        chosen = np.asarray(views, dtype=np.int64)
        if self.beam.vectors is not None:
            return self.beam.vectors[chosen]
        return self.beam.poses(self.angles[chosen], self.num_columns, self.num_rows)

    def _integrals(self, start: int, span: slice) -> Callable[[NDArray[Any]], NDArray[Any]]:
        """What makes line integrals of a frame with these rows."""
        if self.white is None or self.dark is None:
            return lambda values: values
        dark = self.dark[span]
        beam = self.white[span] - dark
        blind = ~(beam > 0)
        if blind.all(axis=1).any():
            row = start + span.step * int(blind.all(axis=1).argmax())
            raise DataError(f"{self.path}: no pixel of row {row} sees the beam (white is not above dark); leave it out")
        beam[blind] = 1
        blind_rows = np.flatnonzero(blind.any(axis=1)).tolist()

        def integrals(counts: NDArray[Any]) -> NDArray[Any]:
            transmission = (counts - dark) / beam
            for row in blind_rows:
                seeing = np.flatnonzero(~blind[row])
                lost = np.flatnonzero(blind[row])
                transmission[row, lost] = np.interp(lost, seeing, transmission[row, seeing])
            np.maximum(transmission, MIN_TRANSMISSION, out=transmission)
            return np.negative(np.log(transmission, out=transmission), out=transmission)

        return integrals

    def _check_finite(self, values: NDArray[Any], view: int, start: int, step: int) -> None:
        finite = np.isfinite(values)
        if not finite.all():
            row, column = np.unravel_index(np.argmin(finite), values.shape)
            raise DataError(
                f"{self.path}: view {view} has {values.size - np.count_nonzero(finite)} "
                f"{'counts' if self.white is not None else 'values'} that are not finite (the first in row "
                f"{start + step * row}, column {column}); remove the view or replace them"
            )


def _bridge(profiles: NDArray[np.float32], lost: NDArray[np.bool_]) -> None:
    """Interpolate lost columns of (views, columns) linearly between those that are not."""
    seeing, gaps = np.flatnonzero(~lost), np.flatnonzero(lost)
    place = np.interp(gaps, seeing, np.arange(seeing.size))
    before = np.floor(place).astype(int)
    weight = (place - before).astype(np.float32)
    after = np.minimum(before + 1, seeing.size - 1)
    profiles[:, gaps] = (1 - weight) * profiles[:, seeing[before]] + weight * profiles[:, seeing[after]]


def check_exists(path: Path) -> None:
    """Refuse a file that is missing or empty.

    Raises
    ------
    DataError
    """
    if not path.is_file():
        raise DataError(f"{path}: there is no such file; check the path of the scan")
    if path.stat().st_size == 0:
        raise DataError(f"{path}: the file is empty; write or download it again")


def fields(
    values: str | None,
    flats: Iterable[NDArray[Any]] | None,
    darks: Iterable[NDArray[Any]] | None,
    shape: tuple[int, int],
    path: Path,
    remedy: str,
    names: tuple[str, str, str] = ("flats", "darks", "projections"),
) -> Fields:
    """The mean flat and dark field that turn a scan's projections into line integrals.

    Parameters
    ----------
    values
        What the projections hold, one of `VALUES`; None: counts, if there are flat fields.
    flats, darks
        Frames (rows, columns) of the open and of the closed beam, None where there are none.
    shape
        (rows, columns) of the projections.
    path, remedy, names
        For messages: the file, how to say what the projections hold, and what it calls flats, darks and projections.

    Returns
    -------
    White and dark, both None for integrals, and what was assumed.

    Raises
    ------
    DataError
        Counts come without flat fields, or fields with projections that need none; a field has another shape than the
        projections, or values that are not finite.
    """
    if values not in (None, *VALUES):
        raise DataError(f"{path}: values is {values!r}; projections hold {', '.join(VALUES)}")
    if values in ("transmission", "integrals"):
        if flats is not None or darks is not None:
            raise DataError(f"{path}: values is {values}, which needs no flat and dark fields; leave them out")
        if values == "integrals":
            return None, None, ["projections are line integrals, as the file says"]
        one = np.ones(shape, np.float32)
        return one, np.zeros_like(one), ["projections are transmissions, as the file says"]
    if flats is None:
        raise DataError(f"{path}: has no flat fields, without which counts are no line integrals; {remedy}")
    white = _mean_frame(flats, shape, path, names[0], names[2])
    notes = []
    if darks is None:
        dark = np.zeros_like(white)
        notes.append(f"{names[1]} is missing: the dark field is taken as zero")
    else:
        dark = _mean_frame(darks, shape, path, names[1], names[2])
    if blind := np.count_nonzero(~(white > dark)):
        notes.append(f"{blind} detector pixels see no beam: they are interpolated along their rows")
    return white, dark, notes


def _mean_frame(
    frames: Iterable[NDArray[Any]], shape: tuple[int, int], path: Path, name: str, data: str
) -> NDArray[np.float32]:
    """The mean of frames (rows, columns), of which one at a time is in memory."""
    total, count = np.zeros(shape), 0
    for frame in frames:
        if frame.shape != shape:
            raise DataError(f"{path}: frames of {name} are {frame.shape}, those of {data} {shape}; they must match")
        if frame.dtype.kind not in "iuf":
            raise DataError(f"{path}: {name} are of type {frame.dtype}; write real numbers")
        total += frame
        count += 1
    if not count:
        raise DataError(f"{path}: {name} holds no frame; leave it out or record one")
    if not np.isfinite(total).all():
        row, column = np.unravel_index(np.argmin(np.isfinite(total)), shape)
        raise DataError(f"{path}: {name} is not finite in row {row}, column {column}; remove that frame")
    return (total / count).astype(np.float32)
