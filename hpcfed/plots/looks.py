"""What all pictures have in common: their style, how a run is named, how a picture is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING

from hpcfed import config
from hpcfed.errors import ConfigError
from hpcfed.run.run_folder import RunFolder

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STYLE = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.labelsize": 9,
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.formatter.limits": (-3, 4),
    "axes.formatter.use_mathtext": True,
    "grid.color": "0.92",
    "grid.linewidth": 0.6,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "xtick.major.width": 0.7,
    "ytick.major.width": 0.7,
    "legend.frameon": False,
    "figure.titlesize": 10,
    "lines.linewidth": 1.4,
    "lines.markersize": 3.5,
    "savefig.dpi": 150,
}


def save(figure: Figure, path: Path) -> Path:
    """Write a picture, as PNG unless the name says otherwise.

    Raises
    ------
    ConfigError
        If the format is unknown or the file cannot be written.
    """
    path = path if path.suffix else path.with_suffix(".png")
    if path.suffix[1:].lower() not in figure.canvas.get_supported_filetypes():
        raise ConfigError(f"picture {path} has an unknown format: use .png, .pdf or .svg")
    try:
        figure.savefig(path)
    except OSError as error:
        raise ConfigError(f"picture {path} cannot be written: {error.strerror or error}") from error
    return path


def title(folder: RunFolder) -> str:
    """A run in a line."""
    known = configuration(folder)
    levels = int(known.get("compressor.quantize", 0))
    quantized = f", {known.get('compressor.name')} with {levels} levels" if levels else ""
    facts = [known.get("algorithm.name", "?") + quantized]
    facts += [f"{known['workload.clients']} clients"] if "workload.clients" in known else []
    return f"{folder.path.resolve().name}: {', '.join(facts)}"


def names(folders: Sequence[RunFolder]) -> list[str]:
    """The names of the folders, each with the options that set the runs apart."""
    names = [folder.path.resolve().name for folder in folders]
    if len(set(names)) < len(names):
        names = [str(folder.path) for folder in folders]
    configurations = [configuration(folder) for folder in folders]
    keys = dict.fromkeys(key for known in configurations for key in known)
    apart = [key for key in keys if _sets_apart(key, configurations)]
    facts = [", ".join(f"{_short(key)} {known[key]}" for key in apart if key in known) for known in configurations]
    return [f"{name}: {shorten(fact, 90)}" if fact else name for name, fact in zip(names, facts, strict=True)]


def _sets_apart(key: str, configurations: Sequence[Mapping[str, str]]) -> bool:
    """Whether runs that have the option differ in it, or it is unset in a run whose part (by name) could have it."""
    part = key.partition(".")[0] + ".name"
    having = {known.get(part) for known in configurations if key in known}
    lacking = {known.get(part) for known in configurations if key not in known}
    return len({known[key] for known in configurations if key in known}) > 1 or bool(having & lacking)


def _short(key: str) -> str:
    """``algorithm.step`` as step, ``algorithm.name`` as algorithm."""
    part, _, name = key.partition(".")
    return part if name in ("", "name") else name.replace("_", " ")


def configuration(folder: RunFolder) -> dict[str, str]:
    """``config.toml`` as one table, ``section.key`` to the value as text."""
    flat = {}
    for section, table in config.read_toml(folder.config).items():
        for key, value in (table if isinstance(table, dict) else {"": table}).items():
            text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
            flat[f"{section}.{key}".rstrip(".")] = f"{value:g}" if isinstance(value, float) else text
    return flat
