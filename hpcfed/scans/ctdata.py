"""Fan-beam scans as a MATLAB structure ``CtData``: the layout of the Helsinki Tomography Challenge 2022."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from hpcfed.errors import DataError
from hpcfed.scans.arrays import MatFrames, is_hdf5, load_mat
from hpcfed.scans.geometry import circular, radians
from hpcfed.scans.model import Scan, check_exists


def holds_ctdata(path: Path) -> bool:
    """Whether a variable of the ``.mat`` is called CtData or begins with it.

    Raises
    ------
    DataError
        The file is damaged.
    """
    return _variable(path) is not None


def open_ctdata(path: str | Path) -> Scan:
    """Open a fan-beam scan in a structure whose name begins with ``CtData``.

    Read are its ``sinogram`` (views, columns), which are line integrals already, and of its ``parameters`` the
    ``angles`` in degrees, ``distanceSourceOrigin``, ``distanceSourceDetector``, and the pixels' size after binning,
    ``pixelSizePost`` (or ``pixelSize``), all in mm. Counter-clockwise angles go with the columns as they are stored, as
    the challenge's own example does.

    Raises
    ------
    DataError
        The file is missing, empty or damaged; a field is missing; angles and views differ in number; a length is not
        positive.
    """
    path = Path(path)
    check_exists(path)
    variable = _variable(path)
    if variable is None:
        raise DataError(f"{path}: holds no structure CtData; is it of the challenge's layout?")
    content = load_mat(path, [variable])[variable]
    parameters = content.get("parameters") if isinstance(content, dict) else None
    sinogram = np.asarray(_field(content, "sinogram", path)) if parameters is not None else None
    if sinogram is None or not isinstance(parameters, dict):
        raise DataError(f"{path}: {variable}.parameters is missing; it holds the angles and distances")
    if sinogram.ndim != 2 or sinogram.size == 0 or sinogram.dtype.kind not in "iuf":
        raise DataError(f"{path}: {variable}.sinogram has shape {sinogram.shape}; it needs views and columns")
    num_views, num_columns = sinogram.shape
    where = f"{variable}.parameters.angles"
    angles, unit, _ = radians(_field(parameters, "angles", path), "degrees", num_views, path, where, "")
    pixels = "pixelSizePost" if "pixelSizePost" in parameters else "pixelSize"
    source = _field(parameters, "distanceSourceOrigin", path)
    known = {
        "source_distance": source,
        "detector_distance": _field(parameters, "distanceSourceDetector", path) - source,
        "pixel_size": _field(parameters, pixels, path),
    }
    beam, voxel, assumed = circular(known, num_columns, 1, path)
    notes = ("angles are in degrees and projections are line integrals, as this layout has them", *assumed)
    frames = MatFrames(path, f"{variable}.sinogram")
    return Scan(path, angles, num_views, 1, num_columns, unit, frames, notes, beam=beam, voxel=voxel)


def _variable(path: Path) -> str | None:
    import scipy.io

    if is_hdf5(path):
        return None
    try:
        names = [name for name, _, _ in scipy.io.whosmat(path)]
    except Exception as error:  # the library raises a dozen types on damaged files
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DataError(f"{path}: cannot be read, write or download it again ({reason})") from error
    return next((name for name in names if name.startswith("CtData")), None)


def _field(structure: dict[str, Any], name: str, path: Path) -> Any:
    if name not in structure:
        raise DataError(f"{path}: the field {name} is missing; is it of the challenge's layout?")
    return structure[name]
