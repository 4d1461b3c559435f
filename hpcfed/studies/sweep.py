"""A sweep: a base run with options varied over a grid, along lists or at random, each setting with several seeds.

::

    [base.workload]              # the base: tables as in a run's config.toml
    name = "logreg"

    [sweep]
    seeds = [0, 1, 2]
    step = [0.1, 0.3, 1.0]       # options by the names of the flags, underscores for dashes
    algorithm = ["fedavg", "fedmid"]

``mode = "grid"`` (the default) takes every combination; ``"list"`` the first values of all lists, then the second, and
so on; ``"random"`` as many combinations as ``samples`` says, from the lists and from ranges such as
``step = { low = 1e-3, high = 1, log = true }``, drawn by ``sweep_seed``.

The table of the runs, ``sweep.csv`` and ``sweep.h5``, grows as they end.
"""

from __future__ import annotations

import contextlib
import csv
import fcntl
import itertools
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from hpcfed.errors import ConfigError
from hpcfed.run.recorder import clock
from hpcfed.run.summary import CLOSING, aligned
from hpcfed.studies.study import Member, Study, folder_name, read_seeds, read_tables

MODES = ("grid", "list", "random")
# What is no option in the table [sweep].
_WORDS = ("mode", "samples", "seeds", "sweep_seed")
_NAME_LENGTH = 60
_DIGITS = 5


def read(path: Path, folder: Path) -> Sweep:
    """The sweep that a file describes.

    Raises
    ------
    ConfigError
        If the file is not sound.
    """
    text, file = read_tables(path, ("base", "sweep"), "sweep")
    source = f"{path}: [sweep]"
    table = file.get("sweep")
    if not isinstance(table, Mapping) or not table:
        raise ConfigError(f"{path}: a sweep needs a table [sweep] with lists of values for options")
    if "seed" in table:
        raise ConfigError(f"{source} seed: write seeds = [0, 1, 2]")
    seeds = read_seeds(table, source)
    points = list(settings(table, source))
    width = len(str(len(points) * len(seeds) - 1))
    members = []
    for place, (values, seed) in enumerate(itertools.product(points, seeds)):
        setting = " ".join(f"{name}={_text(value)}" for name, value in values.items())
        words = (f"{place:0{width}d}", folder_name(setting)[:_NAME_LENGTH], f"seed{seed}")
        name = "-".join(word for word in words if word)
        members.append(Member(name, values, {**values, "seed": seed}, f"{path}: {setting or 'the base'}"))
    return Sweep(folder, text, file.get("base", {}), tuple(members))


def settings(table: Mapping[str, Any], source: str) -> Iterator[dict[str, Any]]:
    """The combinations of option values that a table ``[sweep]`` asks for.

    Raises
    ------
    ConfigError
        If it is not sound.
    """
    mode = table.get("mode", "grid")
    if mode not in MODES:
        raise ConfigError(f"{source} mode = {mode!r}: use one of {', '.join(MODES)}")
    given = {name: values for name, values in table.items() if name not in _WORDS}
    for name, values in given.items():
        if not (isinstance(values, list) and values) and not (mode == "random" and _is_range(values)):
            ranges = " or a range such as { low = 1e-3, high = 1, log = true }" if mode == "random" else ""
            raise ConfigError(f"{source} {name} = {values!r}: give a list of values{ranges}")
    if mode == "random":
        yield from _drawn(given, _count(table, "samples", 20, 1, source), _count(table, "sweep_seed", 0, 0, source))
        return
    for name in ("samples", "sweep_seed"):
        if name in table:
            raise ConfigError(f'{source} {name} belongs to mode = "random"')
    lengths = {name: len(values) for name, values in given.items()}
    if mode == "list" and len(set(lengths.values())) > 1:
        counts = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise ConfigError(f'{source} mode = "list" takes lists of one length: {counts}')
    rows = itertools.product(*given.values()) if mode == "grid" else zip(*given.values(), strict=True)
    for row in rows:
        yield dict(zip(given, row, strict=True))


def _drawn(given: Mapping[str, Any], samples: int, seed: int) -> Iterator[dict[str, Any]]:
    """The same values on every machine: only uniform numbers are drawn."""
    rng = np.random.default_rng(seed)
    for _ in range(samples):
        yield {name: _value(values, rng.random()) for name, values in given.items()}


def _value(values: Any, uniform: float) -> Any:
    """The value of a list or range at a place in [0, 1); a range of whole numbers includes both its ends."""
    if isinstance(values, list):
        return values[int(uniform * len(values))]
    low, high = values["low"], values["high"]
    whole = type(low) is int and type(high) is int
    end = high + 1 if whole else high
    value = low * (end / low) ** uniform if values.get("log", False) else low + (end - low) * uniform
    return min(int(value), high) if whole else float(f"{value:.{_DIGITS}g}")


def _is_range(values: Any) -> bool:
    if not isinstance(values, Mapping) or not {"low", "high"} <= set(values) <= {"low", "high", "log"}:
        return False
    low, high, log = values["low"], values["high"], values.get("log", False)
    numbers = all(type(end) in (int, float) and math.isfinite(end) for end in (low, high))
    return numbers and low < high and type(log) is bool and (low > 0 or not log)


def _count(table: Mapping[str, Any], name: str, default: int, least: int, source: str) -> int:
    value = table.get(name, default)
    if type(value) is not int or value < least:
        raise ConfigError(f"{source} {name} = {value!r}: give a whole number, at least {least}")
    return value


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(map(_text, value))
    if isinstance(value, float):
        return f"{value:g}".replace("e+", "e")
    return str(value).lower() if isinstance(value, bool) else str(value)


# -- what has come out -------------------------------------------------------------------------------------------------


class Sweep(Study):
    """Settings of options over a grid, along lists or at random, each with several seeds."""

    kind = "sweep"
    file = "sweep.toml"

    @property
    def options(self) -> list[str]:
        """What is varied besides the seed."""
        return list(self.members[0].values)

    def draw(self, path: Path | None = None, metric: str | None = None) -> Path:
        """Draw how sensitive the outcome is to each option (`hpcfed.plots.sensitivity`)."""
        from hpcfed import plots

        path = path or self.folder / "sensitivity.png"
        return plots.sensitivity(self.rows(), self.options, path, metric or "objective")

    def keep(self) -> None:
        """Write ``sweep.csv`` and ``sweep.h5`` as things stand, each all or nothing.

        Who writes last has read after all others had: what they knew is not lost.
        """
        with _alone(self.folder / ".table-lock"):
            rows = self.rows()
            names = dict.fromkeys(name for row in rows for name in row)
            last = [name for name in ("seconds", "digest") if names.pop(name, "") is None]
            columns = [*names, *last]
            _write_csv(self.folder / "sweep.csv", columns, rows)
            _write_hdf5(self.folder / "sweep.h5", columns, rows, self.text)

    def table(self) -> str:
        """How far it has come, and a line for each run."""
        rows = self.rows()
        states = [row["status"] for row in rows]
        counts = [f"{states.count(each)} {each}" for each in ("finished", "diverged", "pending") if each in states]
        shown = ("status", *self.options, "seed", *CLOSING, "seconds", "digest")
        lines = [
            {"run": row["run"].partition("-")[0]}
            | {name: _cell(name, row[name]) for name in shown if row.get(name) is not None}
            for row in rows
        ]
        return f"sweep {self.folder}: {len(rows)} runs, {', '.join(counts)}\n\n{aligned(lines)}"


def _cell(name: str, value: Any) -> str:
    if name == "seconds":
        return clock(value)
    return value[:12] if name == "digest" else f"{value:.6g}" if isinstance(value, float) else _text(value)


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """A block that one process at a time enters; on a file system without locks, all of them."""
    with path.open("w") as file:
        with contextlib.suppress(OSError):
            fcntl.lockf(file, fcntl.LOCK_EX)  # ends with the file
        yield


def _write_csv(path: Path, columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
    temporary = path.with_suffix(f".csv.{os.getpid()}")
    with temporary.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        for row in rows:
            cells = (row.get(name) for name in columns)
            writer.writerow("" if cell is None else cell if isinstance(cell, float) else _text(cell) for cell in cells)
    os.replace(temporary, path)


def _write_hdf5(path: Path, columns: Sequence[str], rows: Sequence[Mapping[str, Any]], text: str) -> None:
    """A dataset for each column: numbers with NaN for what is unknown, or texts."""
    temporary = path.with_suffix(f".h5.{os.getpid()}")
    with h5py.File(str(temporary), "w") as file:
        file.attrs["sweep"] = text
        file.attrs["columns"] = columns
        for name in columns:
            cells = [row.get(name) for row in rows]
            if all(cell is None or type(cell) in (int, float) for cell in cells):
                file[name] = np.array([math.nan if cell is None else cell for cell in cells])
            else:
                file[name] = ["" if cell is None else _text(cell) for cell in cells]
    os.replace(temporary, path)
