"""Every picture, drawn from a run folder alone.

Nothing here needs the run to be going or its data to be at hand: curves come from ``metrics.jsonl``, names from
``config.toml``, images from ``result.h5``. matplotlib is used through its object interface, without a display, and
loaded only when something is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hpcfed import config, registry
from hpcfed.errors import ConfigError, DataError
from hpcfed.run_folder import RunFolder

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LABELS = {
    "objective": "objective",
    "misfit": "misfit",
    "tv": "total variation",
    "psnr": "PSNR, dB",
    "ssim": "SSIM",
    "test_accuracy": "test accuracy",
    "test_loss": "test loss",
    "relative_change": "relative change of a round",
}
# Metrics worth seeing against bits and time, too; the others are drawn against rounds only.
MAIN = ("objective", "psnr", "test_accuracy")
# Metrics that start far above the range that matters.
FALLING = ("objective", "misfit", "tv", "test_loss")
# Okabe and Ito's colours, which the colour-blind can tell apart, the strongest first; then the same, dashed.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES = ("-", "--", ":", "-.")
GREY = "0.35"
STYLE = {
    "font.size": 9,
    "axes.labelsize": 9,
    "axes.titlesize": 9,
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.formatter.limits": (-3, 4),
    "axes.formatter.use_mathtext": True,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "xtick.major.width": 0.7,
    "ytick.major.width": 0.7,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "lines.linewidth": 1.4,
    "lines.markersize": 3.0,
    "savefig.dpi": 150,
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
        If ``out`` cannot be written.
    """
    if len(folders) != 1:
        return [convergence(folders, out or Path("compare.png"))]
    folder = folders[0]
    written = [convergence(folders, out or folder.path / "convergence.png")]
    if folder.finished:
        further = [name for name in _pictures(folder) if name in PICTURES]
        written += [PICTURES[name](folder, folder.path / f"{name}.png") for name in further]
    return written


def _pictures(folder: RunFolder) -> tuple[str, ...]:
    """What the run's workload wants drawn; nothing of a workload that cannot be loaded here."""
    try:
        pictures: tuple[str, ...] = registry.load("workload", _configuration(folder)["workload.name"]).pictures
    except Exception:  # a module of the user's own may fail in any way, and the curves are worth having without it
        return ()
    return pictures


def _save(figure: Figure, path: Path) -> Path:
    path = path if path.suffix else path.with_suffix(".png")
    try:
        figure.savefig(path)
    except OSError as error:
        raise ConfigError(f"picture {path} cannot be written: {error.strerror or error}") from error
    except ValueError as error:
        if path.suffix.removeprefix(".") in figure.canvas.get_supported_filetypes():
            raise
        raise ConfigError(f"picture {path} has an unknown format: use .png, .pdf or .svg") from error
    return path


# -- convergence -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Curves:
    """The records of a run as columns; what is missing or not a number is NaN."""

    name: str
    colour: str
    dash: str
    records: Sequence[Mapping[str, Any]]

    def column(self, key: str) -> NDArray[np.float64]:
        values = np.array([_number(_look_up(record, key)) for record in self.records])
        values[~np.isfinite(values)] = np.nan
        return values

    def has(self, key: str) -> bool:
        return bool(np.isfinite(self.column(key)).any())


@dataclass(frozen=True)
class _Horizontal:
    """What a curve is drawn against: a key of the records, in a unit of ``scale``."""

    key: str
    label: str
    scale: float = 1.0
    log: bool = False


@dataclass(frozen=True)
class _Panel:
    """One pair of axes: metrics, the first solid and the second dashed, against something."""

    metrics: tuple[str, ...]
    against: _Horizontal


def convergence(folders: Sequence[RunFolder], path: Path) -> Path:
    """Draw how the runs converge: metrics against rounds, the main ones against bits sent and time as well.

    An axis is logarithmic where its values are positive and span more than a decade. Metrics that start far above
    their limit are shown in the range of the last 90 % of the rounds.

    Raises
    ------
    DataError
        If a run has no recorded rounds.
    """
    import matplotlib
    from matplotlib.figure import Figure

    curves = _curves(folders)
    columns, panels = _arrange(curves)
    rows = math.ceil(len(panels) / columns)
    with matplotlib.rc_context(STYLE):
        head = 0.2 if len(curves) == 1 else 0.2 * len(curves)
        figure = Figure(figsize=(3.3 * columns, 2.3 * rows + head + 0.15), layout="constrained")
        figure.get_layout_engine().set(w_pad=0.06, h_pad=0.06, wspace=0.03, hspace=0.03)
        for place, panel in enumerate(panels, start=1):
            _draw_panel(figure.add_subplot(rows, columns, place), panel, curves)
        if len(curves) == 1:
            figure.suptitle(_title(folders[0]), fontsize=9.5)
        else:
            lines = [_line(curve) for curve in curves]
            figure.legend(lines, [curve.name for curve in curves], loc="outside upper left", ncols=1)
        return _save(figure, path)


def _curves(folders: Sequence[RunFolder]) -> list[_Curves]:
    """The runs with their names and looks."""
    curves = []
    for place, (folder, name) in enumerate(zip(folders, _names(folders), strict=True)):
        records = folder.history()
        if not records:
            raise DataError(
                f"run folder {folder.path} has no recorded rounds yet: wait for the first, or resume the run"
            )
        dash = DASHES[place // len(COLOURS) % len(DASHES)]
        curves.append(_Curves(name, COLOURS[place % len(COLOURS)], dash, records))
    return curves


def _arrange(curves: Sequence[_Curves]) -> tuple[int, list[_Panel]]:
    """The number of columns and the panels, row by row: the main metrics have a row each, the others follow."""
    rounds = _Horizontal("round", "round")
    horizontals = [rounds, *_bits(curves), _time(curves)]
    known = [name for name in LABELS if any(curve.has(name) for curve in curves)]
    panels = [_Panel((name,), against) for name in MAIN if name in known for against in horizontals]
    rest = [(name,) for name in known if name not in MAIN and name not in ("misfit", "tv")]
    rest += [parts] if (parts := tuple(name for name in ("misfit", "tv") if name in known)) else []
    return len(horizontals), panels + [_Panel(names, rounds) for names in rest]


def _bits(curves: Sequence[_Curves]) -> list[_Horizontal]:
    """Bits as an axis, if any were sent; logarithmic if one run sent far fewer than another."""
    totals = [
        float(np.nanmax(bits))
        for curve in curves
        if curve.has(bits_key := "paper_bits_up")
        for bits in [curve.column(bits_key)]
    ]
    totals = [total for total in totals if total > 0]
    if not totals:
        return []
    log = max(totals) > 10 * min(totals)
    power = 0 if log else min(max(int(math.log10(max(totals)) // 3), 0), 5)
    unit = ("bit", "kbit", "Mbit", "Gbit", "Tbit", "Pbit")[power]
    return [_Horizontal("paper_bits_up", f"sent by all clients, {unit}", 1000.0**power, log)]


def _time(curves: Sequence[_Curves]) -> _Horizontal:
    longest = max(
        (float(np.nanmax(curve.column("seconds.total"))) for curve in curves if curve.has("seconds.total")), default=0.0
    )
    unit, scale = ("s", 1.0) if longest < 600 else ("min", 60.0) if longest < 36_000 else ("h", 3600.0)
    return _Horizontal("seconds.total", f"time, {unit}", scale)


def _draw_panel(axes: Axes, panel: _Panel, curves: Sequence[_Curves]) -> None:
    several = len(panel.metrics) > 1
    for curve in curves:
        x = curve.column(panel.against.key) / panel.against.scale
        marker = "o" if len(x) <= 25 else ""
        for place, metric in enumerate(panel.metrics):
            dash = curve.dash if not several else DASHES[place]
            axes.plot(x, curve.column(metric), color=curve.colour, linestyle=dash, marker=marker)
    every = [curve.column(metric) for curve in curves for metric in panel.metrics]
    shown = every
    if panel.metrics[0] in FALLING:
        shown = [_late(curve.column("round"), curve.column(metric)) for curve in curves for metric in panel.metrics]
    _set_range(axes, np.concatenate(shown), clipped=shown is not every)
    if panel.against.log:
        axes.set_xscale("log")
    axes.set_xlabel(panel.against.label)
    axes.set_ylabel(" and ".join(LABELS[metric] for metric in panel.metrics))
    axes.grid(color="0.92", linewidth=0.6)
    axes.set_axisbelow(True)
    if several:
        from matplotlib.lines import Line2D

        samples = [Line2D([], [], color=GREY, linestyle=DASHES[place]) for place in range(len(panel.metrics))]
        axes.legend(samples, [LABELS[metric] for metric in panel.metrics], loc="best")


def _late(rounds: NDArray[np.float64], values: NDArray[np.float64]) -> NDArray[np.float64]:
    """The values of the last 90 % of the rounds, all of them if few are left."""
    late = values[rounds >= 0.1 * np.nanmax(rounds)]
    return late if np.isfinite(late).sum() > 2 else values


def _set_range(axes: Axes, values: NDArray[np.float64], clipped: bool) -> None:
    """A logarithmic axis for positive values over more than a decade; the range of ``values`` if they are a choice."""
    values = values[np.isfinite(values)]
    if not values.size:
        return
    low, high = float(values.min()), float(values.max())
    log = low > 0 and high > 10 * low
    if log:
        axes.set_yscale("log")
    if clipped and high > low:
        if log:
            margin = (high / low) ** 0.05
            axes.set_ylim(low / margin, high * margin)
        else:
            margin = 0.05 * (high - low)
            axes.set_ylim(low - margin, high + margin)


def _line(curve: _Curves) -> Any:
    from matplotlib.lines import Line2D

    return Line2D([], [], color=curve.colour, linestyle=curve.dash)


# -- names -------------------------------------------------------------------------------------------------------------


def _title(folder: RunFolder) -> str:
    """The run in a line."""
    known = _configuration(folder)
    method = known.get("algorithm.name", "?")
    if known.get("compressor.name", "none") != "none":
        method += f" with {known['compressor.name']}"
    clients = known.get("workload.clients")
    return f"{_folder_name(folder)}: {method}" + (f", {clients} clients" if clients else "")


def _names(folders: Sequence[RunFolder]) -> list[str]:
    """The names of the folders; of several, with what sets their configurations apart."""
    names = [_folder_name(folder) for folder in folders]
    if len(set(names)) < len(names):
        names = [str(folder.path) for folder in folders]
    if len(folders) == 1:
        return names
    configurations = [_configuration(folder) for folder in folders]
    apart = [
        key
        for key in dict.fromkeys(key for known in configurations for key in known)
        if _sets_apart(key, configurations)
    ]
    for place, known in enumerate(configurations):
        facts = [f"{_short(key)} {known[key]}" for key in apart if key in known]
        names[place] += f": {', '.join(facts)}" if facts else ""
    return names


def _sets_apart(key: str, configurations: Sequence[Mapping[str, str]]) -> bool:
    """Whether an option differs among the runs that have it, or is unset in some run with the same part."""
    part = key.partition(".")[0] + ".name"
    having = {known.get(part) for known in configurations if key in known}
    lacking = {known.get(part) for known in configurations if key not in known}
    return len({known[key] for known in configurations if key in known}) > 1 or bool(having & lacking)


def _short(key: str) -> str:
    """``algorithm.step`` as step, ``algorithm.name`` as algorithm."""
    part, _, name = key.partition(".")
    return part if name in ("name", "") else name.replace("_", " ")


def _configuration(folder: RunFolder) -> dict[str, str]:
    """``config.toml`` as one table, ``section.key`` to the value as text."""
    flat: dict[str, str] = {}
    for section, table in config.read_toml(folder.config).items():
        for key, value in (table if isinstance(table, dict) else {"": table}).items():
            text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
            flat[f"{section}.{key}" if key else section] = f"{value:g}" if isinstance(value, float) else text
    return flat


def _folder_name(folder: RunFolder) -> str:
    return folder.path.resolve().name


def _look_up(record: Mapping[str, Any], key: str) -> Any:
    value: Any = record
    for name in key.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) else math.nan


# -- slices ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Plane:
    """A central plane of a volume: where it lies, and how its pixels lie on the paper."""

    name: str
    axis: int  # of the volume (y, x, z), the one that the plane is normal to
    index: int

    def cut(self, dataset: Any) -> NDArray[np.float32]:
        """The plane as an image, first row on top: y downwards in axial planes, z upwards in the others."""
        if self.axis == 2:
            return np.asarray(dataset[:, :, self.index], np.float32)
        image = dataset[self.index, :, :] if self.axis == 0 else dataset[:, self.index, :]
        return np.asarray(image, np.float32).T[::-1]


# Planes flatter than this are stretched, as their pixels would be too thin to see.
FLATTEST = 0.15


def slices(folder: RunFolder, path: Path) -> Path:
    """Draw the three central planes of a finished reconstruction, with the reference and the difference if there is one.

    Reference and reconstruction share a grey window, zero to the reference's maximum; the difference is reconstruction
    minus reference.

    Raises
    ------
    DataError
        If the result cannot be read or holds no volume.
    """
    import matplotlib
    from matplotlib.figure import Figure

    planes, volume, reference = _read_planes(folder)
    columns = {"reconstruction": volume}
    if reference:
        difference = [mine - true for mine, true in zip(volume, reference, strict=True)]
        columns = {"reference": reference, "reconstruction": volume, "reconstruction − reference": difference}
    greys: dict[str, Any] = {"cmap": "gray", **_window(volume, reference)}
    limit = _robust_limit(columns.get("reconstruction − reference", []))
    colours = {"cmap": "RdBu_r", "vmin": -limit, "vmax": limit}

    with matplotlib.rc_context(STYLE):
        figure, grid = _lay_out(Figure, volume, upright=reference is not None)
        for column, (name, images) in enumerate(columns.items()):
            for row, (plane, image) in enumerate(zip(planes, images, strict=True)):
                axes = grid[row, column] if reference else grid[0, row]
                stretched = _show(axes, image, colours if "−" in name else greys)
                label = f"{plane.name}, {'yxz'[plane.axis]} = {plane.index}" + (f", {stretched}" if stretched else "")
                if not reference:
                    axes.set_title(label)
                elif column == 0:
                    axes.set_ylabel(label)
            if reference:
                grid[0, column].set_title(name)
        grey_axes = grid[:, :2] if reference else grid
        _colour_bar(figure, grey_axes, "attenuation")
        if reference:
            _colour_bar(figure, grid[:, 2], "difference")
        figure.suptitle(_result_title(folder), fontsize=9.5)
        return _save(figure, path)


def _read_planes(folder: RunFolder) -> tuple[list[_Plane], list[NDArray[np.float32]], list[NDArray[np.float32]] | None]:
    """The central planes of the volume and of the reference. No more than these is read: volumes may be large."""
    import h5py

    try:
        with h5py.File(folder.result, "r") as file:
            volume, reference = file.get("volume"), file.get("reference")
            if volume is None or volume.ndim != 3:
                raise DataError(f"result {folder.result} has no three-dimensional volume: hpcfed plot cannot slice it")
            names = [("axial", 2), ("coronal", 0), ("sagittal", 1)]
            planes = [_Plane(name, axis, volume.shape[axis] // 2) for name, axis in names]
            # A single slice is a flat image: its other planes are lines.
            planes = planes[:1] if volume.shape[2] == 1 else planes
            cut = [plane.cut(volume) for plane in planes]
            if reference is None or reference.shape != volume.shape:
                return planes, cut, None
            return planes, cut, [plane.cut(reference) for plane in planes]
    except OSError as error:
        raise DataError(f"result {folder.result} cannot be read: {error}") from error


def _lay_out(
    new_figure: Callable[..., Figure], images: Sequence[NDArray[np.float32]], upright: bool
) -> tuple[Figure, Any]:
    """A figure with a grid of axes that fit the images: a row an image, three columns, or all images in one row."""
    flatness = [min(max(image.shape[0] / image.shape[1], FLATTEST), 1.6) for image in images]
    width = 2.6
    if upright:
        size = (3 * width + 0.4, width * sum(flatness) + 1.1)
        figure = new_figure(figsize=size, layout="compressed")
        grid = figure.subplots(len(images), 3, squeeze=False, height_ratios=flatness)
    else:
        figure = new_figure(figsize=(len(images) * width + 0.4, width * max(flatness) + 1.1), layout="compressed")
        grid = figure.subplots(1, len(images), squeeze=False)
    return figure, grid


def _show(axes: Axes, image: NDArray[np.float32], look: Mapping[str, Any]) -> str:
    """Draw an image with square pixels; a very flat one is stretched, and how much is returned in words."""
    rows, columns = image.shape
    factor = max(FLATTEST * columns / rows, 1.0)
    axes.imshow(image, aspect=factor, interpolation="nearest", **look)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set_visible(False)
    return f"height × {factor:.2g}" if factor > 1 else ""


def _colour_bar(figure: Figure, axes: Any, label: str) -> None:
    bar = figure.colorbar(axes.flat[0].images[0], ax=axes, location="bottom", fraction=0.05, aspect=30, pad=0.02)
    bar.set_label(label)
    bar.outline.set_visible(False)


def _window(volume: Sequence[NDArray[np.float32]], reference: Sequence[NDArray[np.float32]] | None) -> dict[str, float]:
    """Black and white: the range of the reference, zero included; else the percentiles 0.5 and 99.5."""
    values = np.concatenate([image.ravel() for image in (reference or volume)])
    values = values[np.isfinite(values)]
    if not values.size:
        return {"vmin": 0.0, "vmax": 1.0}
    low, high = (min(values.min(), 0.0), values.max()) if reference else np.percentile(values, [0.5, 99.5])
    return {"vmin": float(low), "vmax": float(high) if high > low else float(low) + 1.0}


def _robust_limit(images: Sequence[NDArray[np.float32]]) -> float:
    """The 99.5th percentile of the absolute values."""
    values = np.concatenate([np.abs(image).ravel() for image in images]) if images else np.ones(1)
    values = values[np.isfinite(values)]
    return max(float(np.percentile(values, 99.5)) if values.size else 1.0, np.finfo(np.float32).tiny)


def _result_title(folder: RunFolder) -> str:
    """The run in a line, and how good its last solution is."""
    last = folder.history()[-1]
    facts = [f"{last['round']} rounds"]
    facts += [f"PSNR {last['psnr']:.2f} dB"] if "psnr" in last else []
    facts += [f"SSIM {last['ssim']:.4f}"] if "ssim" in last else []
    return f"{_title(folder)}\n{', '.join(facts)}"


# The pictures of a finished run besides its convergence, by the names that workloads give.
PICTURES: dict[str, Callable[[RunFolder, Path], Path]] = {"slices": slices}
