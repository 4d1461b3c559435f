"""Cone-beam and fan-beam projections on a GPU, by ASTRA's 3D CUDA projector on torch tensors.

Geometry, shapes and methods are those of `hpcfed.operators.cone_beam`. Forward and back projection are not exact
transposes of each other, as in `hpcfed.operators.parallel_beam_cuda`.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from hpcfed.errors import ConfigError
from hpcfed.operators.cone_beam import Reals, check_vectors, filter_weights, level_vectors, ray_cosines
from hpcfed.operators.parallel_beam import check_shape, ramp_response
from hpcfed.operators.parallel_beam_cuda import CudaParallelBeam, Tensor, require_cuda

CHUNK_VOXELS = 2**22  # back-projected together by `backproject`


class CudaConeBeam(CudaParallelBeam):
    """The projector ``A`` of one client on one GPU.

    Parameters
    ----------
    shape, vectors, num_columns, num_rows, arc : as for `hpcfed.operators.cone_beam.ConeBeam`.
    device, memory : as for `CudaParallelBeam`.

    Raises
    ------
    ConfigError
        Without a GPU that both ASTRA and torch can use, or if the vectors describe no scan of this volume.
    """

    beam = "cone_vec"

    def __init__(
        self,
        shape: tuple[int, int, int],
        vectors: Reals,
        num_columns: int,
        num_rows: int,
        *,
        arc: tuple[float, float] | None = None,
        device: int = 0,
        memory: int = 0,
    ) -> None:
        require_cuda(type(self).__name__)
        import astra
        import torch

        self.shape = check_shape(shape)
        self.vectors = np.atleast_2d(np.asarray(vectors, dtype=np.float64))
        self.num_columns, self.num_rows, self.arc = int(num_columns), int(num_rows), arc
        check_vectors(self.vectors, self.shape, self.num_columns, self.num_rows)
        self._vectors = astra_vectors(self.vectors)
        self.device = torch.device("cuda", device)
        astra.set_gpu_index(device, memory=memory)

    def filtered_backprojection(self, projections: Tensor, window: Literal["hann", "ramp"] = "hann") -> Tensor:
        """The whole volume as these views alone show it, by the method of Feldkamp, Davis and Kress."""
        self._check(projections, (self.num_views, self.num_columns, self.num_rows), "projections")
        return feldkamp(projections, self.vectors, self.shape, self.arc, window)


class CudaFanBeam(CudaConeBeam):
    """A fan beam in a single slice: the one detector row of a cone that is level with the source.

    Parameters are those of `hpcfed.operators.cone_beam.FanBeam`; a stack of slices is refused.
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        vectors: Reals,
        num_columns: int,
        *,
        arc: tuple[float, float] | None = None,
        device: int = 0,
        memory: int = 0,
    ) -> None:
        if shape[2] != 1:
            raise ConfigError(f"a fan beam in {shape[2]} slices is not computed on a GPU: use --device cpu")
        super().__init__(shape, level_vectors(vectors), num_columns, 1, arc=arc, device=device, memory=memory)


def astra_vectors(vectors: Reals) -> Reals:
    """Rows of ASTRA's ``cone_vec`` geometry: its y grows with the row of a volume, where ours falls."""
    return np.asarray(vectors * np.tile([1.0, -1.0, 1.0], 4))


def feldkamp(
    projections: Tensor,
    vectors: Reals,
    shape: tuple[int, int, int],
    arc: tuple[float, float] | None,
    window: Literal["hann", "ramp"],
) -> Tensor:
    """`ConeBeam.filtered_backprojection` of tensors on any device."""
    import scipy.fft
    import torch

    num_views, num_columns, num_rows = projections.shape
    length = scipy.fft.next_fast_len(2 * num_columns, real=True)
    response = torch.from_numpy(ramp_response(length, window)).to(projections.device)[:, None]
    weights = filter_weights(vectors, arc, num_columns)[:, :, None]
    volume = torch.zeros(shape, dtype=torch.float32, device=projections.device)
    for view in range(num_views):
        factors = weights[view] * ray_cosines(vectors[view : view + 1], num_columns, num_rows)[0]
        weighted = projections[view] * torch.from_numpy(factors.astype(np.float32)).to(projections.device)
        spectrum = torch.fft.rfft(weighted, n=length, dim=0) * response
        backproject(torch.fft.irfft(spectrum, n=length, dim=0)[:num_columns], vectors[view], volume)
    return volume


def backproject(filtered: Tensor, vector: NDArray[np.float64], volume: Tensor) -> None:
    """Add one view's values (columns, rows) where voxels are seen, divided by the squared share of the way there."""
    import torch

    source, middle, u, v = vector.reshape(4, 3)
    solve = np.linalg.inv(np.stack([u, v, middle - source], axis=1)).tolist()
    x, y, z = (
        sign * (torch.arange(size, dtype=torch.float32, device=volume.device) - (size - 1) / 2) - float(start)
        for sign, size, start in zip(
            (1, -1, 1), (volume.shape[1], volume.shape[0], volume.shape[2]), source, strict=True
        )
    )
    block = max(1, CHUNK_VOXELS // (volume.shape[1] * volume.shape[2]))
    for top in range(0, volume.shape[0], block):
        rows = y[top : top + block, None, None]
        column, row, t = (a * x[:, None] + b * rows + c * z for a, b, c in solve)
        places = [2 * place / t / size for place, size in ((row, filtered.shape[1]), (column, filtered.shape[0]))]
        grid = torch.stack(places, dim=-1).reshape(1, -1, volume.shape[2], 2)
        seen = torch.nn.functional.grid_sample(filtered[None, None], grid, align_corners=False)
        volume[top : top + block] += seen.reshape(t.shape) / t**2
