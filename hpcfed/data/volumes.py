"""Volumes from files: read, check, resample, and scale to [0, 1]."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from hpcfed.data import tiff_log
from hpcfed.errors import ConfigError, DataError

NPZ_NAMES = ("volume", "image", "hu", "data")
"""Names looked for, in this order, in an ``.npz`` that holds several three-dimensional arrays."""


def read_volume(path: str | Path, shape: tuple[int, int, int]) -> NDArray[np.float32]:
    """Read a volume, resample it to ``shape`` and scale it so that its maximum is 1.

    The kind of file is told by its extension:

    ==================  =============  ============================================================================
    extension           axes           what is read
    ==================  =============  ============================================================================
    .npy                (z, y, x)      the array
    .npz                (z, y, x)      the only three-dimensional array, else the first of ``NPZ_NAMES``
    .nii, .nii.gz       (x, y, z)      turned to the nearest right-anterior-superior axes, anterior up (nibabel)
    .tif, .tiff         (z, y, x)      the first series, one page a slice (tifffile)
    ==================  =============  ============================================================================

    An array of an ``.npz`` named ``hu`` holds Hounsfield units; it becomes the attenuation ``0.0206 (1 + hu / 1000)``
    per mm (water at about 70 keV). Negative values are set to 0. Shrinking smooths first, with a Gaussian of
    ``(factor - 1) / 2`` voxels; values between voxel centres are interpolated linearly. Pickled arrays are refused.

    Parameters
    ----------
    path
        The file.
    shape
        (ny, nx, nz) of the result.

    Returns
    -------
    ndarray, float32, (ny, nx, nz), C-contiguous
        Values in [0, 1] with maximum 1; row 0 is the top.

    Raises
    ------
    DataError
        The file is missing, empty, damaged, of an unknown kind, not three-dimensional, constant, not positive anywhere,
        or not finite everywhere.
    ConfigError
        The library that reads this kind of file is not installed.
    """
    path = Path(path)
    reader = next((reader for ending, reader in _READERS.items() if path.name.lower().endswith(ending)), None)
    if reader is None:
        raise DataError(f"{path}: no known volume file; its name should end in one of {', '.join(_READERS)}")
    if not path.is_file():
        raise DataError(f"{path}: there is no such file; check the path of the volume")
    if path.stat().st_size == 0:
        raise DataError(f"{path}: the file is empty; write or download it again")
    try:
        volume = reader(path)
    except (ConfigError, DataError):
        raise
    except Exception as error:  # the libraries raise a dozen types on damaged files
        raise DataError(f"{path}: cannot be read, write or download it again ({_one_line(error)})") from error
    volume = _resample(np.maximum(volume, 0), shape)
    peak = volume.max()
    if not peak > 0:
        raise DataError(f"{path}: no value of the volume is positive; nothing would be left to reconstruct")
    volume /= peak
    return volume


def _read_npy(path: Path) -> NDArray[np.float32]:
    return _checked(np.load(path, allow_pickle=False), path).transpose(1, 2, 0)


def _read_npz(path: Path) -> NDArray[np.float32]:
    with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
        arrays = {name: archive[name] for name in archive.files}
    cubes = [name for name, array in arrays.items() if array.ndim == 3]
    if not cubes:
        found = ", ".join(f"{name} {array.shape}" for name, array in arrays.items()) or "nothing"
        raise DataError(f"{path}: holds no three-dimensional array but {found}; save the volume as (z, y, x)")
    name = cubes[0] if len(cubes) == 1 else next((name for name in NPZ_NAMES if name in cubes), None)
    if name is None:
        raise DataError(
            f"{path}: holds {len(cubes)} three-dimensional arrays ({', '.join(cubes)}); "
            f"name the one to read {' or '.join(NPZ_NAMES)}"
        )
    volume = _checked(arrays[name], path)
    if name == "hu":
        volume = np.float32(0.0206) * (1 + volume / np.float32(1000))
    return volume.transpose(1, 2, 0)


def _read_nifti(path: Path) -> NDArray[np.float32]:
    nibabel = _optional("nibabel", path)
    image = nibabel.as_closest_canonical(nibabel.load(path))
    stored = image.get_fdata(dtype=np.float32, caching="unchanged")
    return _checked(stored, path).transpose(1, 0, 2)[::-1]


def _read_tiff(path: Path) -> NDArray[np.float32]:
    tifffile = _optional("tifffile", path)
    with tiff_log.raised(), path.open("rb") as file:
        stack = tifffile.imread(file)
    return _checked(stack, path).transpose(1, 2, 0)


_READERS: dict[str, Callable[[Path], NDArray[np.float32]]] = {
    ".npy": _read_npy,
    ".npz": _read_npz,
    ".nii": _read_nifti,
    ".nii.gz": _read_nifti,
    ".tif": _read_tiff,
    ".tiff": _read_tiff,
}


def _optional(module: str, path: Path) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"{path}: reading this kind of file needs {module}; pip install {module}") from error


def _checked(volume: NDArray[Any], path: Path) -> NDArray[np.float32]:
    """Return the array as float32 if it is a volume of finite numbers that differ."""
    if volume.ndim != 3 or volume.size == 0:
        raise DataError(f"{path}: has shape {volume.shape}; a volume needs three axes, none of them empty")
    if volume.dtype.kind not in "biuf":
        raise DataError(f"{path}: holds values of type {volume.dtype}; a volume needs integers or real numbers")
    with np.errstate(over="ignore"):
        volume = volume.astype(np.float32, copy=False)
    finite = np.isfinite(volume)
    if not finite.all():
        first = tuple(int(index) for index in np.unravel_index(np.argmin(finite), volume.shape))
        raise DataError(
            f"{path}: {volume.size - np.count_nonzero(finite)} of {volume.size} values are not finite (the first at "
            f"{first}, in the order of the file); replace them"
        )
    if volume.min() == volume.max():
        raise DataError(f"{path}: every value is {volume.flat[0]:g}; a constant volume holds nothing to reconstruct")
    return volume


def _resample(volume: NDArray[np.float32], shape: tuple[int, int, int]) -> NDArray[np.float32]:
    """Resample to ``shape``; the edges of the two grids coincide, so voxel i is centred at ``(i + 1/2) / n``."""
    if volume.shape == shape:
        return np.ascontiguousarray(volume)
    factors = [old / new for old, new in zip(volume.shape, shape, strict=True)]
    if max(factors) > 1:
        volume = ndimage.gaussian_filter(volume, [max(0.0, (factor - 1) / 2) for factor in factors], mode="nearest")
    zoom = [1 / factor for factor in factors]
    return np.ascontiguousarray(ndimage.zoom(volume, zoom, order=1, mode="nearest", grid_mode=True))


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
