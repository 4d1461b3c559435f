"""How runs converge: one picture of curves for one run, for several, or for groups of runs with their spread."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hpcfed.errors import DataError
from hpcfed.plots.looks import STYLE, names, save, title
from hpcfed.run.run_folder import RunFolder

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LABELS = {
    "objective": "objective",
    "excess_risk": "excess risk",
    "psnr": "PSNR, dB",
    "test_accuracy": "test accuracy",
    "ssim": "SSIM",
    "test_loss": "test loss",
    "relative_change": "relative change",
    "misfit": "misfit",
    "tv": "total variation",
    "relative_error": "relative error",
    "gradient_norm": "norm of the gradient",
    "robust_loss": "robust loss",
    "loss_worst": "worst client's loss",
    "loss_before": "loss before adaptation",
    "loss_after": "loss after adaptation",
    "accuracy_before": "accuracy before adaptation",
    "accuracy_after": "accuracy after adaptation",
    "lower_loss": "lower loss",
    "hypergradient_norm": "norm of the hypergradient",
}
# Metrics worth seeing against bits and time, too; the others are drawn against rounds only.
MAIN = ("objective", "gradient_norm", "excess_risk", "relative_error", "psnr", "test_accuracy")
# Metrics that start far above the range that matters.
FALLING = ("objective", "relative_error", "test_loss", "misfit", "tv")
# Metrics with something to compare them with: another key of the records, which stays as it is, and what to call it.
LEVELS = {"excess_risk": ("public_only_risk", "public records alone")}
# Okabe and Ito's colours, which the colour-blind can tell apart, the strongest first; then the same, dashed.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES = ("-", "--", ":", "-.")


@dataclass(frozen=True)
class _Curves:
    """The records of a run by column, with its name and its looks.

    Of a group of runs: their mean records, and in ``deviations`` the standard deviations.
    """

    name: str
    colour: str
    dash: str
    records: Sequence[Mapping[str, Any]]
    deviations: Sequence[Mapping[str, Any]] = ()

    def column(self, key: str) -> NDArray[np.float64]:
        """The values of ``key`` (``seconds.total`` is a value in a table); NaN where there is no finite number."""
        return _column(self.records, key)

    def has(self, key: str) -> bool:
        return bool(np.isfinite(self.column(key)).any())

    def last(self, key: str) -> float:
        """The largest value of a growing column, 0 if there is none."""
        return float(np.nanmax(self.column(key))) if self.has(key) else 0.0

    def worth_seeing(self, metric: str) -> NDArray[np.float64]:
        """The metric's values; where it falls far, those within the values of the last 90 % of the rounds."""
        values, rounds = self.column(metric), self.column("round")
        known = np.isfinite(values)
        late = values[known & (rounds >= 0.1 * self.last("round"))]
        values = values[known]
        if metric in FALLING and late.size > 2 and np.ptp(values) > 3 * np.ptp(late):
            values = values[values <= float(late.max())]
        if metric in FALLING and values.size and values[0] > 0:  # a run that diverges leaves the picture
            values = values[values <= 10 * values[0]]
        return values

    def along(self, horizontal: _Horizontal) -> NDArray[np.float64]:
        """Places on a horizontal axis; time counts from the first record on, so that tuning and set-up are left out."""
        places = self.column(horizontal.key)
        if horizontal.key == "seconds.total" and places.size:
            places = places - places[0]
        return places / horizontal.scale


@dataclass(frozen=True)
class _Horizontal:
    """What curves are drawn against: a key of the records, divided by ``scale``."""

    key: str
    label: str
    scale: float = 1.0
    log: bool = False


def convergence(folders: Sequence[RunFolder], path: Path) -> Path:
    """Draw how runs converge: all metrics against rounds, the main ones against bits sent and time as well.

    An axis is logarithmic where its values are positive and span more than a decade. A metric that starts far above its
    limit is cut off at its largest value in the last 90 % of the rounds.

    Raises
    ------
    DataError
        If a run has no recorded rounds, or no metric of any run is a number.
    """
    curves = _curves(folders)
    return _draw(curves, title(folders[0]) if len(curves) == 1 else "", path)


def comparison(groups: Mapping[str, Sequence[RunFolder]], path: Path) -> Path:
    """Draw how groups of runs converge, as `convergence` does: each one's mean, and a standard deviation about it.

    Rounds that some run of a group has not recorded are left out; groups without records are, too. Of names such as
    ``fedavg, 20 levels`` what is before the first comma says the colour, what is after it the dashes.

    Raises
    ------
    DataError
        If no group has a recorded metric that is a number.
    """
    recorded = {name: [found for folder in folders if (found := folder.history())] for name, folders in groups.items()}
    recorded = {name: histories for name, histories in recorded.items() if histories}
    curves: list[_Curves] = []
    for (name, histories), looks in zip(recorded.items(), _looks_by_name(list(recorded)), strict=True):
        records, deviations = _statistics(histories)
        curves.append(_Curves(name, *looks, records, deviations if len(histories) > 1 else ()))
    return _draw(curves, "", path)


def _draw(curves: Sequence[_Curves], heading: str, path: Path) -> Path:
    """The picture of the curves, with a heading or, without one, a legend."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.lines import Line2D

    horizontals = [_Horizontal("round", "round"), *_samples(curves), *_bits(curves), _time(curves)]
    known = [name for name in LABELS if any(curve.has(name) for curve in curves)]
    if "excess_risk" in known:  # it is the objective, less its minimum
        known = [name for name in known if name != "objective"]
    main = [name for name in MAIN if name in known]
    rest = [name for name in known if name not in main and not (name == "tv" and "misfit" in known)]
    if not known:
        raise DataError(f"picture {path}: no run has a metric that is a number: there is nothing to draw")
    columns = len(horizontals)
    legends = 3 if len(curves) > 8 and max(len(curve.name) for curve in curves) <= 30 else 1
    rows = len(main) + math.ceil(len(rest) / columns)

    with matplotlib.rc_context(STYLE):
        figure = Figure(
            figsize=(3.2 * columns, 2.2 * rows + 0.2 * math.ceil(len(curves) / legends) + 0.2),
            layout=ConstrainedLayoutEngine(w_pad=0.06, h_pad=0.06),
        )
        grid = figure.add_gridspec(rows, columns)
        for row, metric in enumerate(main):
            left = figure.add_subplot(grid[row, 0])
            _draw_curves(left, metric, horizontals[0], curves)
            for column in range(1, columns):
                axes = figure.add_subplot(grid[row, column], sharey=left)
                _draw_curves(axes, metric, horizontals[column], curves)
                axes.tick_params(which="both", labelleft=False)
                axes.yaxis.offsetText.set_visible(False)
                axes.set_ylabel("")
        for place, metric in enumerate(rest, start=len(main) * columns):
            axes = figure.add_subplot(grid[place // columns, place % columns])
            _draw_curves(axes, metric, horizontals[0], curves)
            if metric == "misfit" and "tv" in known:
                _add_variation(axes, curves)
        if heading:
            figure.suptitle(heading)
        else:
            handles = [Line2D([], [], color=curve.colour, linestyle=curve.dash) for curve in curves]
            figure.legend(handles, [curve.name for curve in curves], loc="outside upper left", ncols=legends)
        return save(figure, path)


def _curves(folders: Sequence[RunFolder]) -> list[_Curves]:
    """The runs with their names and looks."""
    curves = []
    for place, (folder, name) in enumerate(zip(folders, names(folders), strict=True)):
        records = folder.history()
        if not records:
            raise DataError(f"run folder {folder.path} has no recorded rounds: wait for the first, or resume the run")
        curves.append(_Curves(name, *_looks(place), records))
    return curves


def _looks(place: int) -> tuple[str, str]:
    """Colour and dash of a curve by its place."""
    return COLOURS[place % len(COLOURS)], DASHES[place // len(COLOURS) % len(DASHES)]


def _looks_by_name(names: Sequence[str]) -> list[tuple[str, str]]:
    """Colours by what is before the names' first commas, dashes by the rest; by place if that tells them not apart."""
    parts = [name.partition(", ") for name in names]
    colours = list(dict.fromkeys(first for first, _, _ in parts))
    dashes = list(dict.fromkeys(rest for _, _, rest in parts if rest))
    if len(colours) > len(COLOURS) or len(dashes) > len(DASHES):
        return [_looks(place) for place in range(len(names))]
    looks = [(COLOURS[colours.index(first)], DASHES[dashes.index(rest) if rest else 0]) for first, _, rest in parts]
    return looks if len(set(looks)) == len(looks) else [_looks(place) for place in range(len(names))]


def _statistics(histories: Sequence[Sequence[Mapping[str, Any]]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Mean and standard deviation of several runs' records, at the rounds that all of them have recorded."""
    by_round = [{record["round"]: record for record in history} for history in histories]
    rounds = sorted(set.intersection(*map(set, by_round)))
    keys = ("round", "samples", "paper_bits_up", "seconds.total", *LABELS, *(level for level, _ in LEVELS.values()))
    values = np.array([[[_number(run[number], key) for key in keys] for number in rounds] for run in by_round])
    spread = values.std(axis=0, ddof=1) if len(histories) > 1 else np.zeros(values.shape[1:])

    def records(table: NDArray[np.float64]) -> list[dict[str, Any]]:
        return [dict(zip(keys, row, strict=True)) for row in table]

    return records(values.mean(axis=0)), records(spread)


def _samples(curves: Sequence[_Curves]) -> list[_Horizontal]:
    """Samples as an axis, if runs see more of them in a round than others do."""
    rates = [curve.last("samples") / curve.last("round") for curve in curves if curve.last("round")]
    if len(rates) < 2 or not min(rates) or max(rates) < 1.2 * min(rates):
        return []
    return [_Horizontal("samples", "samples of all clients", 1.0, max(rates) > 4 * min(rates))]


def _bits(curves: Sequence[_Curves]) -> list[_Horizontal]:
    """Bits as an axis, if any were sent; logarithmic if one run sent far fewer than another."""
    totals = [total for curve in curves if (total := curve.last("paper_bits_up")) > 0]
    if not totals:
        return []
    log = max(totals) > 4 * min(totals)
    power = 0 if log else min(int(math.log10(max(totals)) / 3), 5)
    unit = ("bits", "kbit", "Mbit", "Gbit", "Tbit", "Pbit")[power]
    return [_Horizontal("paper_bits_up", f"sent by all clients, {unit}", 1000.0**power, log)]


def _time(curves: Sequence[_Curves]) -> _Horizontal:
    """Time as an axis, in a unit that suits the longest run."""
    longest = max(curve.last("seconds.total") - curve.column("seconds.total")[0] for curve in curves)
    unit, scale = ("s", 1.0) if longest < 600 else ("min", 60.0) if longest < 36_000 else ("h", 3600.0)
    return _Horizontal("seconds.total", f"time, {unit}", scale)


def _draw_curves(axes: Axes, metric: str, against: _Horizontal, curves: Sequence[_Curves], dash: str = "") -> None:
    """One metric of all runs; ``dash`` takes the place of the runs' own."""
    for curve in curves:
        x, y = curve.along(against), curve.column(metric)
        marker = "o" if len(curve.records) <= 12 else ""
        axes.plot(x, y, color=curve.colour, linestyle=dash or curve.dash, marker=marker)
        if curve.deviations:
            spread = _column(curve.deviations, metric)
            axes.fill_between(x, y - spread, y + spread, color=curve.colour, alpha=0.15, linewidth=0)
    levels = _draw_levels(axes, metric, curves)
    seen = [curve.worth_seeing(metric) for curve in curves if curve.has(metric)]
    if levels.size and len(seen) > 2:  # a run without the others' handicap may fall so far that it leaves them no room
        floor = sorted(values.min() for values in seen)[1] / 10
        seen = [values[values >= floor] for values in seen]
    _set_range(axes, np.concatenate([levels, *seen]), log="accuracy" not in metric)
    if against.log:
        axes.set_xscale("log", nonpositive="mask")
    axes.set_xlabel(against.label)
    axes.set_ylabel(LABELS[metric])


def _draw_levels(axes: Axes, metric: str, curves: Sequence[_Curves]) -> NDArray[np.float64]:
    """The metric's `LEVELS`, dotted: in black if the runs have the same, in each run's colour otherwise."""
    key, name = LEVELS.get(metric, ("", ""))
    known = {curve.colour: float(np.nanmean(curve.column(key))) for curve in curves if curve.has(key)}
    levels = np.array(list(known.values()))
    same = levels.size > 0 and bool(np.allclose(levels, levels[0], rtol=1e-9))
    for colour, level in {COLOURS[-1]: levels[0]}.items() if same else known.items():
        axes.axhline(level, color=colour, linestyle=":", linewidth=1, zorder=1)
    if levels.size:
        at = (1, levels.max())
        axes.annotate(name, at, (0, 2), ("axes fraction", "data"), "offset points", ha="right", va="bottom", fontsize=7)
    return levels


def _add_variation(axes: Axes, curves: Sequence[_Curves]) -> None:
    """The total variation, dashed, on the right: together with the misfit on the left it makes up the objective."""
    axes.set_ylabel("misfit (solid)")
    right = axes.twinx()
    _draw_curves(right, "tv", _Horizontal("round", "round"), curves, dash="--")
    right.set_ylabel("total variation (dashed)")
    right.grid(False)
    right.spines[["left", "bottom"]].set_visible(False)
    right.spines.right.set_visible(True)


def _set_range(axes: Axes, values: NDArray[np.float64], log: bool) -> None:
    """Make room for these values; on a logarithmic axis if allowed, and they are positive and span over a decade."""
    if not values.size:
        return
    low, high = float(values.min()), float(values.max())
    if log and low > 0 and high > 10 * low:
        axes.set_yscale("log")
        margin = (high / low) ** 0.05
        axes.set_ylim(low / margin, high * margin)
    elif high > low:
        margin = 0.05 * (high - low)
        axes.set_ylim(low - margin, high + margin)


def _column(records: Sequence[Mapping[str, Any]], key: str) -> NDArray[np.float64]:
    """The values of a key, NaN where there is no finite number."""
    values = np.array([_number(record, key) for record in records])
    values[~np.isfinite(values)] = np.nan
    return values


def _number(record: Mapping[str, Any], key: str) -> float:
    if key in record:
        return float(record[key]) if isinstance(record[key], (int, float)) else math.nan
    value: Any = record
    for name in key.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return float(value) if isinstance(value, (int, float)) else math.nan
