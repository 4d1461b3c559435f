"""What learning was for: the losses of clients before and after a run, and a model before and after it adapts."""

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

Numbers = NDArray[np.float64]

# Before and after.
PAIR = (COLOURS[1], COLOURS[0])

# Up to so many clients are named.
APART = 40


def losses(folder: RunFolder, path: Path) -> Path:
    """Draw every client's loss at the end of a run and at its start, worst client first, with the clients' means.

    Raises
    ------
    DataError
        If the result cannot be read, or has no dataset ``losses`` (clients, start and end).
    """
    import matplotlib
    from matplotlib.figure import Figure

    values = _read(folder, "losses")["losses"]
    order = np.argsort(-values[:, 1], kind="stable")
    values = values[order]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7.2, 3.6), layout="constrained")
        axes = figure.subplots()
        _pairs(axes, values, ("at the start", "at the end"))
        for mean, colour in zip(values.mean(axis=0), PAIR, strict=True):
            axes.axhline(mean, color=colour, linestyle=":", linewidth=1, zorder=0)
            axes.annotate(f"mean {mean:.3g}", (1, mean), xycoords=("axes fraction", "data"), va="center", fontsize=8)
        axes.set_yscale("log")
        axes.set_ylabel("loss of a client")
        axes.set_xlabel(f"{len(order):,} clients, worst first")
        if len(order) <= APART:
            axes.set_xticks(np.arange(len(order)), [str(client) for client in order])
        else:
            axes.set_xticks([])
        figure.suptitle(f"{title(folder)}\nworst client: loss {values[:, 1].max():.3g}, mean {values[:, 1].mean():.3g}")
        return save(figure, path)


def adaptation(folder: RunFolder, path: Path) -> Path:
    """Draw a model before and after it adapts to tasks that it has not seen.

    Of sinusoids, the true curve, the support samples and the model's two curves, for a few tasks; of images, the
    accuracy on each task.

    Raises
    ------
    DataError
        If the result cannot be read, or has neither ``curves`` and ``support`` nor ``held_out_accuracies``.
    """
    import matplotlib
    from matplotlib.figure import Figure

    found = _read(folder, "held_out_losses")
    before, after = found["held_out_losses"].mean(axis=0)
    with matplotlib.rc_context(STYLE):
        if "curves" in found and "support" in found:
            figure = Figure(figsize=(7.2, 2.9), layout="constrained")
            panels = figure.subplots(1, len(found["curves"]), sharey=True, squeeze=False)[0]
            _sinusoids(panels, found)
            figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
        elif "held_out_accuracies" in found:
            figure = Figure(figsize=(7.2, 3.6), layout="constrained")
            axes = figure.subplots()
            accuracies = found["held_out_accuracies"]
            _pairs(
                axes, accuracies[np.argsort(-accuracies[:, 1], kind="stable")], ("before the step", "after the step")
            )
            axes.set_ylim(0, 1)
            axes.set_ylabel("accuracy")
            axes.set_xlabel(f"{len(accuracies)} held-out tasks, best first")
            axes.set_xticks([])
        else:
            raise DataError(
                f"result {folder.result} has neither curves nor accuracies of held-out tasks: nothing to draw"
            )
        figure.suptitle(f"{title(folder)}\nheld-out tasks: loss {before:.3g} before the step, {after:.3g} after it")
        return save(figure, path)


def _sinusoids(panels: Any, found: dict[str, Any]) -> None:
    for axes, (truth, before, after), (x, y) in zip(panels, found["curves"], found["support"], strict=True):
        grid = found["x"]
        axes.plot(grid, truth, color="0.2", label="truth")
        axes.plot(grid, before, color=COLOURS[1], linestyle="--", label="before the step")
        axes.plot(grid, after, color=COLOURS[0], label="after the step")
        axes.plot(x, y, "o", color="0.2", label="support samples")
        axes.set_xlabel("x")


def _pairs(axes: Axes, values: Numbers, names: tuple[str, str]) -> None:
    """For each row a line from its first number to its second."""
    places = np.arange(len(values))
    axes.vlines(places, *values.T, color="0.8", linewidth=2)
    for numbers, colour, name in zip(values.T, PAIR, names, strict=True):
        axes.plot(places, numbers, "o", color=colour, label=name)
    axes.grid(visible=False, axis="x")
    axes.legend(loc="best")


def _read(folder: RunFolder, needed: str) -> dict[str, Any]:
    """The datasets of a result that are not groups, and the abscissae of the curves."""
    import h5py

    try:
        with h5py.File(os.fspath(folder.result), "r") as file:
            wanted = ("losses", "held_out_losses", "held_out_accuracies", "curves", "support")
            found: dict[str, Any] = {name: np.asarray(file[name][()]) for name in wanted if name in file}
            if "curves" in found:
                found["x"] = np.asarray(file["curves"].attrs["x"])
    except (OSError, KeyError) as error:
        raise DataError(f"result {folder.result} cannot be read: {error}") from error
    if needed not in found or found[needed].ndim != 2:
        raise DataError(f"result {folder.result} has no table {needed}: nothing to draw")
    return found
