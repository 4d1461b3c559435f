"""What the readers of scans in HDF5 have in common."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcfed.errors import DataError
from hpcfed.scans.model import Frame


@dataclass(frozen=True, eq=False)
class Hdf5Frames:
    """Frames of a dataset (frames, rows, columns).

    Attributes
    ----------
    path, name
        The file, and the dataset in it.
    places
        The frame of each view, None where all frames are views.
    reverse
        Whether the axes are (columns, rows, frames) instead, as MATLAB writes them.
    """

    path: Path
    name: str
    places: NDArray[np.int64] | None = None
    reverse: bool = False

    @contextmanager
    def open(self) -> Iterator[Frame]:
        with open_hdf5(self.path) as file:
            data = file[self.name]

            def frame(view: int, rows: slice) -> NDArray[Any]:
                place = view if self.places is None else int(self.places[view])
                found: NDArray[Any] = data[:, rows, place].T if self.reverse else data[place, rows]
                return found

            yield frame


@contextmanager
def open_hdf5(path: Path) -> Iterator[Any]:
    """Open a file for a while.

    Raises
    ------
    DataError
        It is damaged or not HDF5.
    """
    import h5py

    try:
        # a cache for chunks that hold several views, which are read one by one
        with h5py.File(str(path), "r", rdcc_nbytes=2**26) as file:
            yield file
    except (OSError, RuntimeError, KeyError, ValueError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise DataError(f"{path}: cannot be read as HDF5, write or download it again ({reason})") from error


def unit_of(dataset: Any) -> str | None:
    """The attribute ``units``, whichever way it is stored."""
    return "".join(np.asarray(dataset.attrs.get("units", "")).ravel()[:1].astype(str)).strip() or None
