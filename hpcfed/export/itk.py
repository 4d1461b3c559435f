"""NRRD and MetaImage (``.mha``), by SimpleITK: the ending of the file says which; provenance as their fields."""

from __future__ import annotations

from pathlib import Path

from hpcfed.export.volume import Volume


def write(volume: Volume, path: Path) -> None:
    """Write compressed float32 voxels. In ITK's space x runs to the left and y to the back."""
    import SimpleITK

    image = SimpleITK.GetImageFromArray(volume.stack)
    right, front, head = volume.corner
    image.SetOrigin((-right, -front, head))
    image.SetSpacing((volume.voxel,) * 3)
    image.SetDirection((-1, 0, 0, 0, 1, 0, 0, 0, 1))
    for name, value in volume.facts.items():
        image.SetMetaData(f"hpcfed_{name}", " ".join(value.split()))
    try:
        SimpleITK.WriteImage(image, str(path), useCompression=True)
    except RuntimeError as error:
        raise OSError(" ".join(str(error).split())) from error
