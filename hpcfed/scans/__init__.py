"""Measured scans of any known layout: what a file or folder holds is told from its contents."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path

from hpcfed.errors import DataError
from hpcfed.scans.axis import find_axis
from hpcfed.scans.beam import Beam
from hpcfed.scans.dxchange import open_dxchange
from hpcfed.scans.model import MIN_TRANSMISSION, Scan, Views, check_exists

__all__ = ["MIN_TRANSMISSION", "READERS", "Beam", "Scan", "Views", "find_axis", "open_dxchange", "open_scan"]

READERS: Mapping[str, str] = {
    "DXchange HDF5": "hpcfed.scans.dxchange:open_dxchange",
    "NXtomo HDF5": "hpcfed.scans.nxtomo:open_nxtomo",
    "named arrays in .npz": "hpcfed.scans.arrays:open_npz",
    "named arrays in .mat": "hpcfed.scans.arrays:open_mat",
    "CtData in .mat (HTC 2022)": "hpcfed.scans.ctdata:open_ctdata",
    "TIFF with .toml": "hpcfed.scans.tiff:open_tiff",
    "Nikon .xtekct": "hpcfed.scans.nikon:open_nikon",
}
"""Every layout and what opens it, ``open(path) -> Scan``."""


def open_scan(path: str | Path) -> Scan:
    """Open a scan without reading a projection, whichever of `READERS` its contents call for.

    ``path`` is the file that holds the geometry: of TIFFs, their ``.toml``, or a folder with one of that or of
    ``.xtekct`` in it.

    Raises
    ------
    DataError
        Nothing is there, it is damaged, or of no known layout; the reader says what is amiss otherwise.
    """
    path = Path(path)
    if path.is_dir():
        path = _description(path)
    check_exists(path)
    module, _, name = READERS[_layout(path)].partition(":")
    reader: Callable[[Path], Scan] = getattr(import_module(module), name)
    return reader(path)


def _description(folder: Path) -> Path:
    """The one file in a folder of images that tells their geometry."""
    found = sorted(file for file in folder.iterdir() if file.suffix.lower() in (".toml", ".xtekct"))
    if len(found) != 1:
        names = ", ".join(file.name for file in found) or "none"
        raise DataError(f"{folder}: a folder of images needs one .toml or .xtekct with their geometry; it has {names}")
    return found[0]


def _layout(path: Path) -> str:
    with path.open("rb") as file:
        start = file.read(520)
    if start.startswith(b"MATLAB") or start[512:].startswith(b"\x89HDF"):
        from hpcfed.scans.ctdata import holds_ctdata

        return "CtData in .mat (HTC 2022)" if holds_ctdata(path) else "named arrays in .mat"
    if start.startswith(b"\x89HDF") or path.suffix.lower() in (".h5", ".hdf5", ".nxs", ".nx"):
        from hpcfed.scans.nxtomo import holds_nxtomo

        return "NXtomo HDF5" if holds_nxtomo(path) else "DXchange HDF5"
    if zipfile.is_zipfile(path) or path.suffix.lower() == ".npz":
        return "named arrays in .npz"
    if path.suffix.lower() == ".xtekct" or b"[XTekCT]" in start:
        return "Nikon .xtekct"
    if path.suffix.lower() == ".toml" or start[:4] in (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"):
        return "TIFF with .toml"
    raise DataError(f"{path}: is no scan of a known layout; there are {', '.join(READERS)}")
