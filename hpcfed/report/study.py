"""The page of a sweep or comparison."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpcfed.errors import DataError
from hpcfed.report.page import Page, Picture, Section, Table
from hpcfed.report.run import CAPTIONS, label, provenance
from hpcfed.run.recorder import clock
from hpcfed.run.summary import CLOSING
from hpcfed.studies.study import Study

METRICS = (*CLOSING, "test_loss", "paper_bits_up")


def page_of_study(study: Study) -> Page:
    """What the study's folder tells: settings with means over their seeds, the picture, all runs, the file.

    Raises
    ------
    DataError
        If a file in the folder is damaged.
    """
    rows = study.rows()
    states = [row["status"] for row in rows]
    counts = {state: states.count(state) for state in ("finished", "diverged", "pending") if state in states}
    options = list(dict.fromkeys(name for member in study.members for name in member.values))
    metrics = [name for name in METRICS if any(row.get(name) is not None for row in rows)]
    drawn, notice = _picture(study, rows)
    first = next(
        (study.run_folder(member) for member, state in zip(study.members, states, strict=True) if state == "finished"),
        None,
    )
    sections = [
        Section("Outcome", notice, drawn, [_settings(rows, options, metrics)]),
        Section("Runs", tables=[_runs(rows, options, metrics)]),
        Section("File", text=study.text),
        *(provenance(first) if first else ()),
    ]
    return Page(
        f"{study.kind}: {study.folder.resolve().name}",
        f"{len(rows)} runs: {', '.join(f'{count} {state}' for state, count in counts.items())}",
        {},
        sections,
    )


def _picture(study: Study, rows: Sequence[Mapping[str, Any]]) -> tuple[list[Picture], str]:
    """The picture of what has ended so far, or why there is none."""
    if all(row["status"] == "pending" for row in rows):
        return [], "No run has ended yet."
    try:
        path: Path = study.draw()
    except DataError as error:  # all diverged, or there is nothing to compare
        return [], str(error)
    return [Picture(path, CAPTIONS.get(path.stem, path.stem))], ""


def _settings(rows: Sequence[Mapping[str, Any]], options: Sequence[str], metrics: Sequence[str]) -> Table:
    """Mean and standard deviation of the finished runs of each setting."""
    settings: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        settings.setdefault(repr([row[name] for name in options]), []).append(row)
    lines = []
    for runs in settings.values():
        finished = [row for row in runs if row["status"] == "finished"]
        spreads = [_spread([row[name] for row in finished if row.get(name) is not None]) for name in metrics]
        lines.append([*(_setting(runs[0][name]) for name in options), f"{len(finished)}/{len(runs)}", *spreads])
    heading = [*(name.replace("_", " ") for name in options), "runs", *map(label, metrics)]
    return Table(lines, heading, "Settings: mean and standard deviation over the runs that have finished")


def _spread(values: Sequence[float]) -> Any:
    if not values:
        return None
    mean = statistics.fmean(values)
    if len(set(values)) == 1:
        return values[0]
    return f"{mean:.5g}\u00a0±\u00a0{statistics.stdev(values):.2g}"


def _runs(rows: Sequence[Mapping[str, Any]], options: Sequence[str], metrics: Sequence[str]) -> Table:
    """A line for each run."""
    names = ("status", *options, "seed", *metrics)
    lines = []
    for row in rows:
        took = clock(row["seconds"]) if row.get("seconds") is not None else None
        cells = (row.get(name) if name in metrics else _setting(row.get(name)) for name in names)
        number = row["run"].partition("-")[0]  # of a sweep; the rest of its names stands in the columns
        lines.append([number if number.isdigit() else row["run"], *cells, took])
    heading = ("run", *(label(name) if name in metrics else name.replace("_", " ") for name in names), "took")
    return Table(lines, heading)


def _setting(value: Any) -> str:
    """The value of an option, as it is written in files."""
    if isinstance(value, list):
        return ",".join(map(_setting, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
