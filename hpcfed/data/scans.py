"""Measured scans in the DXchange layout of HDF5, and the column of their rotation axis."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import fft, interpolate, ndimage, optimize

from hpcfed.errors import DataError

MIN_TRANSMISSION = 1e-4
"""Smaller transmissions, and negative ones, count as this one: no line integral exceeds -log(1e-4) = 9.2."""

Views = Sequence[int] | NDArray[np.integer[Any]]


@dataclass(frozen=True, eq=False)
class Scan:
    """A parallel-beam scan on disk: what surrounds the projections is in memory, they are read when asked for.

    Attributes
    ----------
    path
        The HDF5 file.
    angles
        Angle of every view in radians, (views,).
    num_views, num_rows, num_columns
        Size of the scan; rows run along the rotation axis.
    angle_unit
        What the angles of the file were taken to be, "degrees" or "radians".
    white, dark
        Mean flat field and mean dark field, float32 (rows, columns).
    notes
        One sentence for everything that was assumed or mended.
    """

    path: Path
    angles: NDArray[np.float64]
    num_views: int
    num_rows: int
    num_columns: int
    angle_unit: str
    white: NDArray[np.float32]
    dark: NDArray[np.float32]
    notes: tuple[str, ...]

    def read(self, views: Views, rows: slice | None = None) -> NDArray[np.float32]:
        """Read the line integrals of some views, one view at a time.

        ``p = -log(max((data - dark) / (white - dark), MIN_TRANSMISSION))`` with the means of the flat and dark fields.
        A detector pixel whose white is not above its dark is blind: its transmission is interpolated between its
        neighbours in the row.

        Parameters
        ----------
        views
            Indices of views in the file, in any order.
        rows
            Detector rows, by default all.

        Returns
        -------
        ndarray, float32, (views, columns, rows), C-contiguous

        Raises
        ------
        DataError
            A view or row that the scan lacks, counts that are not finite, a dead view (one constant count that is not
            the open beam's), a row without a seeing pixel, or a file that cannot be read.
        """
        chosen = np.asarray(views, dtype=np.int64)
        outside = chosen[(chosen < 0) | (chosen >= self.num_views)]
        if outside.size:
            raise DataError(f"{self.path}: has no view {outside[0]}; views are 0 to {self.num_views - 1}")
        start, stop, step = (rows or slice(None)).indices(self.num_rows)
        if step < 1 or start >= stop:
            raise DataError(f"{self.path}: rows {rows} select nothing; rows are 0 to {self.num_rows - 1}, in order")
        span = slice(start, stop, step)
        dark = self.dark[span]
        beam = self.white[span] - dark
        blind = ~(beam > 0)
        if blind.all(axis=1).any():
            row = start + step * int(blind.all(axis=1).argmax())
            raise DataError(f"{self.path}: no pixel of row {row} sees the beam (white is not above dark); leave it out")
        beam[blind] = 1
        blind_rows = np.flatnonzero(blind.any(axis=1)).tolist()

        integrals = np.empty((chosen.size, self.num_columns, len(dark)), np.float32)
        with _hdf5(self.path) as file:
            data = file["exchange/data"]
            for view, integral in zip(chosen.tolist(), integrals, strict=True):
                counts = data[view, span]
                self._check_view(counts, view, start, step)
                transmission = (counts - dark) / beam
                for row in blind_rows:
                    seeing = np.flatnonzero(~blind[row])
                    lost = np.flatnonzero(blind[row])
                    transmission[row, lost] = np.interp(lost, seeing, transmission[row, seeing])
                if counts.size > 1 and counts.min() == counts.max() and np.abs(transmission - 1).max() > 0.05:
                    raise DataError(f"{self.path}: view {view} is dead, every count is {counts.flat[0]:g}; remove it")
                np.maximum(transmission, MIN_TRANSMISSION, out=transmission)
                np.negative(np.log(transmission, out=transmission).T, out=integral)
        return integrals

    def _check_view(self, counts: NDArray[Any], view: int, start: int, step: int) -> None:
        finite = np.isfinite(counts)
        if not finite.all():
            row, column = np.unravel_index(np.argmin(finite), counts.shape)
            raise DataError(
                f"{self.path}: view {view} has {counts.size - np.count_nonzero(finite)} counts that are not "
                f"finite (the first in row {start + step * row}, column {column}); remove the view or replace them"
            )


def open_dxchange(path: str | Path) -> Scan:
    """Open a scan in the DXchange layout without reading a projection.

    Read are ``exchange/theta`` (views,), the shape of ``exchange/data`` (views, rows, columns), and the means of
    ``exchange/data_white`` and ``exchange/data_dark`` (frames, rows, columns). The attribute ``units`` of ``theta``
    names the unit of the angles; without it they are in degrees, but angles that could be radians (more than 10 views,
    all within 2 pi) are refused rather than guessed at. A missing dark field counts as zero.

    Raises
    ------
    DataError
        The file is missing, empty, damaged or not HDF5; a dataset is missing or has the wrong shape or type; the counts
        of angles and views differ; the unit of the angles cannot be told.
    """
    path = Path(path)
    if not path.is_file():
        raise DataError(f"{path}: there is no such file; check the path of the scan")
    if path.stat().st_size == 0:
        raise DataError(f"{path}: the file is empty; write or download it again")
    with _hdf5(path) as file:
        num_views, num_rows, num_columns = _dataset(file, path, "data", 3).shape
        theta = _dataset(file, path, "theta", 1)
        if len(theta) != num_views:
            raise DataError(
                f"{path}: {len(theta)} angles in exchange/theta for {num_views} views; the counts must match"
            )
        angles, unit, note = _radians(theta, path)
        notes = [note]
        white = _mean_frame(_dataset(file, path, "data_white", 3), path, (num_rows, num_columns))
        if file.get("exchange/data_dark") is None or file["exchange/data_dark"].shape[:1] == (0,):
            dark = np.zeros_like(white)
            notes.append("exchange/data_dark is missing: the dark field is taken as zero")
        else:
            dark = _mean_frame(_dataset(file, path, "data_dark", 3), path, (num_rows, num_columns))
    num_blind = np.count_nonzero(~(white > dark))
    if num_blind:
        notes.append(f"{num_blind} detector pixels see no beam: they are interpolated along their rows")
    return Scan(path, angles, num_views, num_rows, num_columns, unit, white, dark, tuple(notes))


@contextmanager
def _hdf5(path: Path) -> Iterator[Any]:
    import h5py

    try:
        # a cache for chunks that hold several views, which are read one by one
        with h5py.File(str(path), "r", rdcc_nbytes=2**26) as file:
            yield file
    except (OSError, RuntimeError, KeyError, ValueError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise DataError(f"{path}: cannot be read as HDF5, write or download it again ({reason})") from error


def _dataset(file: Any, path: Path, name: str, ndim: int) -> Any:
    dataset = file.get(f"exchange/{name}")
    if dataset is None:
        remedy = (
            "counts need flat fields to become line integrals" if name == "data_white" else "is it a DXchange file?"
        )
        raise DataError(f"{path}: exchange/{name} is missing; {remedy}")
    if not hasattr(dataset, "dtype") or dataset.dtype.kind not in "iuf":
        raise DataError(f"{path}: exchange/{name} is not an array of numbers; is it a DXchange file?")
    if dataset.ndim != ndim or dataset.size == 0:
        raise DataError(f"{path}: exchange/{name} has shape {dataset.shape}; it needs {ndim} axes, none of them empty")
    return dataset


def _radians(theta: Any, path: Path) -> tuple[NDArray[np.float64], str, str]:
    """Return the angles in radians, their unit in the file, and how it was told."""
    angles = theta[:].astype(np.float64)
    if not np.isfinite(angles).all():
        raise DataError(f"{path}: angle {np.argmin(np.isfinite(angles))} of exchange/theta is not finite; mend it")
    if angles.size > 1 and np.ptp(angles) == 0:
        raise DataError(f"{path}: every angle of exchange/theta is {angles[0]:g}; the views of a scan differ in angle")
    named = "".join(np.asarray(theta.attrs.get("units", "")).ravel()[:1].astype(str)).strip().lower()
    if named.startswith("rad"):
        return angles, "radians", "angles are in radians, says their attribute units"
    if named.startswith("deg"):
        return np.deg2rad(angles), "degrees", "angles are in degrees, says their attribute units"
    if angles.size > 10 and np.abs(angles).max() <= 2 * np.pi * 1.01:
        raise DataError(
            f"{path}: exchange/theta spans {angles.min():g} to {angles.max():g} in an unnamed unit, perhaps "
            "radians; set its attribute units to degrees or radians"
        )
    return np.deg2rad(angles), "degrees", "angles are taken to be in degrees: exchange/theta names no unit"


def _mean_frame(frames: Any, path: Path, shape: tuple[int, int]) -> NDArray[np.float32]:
    if frames.shape[1:] != shape:
        raise DataError(f"{path}: frames of {frames.name[1:]} are {frames.shape[1:]}, those of exchange/data {shape}")
    total = np.zeros(shape)
    for index in range(len(frames)):
        total += frames[index]
    if not np.isfinite(total).all():
        row, column = np.unravel_index(np.argmin(np.isfinite(total)), shape)
        raise DataError(f"{path}: {frames.name[1:]} is not finite in row {row}, column {column}; remove that frame")
    return (total / len(frames)).astype(np.float32)


def find_axis(scan: Scan) -> float:
    r"""Find the detector column of the rotation axis, in pixels from the centre of column 0.

    Three ways, the first that can be trusted is taken:

    1. Opposing views mirror one another about the axis, :math:`p(\theta, u) = p(\theta + \pi, 2 u_0 - u)`. The shift
       with the least squared difference is found to a fraction of a pixel, over up to 16 pairs and 8 rows at once. A
       partner that lies between two views is interpolated between them. The object may be wider than the detector.
    2. If the object stays inside the detector, the centroid of a row is :math:`u_0 + a \cos\theta + b \sin\theta`, with
       a and b the object's own centroid (Helgason-Ludwig consistency): a least-squares fit over the views.
    3. As the first, with partners up to one angular step beyond the scanned range, for half turns without the end.

    The first and third are trusted if the views correlate by 0.8 or more, the second if there is air on both sides of
    the object, every view holds the same mass (10 %), and two standard errors of the axis are at most half a pixel.

    Raises
    ------
    DataError
        None of them can be trusted, or the scan cannot be read.
    """
    stride = max(1, scan.num_rows // 8)
    rows = slice(stride // 2, None, stride)
    methods: tuple[Callable[[], float | None], ...] = (
        lambda: _axis_from_pairs(scan, rows, beyond=False),
        lambda: _axis_from_centroids(scan, rows),
        lambda: _axis_from_pairs(scan, rows, beyond=True),
    )
    for method in methods:
        axis = method()
        if axis is not None:
            return axis
    raise DataError(
        f"{scan.path}: the rotation axis cannot be told from {scan.num_views} views over "
        f"{np.rad2deg(np.ptp(scan.angles)):.4g} degrees; give its detector column with --axis"
    )


def _axis_from_pairs(scan: Scan, rows: slice, *, beyond: bool) -> float | None:
    turned = np.unique(np.round(scan.angles % (2 * np.pi), 6))
    step = float(np.median(np.diff(turned))) if turned.size > 1 else 0.0
    partners = ((view, _partner(scan.angles, view, step, beyond)) for view in range(scan.num_views))
    pairs = [(view, partner) for view, partner in partners if partner]
    if not pairs or scan.num_columns < 4:
        return None
    pairs = [pairs[i] for i in np.unique(np.linspace(0, len(pairs) - 1, 16).astype(int))]
    needed = sorted({v for view, partner in pairs for v in (view, *partner)})
    # smooth, or the noise would favour shifts by half a pixel, where the interpolation averages it away
    smooth = ndimage.gaussian_filter1d(scan.read(needed, rows), 1.5, axis=1, mode="nearest")
    profile = dict(zip(needed, smooth.transpose(0, 2, 1).astype(np.float64), strict=True))
    ahead = np.concatenate([profile[view] for view, _ in pairs])
    back = np.concatenate([sum(weight * profile[v] for v, weight in partner.items()) for _, partner in pairs])
    shift, correlation = _register(ahead, back[:, ::-1])
    return (scan.num_columns - 1 - shift) / 2 if correlation >= 0.8 else None


def _partner(angles: NDArray[np.float64], view: int, step: float, beyond: bool) -> dict[int, float] | None:
    """Return the views, with their weights, that make up the view half a turn from this one, if there are any.

    That is one view within 2 % of the angular ``step``, else the nearest on either side, linearly interpolated, or,
    ``beyond`` the scanned range, the two nearest on one side, linearly extrapolated.
    """
    offset = (angles - angles[view]) % (2 * np.pi) - np.pi
    near = int(np.abs(offset).argmin())
    if abs(offset[near]) <= 0.02 * step:
        return {near: 1.0}
    reach = min(2.1 * step, np.deg2rad(4))
    others = np.flatnonzero((np.abs(offset - offset[near]) <= reach) & (np.abs(offset - offset[near]) > 0.02 * step))
    across = others[offset[others] * offset[near] < 0]
    if not across.size and not (beyond and abs(offset[near]) <= min(1.1 * step, reach)):
        return None
    others = across if across.size else others
    if not others.size:
        return None
    far = int(others[np.abs(offset[others]).argmin()])
    weight = offset[far] / (offset[far] - offset[near])
    return {near: weight, far: 1 - weight}


def _register(fixed: NDArray[np.float64], moving: NDArray[np.float64]) -> tuple[float, float]:
    """Find the shift d for which fixed(u) and moving(u + d) differ least, and their correlation there.

    The cost is the squared difference over the overlap divided by the squares over the overlap, for overlaps that hold
    half of all squares or more: at whole shifts by FFT, then between them by cubic splines.
    """
    num_columns = fixed.shape[1]
    size = fft.next_fast_len(2 * num_columns, real=True)
    spectrum = fft.rfft(moving, size) * fft.rfft(fixed, size).conj()
    shifts = np.arange(1 - num_columns, num_columns)
    product = fft.irfft(spectrum.sum(axis=0), size)[shifts]
    left = np.maximum(0, -shifts)  # the overlap in columns of fixed is left <= u < right
    right = num_columns - np.maximum(0, shifts)
    below_fixed, below_moving = (np.append(0, np.cumsum((x**2).sum(axis=0))) for x in (fixed, moving))
    squares = below_fixed[right] - below_fixed[left] + below_moving[right + shifts] - below_moving[left + shifts]
    enough = squares >= squares[num_columns - 1] / 2
    if not squares.any():
        return 0.0, 0.0
    start = shifts[enough][np.argmin(1 - 2 * product[enough] / squares[enough])]

    columns = np.arange(num_columns)
    spline = interpolate.CubicSpline(columns, moving, axis=1)

    def overlap(shift: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        inside = (columns + shift >= 0) & (columns + shift <= num_columns - 1)
        return fixed[:, inside], spline(columns[inside] + shift)

    def cost(shift: float) -> float:
        a, b = overlap(shift)
        return float(((a - b) ** 2).sum() / ((a**2).sum() + (b**2).sum()))

    shift = float(optimize.minimize_scalar(cost, bounds=(start - 1, start + 1), options={"xatol": 1e-3}).x)
    a, b = (x - x.mean() for x in overlap(shift))
    return shift, float((a * b).sum() / np.sqrt((a**2).sum() * (b**2).sum()))


def _axis_from_centroids(scan: Scan, rows: slice) -> float | None:
    views = np.unique(np.linspace(0, scan.num_views - 1, 360).astype(int))
    integrals = scan.read(views, rows).sum(axis=2, dtype=np.float64)
    # a high quantile over the views: the maximum would take noise for the object
    smooth = np.quantile(ndimage.gaussian_filter1d(integrals, 2, axis=1, mode="nearest"), 0.95, axis=0)
    (covered,) = np.nonzero(smooth > 0.05 * smooth.max())
    columns = np.arange(scan.num_columns)
    air = (columns < covered[0]) | (columns > covered[-1]) if covered.size else np.zeros(columns.size, bool)
    margin = max(3, scan.num_columns // 50)
    if views.size < 6 or not (air[:margin].all() and air[-margin:].all()):
        return None
    # beam that changed since the flat field was taken leaves a sloping background, which would pull the centroids
    background = np.polynomial.polynomial.polyfit(columns[air], integrals[:, air].T, 1)
    integrals -= np.polynomial.polynomial.polyval(columns, background)
    mass = integrals.sum(axis=1)
    if not mass.std() < 0.1 * mass.mean():
        return None
    centroids = integrals @ columns / mass
    angles = scan.angles[views]
    design = np.column_stack([np.ones(angles.size), np.cos(angles), np.sin(angles)])
    solution, squares, rank, _ = np.linalg.lstsq(design, centroids)
    if rank < 3:
        return None
    variance = squares[0] / (angles.size - 3) * np.linalg.inv(design.T @ design)[0, 0]
    axis = float(solution[0])
    return axis if 2 * np.sqrt(variance) <= 0.5 and 0 <= axis <= scan.num_columns - 1 else None
