"""Every picture, drawn from a run folder alone.

Nothing here needs the run to be going or its data to be at hand: curves come from ``metrics.jsonl``, names from
``config.toml``, images from ``result.h5``. matplotlib is used through its object interface, so no display is needed,
and loaded only when something is drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from hpcfed import registry
from hpcfed.plots.adaptation import adaptation, losses
from hpcfed.plots.curves import comparison, convergence
from hpcfed.plots.holdings import holdings
from hpcfed.plots.looks import configuration
from hpcfed.plots.planes import slices
from hpcfed.plots.sensitivity import sensitivity
from hpcfed.plots.sparsity import sparsity
from hpcfed.plots.weights import mu
from hpcfed.run.run_folder import RunFolder

__all__ = ["PICTURES", "comparison", "convergence", "draw", "sensitivity"]

# Pictures of a finished run besides its convergence, by the names that workloads give; None: nothing to draw.
PICTURES: dict[str, Callable[[RunFolder, Path], Path | None]] = {
    "slices": slices,
    "holdings": holdings,
    "losses": losses,
    "adaptation": adaptation,
    "sparsity": sparsity,
    "mu": mu,
}


def draw(folders: Sequence[RunFolder], out: Path | None = None) -> list[Path]:
    """Draw the convergence of one run and, if it is finished, its other pictures; or several runs over one another.

    Parameters
    ----------
    folders : the runs.
    out : where the convergence goes, instead of ``DIR/convergence.png`` or, for several runs, ``compare.png``.

    Returns
    -------
    The files written.

    Raises
    ------
    DataError
        If a run has no recorded rounds, or its result lacks what a picture needs.
    ConfigError
        If a picture cannot be written.
    """
    if len(folders) != 1:
        return [convergence(folders, out or Path("compare.png"))]
    folder = folders[0]
    written = [convergence(folders, out or folder.path / "convergence.png")]
    if folder.finished:
        drawn = [PICTURES[name](folder, folder.path / f"{name}.png") for name in _pictures(folder)]
        written += [path for path in drawn if path is not None]
    return written


def _pictures(folder: RunFolder) -> list[str]:
    """What the run's workload wants drawn besides the convergence; nothing if it cannot be loaded here."""
    try:
        names = registry.load("workload", configuration(folder)["workload.name"]).pictures
    except Exception:  # a module of the user's own may fail in any way; the curves can be drawn without it
        return []
    return [name for name in names if name in PICTURES]
