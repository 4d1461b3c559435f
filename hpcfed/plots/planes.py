"""What a reconstruction looks like: its central planes, beside those of the reference where there is one."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcfed.errors import DataError
from hpcfed.plots.looks import STYLE, save, title
from hpcfed.run.run_folder import RunFolder

Image = NDArray[np.float32]
Look = Mapping[str, Any]

# Inches: the widest image, that of a picture of a single one, the height of all images together, the margins.
WIDEST, WIDEST_ALONE, HIGHEST = 2.7, 4.5, 8.0
GAP, LEFT, TOP, BOTTOM = 0.07, 1.05, 0.85, 0.65
# Height over width: flatter and taller images are stretched into this range.
FLATTEST, TALLEST = 0.15, 2.0


@dataclass(frozen=True)
class _Plane:
    """A central plane: the axis of the volume (y, x, z) that it is normal to, and its place on that axis."""

    name: str
    axis: int
    index: int

    def cut(self, dataset: Any) -> Image:
        """The plane as an image, first row on top: y points down in an axial plane, z up in the others."""
        if self.axis == 2:
            return np.asarray(dataset[:, :, self.index], np.float32)
        image = dataset[self.index, :, :] if self.axis == 0 else dataset[:, self.index, :]
        return np.asarray(image, np.float32).T[::-1]

    def label(self, image: Image) -> str:
        stretch = _height(image) / image.shape[0]
        note = "" if math.isclose(stretch, 1) else f"\nheight × {stretch:.2g}"
        return f"{self.name}\n{'yxz'[self.axis]} = {self.index}{note}"


class _Sheet:
    """A figure on which places are given in inches from the upper left corner."""

    def __init__(self, width: float, height: float) -> None:
        from matplotlib.figure import Figure

        self.figure = Figure(figsize=(width, height))
        self._width, self._height = width, height

    def image(self, x: float, y: float, width: float, height: float, image: Image, look: Look) -> Any:
        axes = self._axes(x, y, width, height)
        axes.imshow(image, aspect="auto", interpolation="nearest", **look)
        axes.set_axis_off()
        return axes

    def colour_bar(self, x: float, y: float, width: float, of: Any, label: str) -> None:
        bar = self.figure.colorbar(of.images[0], cax=self._axes(x, y, width, 0.1), orientation="horizontal")
        bar.set_label(label)

    def text(self, x: float, y: float, text: str, **look: Any) -> None:
        self.figure.text(x / self._width, 1 - y / self._height, text, **look)

    def _axes(self, x: float, y: float, width: float, height: float) -> Any:
        bottom = 1 - (y + height) / self._height
        return self.figure.add_axes((x / self._width, bottom, width / self._width, height / self._height))


def slices(folder: RunFolder, path: Path) -> Path:
    """Draw the three central planes of a reconstruction; with the reference, if there is one, and the difference.

    Voxels are cubes and all planes have one scale. Reference and reconstruction share a grey window, from 0 to the
    reference's maximum; the difference is reconstruction minus reference.

    Raises
    ------
    DataError
        If the result cannot be read or holds no volume.
    """
    import matplotlib

    planes, volume, reference = _read_planes(folder)
    labels = [plane.label(image) for plane, image in zip(planes, volume, strict=True)]
    grey = {"cmap": "gray", **_window(reference or volume, robust=not reference)}
    if reference:
        differences = [mine - true for mine, true in zip(volume, reference, strict=True)]
        rows: list[tuple[Image, ...]] = list(zip(reference, volume, differences, strict=True))
        row_labels, column_labels = labels, ["reference", "reconstruction", "reconstruction − reference"]
        looks = [grey, grey, {"cmap": "RdBu_r", **_symmetric_window(differences)}]
    else:
        rows = [tuple(volume)]
        row_labels, column_labels = [""], [label.replace("\n", ", ") for label in labels]
        looks = [grey] * len(volume)

    # From voxels to inches.
    heights = [max(map(_height, row)) for row in rows]
    columns = max(image.shape[1] for image in volume)
    scale = min((WIDEST if len(looks) > 1 else WIDEST_ALONE) / columns, HIGHEST / sum(heights))
    width, pitch, left = scale * columns, scale * columns + GAP, LEFT if reference else 2 * GAP
    below = TOP + scale * sum(heights) + GAP * len(rows)

    with matplotlib.rc_context(STYLE):
        sheet = _Sheet(left + pitch * len(looks) + GAP, below + BOTTOM)
        y, drawn = TOP, []
        for images, height, label in zip(rows, heights, row_labels, strict=True):
            sheet.text(left - 0.1, y + scale * height / 2, label, ha="right", va="center")
            for place, (image, look) in enumerate(zip(images, looks, strict=True)):
                x = left + place * pitch + (width - scale * image.shape[1]) / 2
                drawn.append(sheet.image(x, y, scale * image.shape[1], scale * _height(image), image, look))
            y += scale * height + GAP
        for axes, label in zip(drawn, column_labels, strict=False):
            axes.set_title(label, pad=4)
        num_grey = len(looks) - bool(reference)
        sheet.colour_bar(left + (num_grey - 1) * pitch / 2, below + 0.05, width, drawn[0], "attenuation")
        if reference:
            sheet.colour_bar(left + 2 * pitch, below + 0.05, width, drawn[2], "difference")
        sheet.figure.suptitle(_result_title(folder), y=1 - 0.15 / (below + BOTTOM), linespacing=1.4)
        return save(sheet.figure, path)


def _read_planes(folder: RunFolder) -> tuple[list[_Plane], list[Image], list[Image]]:
    """The central planes of the volume and of the reference, if any. No more is read: volumes may be large."""
    import h5py

    try:
        with h5py.File(os.fspath(folder.result), "r") as file:
            volume: Any = file.get("volume")
            reference: Any = file.get("reference")
            if volume is None or volume.ndim != 3:
                raise DataError(f"result {folder.result} has no three-dimensional dataset volume: nothing to slice")
            names = ("axial", 2), ("coronal", 0), ("sagittal", 1)
            planes = [_Plane(name, axis, volume.shape[axis] // 2) for name, axis in names]
            if volume.shape[2] == 1:  # the other planes of a single slice are lines
                planes = planes[:1]
            comparable = reference is not None and reference.shape == volume.shape
            return (
                planes,
                [plane.cut(volume) for plane in planes],
                [plane.cut(reference) for plane in planes] if comparable else [],
            )
    except OSError as error:
        raise DataError(f"result {folder.result} cannot be read: {error}") from error


def _height(image: Image) -> float:
    """The height of an image on paper in units of its pixels' width."""
    rows, columns = image.shape
    return float(columns * min(max(rows / columns, FLATTEST), TALLEST))


def _window(images: Sequence[Image], robust: bool) -> dict[str, float]:
    """Black and white: 0 (or the minimum, if negative) and the maximum; robust: the percentiles 0.5 and 99.5."""
    values = _finite(images)
    low, high = map(float, np.percentile(values, [0.5, 99.5]) if robust else (np.min(values), np.max(values)))
    low = low if robust else min(low, 0.0)
    return {"vmin": low, "vmax": high if high > low else low + 1}


def _symmetric_window(images: Sequence[Image]) -> dict[str, float]:
    """Zero in the middle, the 99.5th percentile of the absolute values at the ends."""
    limit = float(np.percentile(np.abs(_finite(images)), 99.5)) or 1.0
    return {"vmin": -limit, "vmax": limit}


def _finite(images: Sequence[Image]) -> Image:
    """All finite values, a zero if there are none."""
    values = np.concatenate([image.ravel() for image in images])
    values = values[np.isfinite(values)]
    return values if values.size else np.zeros(1, np.float32)


def _result_title(folder: RunFolder) -> str:
    """A run in a line, and how good its last solution is in another."""
    last = folder.history()[-1]
    facts = [f"{last['round']} rounds"]
    facts += [f"PSNR {last['psnr']:.2f} dB"] if "psnr" in last else []
    facts += [f"SSIM {last['ssim']:.4f}"] if "ssim" in last else []
    return f"{title(folder)}\n{', '.join(facts)}"
