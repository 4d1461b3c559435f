"""Who holds what: how many samples of each class every client has."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hpcfed.errors import DataError
from hpcfed.plots.curves import COLOURS
from hpcfed.plots.looks import STYLE, save, title
from hpcfed.run.run_folder import RunFolder

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Counts = NDArray[np.float64]

# Up to so many clients stand in their own order with a number each; more are sorted.
NUMBERED = 60
MOST_CLASSES = 10


def holdings(folder: RunFolder, path: Path) -> Path:
    """Draw what each client holds as a bar of its samples, stacked by class; below, the classes as shares of each bar.

    Many clients are sorted: in the upper panel by their samples, in the lower by their most frequent class and its
    share (of two classes: by the share). Many classes are drawn in ten groups of neighbours.

    Raises
    ------
    DataError
        If the result cannot be read, or has no dataset ``holdings`` (clients, classes) with an attribute ``classes``.
    """
    import matplotlib
    from matplotlib.figure import Figure

    counts, names = _grouped(*_read(folder))
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    many = len(counts) > NUMBERED
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7.2, 4.8), layout="constrained")
        upper, lower = figure.subplots(2, 1, height_ratios=(3, 2), sharex=not many)
        colours = _colours(len(names))
        by_class = _by_class(shares) if many else np.arange(len(counts))
        by_size = by_class[np.argsort(-counts.sum(axis=1)[by_class], kind="stable")] if many else by_class
        _stack(upper, counts[by_size], colours)
        _stack(lower, shares[by_class], colours)
        upper.set_ylabel("samples")
        lower.set_ylabel("share of samples")
        lower.set_ylim(0, 1)
        upper.set_xlabel(f"{len(counts):,} clients, sorted by samples" if many else "")
        lower.set_xlabel(f"{len(counts):,} clients, sorted by classes" if many else "client")
        figure.legend(upper.patches, names, loc="outside right center", title="label", reverse=True)
        figure.suptitle(title(folder))
        return save(figure, path)


def _read(folder: RunFolder) -> tuple[Counts, list[str]]:
    """The table of counts and the names of its columns."""
    import h5py

    try:
        with h5py.File(os.fspath(folder.result), "r") as file:
            dataset: Any = file.get("holdings")
            if dataset is None or dataset.ndim != 2 or 0 in dataset.shape:
                raise DataError(f"result {folder.result} has no table holdings (clients, classes): nothing to draw")
            counts = np.asarray(dataset[()], np.float64)
            classes = np.asarray(dataset.attrs.get("classes", np.arange(counts.shape[1])))
    except OSError as error:
        raise DataError(f"result {folder.result} cannot be read: {error}") from error
    if classes.size != counts.shape[1]:
        raise DataError(
            f"result {folder.result} names {classes.size} classes for {counts.shape[1]} columns of holdings"
        )
    return counts, [_name(label) for label in classes.ravel()]


def _name(label: Any) -> str:
    if isinstance(label, bytes):
        return label.decode()
    return label if isinstance(label, str) else f"{label:g}"


def _grouped(counts: Counts, names: list[str]) -> tuple[Counts, list[str]]:
    """At most ten columns: neighbouring classes together."""
    if len(names) <= MOST_CLASSES:
        return counts, names
    groups = np.array_split(np.arange(len(names)), MOST_CLASSES)
    sums = np.column_stack([counts[:, group].sum(axis=1) for group in groups])
    return sums, [f"{names[group[0]]} to {names[group[-1]]}" for group in groups]


def _by_class(shares: Counts) -> NDArray[np.intp]:
    if shares.shape[1] == 2:
        return np.argsort(-shares[:, 0], kind="stable")
    return np.lexsort((-shares.max(axis=1), shares.argmax(axis=1)))


def _colours(number: int) -> list[Any]:
    """Colours that tell a few classes apart; for more, shades in the order of the classes."""
    import matplotlib

    if number <= len(COLOURS):
        return list(COLOURS[:number])
    return list(matplotlib.colormaps["viridis"](np.linspace(0, 1, number)))


def _stack(axes: Axes, heights: Counts, colours: list[Any]) -> None:
    """One bar a client, with gaps between few; one outline a class, so that a thousand clients are drawn quickly."""
    clients = np.arange(len(heights))
    half = 0.4 if len(heights) <= NUMBERED else 0.5
    edges = np.column_stack([clients - half, clients + half]).ravel()
    tops = np.cumsum(heights, axis=1)
    for below, top, colour in zip((tops - heights).T, tops.T, colours, strict=True):
        # between two bars lies a gap without height, or nothing at all
        values, baseline = (np.column_stack([each, np.zeros_like(each)]).ravel()[:-1] for each in (top, below))
        axes.stairs(values, edges, baseline=baseline, fill=True, color=colour, linewidth=0)
    axes.set_xlim(edges[0] - 0.2, edges[-1] + 0.2)
    axes.grid(visible=False, axis="x")
    if len(heights) <= NUMBERED:
        axes.set_xticks(clients[:: 1 if len(heights) <= 20 else 5])
    else:
        axes.set_xticks([])
