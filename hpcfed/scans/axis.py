"""The detector column of the rotation axis of a parallel-beam scan, found from its projections."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from scipy import fft, interpolate, ndimage, optimize

from hpcfed.errors import DataError
from hpcfed.scans.model import Scan


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
        None of them can be trusted, the scan cannot be read, or its beam is no parallel one.
    """
    if scan.beam is not None:
        raise DataError(f"{scan.path}: has a fan or cone beam, whose axis comes with its geometry; it is not searched")
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
