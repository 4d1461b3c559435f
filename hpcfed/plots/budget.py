"""What a privacy budget buys: epsilon over the epochs of a run, and the noise that each epsilon asks for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hpcfed.plots.curves import COLOURS
from hpcfed.plots.looks import STYLE, save
from hpcfed.privacy import calibration
from hpcfed.privacy.certify import Certificate
from hpcfed.privacy.schedule import Schedule

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# The curves of long runs are worked out at so many epochs.
POINTS = 200


def budget(
    schedule: Schedule, delta: float, clip: float | None, sigma: float, certificate: Certificate, path: Path
) -> Path:
    """Draw what a method with noise ``sigma`` has spent after each epoch, and sigma against epsilon for all its epochs.

    Where the epochs are not amplified, the exact epsilon of the same noise is drawn, too.

    Raises
    ------
    ConfigError
        If the method cannot have this noise, or the picture cannot be written.
    """
    import matplotlib
    from matplotlib.figure import Figure

    cost = schedule.cost(clip, sigma, certificate=certificate)
    total = calibration.epsilon_of_rho(schedule.private_epochs * cost.rho, delta)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7.2, 3.2), layout="constrained")
        left, right = figure.subplots(1, 2)
        _spent(left, schedule, delta, cost.rho, exact=cost.amplification == 1)
        left.axhline(total, color="0.6", linestyle=":", linewidth=1)
        grid = np.geomspace(min(0.1, total / 3), max(10, total * 3), 60)
        needed = [schedule.noise(epsilon, delta, clip, certificate=certificate) for epsilon in grid]
        right.loglog(grid, needed, color=COLOURS[0], label=schedule.method)
        if cost.amplification < 1:
            plain = Certificate(False, "drawn for comparison")
            needed = [schedule.noise(epsilon, delta, clip, certificate=plain) for epsilon in grid]
            right.loglog(grid, needed, color="0.5", linestyle="--", label="without amplification")
        right.plot(total, sigma, "o", color=COLOURS[1], markersize=5, label=f"sigma {sigma:.4g}")
        right.set_xlabel("epsilon after all epochs")
        right.set_ylabel("sigma")
        right.legend()
        figure.suptitle(
            f"{schedule.method}: ({total:.4g}, {delta:g})-private after {schedule.epochs} epochs with sigma {sigma:.4g}"
        )
        return save(figure, path)


def _spent(axes: Axes, schedule: Schedule, delta: float, rho: float, *, exact: bool) -> None:
    """Epsilon after each epoch, by each way of accounting that holds."""
    numbers = np.unique(np.linspace(0, schedule.epochs, min(schedule.epochs, POINTS) + 1).astype(int))
    private = np.array([schedule.sees_private(number) for number in range(1, schedule.epochs + 1)])
    spent = rho * np.concatenate([[0], np.cumsum(private)])[numbers]
    ways = [
        ("closed form", COLOURS[0], "-", calibration.epsilon_of_rho),
        ("improved conversion", COLOURS[2], "--", calibration.improved_epsilon_of_rho),
    ]
    if exact:
        ways.append(
            (
                "exact",
                COLOURS[1],
                ":",
                lambda rho, delta: calibration.gaussian_epsilon(calibration.mu_of_rho(rho), delta),
            )
        )
    for name, colour, dash, way in ways:
        axes.plot(numbers, [way(float(each), delta) for each in spent], color=colour, linestyle=dash, label=name)
    axes.set_xlabel("epoch")
    axes.set_ylabel("epsilon spent")
    axes.set_ylim(bottom=0)
    axes.legend()
