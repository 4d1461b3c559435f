"""NIfTI-1: voxels (x, y, z), whose affine says that y falls from row to row; provenance as an extension."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from hpcfed.export.volume import Volume


def write(volume: Volume, path: Path) -> None:
    """Write ``.nii``, or compressed ``.nii.gz``."""
    import nibabel

    affine = np.diag([volume.voxel, -volume.voxel, volume.voxel, 1.0])
    affine[:3, 3] = volume.corner
    image = nibabel.Nifti1Image(volume.array.transpose(1, 0, 2), affine)
    image.header.set_xyzt_units("mm")
    image.header["descrip"] = f"{volume.facts['software']} {volume.facts.get('digest', '')}"[:79]
    image.header.extensions.append(nibabel.nifti1.Nifti1Extension("comment", volume.description.encode()))
    nibabel.save(image, path)
