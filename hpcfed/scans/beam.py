"""Where the rays of a scan with a point source run: fan beams, cone beams, and one source and detector pose a view."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class Beam:
    """A point source and a flat detector that turn about the rotation axis; lengths are in units of a voxel's edge.

    Coordinates are those of `hpcfed.operators.parallel_beam`, with z along the slices from the middle of the volume: at
    the angle ``t`` the source is at ``R (sin t, -cos t, 0)`` with R the ``source_distance``. Straight across, at
    ``D (-sin t, cos t, 0)`` with D the ``detector_distance``, is the point of the detector that has the column ``axis``
    and the row ``middle``; columns run along ``(cos t, sin t, 0)``, rows along z. As R grows this becomes the parallel
    beam. These are the conventions of ASTRA's ``cone`` and ``fanflat`` geometries.

    Attributes
    ----------
    source_distance, detector_distance
        From the rotation axis to the source, and to the detector. Of a scan with ``vectors``, means over its views.
    pixel_size
        Pitch of the columns and of the rows on the detector.
    axis, middle
        Column on which the rotation axis falls, and row on the level of the source; counted from 0 at pixel centres.
    vectors
        Where the poses are no circle: float64 (views, 12), in each row source, centre of the detector, step from one
        column to the next, step from one row to the next, (x, y, z) each: ASTRA's ``cone_vec``. They alone count then.
    """

    source_distance: float
    detector_distance: float
    pixel_size: tuple[float, float]
    axis: float
    middle: float
    vectors: NDArray[np.float64] | None = None

    @property
    def magnification(self) -> float:
        """How much larger than itself the detector shows what is at the rotation axis."""
        return 1 + self.detector_distance / self.source_distance

    def poses(self, angles: NDArray[np.float64], num_columns: int, num_rows: int) -> NDArray[np.float64]:
        """The poses at some angles of a circle in the layout of ``vectors``, float64 (views, 12)."""
        zero, one = np.zeros_like(angles), np.ones_like(angles)
        across = np.stack([-np.sin(angles), np.cos(angles), zero], axis=1)
        along = self.pixel_size[0] * np.stack([np.cos(angles), np.sin(angles), zero], axis=1)
        upwards = self.pixel_size[1] * np.stack([zero, zero, one], axis=1)
        centre = self.detector_distance * across
        centre += ((num_columns - 1) / 2 - self.axis) * along + ((num_rows - 1) / 2 - self.middle) * upwards
        return np.concatenate([-self.source_distance * across, centre, along, upwards], axis=1)
