"""OME-Zarr (NGFF 0.5): chunks of slices, with the voxels' size and provenance as attributes."""

from __future__ import annotations

from pathlib import Path

from hpcfed.export.volume import Volume

CHUNK = (16, 256, 256)


def write(volume: Volume, path: Path) -> None:
    """Write a group with one level of resolution, the array ``0`` (z, y, x)."""
    import zarr

    stack = volume.stack
    group = zarr.open_group(path, mode="w", zarr_format=3)
    chunks = tuple(min(size, chunk) for size, chunk in zip(stack.shape, CHUNK, strict=True))
    group.create_array("0", data=stack, chunks=chunks, dimension_names=["z", "y", "x"])
    scale = {"type": "scale", "scale": [volume.voxel] * 3}
    group.attrs["ome"] = {
        "version": "0.5",
        "multiscales": [
            {
                "name": volume.name,
                "axes": [{"name": axis, "type": "space", "unit": "millimeter"} for axis in "zyx"],
                "datasets": [{"path": "0", "coordinateTransformations": [scale]}],
            }
        ],
    }
    group.attrs["hpcfed"] = dict(volume.facts)
