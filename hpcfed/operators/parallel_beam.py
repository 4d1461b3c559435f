"""Parallel-beam projections of a volume about a vertical axis, on a CPU.

Coordinates, in units of a voxel, which is also the pitch of the detector. Voxel ``(i, k, l)`` of a volume of shape
``(ny, nx, nz)`` has its centre at ``x = k - (nx - 1)/2`` (to the right), ``y = (ny - 1)/2 - i`` (up: row 0 is at the
top), and belongs to slice ``l``. The rotation axis is ``x = y = 0``. The ray of a view at the angle ``theta`` that
meets the centre of detector column ``j`` in row ``l`` is the line

    ``x cos(theta) + y sin(theta) = j - axis``

of slice ``l``. Angles count counter-clockwise; these are the conventions of ASTRA's 2D ``parallel`` geometry. As every
slice has the same rays, ``A`` acts on all slices with one set of weights: those of Joseph's method, "An improved
algorithm for reprojecting rays through pixel images" (IEEE Trans. Med. Imaging 1, 1982), ASTRA's ``linear``.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from hpcfed.errors import ConfigError, DataError

Volume = NDArray[np.float32]
Projections = NDArray[np.float32]

SLAB_SLICES = 64  # slices projected together
FEW_SLICES = 4  # for which loops across rays and pixels are faster than loops along the slices
SCRATCH_BYTES = 2**20  # of a block of views: what a second-level cache holds


class ParallelBeam:
    """The projector ``A`` of one client: its views of the whole volume.

    The weights are computed where they are used, from the angles, in double precision: there is no matrix to build or
    to hold, and `adjoint` is the exact transpose of `forward` but for the rounding of float32 sums. Every method is
    deterministic and works on any number of threads at once.

    Parameters
    ----------
    shape : (ny, nx, nz) of the volume.
    angles : of this client's views, in radians.
    num_columns : of the detector. Its number of rows is nz.
    axis : detector column, counted from 0 at pixel centres, on which the rotation axis falls; the middle by default.

    Notes
    -----
    Volumes are float32 arrays (ny, nx, nz) and projections float32 arrays (views, columns, rows), both C-contiguous,
    so that the slices of a pixel or of a ray lie next to each other. Where a method takes ``views``, an array of local
    view numbers, only those rows of ``A`` are used. ``out`` is overwritten and returned; it must
    not share memory with an input.
    """

    def __init__(
        self, shape: tuple[int, int, int], angles: NDArray[np.float64], num_columns: int, axis: float | None = None
    ) -> None:
        self.shape = check_shape(shape)
        self.angles = np.atleast_1d(np.asarray(angles, dtype=np.float64))
        self.num_columns = int(num_columns)
        self.axis = (self.num_columns - 1) / 2 if axis is None else float(axis)
        check_geometry(self.angles, self.num_columns, self.axis)
        cosines, sines = np.cos(self.angles), np.sin(self.angles)
        self._directions = np.stack([cosines, sines, np.maximum(np.abs(cosines), np.abs(sines))], axis=1)
        radius = np.hypot(self.shape[0] - 1, self.shape[1] - 1) / 2
        self._first = int(np.floor(self.axis - radius)) - 1
        self._offset = self.axis - self._first
        self._num_rays = int(self._offset + radius) + 3  # one to spare on either side, for rounding

    @property
    def num_views(self) -> int:
        """Number of this client's views."""
        return self.angles.size

    @property
    def nbytes(self) -> int:
        """Bytes held by the projector itself, and scratch that a call needs for its duration."""
        turned = 4 * math.prod(self.shape) if self.shape[2] <= FEW_SLICES else 0  # the volume once more
        return self.angles.nbytes + self._directions.nbytes + self._scratch().nbytes + turned

    def forward(
        self, volume: Volume, views: NDArray[np.integer] | None = None, out: Projections | None = None
    ) -> Projections:
        """``A x``, the line integrals, of shape (views, columns, rows)."""
        from hpcfed.operators import parallel_beam_kernels as kernels

        check_array(volume, self.shape, "volume")
        directions = self._select(views)
        out = output(out, (len(directions), self.num_columns, self.shape[2]), "projections")
        kernels.forward(volume, directions, self._offset, self._first, out, self._scratch())
        return out

    def adjoint(
        self, projections: Projections, views: NDArray[np.integer] | None = None, out: Volume | None = None
    ) -> Volume:
        """``A^T p``; ``projections`` holds the given views only, in their order."""
        out = output(out, self.shape, "volume")
        out.fill(0)
        self._add_adjoint(projections, self._select(views), out)
        return out

    def gradient(
        self,
        volume: Volume,
        projections: Projections,
        scale: float = 1.0,
        views: NDArray[np.integer] | None = None,
        out: Volume | None = None,
    ) -> Volume:
        """``scale * A^T (A x - b)``, without storing the residual.

        ``projections`` holds all of this client's views, also where ``views`` selects some of them.
        """
        check_array(projections, (self.num_views, self.num_columns, self.shape[2]), "projections")
        rows = np.arange(self.num_views) if views is None else np.asarray(views, dtype=np.int64)
        return self._residual_adjoint(volume, projections, rows, views, scale, out)

    def normal(self, volume: Volume, out: Volume | None = None) -> Volume:
        """``A^T A x``: the gradient for data that are zero in every view."""
        zero = np.zeros((1, self.num_columns, self.shape[2]), dtype=np.float32)
        return self._residual_adjoint(volume, zero, np.zeros(self.num_views, dtype=np.int64), None, 1.0, out)

    def misfit(self, volume: Volume, projections: Projections) -> float:
        """``1/2 ||A x - b||^2``, summed in double precision."""
        from hpcfed.operators import parallel_beam_kernels as kernels

        check_array(volume, self.shape, "volume")
        check_array(projections, (self.num_views, self.num_columns, self.shape[2]), "projections")
        return float(kernels.misfit(volume, projections, self._directions, self._offset, self._first, self._scratch()))

    def filtered_backprojection(self, projections: Projections, window: Literal["hann", "ramp"] = "hann") -> Volume:
        """``(pi / num_views) sum over the views of their filtered rows, spread back along the rays``.

        That is the whole volume as these views alone show it. `ramp_response` filters the rows; spreading interpolates
        them linearly between columns, `adjoint`'s weights without the ripple that these have at oblique angles. The
        scale is right where the views spread evenly enough over 180 degrees; few views leave streaks, but no bias.
        """
        check_array(projections, (self.num_views, self.num_columns, self.shape[2]), "projections")
        length = 1 << (2 * self.num_columns - 1).bit_length()  # no wrap-around, and fast
        response = (np.pi / self.num_views) * ramp_response(length, window)[:, None]
        interpolating = self._directions.copy()
        interpolating[:, 2] = 1
        volume = np.zeros(self.shape, dtype=np.float32)
        block = self._block()
        for begin in range(0, self.num_views, block):
            views = slice(begin, begin + block)
            spectrum = np.fft.rfft(projections[views], n=length, axis=1)
            spectrum *= response
            filtered = np.fft.irfft(spectrum, n=length, axis=1)[:, : self.num_columns]
            self._add_adjoint(np.ascontiguousarray(filtered), interpolating[views], volume)
        return volume

    def _add_adjoint(self, projections: Projections, directions: NDArray[np.float64], volume: Volume) -> None:
        from hpcfed.operators import parallel_beam_kernels as kernels

        check_array(projections, (len(directions), self.num_columns, self.shape[2]), "projections")
        kernels.adjoint(projections, directions, self._offset, self._first, volume, self._scratch())

    def _residual_adjoint(
        self,
        volume: Volume,
        projections: Projections,
        rows: NDArray[np.int64],
        views: NDArray[np.integer] | None,
        scale: float,
        out: Volume | None,
    ) -> Volume:
        from hpcfed.operators import parallel_beam_kernels as kernels

        check_array(volume, self.shape, "volume")
        out = output(out, self.shape, "volume")
        out.fill(0)
        directions, scratch = self._select(views), self._scratch()
        kernels.gradient(volume, projections, rows, directions, self._offset, self._first, scale, out, scratch)
        return out

    def _select(self, views: NDArray[np.integer] | None) -> NDArray[np.float64]:
        return self._directions if views is None else self._directions[views]

    def _block(self) -> int:
        """Views swept together, so that their shadows fit `SCRATCH_BYTES`."""
        return max(1, min(self.num_views, SCRATCH_BYTES // (4 * self._num_rays * min(self.shape[2], SLAB_SLICES))))

    def _scratch(self) -> NDArray[np.float32]:
        return np.empty((self._block(), self._num_rays, min(self.shape[2], SLAB_SLICES)), dtype=np.float32)


def ramp_response(length: int, window: Literal["hann", "ramp"] = "hann") -> NDArray[np.float32]:
    """Frequency response of the filter of filtered backprojection, at the ``length // 2 + 1`` points of a real FFT.

    The ramp |f| cut off at half a cycle per pixel is sampled where it has its finite support, in space: 1/4 at 0,
    ``-1/(pi n)^2`` at odd n, 0 at even n (Kak and Slaney, Principles of Computerized Tomographic Imaging, 1988,
    chapter 3). Sampling it in frequency instead would lose the mean. ``hann`` multiplies it by
    ``(1 + cos(2 pi f)) / 2``, which trades resolution for noise.
    """
    if window not in ("hann", "ramp"):
        raise ConfigError(f"window = {window!r} is unknown: choose hann or ramp")
    distance = np.minimum(np.arange(length), length - np.arange(length))
    kernel = np.zeros(length)
    kernel[0] = 0.25
    odd = distance % 2 == 1
    kernel[odd] = -1 / (np.pi * distance[odd]) ** 2
    response = np.fft.rfft(kernel).real
    if window == "hann":
        response *= (1 + np.cos(2 * np.pi * np.fft.rfftfreq(length))) / 2
    return response.astype(np.float32)


def check_shape(shape: tuple[int, int, int]) -> tuple[int, int, int]:
    """The shape of a volume as three positive numbers, or a ConfigError."""
    if len(shape) != 3 or min(shape) < 1:
        raise ConfigError(f"shape = {tuple(shape)} is not that of a volume: give ny, nx, nz, each at least 1")
    ny, nx, nz = (int(size) for size in shape)
    return ny, nx, nz


def check_geometry(angles: NDArray[np.float64], num_columns: int, axis: float) -> None:
    """Raise a ConfigError unless these describe a scan."""
    if angles.ndim != 1 or angles.size == 0 or not np.isfinite(angles).all():
        raise ConfigError(f"angles of shape {angles.shape} are no views: give a list of finite numbers, in radians")
    if num_columns < 1:
        raise ConfigError(f"num_columns = {num_columns}: a detector has at least 1 column")
    if not np.isfinite(axis):
        raise ConfigError(f"axis = {axis} is no detector column: give the column on which the rotation axis falls")


def check_array(array: NDArray[np.float32], shape: tuple[int, ...], name: str) -> None:
    """Raise a DataError unless the array is a C-contiguous float32 array of this shape."""
    if array.shape != shape or array.dtype != np.float32 or not array.flags.c_contiguous:
        order = "C-contiguous" if array.flags.c_contiguous else "not C-contiguous"
        raise DataError(f"{name}: {array.dtype} {array.shape}, {order}; expected float32 {shape}, C-contiguous")


def output(out: NDArray[np.float32] | None, shape: tuple[int, ...], name: str) -> NDArray[np.float32]:
    """The caller's output array, checked, or a new one."""
    if out is None:
        return np.empty(shape, dtype=np.float32)
    check_array(out, shape, name)
    return out
