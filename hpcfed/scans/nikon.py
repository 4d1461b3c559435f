"""Cone-beam scans of Nikon (X-Tek) machines: an ``.xtekct`` and a folder of TIFF images."""

from __future__ import annotations

import configparser
from pathlib import Path

import numpy as np

from hpcfed.errors import DataError
from hpcfed.scans.beam import Beam
from hpcfed.scans.geometry import circular, posed
from hpcfed.scans.model import Scan, check_exists
from hpcfed.scans.tiff import TiffFrames, pages_of


def open_nikon(path: str | Path) -> Scan:
    """Open a scan that an ``.xtekct`` describes, without reading more than one image.

    Read are ``Projections``, ``InitialAngle`` and ``AngularStep`` (degrees), ``SrcToObject``, ``SrcToDetector``,
    ``DetectorPixelSizeX`` and ``Y`` (mm), ``WhiteLevel``, ``BlackLevel`` where it is there, and the sideways shift of
    the axis, ``ObjectOffsetX`` or else the mean of ``CentreOfRotationTop`` and ``Bottom``. The images are the ``.tif``
    in ``InputFolderName`` beside the file that begin with its ``Name``.

    Angles in lists beside it (``.ang``, ``_ctdata.txt``) are not read. Seen from the source, images have their first
    column on the right and their first row at the top, and the object turns so that the angle falls from view to view:
    UNVERIFIED on a scan of known handedness, it is what the Core Imaging Library's reader has. With slices that count
    from the top the volume is no mirror image.

    Raises
    ------
    DataError
        A file or key is missing, a number is none, images and ``Projections`` differ in number, or an image has another
        size than the file says.
    """
    path = Path(path)
    check_exists(path)
    known = _read(path)

    def number(key: str, default: float | None = None) -> float:
        text = known.get(key.lower(), "")
        if not text and default is not None:
            return default
        try:
            return float(text)
        except ValueError as error:
            state = f"is {text!r}" if text else "is missing"
            raise DataError(f"{path}: {key} {state}; it must be a number") from error

    num_views, num_rows, num_columns = (
        int(number(key)) for key in ("Projections", "DetectorPixelsY", "DetectorPixelsX")
    )
    folder = path.parent / known.get("inputfoldername", "").replace("\\", "/")
    frames = TiffFrames(pages_of(folder, f"{known.get('name', '')}*.tif", path))
    if len(frames.pages) != num_views:
        raise DataError(f"{path}: {len(frames.pages)} images in {folder} for Projections={num_views}; they must match")
    with frames.open() as frame:
        shape = frame(0, slice(None)).shape
    if shape != (num_rows, num_columns):
        raise DataError(f"{path}: images are {shape}, the file says {(num_rows, num_columns)} (rows, columns)")

    source, whole = number("SrcToObject"), number("SrcToDetector")
    lengths = {
        "source_distance": source,
        "detector_distance": whole - source,
        "pixel_size": [number("DetectorPixelSizeX"), number("DetectorPixelSizeY")],
    }
    beam, voxel, _ = circular(lengths, num_columns, num_rows, path)
    assert beam is not None
    assert voxel is not None
    angles = np.deg2rad(180 - number("InitialAngle", 0.0) - number("AngularStep") * np.arange(num_views))
    centre = (number("CentreOfRotationTop", 0.0) + number("CentreOfRotationBottom", 0.0)) / 2
    offset = number("ObjectOffsetX", centre * source / whole)
    notes = [f"angles start at InitialAngle and fall by AngularStep; {known.get('name', '')}'s own lists are not read"]
    if offset:
        # the axis is beside the straight line from source to detector, which so is no radius
        beam = _shifted(beam, offset / voxel, angles, num_columns, num_rows, path)
        notes.append(f"the rotation axis is {offset:g} mm beside the central ray")
    if number("ObjectTilt", 0.0) or number("ObjectRoll", 0.0):
        notes.append("ObjectTilt and ObjectRoll are passed over: the rotation axis is taken to be upright")
    level, black = number("WhiteLevel"), number("BlackLevel", 0.0)
    if not level > black:
        raise DataError(f"{path}: WhiteLevel is {level:g}, BlackLevel {black:g}; the open beam must be brighter")
    notes.append(f"there are no flat fields: the open beam counts WhiteLevel {level:g} everywhere, none {black:g}")
    white, dark = (np.full((num_rows, num_columns), each, np.float32) for each in (level, black))
    return Scan(
        path,
        angles,
        num_views,
        num_rows,
        num_columns,
        "degrees",
        frames,
        tuple(notes),
        white,
        dark,
        beam,
        voxel=voxel,
    )


def _shifted(beam: Beam, offset: float, angles: np.ndarray, num_columns: int, num_rows: int, path: Path) -> Beam:
    """The beam with source and detector moved by ``-offset`` voxels along the columns."""
    poses = beam.poses(angles, num_columns, num_rows)
    along = offset * np.stack([np.cos(angles), np.sin(angles), np.zeros_like(angles)], axis=1)
    poses[:, 0:3] -= along
    poses[:, 3:6] -= along
    return posed(poses, 1.0, num_columns, num_rows, path)[0]


def _read(path: Path) -> configparser.SectionProxy:
    parser = configparser.ConfigParser(interpolation=None, strict=False)
    try:
        parser.read_string(path.read_text(encoding="utf-8-sig", errors="replace"))
    except configparser.Error as error:
        raise DataError(f"{path}: cannot be read as .xtekct ({' '.join(str(error).split())})") from error
    if "XTekCT" not in parser:
        raise DataError(f"{path}: has no section [XTekCT]; is it a file of a Nikon machine?")
    return parser["XTekCT"]
