"""Reconstructions in the formats of other programs; a file here is a format."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from hpcfed.errors import ConfigError
from hpcfed.export.volume import Volume, read
from hpcfed.run.run_folder import RunFolder

__all__ = ["FORMATS", "Format", "Volume", "export"]


@dataclass(frozen=True)
class Format:
    """A format.

    Attributes
    ----------
    module : which has ``write(volume, path)``.
    package : what must be installed.
    endings : that its files may have, the default first; those of folders are free.
    """

    module: str
    package: str
    endings: tuple[str, ...]
    is_folder: bool = False


FORMATS: Mapping[str, Format] = {
    "tiff": Format("hpcfed.export.tiff", "tifffile", (".ome.tif", ".tif", ".tiff")),
    "nifti": Format("hpcfed.export.nifti", "nibabel", (".nii.gz", ".nii")),
    "nrrd": Format("hpcfed.export.itk", "SimpleITK", (".nrrd",)),
    "mha": Format("hpcfed.export.itk", "SimpleITK", (".mha",)),
    "dicom": Format("hpcfed.export.dicom", "pydicom", (".dicom",), is_folder=True),
    "zarr": Format("hpcfed.export.ome_zarr", "zarr", (".ome.zarr",), is_folder=True),
}


def export(
    folder: RunFolder, to: str, out: Path | None = None, dataset: str = "volume", voxel: float | None = None
) -> Path:
    """Write a volume of a run's result in another format, all or nothing, and return where.

    Parameters
    ----------
    folder : the run.
    to : one of `FORMATS`.
    out : the file, or, of dicom and zarr, the folder; by default ``DIR/DATASET`` with the ending of the format.
    dataset : of ``result.h5``, three-dimensional.
    voxel : edge of a voxel in mm, where the result does not know it.

    Raises
    ------
    ConfigError
        The run is not finished, has no such dataset, a package is missing, or the place cannot be written.
    DataError
        The result is damaged, or the dataset cannot be shown in this format.
    """
    form = FORMATS[to]
    try:
        import_module(form.package)
    except ImportError as error:
        raise ConfigError(f"--to {to} needs {form.package}: pip install {form.package}") from error
    path = out or folder.path / f"{dataset}{form.endings[0]}"
    if not form.is_folder and not path.name.lower().endswith(form.endings):
        raise ConfigError(f"--out {path}: files of {to} end in {' or '.join(form.endings)}")
    if path.is_dir() and any(path.iterdir()):
        raise ConfigError(f"--out {path} is a folder that holds something: choose another")
    volume = read(folder, dataset, voxel)
    write: Callable[[Volume, Path], None] = import_module(form.module).write
    # the libraries look at the ending, so the whole name stays at the end
    temporary = path.with_name(f".{secrets.token_hex(4)}-{path.name}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(volume, temporary)
        os.replace(temporary, path)
    except OSError as error:
        raise ConfigError(f"--out {path} cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        if temporary.is_file():
            temporary.unlink()
    return path
