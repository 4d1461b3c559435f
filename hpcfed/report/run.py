"""The page of a run."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hpcfed import config
from hpcfed.errors import DataError
from hpcfed.report.page import Page, Picture, Section, Table
from hpcfed.run import summary
from hpcfed.run.recorder import clock
from hpcfed.run.run_folder import RunFolder

CAPTIONS = {
    "convergence": "How the run converged: its metrics over rounds, the main ones over bits sent and time, too.",
    "slices": "The reconstruction's central planes, beside the reference where there is one.",
    "holdings": "What each client holds.",
    "losses": "Every client's loss at the start and at the end.",
    "adaptation": "The model before and after it adapts to tasks that it has not seen.",
    "sparsity": "What is left of each layer.",
    "compare": "How the variants converge: means over the seeds, with a standard deviation.",
    "sensitivity": "How the outcome depends on each option that was varied.",
}
# Keys of records that are no metrics but what the run has cost so far.
COSTS = (
    "wire_bytes_up",
    "wire_bytes_down",
    "paper_bits_up",
    "paper_bits_down",
    "samples",
    "gradients",
    "jacobian_products",
    "hessian_products",
)


def page_of_run(folder: RunFolder) -> Page:
    """What the run's folder tells: numbers, pictures, privacy, configuration, provenance.

    Raises
    ------
    DataError
        If a file in the folder is damaged.
    """
    facts = summary.facts(folder)
    sections = [
        Section("Pictures", pictures=pictures(folder)),
        *_numbers(folder),
        *_privacy(folder.path / "privacy.json"),
        Section("Configuration", tables=tuple(_configuration(folder))),
        *_tuning(folder.path / "tuning.json"),
        *provenance(folder),
    ]
    ranks = f" on {facts['ranks']} rank{'s' if facts['ranks'] != 1 else ''}" if facts["ranks"] else ""
    state = "" if facts["finished"] else ", not finished"
    took = f", took {clock(facts['seconds']['total'])}" if "total" in facts["seconds"] else ""
    return Page(
        f"{facts['workload']} by {facts['algorithm']}: {folder.path.resolve().name}",
        f"{facts['rounds']} rounds, {facts['clients']} clients{ranks}{took}{state}",
        {label(name): facts["metrics"][name] for name in summary.CLOSING if name in facts["metrics"]},
        [section for section in sections if section != Section(section.title)],
    )


def label(name: str) -> str:
    """What a key of the records is called in pictures."""
    from hpcfed.plots.curves import LABELS

    return LABELS.get(name, name.replace("_", " "))


def pictures(folder: RunFolder) -> tuple[Picture, ...]:
    """The pictures in a run's folder, drawn anew if they are missing or the run has gone on; none without records."""
    from hpcfed import plots

    first = folder.path / "convergence.png"
    if folder.history() and not (first.is_file() and first.stat().st_mtime >= folder.metrics.stat().st_mtime):
        with contextlib.suppress(DataError):  # the page is worth having without a picture that cannot be drawn
            plots.draw([folder])
    found = sorted(folder.path.glob("*.png"), key=lambda path: (path != first, path.name))
    return tuple(Picture(path, CAPTIONS.get(path.stem, path.stem.replace("_", " "))) for path in found)


def provenance(folder: RunFolder) -> Iterator[Section]:
    """Where a finished run's result comes from: command, digest, versions, machine."""
    import h5py

    if not folder.finished:
        return
    try:
        with h5py.File(os.fspath(folder.result), "r") as file:
            about = {**dict(file["provenance"].attrs), **dict(file.attrs)}
    except (OSError, KeyError) as error:
        raise DataError(f"result {folder.result} is damaged: hpcfed resume {folder.path} writes it again") from error
    about = {name: value.item() if hasattr(value, "item") else value for name, value in about.items()}
    memory = about.pop("peak_memory_bytes", None)
    run = [
        (name, str(about.pop(name)))
        for name in ("command", "digest", "date", "host", "platform", "losses")
        if name in about
    ]
    if memory:
        run.append(("memory", f"{memory / 2**20:.0f} MiB a rank at most"))
    told = ("config", "workload", "algorithm", "clients", "rounds")
    versions = [(name, str(value)) for name, value in about.items() if name not in (*told, "ranks")]
    yield Section("Provenance", tables=(Table(run, caption="Run"), Table(versions, caption="Versions")))


def _numbers(folder: RunFolder) -> Iterator[Section]:
    """Metrics at the first and last record, costs and seconds."""
    history = folder.history()
    if not history:
        yield Section("Numbers", notice="No round has been recorded yet.")
        return
    first, last = history[0], history[-1]
    metrics = [name for name in last if name not in (*COSTS, "round", "seconds")]
    rows = [(label(name), first.get(name), last[name]) for name in metrics]
    heading = ("metric", f"round {first['round']}", f"round {last['round']}")
    costs = [(label(name), last[name]) for name in COSTS if last.get(name)]
    seconds = last.get("seconds", {})
    total = seconds.get("total", 0.0)
    times = [(name, round(value, 2), f"{value / total:.0%}" if total else "") for name, value in seconds.items()]
    tables = (
        Table(rows, heading, "Metrics"),
        Table(costs, ("cost", "so far"), "Costs, all clients"),
        Table(times, ("time", "seconds", "share"), "Time"),
    )
    yield Section("Numbers", tables=tables)


def _configuration(folder: RunFolder) -> Iterator[Table]:
    """A table for each part."""
    for name, part in config.read_toml(folder.config).items():
        if isinstance(part, Mapping) and part:
            yield Table([(key.replace("_", " "), _plain(value)) for key, value in part.items()], caption=name)


def _privacy(path: Path) -> Iterator[Section]:
    """What the run may say about privacy, the warning first: all that its report holds but the ledgers themselves."""
    if not path.is_file():
        return
    known = _read_json(path)
    scalars = {name: value for name, value in known.items() if not isinstance(value, (list, Mapping))}
    noise = str(scalars.pop("noise", ""))
    lists = {name: value for name, value in known.items() if isinstance(value, list) and value}
    tables = [Table([(name.replace("_", " "), _plain(value)) for name, value in scalars.items()])]
    tables += [_records(name, value) for name, value in lists.items() if isinstance(value[0], Mapping)]
    words = {name.replace("_", " "): value for name, value in lists.items() if not isinstance(value[0], Mapping)}
    yield Section("Privacy", noise[:1].upper() + noise[1:], tables=tables, lists=words)


def _tuning(path: Path) -> Iterator[Section]:
    """The values that were tried, and which one was kept."""
    if path.is_file():
        known = _read_json(path)
        chosen = ", ".join(f"{name} {_plain(value)}" for name, value in known.get("chosen", {}).items())
        caption = f"Chosen: {chosen}, after {known.get('rounds')} rounds each"
        yield Section("Tuning", tables=[_records(caption, known.get("tried", []))])


def _records(caption: str, records: Sequence[Mapping[str, Any]]) -> Table:
    columns = list(dict.fromkeys(name for record in records for name in record))
    rows = [[record.get(name) for name in columns] for record in records]
    return Table(rows, [name.replace("_", " ") for name in columns], caption)


def _plain(value: Any) -> Any:
    """A value of a configuration as it stands there: numbers without separators."""
    if isinstance(value, list):
        return ",".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else value if isinstance(value, bool) else str(value)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path} is damaged ({error}): remove it") from error
    if not isinstance(known, dict):
        raise DataError(f"{path} is damaged: it holds no table; remove it")
    return known
