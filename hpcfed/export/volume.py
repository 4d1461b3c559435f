"""What is exported: a volume of a result, with its voxels' size and where it comes from."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcfed import __version__
from hpcfed.errors import ConfigError, DataError
from hpcfed.run.run_folder import RunFolder

EDGE = "voxel_edge"
"""The attribute of a dataset that says how large a voxel is, in mm, where a scan told."""


@dataclass(frozen=True, eq=False)
class Volume:
    """A volume and what is known about it.

    In space, x runs to the right, y up or to the front (row 0 is at the top), z up or to the head; every format says so
    in its own way, and the volume's middle is the origin.

    Attributes
    ----------
    array : float32 (y, x, z), as in the result.
    voxel : edge of a voxel in mm.
    name : of the dataset.
    facts : provenance, by name.
    """

    array: NDArray[np.float32]
    voxel: float
    name: str
    facts: Mapping[str, str]

    @property
    def stack(self) -> NDArray[np.float32]:
        """The volume as slices, (z, y, x), C-contiguous."""
        return np.ascontiguousarray(self.array.transpose(2, 0, 1))

    @property
    def corner(self) -> tuple[float, float, float]:
        """Where the centre of voxel (0, 0, 0) is: x to the right, y to the front, z to the head, in mm."""
        rows, columns, slices = (self.voxel * (size - 1) / 2 for size in self.array.shape)
        return -columns, rows, -slices

    @property
    def description(self) -> str:
        """The facts as JSON."""
        return json.dumps(self.facts, indent=1)


def read(folder: RunFolder, dataset: str, voxel: float | None) -> Volume:
    """Read a volume of a finished run.

    The voxels' size is ``voxel``, or the attribute ``voxel_edge``, or 1 mm, which the facts then say is a guess.

    Raises
    ------
    ConfigError
        The run is not finished, or there is no such three-dimensional dataset.
    DataError
        The result is damaged, or has values that are not finite.
    """
    import h5py

    if not folder.finished:
        raise ConfigError(f"{folder.path} is not finished, so there is no result: hpcfed resume {folder.path}")
    try:
        with h5py.File(os.fspath(folder.result), "r") as file:
            found = file.get(dataset)
            if not isinstance(found, h5py.Dataset) or found.ndim != 3:
                volumes = [name for name in file if getattr(file[name], "ndim", 0) == 3]
                there = f"there are {', '.join(volumes)}" if volumes else "there is none"
                raise ConfigError(f"--dataset {dataset}: no volume of {folder.result} is called that; {there}")
            array = np.asarray(found[()], np.float32)
            known: Any = found.attrs.get(EDGE)
            about = {**dict(file["provenance"].attrs), **dict(file.attrs)}
            unit = str(found.attrs.get("unit", ""))
    except OSError as error:
        raise DataError(f"result {folder.result} is damaged: hpcfed resume {folder.path} writes it again") from error
    if not np.isfinite(array).all():
        raise DataError(f"{dataset} of {folder.result} has values that are not finite: it has no place in a picture")
    names = ("workload", "algorithm", "clients", "rounds", "command", "digest", "date")
    facts = {
        "software": f"hpcfed {__version__}",
        "run": folder.path.resolve().name,
        "dataset": dataset,
        **({"unit": unit} if unit else {}),
        **{name: str(about[name]) for name in names if name in about},
    }
    if voxel is None and known is None:
        facts["voxel_size"] = "unknown, taken as 1 mm"
    return Volume(array, float(voxel or known or 1), dataset, facts)
