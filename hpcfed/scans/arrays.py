"""Scans as named arrays in ``.npz`` and ``.mat`` files: parallel, fan and cone beams, and a pose a view.

======================  ============================================================================================
name                    what it is
======================  ============================================================================================
projections             (views, rows, columns), or (views, columns) of a single row
angles                  (views,), in the unit that ``unit`` names, ``degrees`` or ``radians``
vectors                 instead of angles: (views, 12), source, detector centre, u and v of each view
flats, darks            (frames, rows, columns), or one frame (rows, columns)
values                  without flats: ``transmission`` or ``integrals``
source_distance         of a fan or cone beam, source to rotation axis; in mm, as the three below
detector_distance       rotation axis to detector
pixel_size              on the detector: one number, or one for columns and one for rows
voxel_size              by default the size of a pixel as it is at the rotation axis
axis, middle            column of the rotation axis, and row on the level of the source, from 0 at pixel centres
======================  ============================================================================================

Without the three lengths the beam is parallel.
"""

from __future__ import annotations

import os
import struct
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcfed.errors import DataError
from hpcfed.scans.geometry import NAMES, named
from hpcfed.scans.hdf5 import Hdf5Frames, open_hdf5
from hpcfed.scans.model import Frame, Frames, Scan, check_exists, fields

SMALL = (*NAMES, "flats", "darks", "values")
"""What is read at once, besides the projections."""


@dataclass(frozen=True)
class NpzFrames:
    """Frames of ``projections`` in an ``.npz``: no more than a view is in memory, compressed or not.

    What is not compressed is read where it lies; what is, from the beginning up to the last view.
    """

    path: Path

    @contextmanager
    def open(self) -> Iterator[Frame]:
        with _guarded(self.path), _member(self.path, "projections.npy") as stream:
            shape, dtype = _header(stream, self.path)
            start, count = stream.tell(), int(np.prod(shape[1:]))

            def frame(view: int, rows: slice) -> NDArray[Any]:
                stream.seek(start + view * count * dtype.itemsize)
                content = stream.read(count * dtype.itemsize)
                return np.frombuffer(content, dtype).reshape(-1, shape[-1])[rows]

            yield frame


@contextmanager
def _member(path: Path, name: str) -> Iterator[Any]:
    """A stream of a file in an archive: the archive itself at the right place if the file is not compressed."""
    with zipfile.ZipFile(path) as archive:
        found = archive.getinfo(name)
        if found.compress_type != zipfile.ZIP_STORED:
            with archive.open(found) as stream:
                yield stream
            return
    with path.open("rb") as stream:
        stream.seek(found.header_offset)
        lengths = struct.unpack("<26xHH", stream.read(30))  # of the name and of an extra field, before the content
        stream.seek(sum(lengths), os.SEEK_CUR)
        yield stream


@dataclass(frozen=True)
class MatFrames:
    """Frames of a variable in a ``.mat`` before version 7.3, which can only be read whole.

    ``name`` may be that of a field, ``structure.field``. The variable has the axes (views, rows, columns) or
    (views, columns).
    """

    path: Path
    name: str

    @contextmanager
    def open(self) -> Iterator[Frame]:
        variable, _, field = self.name.partition(".")
        with _guarded(self.path):
            found = load_mat(self.path, [variable])[variable]
        array: NDArray[Any] = found[field] if field else found
        yield lambda view, rows: array[view].reshape(-1, array.shape[-1])[rows]


def open_npz(path: str | Path) -> Scan:
    """Open a scan in an ``.npz`` whose arrays are named as the module says, without reading a projection.

    Raises
    ------
    DataError
        The file is missing, empty or damaged; an array is missing or has the wrong shape or type; counts do not match.
    """
    path = Path(path)
    check_exists(path)
    with _guarded(path), zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        if "projections.npy" not in names:
            raise DataError(f"{path}: holds no array projections but {', '.join(names) or 'nothing'}; name it so")
        with archive.open("projections.npy") as stream:
            shape, dtype = _header(stream, path)
    with _guarded(path), np.load(path, allow_pickle=False) as arrays:
        known = {name: arrays[name] for name in SMALL if name in arrays}
    return _assemble(known, shape, dtype, NpzFrames(path), path)


def open_mat(path: str | Path) -> Scan:
    """Open a scan in a ``.mat`` whose variables are named as the module says.

    Those of version 7.3 are read view by view, older ones whole.

    Raises
    ------
    DataError
        As `open_npz`.
    """
    path = Path(path)
    check_exists(path)
    frames: Frames
    if is_hdf5(path):
        with open_hdf5(path) as file:
            if "projections" not in file:
                raise DataError(f"{path}: holds no variable projections but {', '.join(file)}; name it so")
            shape, dtype = file["projections"].shape[::-1], file["projections"].dtype
            known = {name: _matlab(file[name]) for name in SMALL if name in file}
        frames = Hdf5Frames(path, "projections", reverse=True)
        if len(shape) == 2:
            raise DataError(f"{path}: projections has two axes; in a version 7.3 .mat give views, rows and columns")
    else:
        import scipy.io

        with _guarded(path):
            variables = {name: (shape, kind) for name, shape, kind in scipy.io.whosmat(path)}
            known = load_mat(path, [name for name in SMALL if name in variables])
        if "projections" not in variables:
            raise DataError(f"{path}: holds no variable projections but {', '.join(variables)}; name it so")
        shape, kind = variables["projections"]
        dtype = np.dtype(kind if kind in ("single", "double") or "int" in kind else "O")
        frames = MatFrames(path, "projections")
    return _assemble(known, shape, dtype, frames, path)


def is_hdf5(path: Path) -> bool:
    """Whether a ``.mat`` is of version 7.3, which is HDF5 behind a header."""
    with path.open("rb") as file:
        return b"\x89HDF" in (file.read(4), file.read(512)[508:])


def load_mat(path: Path, names: list[str]) -> dict[str, Any]:
    """Variables of a ``.mat`` before version 7.3: structures as dictionaries, without axes of size 1."""
    import scipy.io

    loaded = scipy.io.loadmat(path, variable_names=names, simplify_cells=True)
    return {name: value for name, value in loaded.items() if not name.startswith("__")}


def _assemble(
    known: Mapping[str, Any], shape: tuple[int, ...], dtype: np.dtype[Any], frames: Frames, path: Path
) -> Scan:
    if len(shape) not in (2, 3) or 0 in shape:
        raise DataError(f"{path}: projections has shape {shape}; it needs views, rows and columns, none of them zero")
    if dtype.kind not in "iuf":
        raise DataError(f"{path}: projections holds {dtype}; it needs integers or real numbers")
    num_views, num_rows, num_columns = shape[0], shape[1] if len(shape) == 3 else 1, shape[-1]
    known = {name: value for name, value in known.items() if np.size(value)}
    if "angles" in known:
        known["angles"] = np.ravel(known["angles"])
    for name in ("unit", "values"):
        if name in known:
            known[name] = str(np.ravel(known[name])[0])
    remedy = "add unit: degrees or radians"
    size = (num_views, num_rows, num_columns)
    geometry = named(known, size, path, remedy)
    remedy = "add flats, or values: transmission or integrals"
    flats, darks = (_stack(known, name, num_rows, num_columns) for name in ("flats", "darks"))
    corrected = fields(known.get("values"), flats, darks, (num_rows, num_columns), path, remedy)
    return geometry.scan(path, size, frames, corrected)


def _stack(known: Mapping[str, Any], name: str, num_rows: int, num_columns: int) -> NDArray[Any] | None:
    """Frames (frames, rows, columns), whichever axes of size 1 were left out."""
    if name not in known:
        return None
    array = np.asarray(known[name])
    return array.reshape(-1, num_rows, num_columns) if array.shape[-1:] == (num_columns,) else np.atleast_3d(array)


def _matlab(dataset: Any) -> Any:
    """A variable of a version 7.3 ``.mat``: axes are reversed, texts are numbers of characters."""
    array = np.asarray(dataset[()]).T
    if np.asarray(dataset.attrs.get("MATLAB_class", "")).astype(str) == "char":
        return "".join(map(chr, array.ravel()))
    return array.squeeze()


def _header(stream: Any, path: Path) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Shape and type of the array whose ``.npy`` a stream is, which stands at the numbers then."""
    version = np.lib.format.read_magic(stream)
    read: Callable[..., Any] = np.lib.format.read_array_header_1_0
    shape, fortran, dtype = (read if version == (1, 0) else np.lib.format.read_array_header_2_0)(stream)
    if fortran and len(shape) > 1:
        raise DataError(f"{path}: projections is stored column by column; save numpy.ascontiguousarray(projections)")
    return shape, dtype


@contextmanager
def _guarded(path: Path) -> Iterator[None]:
    """Turn whatever the libraries raise about damaged files into one line."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DataError(f"{path}: cannot be read, write or download it again ({reason})") from error
