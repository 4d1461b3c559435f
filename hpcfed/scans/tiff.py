"""Scans as TIFF images with a small TOML file that tells their geometry.

::

    projections = "scan_*.tif"            # files beside the TOML, in the order of their numbers, or one of many pages
    flats = "flat_*.tif"                  # the same; darks, too, may be left out
    darks = "dark_*.tif"
    angles = { first = 0, step = 0.5 }    # or a list, or the name of a text file with one angle a line
    unit = "degrees"                      # or radians
    source_distance = 410.7               # of a fan or cone beam, in mm: source to axis
    detector_distance = 143.1             # rotation axis to detector
    pixel_size = 0.2                      # on the detector; [columns, rows] where they differ

Instead of flats, ``values = "transmission"`` or ``"integrals"`` says that the images need none. Instead of angles,
``vectors`` names a text file with 12 numbers a line, the pose of each view (`hpcfed.scans.beam.Beam`). Optional
are also ``voxel_size``, ``axis`` and ``middle`` (`hpcfed.scans.geometry.circular`), and how images lie:
``transpose = true`` where their rows run along the rotation axis, then ``flip = ["rows", "columns"]``, either or both.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcfed.data import tiff_log
from hpcfed.errors import ConfigError, DataError
from hpcfed.scans.geometry import NAMES, named
from hpcfed.scans.model import Frame, Scan, check_exists, fields

KEYS = ("projections", "flats", "darks", "values", *NAMES, "transpose", "flip")


@dataclass(frozen=True)
class TiffFrames:
    """Frames that are pages of TIFF files; one page is in memory at a time.

    Attributes
    ----------
    pages
        File and page of each view.
    transpose
        Whether images are (columns, rows).
    flip
        Axes that run backwards, after the transposition: 0 for rows, 1 for columns.
    """

    pages: tuple[tuple[Path, int], ...]
    transpose: bool = False
    flip: tuple[int, ...] = ()

    @contextmanager
    def open(self) -> Iterator[Frame]:
        tifffile = load_tifffile(self.pages[0][0])
        last: dict[Path, Any] = {}

        def frame(view: int, rows: slice) -> NDArray[Any]:
            path, page = self.pages[view]
            with _readable(path):
                if path not in last:
                    close()
                    last[path] = tifffile.TiffFile(path)
                image: NDArray[Any] = last[path].pages[page].asarray()
            if image.ndim != 2 or image.dtype.kind not in "iuf":
                raise DataError(
                    f"{path}: page {page} has shape {image.shape} of {image.dtype}; images need grey levels"
                )
            return np.flip(image.T if self.transpose else image, self.flip)[rows]

        def close() -> None:
            for file in last.values():
                file.close()
            last.clear()

        try:
            yield frame
        finally:
            close()

    def all(self) -> Iterator[NDArray[Any]]:
        """One whole frame after the other."""
        with self.open() as frame:
            for view in range(len(self.pages)):
                yield frame(view, slice(None))


def open_tiff(path: str | Path) -> Scan:
    """Open a scan of TIFF images, of which ``path`` is the TOML file or a TIFF with one of the same name beside it.

    Raises
    ------
    DataError
        The TOML is not sound, a file is missing or damaged, images differ in size, counts of images and angles differ.
    ConfigError
        tifffile is not installed.
    """
    path = Path(path)
    if path.suffix.lower() != ".toml":
        image, path = path, path.with_suffix(".toml")
        if not path.is_file():
            raise DataError(f"{image}: an image does not tell its geometry; write {path.name} beside it")
    known = _read_toml(path)
    transpose, flip = bool(known.get("transpose", False)), _flip(known, path)
    frames, flats, darks = (
        TiffFrames(_pages(known, name, path), transpose, flip) if name in known else None
        for name in ("projections", "flats", "darks")
    )
    assert frames is not None
    num_views = len(frames.pages)
    with frames.open() as frame:
        num_rows, num_columns = frame(0, slice(None)).shape
    size = (num_views, num_rows, num_columns)
    geometry = named(_geometry(known, num_views, path), size, path, 'write unit = "degrees" or "radians"')
    corrected = fields(
        known.get("values"),
        flats.all() if flats else None,
        darks.all() if darks else None,
        (num_rows, num_columns),
        path,
        'name flats, or write values = "transmission" or "integrals"',
    )
    return geometry.scan(path, size, frames, corrected)


def pages_of(folder: Path, pattern: str, of: Path) -> tuple[tuple[Path, int], ...]:
    """File and page of each image that a pattern names, by the numbers in the names; of one file all its pages.

    Raises
    ------
    DataError
        There is none, or it is damaged; ``of`` is the file that names it.
    """
    files = sorted(folder.glob(pattern), key=lambda file: _natural(file.name))
    if not files:
        raise DataError(f"{of}: no file {pattern} in {folder}; check the name and that the images are there")
    if len(files) > 1:
        return tuple((file, 0) for file in files)
    check_exists(files[0])
    tifffile = load_tifffile(files[0])
    with _readable(files[0]), tifffile.TiffFile(files[0]) as file:
        return tuple((files[0], page) for page in range(len(file.pages)))


def load_tifffile(path: Path) -> Any:
    """The library.

    Raises
    ------
    ConfigError
        It is not installed.
    """
    try:
        return import_module("tifffile")
    except ImportError as error:
        raise ConfigError(f"{path}: reading images needs tifffile; pip install tifffile") from error


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        with tiff_log.raised():
            yield
    except Exception as error:  # the library raises a dozen types on damaged files
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DataError(f"{path}: cannot be read as TIFF, write or download it again ({reason})") from error


def _read_toml(path: Path) -> Mapping[str, Any]:
    check_exists(path)
    try:
        known = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: is no TOML ({error}); mend it") from error
    for key in known:
        if key not in KEYS:
            raise DataError(f"{path}: {key} is unknown; there are {', '.join(KEYS)}")
    if "projections" not in known:
        raise DataError(f'{path}: projections is missing; name the images, such as projections = "scan_*.tif"')
    return known


def _pages(known: Mapping[str, Any], name: str, path: Path) -> tuple[tuple[Path, int], ...]:
    if not isinstance(known[name], str) or not known[name] or known[name].startswith("/"):
        raise DataError(f'{path}: {name} is {known[name]!r}; name files beside this one, such as "scan_*.tif"')
    return pages_of(path.parent, known[name], path)


def _geometry(known: Mapping[str, Any], num_views: int, path: Path) -> Mapping[str, Any]:
    """The keys with angles and vectors as arrays, wherever they stand."""
    if "vectors" in known:
        return {**known, "vectors": _table(path, str(known["vectors"]))}
    match known.get("angles"):
        case None:
            raise DataError(f"{path}: angles or vectors is missing; write angles = {{ first = 0, step = 0.5 }}")
        case str(name):
            return {**known, "angles": _table(path, name).ravel()}
        case {"first": int() | float() as first, "step": int() | float() as step}:
            return {**known, "angles": first + step * np.arange(num_views)}
        case list(given) if all(type(angle) in (int, float) for angle in given):
            return known
        case other:
            raise DataError(f"{path}: angles is {other!r}; give first and step, a list, or the name of a text file")


def _table(path: Path, name: str) -> NDArray[np.float64]:
    file = path.parent / name
    check_exists(file)
    try:
        return np.loadtxt(file, delimiter="," if "," in file.read_text() else None, ndmin=2)
    except ValueError as error:
        raise DataError(f"{file}: is no table of numbers ({error}); mend it") from error


def _flip(known: Mapping[str, Any], path: Path) -> tuple[int, ...]:
    flip = known.get("flip", [])
    names = ("rows", "columns")
    if not isinstance(flip, list) or not set(flip) <= set(names):
        raise DataError(f'{path}: flip is {flip!r}; it lists "rows", "columns" or both')
    return tuple(names.index(name) for name in flip)


def _natural(name: str) -> list[tuple[int, str]]:
    """For sorting: 2 before 10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
