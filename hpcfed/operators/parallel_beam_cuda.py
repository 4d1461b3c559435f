"""Parallel-beam projections on a GPU, by ASTRA's 3D CUDA projector on torch tensors.

Geometry, shapes and methods are those of `hpcfed.operators.parallel_beam`. Unlike there, forward and back projection
are not exact transposes of each other: ASTRA interpolates along the ray in one and on the detector in the other. Choose
step sizes with a margin, and no stopping test finer than the mismatch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from hpcfed.errors import ConfigError, DataError, HpcfedError
from hpcfed.operators.parallel_beam import check_geometry, check_shape, ramp_response

Tensor = Any  # a float32 torch tensor on this client's GPU

NUM_POISONED = 16  # output elements that must have changed after a call to ASTRA


class CudaParallelBeam:
    """The projector ``A`` of one client on one GPU.

    Parameters
    ----------
    shape, angles, num_columns, axis : as for `hpcfed.operators.parallel_beam.ParallelBeam`.
    device : number of the GPU on this machine.
    memory : bytes of GPU memory that ASTRA may use in this rank; 0 lets it take what is free at the time, which is safe
        only where no other rank shares the GPU. ASTRA copies a volume (forward) or the projections (adjoint) to texture
        memory besides the tensors given here.

    Raises
    ------
    ConfigError
        Without a GPU that both ASTRA and torch can use. ASTRA must not be asked for a 3D projection then: it would end
        the process.
    """

    beam = "parallel3d_vec"  # as ASTRA calls it

    def __init__(
        self,
        shape: tuple[int, int, int],
        angles: NDArray[np.float64],
        num_columns: int,
        axis: float | None = None,
        *,
        device: int = 0,
        memory: int = 0,
    ) -> None:
        require_cuda("CudaParallelBeam")
        import astra
        import torch

        self.shape = check_shape(shape)
        self.angles = np.atleast_1d(np.asarray(angles, dtype=np.float64))
        self.num_columns, self.num_rows = int(num_columns), self.shape[2]
        self.axis = (self.num_columns - 1) / 2 if axis is None else float(axis)
        check_geometry(self.angles, self.num_columns, self.axis)
        self.device = torch.device("cuda", device)
        self._vectors = projection_vectors(self.angles, self.num_columns, self.axis)
        astra.set_gpu_index(device, memory=memory)

    @property
    def num_views(self) -> int:
        """Number of this client's views."""
        return len(self._vectors)

    @property
    def nbytes(self) -> int:
        """Bytes held by the projector itself."""
        return int(self._vectors.nbytes)

    def forward(self, volume: Tensor, views: NDArray[np.integer] | None = None, out: Tensor | None = None) -> Tensor:
        """``A x``, the line integrals, of shape (views, columns, rows)."""
        self._check(volume, self.shape, "volume")
        return _deliver(self._project(volume, views).permute(1, 2, 0), out)

    def adjoint(
        self, projections: Tensor, views: NDArray[np.integer] | None = None, out: Tensor | None = None
    ) -> Tensor:
        """``A^T p``, nearly; ``projections`` holds the given views only, in their order."""
        count = self.num_views if views is None else len(views)
        self._check(projections, (count, self.num_columns, self.num_rows), "projections")
        return _deliver(self._backproject(projections.permute(2, 0, 1).contiguous(), views).permute(1, 2, 0), out)

    def gradient(
        self,
        volume: Tensor,
        projections: Tensor,
        scale: float = 1.0,
        views: NDArray[np.integer] | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """``scale * A^T (A x - b)``; ``projections`` holds all views, also where ``views`` selects some."""
        self._check(volume, self.shape, "volume")
        self._check(projections, (self.num_views, self.num_columns, self.num_rows), "projections")
        residual = self._project(volume, views)
        residual -= (projections if views is None else projections[views]).permute(2, 0, 1)
        residual *= scale
        return _deliver(self._backproject(residual, views).permute(1, 2, 0), out)

    def normal(self, volume: Tensor, out: Tensor | None = None) -> Tensor:
        """``A^T A x``."""
        self._check(volume, self.shape, "volume")
        return _deliver(self._backproject(self._project(volume, None), None).permute(1, 2, 0), out)

    def misfit(self, volume: Tensor, projections: Tensor) -> float:
        """``1/2 ||A x - b||^2``, summed in double precision."""
        import torch

        residual = self.forward(volume)
        residual -= projections
        return 0.5 * float(torch.linalg.vector_norm(residual, dtype=torch.float64)) ** 2

    def filtered_backprojection(self, projections: Tensor, window: Literal["hann", "ramp"] = "hann") -> Tensor:
        """``(pi / num_views) A^T F p``: the whole volume as these views alone show it."""
        import scipy.fft
        import torch

        length = scipy.fft.next_fast_len(2 * self.num_columns, real=True)
        response = torch.from_numpy((np.pi / self.num_views) * ramp_response(length, window)).to(self.device)
        filtered = torch.empty_like(projections)
        for view in range(self.num_views):
            spectrum = torch.fft.rfft(projections[view], n=length, dim=0) * response[:, None]
            filtered[view] = torch.fft.irfft(spectrum, n=length, dim=0)[: self.num_columns]
        return self.adjoint(filtered)

    def _project(self, volume: Tensor, views: NDArray[np.integer] | None) -> Tensor:
        """Projections in ASTRA's order (rows, views, columns)."""
        import astra
        import torch

        slices = volume.permute(2, 0, 1).contiguous()
        with self._projector(views) as (projector, num_views):
            out = torch.empty((self.num_rows, num_views, self.num_columns), dtype=torch.float32, device=self.device)
            with _written(out, slices, "projections"):
                astra.projector3d.direct_FP(projector, slices, out=out)
        return out

    def _backproject(self, projections: Tensor, views: NDArray[np.integer] | None) -> Tensor:
        """A volume in ASTRA's order (slices, rows, columns), from projections in ASTRA's order."""
        import astra
        import torch

        ny, nx, nz = self.shape
        with self._projector(views) as (projector, _):
            out = torch.empty((nz, ny, nx), dtype=torch.float32, device=self.device)
            with _written(out, projections, "volume"):
                astra.projector3d.direct_BP(projector, projections, out=out)
        return out

    @contextmanager
    def _projector(self, views: NDArray[np.integer] | None) -> Iterator[tuple[int, int]]:
        """ASTRA's projector for these views, and their number."""
        import astra

        vectors = self._vectors if views is None else self._vectors[views]
        projection_geometry = astra.create_proj_geom(self.beam, self.num_rows, self.num_columns, vectors)
        projector = astra.create_projector("cuda3d", projection_geometry, astra.create_vol_geom(*self.shape))
        try:
            yield projector, len(vectors)
        finally:
            astra.projector3d.delete(projector)

    def _check(self, tensor: Tensor, shape: tuple[int, ...], name: str) -> None:
        import torch

        if tuple(tensor.shape) != shape or tensor.dtype != torch.float32 or tensor.device != self.device:
            found = f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"
            raise DataError(f"{name}: {found}; expected torch.float32 {shape} on {self.device}")


def projection_vectors(angles: NDArray[np.float64], num_columns: int, axis: float) -> NDArray[np.float64]:
    """Rows (ray, detector centre, column step, row step) of ASTRA's ``parallel3d_vec`` geometry.

    ASTRA's y grows with the row of a volume in 3D, where it falls in 2D: y is turned round with respect to
    `hpcfed.operators.parallel_beam`.
    """
    zero, one = np.zeros_like(angles), np.ones_like(angles)
    column = np.stack([np.cos(angles), -np.sin(angles), zero], axis=1)
    ray = np.stack([np.sin(angles), np.cos(angles), zero], axis=1)
    centre = ((num_columns - 1) / 2 - axis) * column
    return np.concatenate([ray, centre, column, np.stack([zero, zero, one], axis=1)], axis=1)


def require_cuda(name: str) -> None:
    """Raise a ConfigError unless ASTRA and torch can both use a GPU."""
    import astra

    # Where there is no GPU, ASTRA's answer spares the seconds that loading torch takes.
    if astra.use_cuda():
        try:
            import torch
        except ImportError:
            torch = None
        if torch is not None and torch.cuda.is_available():
            return
    raise ConfigError(f"{name}: ASTRA and torch find no CUDA device that both can use; compute on the cpu")


@contextmanager
def _written(out: Tensor, source: Tensor, name: str) -> Iterator[None]:
    """Raise unless the body fills ``out``: ASTRA's direct projections report a failure, such as no memory, to nobody.

    A few elements are set to NaN before and looked at after.
    """
    import torch

    flat = out.view(-1)
    places = torch.linspace(0, flat.numel() - 1, NUM_POISONED, dtype=torch.float64, device=out.device).long()
    flat[places] = torch.nan
    torch.cuda.current_stream(out.device).synchronize()  # ASTRA works in streams of its own
    yield
    if bool(flat[places].isnan().any()) and bool(source.isfinite().all()):
        raise HpcfedError(
            f"ASTRA left the {name} of shape {tuple(out.shape)} unfilled, probably for want of GPU memory: "
            "use fewer ranks on this GPU, or compute on the cpu"
        )


def _deliver(result: Tensor, out: Tensor | None) -> Tensor:
    if out is None:
        return result.contiguous()
    out.copy_(result)
    return out
