"""The Joseph filters of RTK (pip install itk-rtk) on a circular cone beam, with the arrays of `hpcfed.operators`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcfed.scans import Beam

Array = NDArray[np.float32]


def pair(
    shape: tuple[int, int, int], beam: Beam, angles: NDArray[np.float64], columns: int, rows: int
) -> tuple[Callable[[Array], Array], Callable[[Array], Array]]:
    """Forward projection, (ny, nx, nz) to (views, columns, rows), and backprojection; the detector is centred.

    RTK's axis of rotation is its y, upwards ours z; its z is our -y, in which image rows run, and its gantry angle our
    angle.
    """
    import itk
    from itk import RTK as rtk

    kind = itk.Image[itk.F, 3]
    geometry = rtk.ThreeDCircularProjectionGeometry.New()
    for angle in np.rad2deg(angles):
        geometry.AddProjection(beam.source_distance, beam.source_distance + beam.detector_distance, float(angle))

    def image(array: Array, spacing: tuple[float, ...], centred: int) -> Any:
        """Its first ``centred`` axes have their origin in the middle."""
        made = itk.image_from_array(np.ascontiguousarray(array))
        made.SetSpacing(spacing)
        middle = -(np.array(array.shape[::-1]) - 1) / 2 * spacing
        middle[centred:] = 0
        made.SetOrigin(middle.tolist())
        return made

    def volume_of(array: Array) -> Any:
        return image(array.transpose(0, 2, 1), (1.0, 1.0, 1.0), 3)

    def projections_of(array: Array) -> Any:
        return image(array.transpose(0, 2, 1), (*beam.pixel_size, 1.0), 2)

    def run(name: str, into: Any, source: Any) -> Array:
        made = getattr(rtk, name)[kind, kind].New()
        made.SetInput(0, into)
        made.SetInput(1, source)
        made.SetGeometry(geometry)
        made.SetNumberOfWorkUnits(1)
        made.Update()
        return np.ascontiguousarray(itk.array_from_image(made.GetOutput()).transpose(0, 2, 1))

    def forward(volume: Array) -> Array:
        empty = projections_of(np.zeros((len(angles), columns, rows), np.float32))
        return run("JosephForwardProjectionImageFilter", empty, volume_of(volume))

    def back(projections: Array) -> Array:
        empty = volume_of(np.zeros(shape, np.float32))
        return run("JosephBackProjectionImageFilter", empty, projections_of(projections))

    return forward, back
