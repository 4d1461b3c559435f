"""Runs in words: what ``hpcfed show`` and ``hpcfed list`` print."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hpcfed import config, registry
from hpcfed.run import checkpoint, result
from hpcfed.run.recorder import clock
from hpcfed.run.run_folder import RunFolder

CLOSING = ("objective", "excess_risk", "relative_error", "psnr", "ssim", "test_accuracy")


def facts(folder: RunFolder) -> dict[str, Any]:
    """What a run is and how far it has come.

    Keys: ``workload, algorithm, clients, ranks, rounds`` (done), ``digest`` (SHA-256 of the solution's bytes),
    ``finished``, ``ended`` (why), ``peak_memory_bytes`` (of the rank that had most), ``metrics`` (the last record) and
    ``seconds`` by kind. ``ranks``, ``digest``, ``ended`` and the memory are None until the run is finished.
    """
    configuration = config.assemble({}, config.read_toml(folder.config), str(folder.config))
    history = folder.history()
    last = dict(history[-1]) if history else {}
    attributes = result.read_attributes(folder.result) if folder.finished else {}
    return {
        "workload": configuration.workload.name,
        "algorithm": configuration.algorithm.name,
        "clients": configuration.workload.options.clients,
        "ranks": attributes.get("ranks"),
        "rounds": max(last.get("round", 0), checkpoint.last_round(folder.checkpoints)),
        "digest": attributes.get("digest"),
        "peak_memory_bytes": attributes.get("peak_memory_bytes"),
        "finished": folder.finished,
        "ended": attributes.get("ended"),
        "seconds": last.pop("seconds", {}),
        "metrics": {name: value for name, value in last.items() if name != "round"},
    }


def table(facts: Mapping[str, Any]) -> str:
    """The facts for a reader."""
    rows = [(name, facts[name]) for name in ("workload", "algorithm", "clients", "ranks", "rounds", "digest")]
    if facts["peak_memory_bytes"]:
        rows.append(("memory", f"{facts['peak_memory_bytes'] / 2**20:.0f} MiB a rank at most"))
    rows.append(("finished", f"yes, after {facts['ended']}" if facts["finished"] else "no"))
    rows += [(name, f"{value:.6g}" if isinstance(value, float) else value) for name, value in facts["metrics"].items()]
    total = facts["seconds"].get("total", 0.0)
    for name, value in facts["seconds"].items():
        share = f"  {value / total:4.0%}" if total and name != "total" else f"  {clock(value)}"
        rows.append((f"{name} seconds", f"{value:.2f}{share}"))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name.replace('_', ' '):{width}}  {'-' if value is None else value}" for name, value in rows)


def closing(folder: RunFolder) -> str:
    """The last words of a run: its numbers, its pictures, its folder."""
    known = facts(folder)
    metrics = known["metrics"]
    ranks = f"{known['ranks']} rank{'s' if known['ranks'] != 1 else ''}"
    lines = [
        f"{known['workload']} by {known['algorithm']}: {known['rounds']} rounds, {known['clients']} clients on {ranks}",
        f"took {clock(known['seconds'].get('total', 0.0))}; ended after {known['ended']}",
        "  ".join(f"{name} {metrics[name]:.6g}" for name in CLOSING if name in metrics),
        f"digest {known['digest']}",
        *(f"picture {picture}" for picture in sorted(folder.path.glob("*.png"))),
        f"run folder {folder.path}",
    ]
    return "\n".join(lines)


def aligned(rows: Sequence[Mapping[str, str]]) -> str:
    """Rows of texts by column as lines under a heading; a dash where a row has nothing."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    width = {column: max(len(column), *(len(row.get(column, "-")) for row in rows)) for column in columns}
    lines = ["  ".join(f"{column.replace('_', ' '):{width[column]}}" for column in columns)]
    lines += ["  ".join(f"{row.get(column, '-'):{width[column]}}" for column in columns) for row in rows]
    return "\n".join(line.rstrip() for line in lines)


def catalogue() -> str:
    """All algorithms, workloads and compressors, and which fit together."""
    lines = ["Workloads"]
    lines += [
        f"  {name:12} {_first_paragraph(registry.load('workload', name))}\n"
        f"  {'':12} algorithms: {', '.join(registry.fitting_algorithms(name)) or 'none'}"
        for name in registry.WORKLOADS
    ]
    lines.append("Algorithms")
    lines += [
        f"  {name:12} {_first_paragraph(registry.load('algorithm', name))}\n"
        f"  {'':12} workloads: {', '.join(registry.fitting_workloads(name)) or 'none'}"
        for name in registry.ALGORITHMS
    ]
    lines.append("Compressors (all fit every algorithm that has lossy messages)")
    lines += [f"  {name:12} {_first_paragraph(registry.load('compressor', name))}" for name in registry.COMPRESSORS]
    return "\n".join(lines)


def _first_paragraph(owner: type) -> str:
    return " ".join((owner.__doc__ or "").split("\n\n")[0].split()).replace("``", "")
