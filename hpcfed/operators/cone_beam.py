"""Cone-beam and fan-beam projections of a volume, on a CPU.

Coordinates are those of `hpcfed.operators.parallel_beam`, in units of a voxel: x to the right, y up (image row 0 is at
the top), z along the slices, the origin in the middle of the volume and on the rotation axis. A view is four vectors,
as in ASTRA's ``cone_vec`` geometry: the source, the middle of the detector, the step u from one of its columns to the
next, and the step v from one of its rows to the next.

Weights are Joseph's ("An improved algorithm for reprojecting rays through pixel images", IEEE Trans. Med. Imaging 1,
1982): where a ray crosses the planes of voxels that it meets most steeply, the volume is interpolated on each plane,
and the sum is multiplied by the length of ray between two of them.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from hpcfed.errors import ConfigError
from hpcfed.operators.parallel_beam import Projections, Volume, check_array, check_shape, output, ramp_response

Reals = NDArray[np.float64]

SCRATCH_BYTES = 2**20  # of a block of views that has more than one for each thread
FEW_SLICES = 16  # of a fan beam, for which loops across the rays are faster than loops along the slices


class ConeBeam:
    """The projector ``A`` of one client: its views of the whole volume.

    The weights are computed where they are used; there is no matrix. `adjoint` is the exact transpose of `forward` but
    for the rounding of float32 sums. Every method is deterministic, gives the same bits on any number of threads, and
    may be called by several threads at once.

    Where detector rows are parallel to the slices (u has no z, v nothing but a positive z) compiled loops walk all rays
    of a detector column together; they step through planes of the image even where a ray meets the slices more
    steeply. Other views are walked ray by ray, which takes several times as long.

    Parameters
    ----------
    shape : (ny, nx, nz) of the volume.
    vectors : (views, 12): source, detector middle, u and v of each of this client's views, in voxels.
    num_columns, num_rows : of the detector.
    arc : first angle and extent, in radians, of the whole scan that these views are part of, if it is less than a turn.
    threads : that share the work of a call.

    Notes
    -----
    Volumes are float32 arrays (ny, nx, nz) and projections float32 arrays (views, columns, rows), both C-contiguous.
    Where a method takes ``views``, an array of local view numbers, only those rows of ``A`` are used. ``out`` is
    overwritten and returned; it must not share memory with an input.

    Raises
    ------
    ConfigError
        If the vectors describe no scan of this volume.
    """

    compiled = "hpcfed.operators.cone_beam_kernels"

    def __init__(
        self,
        shape: tuple[int, int, int],
        vectors: Reals,
        num_columns: int,
        num_rows: int,
        *,
        arc: tuple[float, float] | None = None,
        threads: int = 1,
    ) -> None:
        self.shape = check_shape(shape)
        self.vectors = np.atleast_2d(np.asarray(vectors, dtype=np.float64))
        self.num_columns, self.num_rows = int(num_columns), int(num_rows)
        self.arc, self.threads = arc, int(threads)
        check_vectors(self.vectors, self.shape, self.num_columns, self.num_rows)
        if is_upright(self.vectors):
            self._beams = self._upright_beams()
        else:
            self.compiled = "hpcfed.operators.tilted_beam_kernels"
            self._beams = self.vectors

    @property
    def num_views(self) -> int:
        """Number of this client's views."""
        return len(self.vectors)

    @property
    def nbytes(self) -> int:
        """Bytes held by the projector itself, and scratch that a call needs for its duration."""
        scratch = 4 * self._block() * self.num_columns * self.num_rows
        return self.vectors.nbytes + self._beams.nbytes + scratch

    def forward(
        self, volume: Volume, views: NDArray[np.integer] | None = None, out: Projections | None = None
    ) -> Projections:
        """``A x``, the line integrals, of shape (views, columns, rows)."""
        check_array(volume, self.shape, "volume")
        beams = self._select(views)
        out = output(out, (len(beams), self.num_columns, self.num_rows), "projections")
        self._project(volume, beams, out)
        return out

    def adjoint(
        self, projections: Projections, views: NDArray[np.integer] | None = None, out: Volume | None = None
    ) -> Volume:
        """``A^T p``; ``projections`` holds the given views only, in their order."""
        beams = self._select(views)
        check_array(projections, (len(beams), self.num_columns, self.num_rows), "projections")
        out = output(out, self.shape, "volume")
        out.fill(0)
        self._spread("adjoint", projections, beams, out)
        return out

    def gradient(
        self,
        volume: Volume,
        projections: Projections,
        scale: float = 1.0,
        views: NDArray[np.integer] | None = None,
        out: Volume | None = None,
    ) -> Volume:
        """``scale * A^T (A x - b)``; the residual exists for one block of views at a time.

        ``projections`` holds all of this client's views, also where ``views`` selects some of them.
        """
        self._check_all(projections)
        out = output(out, self.shape, "volume")
        out.fill(0)
        for rows, beams, residual in self._forward_blocks(volume, views):
            residual -= projections[rows]
            residual *= np.float32(scale)
            self._spread("adjoint", residual, beams, out)
        return out

    def normal(self, volume: Volume, out: Volume | None = None) -> Volume:
        """``A^T A x``."""
        out = output(out, self.shape, "volume")
        out.fill(0)
        for _, beams, block in self._forward_blocks(volume):
            self._spread("adjoint", block, beams, out)
        return out

    def misfit(self, volume: Volume, projections: Projections) -> float:
        """``1/2 ||A x - b||^2``, summed in double precision, view by view."""
        self._check_all(projections)
        total = 0.0
        for rows, _, residual in self._forward_blocks(volume):
            residual -= projections[rows]
            for view in residual.reshape(len(residual), -1):
                total += float(np.einsum("i,i->", view, view, dtype=np.float64))
        return total / 2

    def filtered_backprojection(self, projections: Projections, window: Literal["hann", "ramp"] = "hann") -> Volume:
        """The whole volume as these views alone show it, by the method of Feldkamp, Davis and Kress.

        Each view is weighted by the cosine of its rays' angle to the detector's normal, filtered along its rows
        (`ramp_response`) and spread back, divided by the squared distance from the source along that normal
        ("Practical cone-beam algorithm", J. Opt. Soc. Am. A 1, 1984). It is exact in the plane of a circle of sources,
        and loses contrast away from it. The scale is right where the views spread evenly over the scan; few views leave
        streaks, but no bias. Where the scan is an ``arc``, rays that it measures twice share their weight smoothly
        (`parker_weights`).
        """
        self._check_all(projections)
        length = 1 << (2 * self.num_columns - 1).bit_length()  # no wrap-around, and fast
        response = ramp_response(length, window)[:, None]
        weights = filter_weights(self.vectors, self.arc, self.num_columns)
        volume = np.zeros(self.shape, dtype=np.float32)
        block = self._block()
        for begin in range(0, self.num_views, block):
            views = slice(begin, begin + block)
            weighted = projections[views] * self._cosines(views).astype(np.float32)
            weighted *= weights[views, :, None]
            spectrum = np.fft.rfft(weighted, n=length, axis=1)
            spectrum *= response
            filtered = np.fft.irfft(spectrum, n=length, axis=1)[:, : self.num_columns].astype(np.float32)
            self._spread("backproject", np.ascontiguousarray(filtered), self._beams[views], volume)
        return volume

    def _cosines(self, views: slice) -> Reals:
        """Of the rays' angles to the detector's normal."""
        return ray_cosines(self.vectors[views], self.num_columns, self.num_rows)

    def _upright_beams(self) -> Reals:
        """What `hpcfed.operators.cone_beam_kernels` calls beams."""
        source, middle, u, v = np.split(self.vectors, 4, axis=1)
        way = middle - source
        base = source[:, 2] + (self.shape[2] - 1) / 2
        first_row = way[:, 2] - v[:, 2] * (self.num_rows - 1) / 2
        tail = np.stack([base, first_row, np.zeros_like(base), v[:, 2]], axis=1)
        return np.concatenate([source[:, :2], way[:, :2], u[:, :2], tail], axis=1)

    def _select(self, views: NDArray[np.integer] | None) -> Reals:
        return self._beams if views is None else self._beams[views]

    def _check_all(self, projections: Projections) -> None:
        check_array(projections, (self.num_views, self.num_columns, self.num_rows), "projections")

    def _block(self) -> int:
        """Views whose projections are held together."""
        view = 4 * self.num_columns * self.num_rows
        return min(self.num_views, max(self.threads, SCRATCH_BYTES // view))

    def _forward_blocks(
        self, volume: Volume, views: NDArray[np.integer] | None = None
    ) -> Iterator[tuple[NDArray[np.integer], Reals, Projections]]:
        """The projections of a block of views at a time, in scratch: their numbers, beams and ``A x``."""
        check_array(volume, self.shape, "volume")
        numbers = np.arange(self.num_views) if views is None else np.asarray(views, dtype=np.int64)
        block = self._block()
        scratch = np.empty((block, self.num_columns, self.num_rows), dtype=np.float32)
        for begin in range(0, numbers.size, block):
            rows = numbers[begin : begin + block]
            beams, projections = self._beams[rows], scratch[: rows.size]
            self._project(volume, beams, projections)
            yield rows, beams, projections

    def _project(self, volume: Volume, beams: Reals, out: Projections) -> None:
        """Write ``A x``; threads share the views."""
        kernel = importlib.import_module(self.compiled).forward
        self._share(len(beams), lambda begin, end: kernel(volume, beams[begin:end], out[begin:end]))

    def _spread(self, name: str, projections: Projections, beams: Reals, volume: Volume) -> None:
        """Add a back-projection to the volume; threads share its image rows."""
        kernel = getattr(importlib.import_module(self.compiled), name)
        self._share(self.shape[0], lambda begin, end: kernel(projections, beams, begin, end, volume))

    def _share(self, count: int, work: Callable[[int, int], Any]) -> None:
        """Call ``work(begin, end)`` for nearly equal parts of ``range(count)``, each in its thread."""
        threads = min(self.threads, count)
        if threads < 2:
            work(0, count)
            return
        bounds = [count * part // threads for part in range(threads + 1)]
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(work, bounds[:-1], bounds[1:]))


class FanBeam(ConeBeam):
    """A stack of fans: every slice is scanned by its own source and detector row, level with it.

    Parameters are those of `ConeBeam`, without rows: there is one for each slice. Only x and y of the vectors' sources,
    middles and u count; v is ignored. Up to `FEW_SLICES` have compiled loops of their own, which run across rays.
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        vectors: Reals,
        num_columns: int,
        *,
        arc: tuple[float, float] | None = None,
        threads: int = 1,
    ) -> None:
        super().__init__(shape, level_vectors(vectors), num_columns, shape[2], arc=arc, threads=threads)
        if shape[2] <= FEW_SLICES:
            self.compiled = "hpcfed.operators.fan_beam_kernels"

    @property
    def nbytes(self) -> int:
        few = self.shape[2] <= FEW_SLICES
        return super().nbytes + (4 * math.prod(self.shape) if few else 0)  # the volume once more, turned over

    def _cosines(self, views: slice) -> Reals:
        return ray_cosines(self.vectors[views], self.num_columns, 1)  # each row is level with its source

    def _upright_beams(self) -> Reals:
        beams = super()._upright_beams()
        beams[:, 6:] = 0, 0, 1, 0
        return beams

    def _block(self) -> int:
        """Of any number of threads, as the order of sums depends on it."""
        return min(self.num_views, max(1, SCRATCH_BYTES // (4 * self.num_columns * self.num_rows)))


def level_vectors(vectors: Reals) -> Reals:
    """The vectors of a fan beam: in the plane z = 0, rows a voxel apart."""
    level = np.array(np.atleast_2d(vectors), dtype=np.float64)
    if level.shape[1] == 12:
        level[:, [2, 5, 8]] = 0
        level[:, 9:] = 0, 0, 1
    return level


def is_upright(vectors: Reals) -> bool:
    """Whether in every view detector rows are parallel to the slices and rise with them."""
    _, _, u, v = np.split(vectors, 4, axis=1)
    return not u[:, 2].any() and not v[:, :2].any() and bool((v[:, 2] > 0).all())


def distances(vectors: Reals) -> tuple[Reals, Reals]:
    """From each source along the detector's normal: to the origin, and to the detector."""
    source, middle, u, v = np.split(vectors, 4, axis=1)
    normal = np.cross(u, v)
    normal /= np.maximum(np.linalg.norm(normal, axis=1, keepdims=True), np.finfo(np.float64).tiny)
    return np.abs((source * normal).sum(axis=1)), np.abs(((middle - source) * normal).sum(axis=1))


def ray_cosines(vectors: Reals, num_columns: int, num_rows: int) -> Reals:
    """Cosines of the rays' angles to the detector's normal, (views, columns, rows)."""
    source, middle, u, v = np.split(vectors[:, :, None, None], 4, axis=1)
    columns = (np.arange(num_columns) - (num_columns - 1) / 2)[:, None]
    rows = np.arange(num_rows) - (num_rows - 1) / 2
    rays = middle - source + columns * u + rows * v
    _, detector = distances(vectors)
    return np.asarray(detector[:, None, None] / np.sqrt(np.einsum("vxcr,vxcr->vcr", rays, rays)))


def filter_weights(vectors: Reals, arc: tuple[float, float] | None, num_columns: int) -> NDArray[np.float32]:
    """Factors of the projections before they are filtered and spread back, (views, columns).

    They hold what one view counts in the mean over angles, the magnification that a back-projection divided by ``t^2``
    asks for, the pitch of the filter at the rotation axis, and for an ``arc`` the weights of rays measured twice.
    """
    origin, detector = distances(vectors)
    pitch = np.linalg.norm(vectors[:, 6:9], axis=1) * origin / detector
    factors = (origin / detector) ** 2 / pitch / len(vectors)
    if arc is None:
        weights = np.full((len(vectors), num_columns), np.pi)
    else:
        weights = arc[1] * parker_weights(vectors, arc, num_columns)
    return np.asarray(weights * factors[:, None], dtype=np.float32)


def parker_weights(vectors: Reals, arc: tuple[float, float], num_columns: int) -> Reals:
    """Weights of the rays of a scan over less than a turn, (views, columns): both directions of a line sum to 1.

    D. L. Parker, "Optimal short scan convolution reconstruction for fanbeam CT", Med. Phys. 9, 1982, for any arc of at
    least half a turn (M. D. Silver, "A method for including redundant data in computed tomography", Med. Phys. 27,
    2000). Of a shorter arc, in which hardly a line is measured twice, all weights are 1.
    """
    source, middle, u, _ = np.split(vectors, 4, axis=1)
    first, extent = arc
    if extent < np.pi:
        return np.ones((len(vectors), num_columns))
    beyond = (extent - np.pi) / 2
    turned = (np.arctan2(source[:, 0], -source[:, 1]) - first + 1e-9) % (2 * np.pi) - 1e-9
    columns = np.arange(num_columns) - (num_columns - 1) / 2
    x, y = ((middle - source)[:, axis, None] + columns * u[:, axis, None] for axis in (0, 1))
    direction = np.arctan2(-source[:, 1], -source[:, 0])[:, None]
    fan = -((np.arctan2(y, x) - direction + np.pi) % (2 * np.pi) - np.pi)  # positive towards rising columns
    entering, leaving = beyond + fan, beyond - fan
    with np.errstate(divide="ignore", invalid="ignore"):
        rise = np.where(entering > 0, np.clip(turned[:, None] / (2 * entering), 0, 1), 1.0)
        fall = np.where(leaving > 0, np.clip((extent - turned[:, None]) / (2 * leaving), 0, 1), 1.0)
    return np.asarray(np.sin(np.pi / 2 * rise) ** 2 * np.sin(np.pi / 2 * fall) ** 2)


def check_vectors(vectors: Reals, shape: tuple[int, int, int], num_columns: int, num_rows: int) -> None:
    """Raise a ConfigError unless these describe a scan from outside the volume."""
    if vectors.ndim != 2 or vectors.shape[1] != 12 or not len(vectors) or not np.isfinite(vectors).all():
        raise ConfigError(f"vectors of shape {vectors.shape} are no views: give rows of 12 finite numbers, in voxels")
    if num_columns < 1 or num_rows < 1:
        raise ConfigError(f"a detector of {num_columns} columns and {num_rows} rows: it has at least 1 of each")
    ny, nx, nz = shape
    inside = np.abs(vectors[:, :3]) < np.array([nx, ny, nz]) / 2
    if inside.all(axis=1).any():
        view = int(inside.all(axis=1).argmax())
        raise ConfigError(f"the source of view {view} is inside the volume {shape}: move it out, or use fewer voxels")
    origin, detector = distances(vectors)
    if not (detector > 0).all() or not (origin > 0).all():
        raise ConfigError("a source lies in the plane of its detector, or columns and rows are parallel: no view")
