"""How sensitive the outcome of a sweep is to each of its options."""

from __future__ import annotations

import math
import statistics
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcfed.errors import DataError
from hpcfed.plots.curves import COLOURS, LABELS
from hpcfed.plots.looks import STYLE, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Row = Mapping[str, Any]

COLUMNS = 3
# Metrics that are better the larger they are.
RISING = ("psnr", "ssim", "accuracy")


@dataclass(frozen=True)
class Setting:
    """One combination of option values: its finished seeds' values of a metric, and how many seeds diverged."""

    options: Row
    outcomes: tuple[float, ...]
    diverged: int

    @property
    def mean(self) -> float:
        return statistics.fmean(self.outcomes)

    @property
    def deviation(self) -> float:
        return statistics.stdev(self.outcomes) if len(self.outcomes) > 1 else 0.0


def sensitivity(rows: Sequence[Row], options: Sequence[str], path: Path, metric: str = "objective") -> Path:
    """Draw a panel for each option that was varied: the last value of a metric against the option.

    A faint point is a run. A strong one is, for each value of the option, the best setting of all other options (by the
    mean over seeds), with a standard deviation over seeds about it: what the option can do where the others are well
    chosen, while the faint points show what it does where they are not. Lines join the strong points if the sweep is a
    full grid; in others each value has met other settings than its neighbours. Where methods (``algorithm``) were
    varied each has its colour. A cross at the upper edge stands for runs that diverged, in a grid with their number if
    there are several.

    Parameters
    ----------
    rows : of the sweep's table.
    options : the columns that are options.
    path : where the picture goes.
    metric : the column to draw.

    Raises
    ------
    DataError
        If no run that finished has the metric.
    """
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.lines import Line2D

    settings = gather(rows, options, metric)
    outcomes = [value for setting in settings for value in setting.outcomes]
    if not outcomes:
        raise DataError(f"picture {path}: no run that finished has a number for {metric}: {_have(rows)}")
    counts = {name: len({_key(row[name]) for row in rows}) for name in options}
    is_grid = len({_combination(row, options) for row in rows}) == math.prod(counts.values())
    varied = [name for name in options if counts[name] > 1] or list(options[:1])
    if not varied:
        raise DataError(f"picture {path}: this sweep varies nothing but the seed")
    methods: list[str | None] = [None]
    if "algorithm" in varied and len(varied) > 1:
        varied.remove("algorithm")
        methods = list(dict.fromkeys(row["algorithm"] for row in rows))
    columns = min(COLUMNS, len(varied))
    lines = math.ceil(len(varied) / columns)
    with matplotlib.rc_context(STYLE):
        figure = Figure(
            figsize=(1.2 + 2.8 * columns, 2.7 * lines + 0.2),
            layout=ConstrainedLayoutEngine(w_pad=0.06, h_pad=0.06),
        )
        panels = list(figure.subplots(lines, columns, sharey=True, squeeze=False).flat)
        for axes in panels[len(varied) :]:
            axes.remove()
        for place, (axes, option) in enumerate(zip(panels, varied, strict=False)):
            _draw(axes, option, settings, methods, metric, is_grid)
            if place % columns == 0:
                axes.set_ylabel(f"last {LABELS.get(metric, metric.replace('_', ' '))}")
        if min(outcomes) > 0 and max(outcomes) > 10 * min(outcomes):
            panels[0].set_yscale("log")
        if methods != [None]:
            handles = [Line2D([], [], color=COLOURS[place % len(COLOURS)], marker="o") for place in range(len(methods))]
            figure.legend(handles, [str(name) for name in methods], loc="outside upper left", ncols=5)
        return save(figure, path)


def gather(rows: Sequence[Row], options: Sequence[str], metric: str) -> list[Setting]:
    """The runs that have ended by their options: a setting for each combination."""
    together: dict[Hashable, list[Row]] = {}
    for row in rows:
        if row["status"] != "pending":
            together.setdefault(_combination(row, options), []).append(row)
    return [
        Setting(
            {name: each[0][name] for name in options},
            tuple(float(row[metric]) for row in each if row["status"] == "finished" and _is_number(row.get(metric))),
            sum(row["status"] == "diverged" for row in each),
        )
        for each in together.values()
    ]


def best_by_value(settings: Sequence[Setting], option: str, metric: str) -> dict[Hashable, Setting]:
    """For each value of the option, the setting of the others whose mean is best; those without a number are out."""
    choose = max if any(word in metric for word in RISING) else min
    by_value: dict[Hashable, list[Setting]] = {}
    for setting in settings:
        if setting.outcomes:
            by_value.setdefault(_key(setting.options[option]), []).append(setting)
    return {key: choose(each, key=lambda setting: setting.mean) for key, each in by_value.items()}


def _draw(
    axes: Axes, option: str, settings: Sequence[Setting], methods: Sequence[str | None], metric: str, is_grid: bool
) -> None:
    places = _places(axes, option, settings)
    for number, method in enumerate(methods):
        colour = COLOURS[number % len(COLOURS)]
        own = [each for each in settings if method is None or each.options["algorithm"] == method]
        for each in own:
            place = places[_key(each.options[option])]
            axes.plot([place] * len(each.outcomes), each.outcomes, "o", color=colour, alpha=0.3, markeredgewidth=0)
        best = best_by_value(own, option, metric)
        keys = sorted(best, key=places.__getitem__)
        means, deviations = [best[key].mean for key in keys], [best[key].deviation for key in keys]
        axes.errorbar(
            [places[key] for key in keys],
            means,
            deviations,
            fmt="o-" if is_grid else "o",
            color=colour,
            elinewidth=0.9,
            capsize=2.5,
        )
    for key, place in places.items():
        diverged = sum(each.diverged for each in settings if _key(each.options[option]) == key)
        if diverged:
            edge = axes.get_xaxis_transform()
            axes.plot(place, 1.0, "x", color="black", transform=edge, clip_on=False, zorder=3)
            text = str(diverged) if is_grid and diverged > 1 else ""
            axes.annotate(text, (place, 1.0), (4, 2), xycoords=edge, textcoords="offset points", fontsize=7)
    axes.set_xlabel(option.replace("_", " "))


def _places(axes: Axes, option: str, settings: Sequence[Setting]) -> dict[Hashable, float]:
    """Where the option's values are on the axis: numbers at themselves, others side by side."""
    values = {_key(setting.options[option]): setting.options[option] for setting in settings}
    numbers = [value for value in values.values() if _is_number(value)]
    if len(numbers) < len(values):
        axes.set_xticks(range(len(values)), list(map(str, values)))
        axes.set_xlim(-0.5, len(values) - 0.5)
        return {key: float(place) for place, key in enumerate(values)}
    if min(numbers) > 0 and max(numbers) >= 10 * min(numbers):
        axes.set_xscale("log")
    return {key: float(value) for key, value in values.items()}


def _combination(row: Row, options: Sequence[str]) -> Hashable:
    return tuple(_key(row[name]) for name in options)


def _have(rows: Sequence[Row]) -> str:
    names = {name: None for row in rows if row["status"] == "finished" for name in row if _is_number(row[name])}
    return f"there are {', '.join(names)}" if names else "none has finished"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _key(value: Any) -> Hashable:
    """The value as a key: lists and truth values, which are no numbers here, as text."""
    if isinstance(value, list):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else value
