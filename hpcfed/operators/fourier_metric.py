"""A metric for tomography: the inverse of ``A^T A``'s blur, slice by slice, as a Fourier filter."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = Any  # a NumPy array or a torch tensor


class FourierMetric:
    """``P``, symmetric and positive: each slice, padded with zeros, times a filter at each frequency (f_y, f_x).

    Projecting along all directions and backprojecting blurs a slice by ``1/r``, whose transfer function is ``1/|f|`` up
    to a factor, and interpolation damps the faster of the two frequencies. P undoes both in part,

        ``P(f) = min(|f| / sinc(max(|f_y|, |f_x|))^2, q)``,

    so that the eigenvalues of ``P A^T A`` are nearly even. Its scale is arbitrary: it goes into the step size. For a
    cone beam this is right in the middle slice, and nearly so beside it.

    Parameters
    ----------
    shape : (ny, nx, nz) of the volume.
    floor : part of the filter's values that are cut off at their quantile q; large: less noise in the first rounds.
    """

    def __init__(self, shape: tuple[int, int, int], floor: float = 0.3) -> None:
        from scipy.fft import next_fast_len

        self.shape = shape
        self._padded = tuple(next_fast_len(size + size // 2, real=True) for size in shape[:2])
        rows, columns = np.fft.fftfreq(self._padded[0]), np.fft.rfftfreq(self._padded[1])
        radius = np.hypot(rows[:, None], columns)
        # A slice's mean is blurred by the kernel's sum over the slice, 2 pi R for a radius R, not by 1/0.
        filter_ = np.maximum(radius, 1 / (np.pi * max(shape[:2])))
        filter_ /= np.sinc(np.maximum(np.abs(rows)[:, None], columns)) ** 2
        filter_ = np.minimum(filter_, np.quantile(filter_, 1 - floor))
        self._filter: NDArray[np.float32] = (filter_ / filter_.max()).astype(np.float32)[:, :, None]

    def apply(self, x: Array) -> Array:
        """``P x``, of the type of x."""
        if not isinstance(x, np.ndarray):
            return self._apply_tensor(x)
        from scipy.fft import irfft2, rfft2

        spectrum = rfft2(x, self._padded, axes=(0, 1))
        spectrum *= self._filter
        whole = irfft2(spectrum, self._padded, axes=(0, 1), overwrite_x=True)
        return np.ascontiguousarray(whole[: self.shape[0], : self.shape[1]])

    def _apply_tensor(self, x: Array) -> Array:
        import torch

        filter_ = torch.as_tensor(self._filter, device=x.device)
        spectrum = torch.fft.rfft2(x, self._padded, dim=(0, 1)) * filter_
        whole = torch.fft.irfft2(spectrum, self._padded, dim=(0, 1))
        return whole[: self.shape[0], : self.shape[1]].contiguous()
