"""TIFF: one page a slice, float32, with the voxels' size and provenance as OME-XML, which Fiji and others read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hpcfed import __version__
from hpcfed.export.volume import Volume


def write(volume: Volume, path: Path) -> None:
    """Write an OME-TIFF, (z, y, x); beyond 4 GB it is a BigTIFF."""
    import tifffile

    size: dict[str, Any] = {f"PhysicalSize{axis}": volume.voxel for axis in "XYZ"}
    size |= {f"PhysicalSize{axis}Unit": "mm" for axis in "XYZ"}
    about = {"axes": "ZYX", "Name": volume.facts["run"], "Description": volume.description}
    tifffile.imwrite(
        path,
        volume.stack,
        ome=True,
        photometric="minisblack",
        metadata={**about, **size},
        software=f"hpcfed {__version__}",
        resolution=(10 / volume.voxel, 10 / volume.voxel),
        resolutionunit="CENTIMETER",
    )
