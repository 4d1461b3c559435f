"""Parallel-beam projections on a CPU with the matrix of ASTRA's 2D projector: an independent second opinion.

Geometry, shapes and methods are those of `hpcfed.operators.parallel_beam`, whose loops have the same weights, need no
matrix and are faster.
"""

from __future__ import annotations

import numpy as np
import scipy.sparse
from numpy.typing import NDArray

from hpcfed.errors import ConfigError
from hpcfed.operators.parallel_beam import ParallelBeam, Projections, Volume, check_array, output


class AstraParallelBeam(ParallelBeam):
    """The projector ``A`` of one client as a sparse matrix, exported once from ASTRA and applied to all slices at once.

    Only ASTRA's 2D ``linear`` projector is used: its 3D objects need a GPU and end a process that has none.
    Parameters are those of `ParallelBeam`.
    """

    def __init__(
        self, shape: tuple[int, int, int], angles: NDArray[np.float64], num_columns: int, axis: float | None = None
    ) -> None:
        super().__init__(shape, angles, num_columns, axis)
        self._matrix = self._export()

    @property
    def nbytes(self) -> int:
        """Bytes held by the matrix."""
        return int(self._matrix.data.nbytes + self._matrix.indices.nbytes + self._matrix.indptr.nbytes)

    def forward(
        self, volume: Volume, views: NDArray[np.integer] | None = None, out: Projections | None = None
    ) -> Projections:
        check_array(volume, self.shape, "volume")
        matrix = self._rows(views)
        out = output(out, (matrix.shape[0] // self.num_columns, self.num_columns, self.shape[2]), "projections")
        out[:] = (matrix @ volume.reshape(-1, self.shape[2])).reshape(out.shape)
        return out

    def adjoint(
        self, projections: Projections, views: NDArray[np.integer] | None = None, out: Volume | None = None
    ) -> Volume:
        matrix = self._rows(views)
        check_array(projections, (matrix.shape[0] // self.num_columns, *projections.shape[1:]), "projections")
        out = output(out, self.shape, "volume")
        out[:] = (matrix.T @ projections.reshape(-1, self.shape[2])).reshape(self.shape)
        return out

    def gradient(
        self,
        volume: Volume,
        projections: Projections,
        scale: float = 1.0,
        views: NDArray[np.integer] | None = None,
        out: Volume | None = None,
    ) -> Volume:
        residual = self.forward(volume, views)
        residual -= projections if views is None else projections[views]
        residual *= np.float32(scale)
        return self.adjoint(residual, views, out)

    def normal(self, volume: Volume, out: Volume | None = None) -> Volume:
        return self.adjoint(self.forward(volume), out=out)

    def misfit(self, volume: Volume, projections: Projections) -> float:
        residual = (self.forward(volume) - projections).reshape(-1)
        return float(np.einsum("i,i->", residual, residual, dtype=np.float64) / 2)

    def _rows(self, views: NDArray[np.integer] | None) -> scipy.sparse.csr_matrix:
        """The matrix, or its rows of the given views."""
        if views is None:
            return self._matrix
        rows = np.asarray(views)[:, None] * self.num_columns + np.arange(self.num_columns)
        return self._matrix[rows.reshape(-1)]

    def _export(self) -> scipy.sparse.csr_matrix:
        try:
            import astra
        except ImportError as error:
            raise ConfigError(f"--projector astra: ASTRA cannot be loaded ({error}): use --projector joseph") from error

        cosines, sines = np.cos(self.angles), np.sin(self.angles)
        # The detector's centre lies off the axis' foot by this much along the detector.
        shift = (self.num_columns - 1) / 2 - self.axis
        vectors = np.stack([sines, -cosines, shift * cosines, shift * sines, cosines, sines], axis=1)
        geometry = astra.create_proj_geom("parallel_vec", self.num_columns, vectors)
        projector = astra.create_projector("linear", geometry, astra.create_vol_geom(self.shape[0], self.shape[1]))
        try:
            identifier = astra.projector.matrix(projector)
            try:
                matrix: scipy.sparse.csr_matrix = astra.matrix.get(identifier).astype(np.float32)
                return matrix
            finally:
                astra.matrix.delete(identifier)
        finally:
            astra.projector.delete(projector)
