"""Scans in the DXchange layout of HDF5: parallel beam."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hpcfed.errors import DataError
from hpcfed.scans.geometry import radians
from hpcfed.scans.hdf5 import Hdf5Frames, open_hdf5, unit_of
from hpcfed.scans.model import Scan, check_exists, fields


def open_dxchange(path: str | Path) -> Scan:
    """Open a scan in the DXchange layout without reading a projection.

    Read are ``exchange/theta`` (views,), the shape of ``exchange/data`` (views, rows, columns), and the means of
    ``exchange/data_white`` and ``exchange/data_dark`` (frames, rows, columns). The attribute ``units`` of ``theta``
    names the unit of the angles; without it they are in degrees, but angles that could be radians (more than 10 views,
    all within 2 pi) are refused rather than guessed at. A missing dark field counts as zero.

    Raises
    ------
    DataError
        The file is missing, empty, damaged or not HDF5; a dataset is missing or has the wrong shape or type; the counts
        of angles and views differ; the unit of the angles cannot be told.
    """
    path = Path(path)
    check_exists(path)
    with open_hdf5(path) as file:
        num_views, num_rows, num_columns = _dataset(file, path, "data", 3).shape
        theta = _dataset(file, path, "theta", 1)
        remedy = "set its attribute units to degrees or radians"
        angles, unit, note = radians(theta[:], unit_of(theta), num_views, path, "exchange/theta", remedy)
        flats = _dataset(file, path, "data_white", 3)
        absent = file.get("exchange/data_dark") is None or file["exchange/data_dark"].shape[:1] == (0,)
        darks = None if absent else _dataset(file, path, "data_dark", 3)
        names = ("exchange/data_white", "exchange/data_dark", "exchange/data")
        white, dark, notes = fields("counts", flats, darks, (num_rows, num_columns), path, "", names)
    return Scan(
        path,
        angles,
        num_views,
        num_rows,
        num_columns,
        unit,
        Hdf5Frames(path, "exchange/data"),
        (note, *notes),
        white,
        dark,
    )


def _dataset(file: Any, path: Path, name: str, ndim: int) -> Any:
    dataset = file.get(f"exchange/{name}")
    if dataset is None:
        remedy = (
            "counts need flat fields to become line integrals" if name == "data_white" else "is it a DXchange file?"
        )
        raise DataError(f"{path}: exchange/{name} is missing; {remedy}")
    if not hasattr(dataset, "dtype") or dataset.dtype.kind not in "iuf":
        raise DataError(f"{path}: exchange/{name} is not an array of numbers; is it a DXchange file?")
    if dataset.ndim != ndim or dataset.size == 0:
        raise DataError(f"{path}: exchange/{name} has shape {dataset.shape}; it needs {ndim} axes, none of them empty")
    return dataset
