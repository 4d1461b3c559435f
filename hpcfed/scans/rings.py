"""Ring artefacts: what each detector pixel adds to all of its line integrals, estimated by the library algotom.

A pixel that is off by a constant draws a ring about the rotation axis, and a straight stripe into the sinogram of its
row. Vo, Atwood and Drakopoulos ("Superior techniques for eliminating ring artifacts in X-ray micro-tomography", Opt.
Express 26, 2018) find stripes by sorting each column of the sinogram and smoothing across the columns. That needs all
views of a row at once, which no client has: here stripes are found once, in evenly spaced views, and each client takes
their mean from the views that it reads.
"""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from hpcfed.errors import ConfigError, DataError
from hpcfed.scans.model import Scan

MOST_VIEWS = 512
"""So many views are looked at, no more: a stripe is a mean over views."""
LEAST_VIEWS = 16
SLAB_BYTES = 2**28
FLUCTUATION = 8.0
"""A pixel is not to be trusted if what is removed from it varies by so many times as much as in its neighbours."""


def without_rings(scan: Scan, size: int = 21) -> Scan:
    """The scan with `Scan.offsets`, so that what is read from it has fewer stripes.

    Of each row's sinogram s (views, columns) the offset of a column is the mean over the views of ``s - clean(s)``,
    with algotom's ``remove_stripe_based_sorting``, less the median of its neighbours'. Where that difference varies
    from view to view, the pixel is dead or flickers, and is marked to be interpolated. Parts of the object that are
    narrower than ``size`` columns in every view lose some of their contrast.

    Parameters
    ----------
    scan
        Parallel, fan or cone beam.
    size
        Columns that the smoothing looks at: stripes of up to half as many are removed.

    Raises
    ------
    ConfigError
        algotom is not installed.
    DataError
        There are too few views or columns to tell a stripe, or the scan cannot be read.
    """
    try:
        removal = import_module("algotom.prep.removal")
    except ImportError as error:
        raise ConfigError(f"{scan.path}: removing rings needs algotom; pip install 'hpcfed[rings]'") from error
    if scan.num_views < LEAST_VIEWS or scan.num_columns < LEAST_VIEWS:
        size_of = f"{scan.num_views} views of {scan.num_columns} columns"
        raise DataError(f"{scan.path}: {size_of} are too few to tell rings; leave them in")
    views = np.unique(np.linspace(0, scan.num_views - 1, MOST_VIEWS).astype(int))
    width = min(size, scan.num_columns // 2)
    slab = max(1, SLAB_BYTES // (4 * views.size * scan.num_columns))
    offsets = np.empty((scan.num_rows, scan.num_columns), np.float32)
    for start in range(0, scan.num_rows, slab):
        rows = slice(start, min(start + slab, scan.num_rows))
        for row, sinogram in enumerate(scan.read(views, rows).transpose(2, 0, 1), start):
            clean = removal.remove_stripe_based_sorting(np.ascontiguousarray(sinogram), width)
            offsets[row] = _offsets(sinogram - clean, width)
    lost = int(np.isnan(offsets).sum())
    note = f"rings: pixels are corrected by {np.nanstd(offsets):.3g} on average, {lost} of them are interpolated"
    return replace(scan, offsets=offsets, notes=(*scan.notes, note))


def _offsets(stripes: NDArray[np.float32], width: int) -> NDArray[np.float32]:
    """The mean of each column, less what neighbours share; NaN where it varies far more than theirs.

    A stripe is narrow: what is wide was taken from the object.
    """
    means, spread = stripes.mean(axis=0), stripes.std(axis=0)
    offsets: NDArray[np.float32] = means - ndimage.median_filter(means, width)
    usual = np.maximum(ndimage.median_filter(spread, width), np.median(spread))
    offsets[spread > FLUCTUATION * np.maximum(usual, 1e-6)] = np.nan
    return offsets
