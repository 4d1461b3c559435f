"""Scans in the NXtomo layout of HDF5 (NeXus), as synchrotrons write them: parallel beam."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from hpcfed.errors import DataError
from hpcfed.scans.geometry import radians
from hpcfed.scans.hdf5 import Hdf5Frames, open_hdf5, unit_of
from hpcfed.scans.model import Scan, check_exists, fields

PROJECTION, FLAT, DARK = 0, 1, 2
"""Values of ``image_key``; frames with others (3: invalid) are passed over."""


def holds_nxtomo(path: Path) -> bool:
    """Whether a frame of the file has an ``image_key``.

    Raises
    ------
    DataError
        The file is damaged or not HDF5.
    """
    with open_hdf5(path) as file:
        return _detector(file) is not None


def open_nxtomo(path: str | Path) -> Scan:
    """Open a scan in the NXtomo layout without reading a projection.

    All frames lie in one dataset; ``image_key`` beside it says which are projections (0), flat fields (1) and dark
    fields (2). Of these are read, wherever the entry stands in the file: ``instrument/detector/data`` (frames, rows,
    columns), ``instrument/detector/image_key`` (frames,), ``sample/rotation_angle`` (frames,) with its unit, and, if
    they are there, the size of pixels in ``x_pixel_size``. Of several entries the first counts. The beam is taken to be
    parallel, whatever distances the file names.

    Raises
    ------
    DataError
        The file is missing, empty, damaged or no NXtomo file; a dataset is missing or has the wrong shape; there are no
        projections or no flat fields; the unit of the angles cannot be told.
    """
    path = Path(path)
    check_exists(path)
    with open_hdf5(path) as file:
        detector = _detector(file)
        if detector is None:
            raise DataError(f"{path}: no data has an image_key beside it; is it an NXtomo file?")
        data, keys = detector["data"], np.asarray(detector["image_key"][()]).ravel()
        if data.ndim != 3 or data.size == 0 or data.dtype.kind not in "iuf":
            raise DataError(f"{path}: {data.name[1:]} has shape {data.shape}; it needs frames, rows and columns")
        if keys.size != len(data):
            raise DataError(f"{path}: {keys.size} numbers in image_key for {len(data)} frames; the counts must match")
        views, flats, darks = (np.flatnonzero(keys == key) for key in (PROJECTION, FLAT, DARK))
        if not views.size:
            raise DataError(f"{path}: no frame is a projection (image_key 0); there is nothing to reconstruct")
        theta = _angles(detector, path)
        if len(theta) != len(data):
            raise DataError(
                f"{path}: {len(theta)} angles in rotation_angle for {len(data)} frames; the counts must match"
            )
        remedy = "set its attribute units to degrees or radians"
        angles, unit, note = radians(theta[()][views], unit_of(theta), views.size, path, "rotation_angle", remedy)
        white, dark, notes = fields(
            "counts",
            (data[place] for place in flats) if flats.size else None,
            (data[place] for place in darks) if darks.size else None,
            data.shape[1:],
            path,
            "record frames with image_key 1",
            ("image_key 1", "image_key 2", "image_key 0"),
        )
        if passed := len(data) - views.size - flats.size - darks.size:
            notes.append(f"{passed} frames that image_key marks as invalid are passed over")
        frames = Hdf5Frames(path, data.name, views)
        shape, voxel = data.shape, _millimetres(detector.get("x_pixel_size"))
    return Scan(path, angles, views.size, shape[1], shape[2], unit, frames, (note, *notes), white, dark, voxel=voxel)


def _detector(file: Any) -> Any:
    """The first group with both ``data`` and ``image_key``, a detector before others; None if there is none."""
    found = []

    def look(name: str, item: Any) -> None:
        if hasattr(item, "keys") and "image_key" in item and getattr(item.get("data"), "ndim", 0) > 1:
            found.append(item)

    file.visititems(look)
    found.sort(key=lambda group: not group.name.endswith("/detector"))
    return found[0] if found else None


def _angles(detector: Any, path: Path) -> Any:
    """The dataset ``rotation_angle``: beside the data, or in the sample of the entry."""
    group = detector
    while True:
        for name in ("rotation_angle", "sample/rotation_angle"):
            if getattr(group.get(name), "ndim", None) == 1:
                return group[name]
        if group.name == "/":
            raise DataError(f"{path}: sample/rotation_angle is missing; the angles of the views must be known")
        group = group.parent


def _millimetres(length: Any) -> float | None:
    """A length in mm; of no or an unknown unit it is in metres, as NeXus has it by default."""
    if length is None or length.size != 1:
        return None
    scale = {"mm": 1.0, "um": 1e-3, "µm": 1e-3, "micron": 1e-3, "cm": 10.0}.get(unit_of(length) or "m", 1e3)
    return scale * float(np.ravel(length[()])[0])
