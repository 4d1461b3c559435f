"""Small scans of several layouts, each broken in one way: for soak.py."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import scipy.io
import tifffile

Arrays = dict[str, Any]
VIEWS, ROWS, COLUMNS = 12, 2, 16


def whole() -> Arrays:
    """Counts behind a disc in a parallel beam, with the frames and the angles that a scan needs."""
    column = np.arange(COLUMNS) - (COLUMNS - 1) / 2
    chords = 2 * np.sqrt(np.maximum(25 - column**2, 0))
    counts = 100 + 5000 * np.exp(-0.05 * np.broadcast_to(chords, (VIEWS, ROWS, COLUMNS)))
    return {
        "projections": counts.astype(np.float32),
        "flats": np.full((2, ROWS, COLUMNS), 5100, np.float32),
        "darks": np.full((2, ROWS, COLUMNS), 100, np.float32),
        "angles": np.linspace(0, 180, VIEWS, endpoint=False),
    }


def _npz(folder: Path, arrays: Arrays) -> Path:
    np.savez(folder / "scan.npz", unit="degrees", **arrays)
    return folder / "scan.npz"


def _mat(folder: Path, arrays: Arrays) -> Path:
    scipy.io.savemat(folder / "scan.mat", {"unit": "degrees", **arrays})
    return folder / "scan.mat"


def _dxchange(folder: Path, arrays: Arrays) -> Path:
    names = {"projections": "data", "flats": "data_white", "darks": "data_dark", "angles": "theta"}
    with h5py.File(folder / "scan.h5", "w") as file:
        for name, array in arrays.items():
            file[f"exchange/{names[name]}"] = array
    return folder / "scan.h5"


def _nxtomo(folder: Path, arrays: Arrays) -> Path:
    kinds = {"projections": 0, "flats": 1, "darks": 2}
    frames = {name: np.atleast_1d(arrays[name]) for name in kinds if name in arrays}
    keys = np.concatenate([np.full(len(array), kinds[name]) for name, array in frames.items()])
    with h5py.File(folder / "scan.nxs", "w") as file:
        entry = file.create_group("entry")
        entry.attrs["definition"] = "NXtomo"
        try:
            entry["instrument/detector/data"] = np.concatenate([*frames.values()])
        except ValueError:  # frames of different sizes have no place in this layout
            entry["instrument/detector/data"] = frames.get("projections", np.zeros(0))
        entry["instrument/detector/image_key"] = keys
        if "angles" in arrays:
            entry["sample/rotation_angle"] = np.resize(arrays["angles"], len(keys))
            entry["sample/rotation_angle"].attrs["units"] = "degree"
    return folder / "scan.nxs"


def _tiff(folder: Path, arrays: Arrays) -> Path:
    lines = ['unit = "degrees"']
    for name in ("projections", "flats", "darks"):
        if name in arrays:
            tifffile.imwrite(folder / f"{name}.tif", arrays[name])
            lines.append(f'{name} = "{name}.tif"')
    if "angles" in arrays:
        lines.append(f"angles = {np.ravel(arrays['angles']).tolist()}")
    (folder / "scan.toml").write_text("\n".join(lines) + "\n")
    return folder / "scan.toml"


LAYOUTS: Mapping[str, Callable[[Path, Arrays], Path]] = {
    "npz": _npz,
    "mat": _mat,
    "DXchange": _dxchange,
    "NXtomo": _nxtomo,
    "TIFF": _tiff,
}


def _spot(array: np.ndarray, value: float, chance: random.Random) -> np.ndarray:
    spoiled = array.astype(float)
    spoiled.flat[chance.randrange(spoiled.size)] = value
    return spoiled


BREAKS: Mapping[str, Callable[[np.ndarray, random.Random], np.ndarray]] = {
    "a NaN": lambda array, chance: _spot(array, np.nan, chance),
    "an infinity": lambda array, chance: _spot(array, np.inf, chance),
    "all NaN": lambda array, chance: np.full(array.shape, np.nan),
    "constant": lambda array, chance: np.ones(array.shape, np.float32),
    "zeros": lambda array, chance: np.zeros(array.shape, np.float32),
    "negative": lambda array, chance: -np.asarray(array, float),
    "one less": lambda array, chance: array[:-1],
    "empty": lambda array, chance: array[:0],
    "one column less": lambda array, chance: array[..., :-1],
    "a dimension less": lambda array, chance: array[0],
    "a dimension more": lambda array, chance: array[None],
    "a number": lambda array, chance: np.float32(3.0),
    "of truth values": lambda array, chance: array > 1,
    "complex": lambda array, chance: array * (1 + 1j),
    "bytes": lambda array, chance: np.asarray(array, np.uint8),
    "in thousands": lambda array, chance: 1000 * np.asarray(array, float),
    "in radians": lambda array, chance: np.deg2rad(array),
}


def broken(folder: Path, chance: random.Random, damage: Callable[[Path, random.Random], str]) -> tuple[Path, str]:
    """A scan in ``folder`` with one thing amiss, in its arrays or (by ``damage``) in the bytes of its files."""
    arrays = whole()
    layout = chance.choice([*LAYOUTS])
    if chance.random() < 0.3:
        path = LAYOUTS[layout](folder, arrays)
        return path, f"{layout}, {damage(chance.choice(sorted(folder.iterdir())), chance)}"
    name = chance.choice([*arrays])
    if chance.random() < 0.1:
        del arrays[name]
        return LAYOUTS[layout](folder, arrays), f"{layout} without {name}"
    how = chance.choice([*BREAKS])
    arrays[name] = BREAKS[how](arrays[name], chance)
    try:
        return LAYOUTS[layout](folder, arrays), f"{layout} with {name}: {how}"
    except (TypeError, ValueError):  # the layout cannot hold that
        return broken(folder, chance, damage)
