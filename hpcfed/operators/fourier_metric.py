"""A metric for tomography: the inverse of ``A^T A``'s blur, as a Fourier filter in the slices and one across them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = Any  # a NumPy array or a torch tensor

# As many numbers as a wide register holds, side by side in the volume.
SLICES_TOGETHER = 16
# The c of a cone: of 0 to 8, what came nearest to the minimum in 24 rounds lay between 2 and 4 on three volumes.
SLOPE_FACTOR = 2.5


class FourierMetric:
    """``P``, symmetric and positive: each slice, padded with zeros, times a filter at each frequency (f_y, f_x).

    Projecting along all directions and backprojecting blurs a slice by ``1/r``, whose transfer function is ``1/|f|`` up
    to a factor, and interpolation damps the faster of the two frequencies. P undoes both in part,

        ``P(f) = min(|f| / sinc(max(|f_y|, |f_x|))^2, q)``,

    so that the eigenvalues of ``P A^T A`` are nearly even. Its scale is arbitrary: it goes into the step size.

    The rays of a cone pass slice z with a slope ``s_z``, and none is perpendicular to a frequency with
    ``|f| < s_z |f_z|``: there ``A^T A`` is small, and so is P above. For a cone P therefore has a second summand,

        ``c S^(1/2) |d/dz| S^(1/2)``,  S the diagonal of the ``s_z``,

    with the operator ``|d/dz|`` of transfer function ``|f_z|``: a symmetric, positive matrix nz by nz for every pixel.

    Parameters
    ----------
    shape : (ny, nx, nz) of the volume.
    slopes : ``s_z`` of each slice, nz numbers; None: all are 0.
    floor : part of the filter's values that are cut off at their quantile q; large: less noise in the first rounds.

    Attributes
    ----------
    norm_bound : upper bound of P's eigenvalues.
    unit : slices that are best transformed together. There are at least four such lots, if there are four slices.
    """

    def __init__(
        self, shape: tuple[int, int, int], slopes: NDArray[np.float64] | None = None, floor: float = 0.3
    ) -> None:
        from scipy.fft import next_fast_len

        self.shape = shape
        self.unit = min(SLICES_TOGETHER, max(1, shape[2] // 4))
        self._padded = tuple(next_fast_len(size + size // 2, real=True) for size in shape[:2])
        rows, columns = np.fft.fftfreq(self._padded[0]), np.fft.rfftfreq(self._padded[1])
        radius = np.hypot(rows[:, None], columns)
        # A slice's mean is blurred by the kernel's sum over the slice, 2 pi R for a radius R, not by 1/0.
        filter_ = np.maximum(radius, 1 / (np.pi * max(shape[:2])))
        filter_ /= np.sinc(np.maximum(np.abs(rows)[:, None], columns)) ** 2
        filter_ = np.minimum(filter_, np.quantile(filter_, 1 - floor))
        self._filter: NDArray[np.float32] = (filter_ / filter_.max()).astype(np.float32)[:, :, None]
        self.norm_bound = 1.0
        self._across: NDArray[np.float32] | None = None
        if slopes is not None and slopes.any():
            across = SLOPE_FACTOR / filter_.max() * np.sqrt(np.outer(slopes, slopes)) * _steepness(shape[2])
            self.norm_bound += float(np.linalg.eigvalsh(across)[-1])
            self._across = across.astype(np.float32)

    def apply(self, x: Array, piece: slice = slice(None)) -> Array:
        """``P x``, of the type of x, in the slices of a piece."""
        image = self._filtered(x[..., piece])
        if self._across is not None:
            across: Array = np.ascontiguousarray(self._across[:, piece])
            if not isinstance(x, np.ndarray):
                import torch

                across = torch.as_tensor(across, device=x.device)
            image += (x.reshape(-1, self.shape[2]) @ across).reshape(image.shape)
        return image

    def _filtered(self, x: Array) -> Array:
        """Some slices, filtered."""
        if not isinstance(x, np.ndarray):
            return self._filtered_tensor(x)
        from scipy.fft import fft, ifft, irfft, rfft

        (ny, nx, _), (padded_y, padded_x) = self.shape, self._padded
        # Rows of padding are not transformed along x: they are zero before, and of no interest after.
        spectrum = fft(rfft(x, padded_x, axis=1), padded_y, axis=0)
        spectrum *= self._filter
        rows = ifft(spectrum, axis=0, overwrite_x=True)[:ny]
        return np.ascontiguousarray(irfft(rows, padded_x, axis=1)[:, :nx])

    def _filtered_tensor(self, x: Array) -> Array:
        import torch

        filter_ = torch.as_tensor(self._filter, device=x.device)
        spectrum = torch.fft.rfft2(x, self._padded, dim=(0, 1)) * filter_
        whole = torch.fft.irfft2(spectrum, self._padded, dim=(0, 1))
        return whole[: self.shape[0], : self.shape[1]].contiguous()


def _steepness(size: int) -> NDArray[np.float64]:
    """The matrix of ``|d/dz|``: a convolution of what is zero beyond its ends, with the transfer function ``|f|``."""
    kernel = np.fft.irfft(np.fft.rfftfreq(4 * size))
    place = np.arange(size)
    return np.asarray(kernel[np.abs(place[:, None] - place)])
