"""How well each weight of a regularizer predicts data that were set aside."""

from __future__ import annotations

from pathlib import Path

import h5py

from hpcfed.errors import DataError
from hpcfed.plots.curves import COLOURS
from hpcfed.plots.looks import STYLE, save, title
from hpcfed.run.run_folder import RunFolder


def mu(folder: RunFolder, path: Path) -> Path | None:
    """Draw the misfit of the views set aside over the weights that ``--mu auto`` tried; nothing for other runs.

    Raises
    ------
    DataError
        If the result cannot be read.
    """
    import matplotlib
    from matplotlib.figure import Figure

    try:
        with h5py.File(str(folder.result), "r") as file:
            if "mu" not in file:
                return None
            weights, misfits = file["mu"][()].T
            found = float(file["mu"].attrs["found"])
    except (OSError, KeyError, ValueError) as error:
        raise DataError(f"{folder.result} does not tell which mu was tried: {error}: run it again") from error
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(4.8, 3.2), layout="constrained")
        axes = figure.subplots()
        axes.loglog(weights, misfits / misfits.min(), "o-", color=COLOURS[0], markersize=4)
        axes.axvline(found, color=COLOURS[1], linestyle="--", label=f"mu {found:.3g}")
        axes.set_xlabel("mu")
        axes.set_ylabel("misfit of unseen views / least")
        axes.legend()
        figure.suptitle(title(folder))
        return save(figure, path)
