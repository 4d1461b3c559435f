"""Labelled images: NumPy archives of well-known sets, and a small set that needs no file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcfed.errors import DataError

OMNIGLOT_SIDE = 105
"""Pixels a side of Omniglot's drawings as they are published."""

SMALL_SIDE = 28
"""What they are shrunk to, as is usual."""


@dataclass(frozen=True, eq=False)
class Images:
    """Images and their classes.

    Attributes
    ----------
    pixels : (n, channels, rows, columns); uint8 from 0 to 255, or float32 as it is.
    labels : (n,) int64, whole numbers from 0.
    """

    pixels: NDArray[Any]
    labels: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(channels, rows, columns) of one image."""
        channels, rows, columns = self.pixels.shape[1:]
        return channels, rows, columns

    def inputs(self, rows: Any = slice(None)) -> NDArray[np.float32]:
        """These images for a model: float32, uint8 scaled to [0, 1]."""
        pixels: NDArray[np.float32] = self.pixels[rows].astype(np.float32)
        if self.pixels.dtype == np.uint8:
            pixels /= 255
        return pixels

    def take(self, rows: Any) -> Images:
        """Some of the images."""
        return Images(self.pixels[rows], self.labels[rows])


def embedded() -> Images:
    """The 1,797 handwritten digits of 8 x 8 pixels in scikit-learn (E. Alpaydin and C. Kaynak 1998, UCI)."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    return Images((pixels / 16).astype(np.float32).reshape(-1, 1, 8, 8), labels.astype(np.int64))


def read_images(path: str | Path) -> tuple[Images, Images | None]:
    """Read an ``.npz`` of images.

    ====================================  ==============================================================================
    arrays                                what is returned
    ====================================  ==============================================================================
    x_train, y_train, x_test, y_test      training and test images, as Keras publishes MNIST and CIFAR
    x, y                                  the images, and None
    packed, y, class_is_evaluation        Omniglot, bits of 105 x 105 pixels a row, shrunk to 28 x 28 by means over
                                          areas: the images of the background classes and of the evaluation classes
    ====================================  ==============================================================================

    Images are (n, rows, columns) or (n, rows, columns, channels).

    Raises
    ------
    DataError
        The file is missing, damaged or holds other arrays; images and labels do not match, values are not finite, or
        labels are no whole numbers from 0.
    """
    path = Path(path)
    if not path.is_file():
        raise DataError(f"{path}: there is no such file; check the path of the images")
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except Exception as error:  # zip, header and pickle errors are of many types
        raise DataError(f"{path}: cannot be read as .npz, write or download it again ({_line(error)})") from error
    names = set(arrays)
    if {"x_train", "y_train"} <= names:
        train = _checked(path, "x_train", arrays["x_train"], "y_train", arrays["y_train"])
        if not {"x_test", "y_test"} <= names:
            return train, None
        test = _checked(path, "x_test", arrays["x_test"], "y_test", arrays["y_test"])
        if test.shape != train.shape:
            raise DataError(f"{path}: images of x_test are {test.shape}, those of x_train {train.shape}")
        return train, test
    if {"packed", "y", "class_is_evaluation"} <= names:
        return _omniglot(path, arrays["packed"], arrays["y"], arrays["class_is_evaluation"])
    if {"x", "y"} <= names:
        return _checked(path, "x", arrays["x"], "y", arrays["y"]), None
    found = ", ".join(sorted(names)) or "nothing"
    raise DataError(f"{path}: holds {found}; save images as x_train, y_train, x_test, y_test, or as x, y")


def _checked(path: Path, x_name: str, x: NDArray[Any], y_name: str, y: NDArray[Any]) -> Images:
    if x.ndim not in (3, 4) or 0 in x.shape or x.dtype.kind not in "uif":
        raise DataError(f"{path}: {x_name} is {x.dtype} {x.shape}, not numbers (n, rows, columns[, channels])")
    y = np.squeeze(y)
    if y.shape != x.shape[:1]:
        raise DataError(f"{path}: {y_name} has shape {y.shape} for {len(x)} images of {x_name}: one label an image")
    if not np.isfinite(x).all():
        raise DataError(f"{path}: {x_name} has values that are not finite: mend or leave out those images")
    if y.dtype.kind not in "uif" or not np.isfinite(y).all() or (y != np.floor(y)).any() or y.min() < 0:
        raise DataError(f"{path}: {y_name} has labels that are no whole numbers from 0: number the classes")
    if x.dtype != np.uint8:
        x = x.astype(np.float32)
    pixels = x[:, None] if x.ndim == 3 else x.transpose(0, 3, 1, 2)
    return Images(np.ascontiguousarray(pixels), y.astype(np.int64))


def _omniglot(path: Path, packed: NDArray[Any], y: NDArray[Any], evaluation: NDArray[Any]) -> tuple[Images, Images]:
    count = OMNIGLOT_SIDE**2
    if packed.dtype != np.uint8 or packed.ndim != 2 or packed.shape[1] != -(-count // 8):
        raise DataError(f"{path}: packed is {packed.dtype} {packed.shape}, not uint8 rows of {-(-count // 8)} bytes")
    shrink = _areas(OMNIGLOT_SIDE, SMALL_SIDE)
    small = np.empty((len(packed), SMALL_SIDE, SMALL_SIDE), np.uint8)
    for first in range(0, len(packed), 1000):
        rows = slice(first, first + 1000)
        drawn = np.unpackbits(packed[rows], axis=1, count=count).reshape(-1, OMNIGLOT_SIDE, OMNIGLOT_SIDE)
        small[rows] = np.rint(255 * (shrink @ drawn.astype(np.float32) @ shrink.T))
    images = _checked(path, "packed", small, "y", y)
    if images.labels.max() >= len(evaluation):
        raise DataError(f"{path}: class_is_evaluation has {len(evaluation)} classes, y names {images.labels.max()}")
    held_out = evaluation[images.labels].astype(bool)
    if held_out.all() or not held_out.any():
        raise DataError(f"{path}: class_is_evaluation marks all classes or none: mark those to hold out")
    return images.take(~held_out), images.take(held_out)


def _areas(before: int, after: int) -> NDArray[np.float32]:
    """(after, before): each of the new pixels as the mean over the old ones that it covers, in parts too."""
    edges = np.arange(after + 1) * (before / after)
    old = np.arange(before)
    overlap: NDArray[np.float64] = np.minimum(edges[1:, None], old + 1) - np.maximum(edges[:-1, None], old)
    return np.maximum(overlap * (after / before), 0).astype(np.float32)


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
