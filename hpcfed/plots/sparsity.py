"""What pruning left: the share of the weights that is kept in each layer of a network."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcfed.errors import DataError
from hpcfed.plots.curves import COLOURS
from hpcfed.plots.looks import STYLE, save, title
from hpcfed.run.run_folder import RunFolder


def sparsity(folder: RunFolder, path: Path) -> Path:
    """Draw the kept share of each layer's weights as a bar, in the layers' order, and that of the whole network.

    Above each bar stands the number of weights that the layer has: most are in a few layers.

    Raises
    ------
    DataError
        If the result cannot be read, or has no dataset ``layers`` (layers, kept and all) with an attribute ``names``.
    """
    import matplotlib
    from matplotlib.figure import Figure

    layers, names = _read(folder)
    kept, sizes = layers.T
    shares, whole = kept / sizes, kept.sum() / sizes.sum()
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7.2, 3.4), layout="constrained")
        axes = figure.subplots()
        bars = axes.bar(np.arange(len(names)), shares, color=COLOURS[0], width=0.7)
        axes.axhline(whole, color=COLOURS[1], linestyle=":", linewidth=1)
        behind = {"facecolor": "white", "linewidth": 0, "pad": 0.5}
        axes.bar_label(bars, [_short(size) for size in sizes], fontsize=6, padding=2, color="0.3", bbox=behind)
        axes.annotate(f"all: {whole:.3g}", (1, whole), xycoords=("axes fraction", "data"), va="center", fontsize=8)
        axes.set_xticks(np.arange(len(names)), names, rotation=90)
        axes.margins(x=0.01, y=0.1)
        axes.grid(visible=False, axis="x")
        axes.set_xlabel("layer; above the bars its weights")
        axes.set_ylabel("share of weights that is kept")
        figure.suptitle(f"{title(folder)}\n{kept.sum():,.0f} of {sizes.sum():,.0f} weights are kept")
        return save(figure, path)


def _read(folder: RunFolder) -> tuple[NDArray[np.float64], list[str]]:
    """Kept weights and weights of each layer, and the layers' names."""
    import h5py

    try:
        with h5py.File(os.fspath(folder.result), "r") as file:
            dataset: Any = file.get("layers")
            if dataset is None or dataset.ndim != 2 or dataset.shape[1] != 2 or 0 in dataset.shape:
                raise DataError(f"result {folder.result} has no table layers (layers, kept and all): nothing to draw")
            layers = np.asarray(dataset[()], np.float64)
            names = [str(name) for name in dataset.attrs.get("names", range(len(layers)))]
    except OSError as error:
        raise DataError(f"result {folder.result} cannot be read: {error}") from error
    if len(names) != len(layers):
        raise DataError(f"result {folder.result} names {len(names)} layers, but its table has {len(layers)}")
    return layers, names


def _short(number: float) -> str:
    return f"{number:.0f}" if number < 1000 else f"{number / 1000:.2g}k"
