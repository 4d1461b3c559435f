"""A comparison: variants of a base run, each with several seeds.

::

    seeds = [0, 1, 2]

    [base.workload]              # the base: tables as in a run's config.toml
    name = "logreg"

    [variants.plain]             # options by the names of the flags, underscores for dashes

    [variants."20 levels"]
    quantize = 20

    [until]                      # optional: when do metrics get as far?
    objective = 0.1

Each run has a folder ``NAME-seedK`` in the comparison's folder.
"""

from __future__ import annotations

import operator
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from hpcfed.errors import ConfigError
from hpcfed.run.run_folder import RunFolder
from hpcfed.run.summary import aligned
from hpcfed.studies.study import Member, Study, folder_name, read_seeds, read_tables

COLUMNS = (
    "objective", "excess_risk", "relative_error", "gradient_norm", "loss_worst", "loss_after", "psnr", "ssim",
    "test_accuracy", "accuracy_after", "test_loss", "paper_bits_up",
)  # fmt: skip
# Metrics that are good when they are large.
RISING = ("psnr", "ssim", "test_accuracy", "accuracy_after", "accuracy_before")


def read(path: Path, folder: Path) -> Comparison:
    """The comparison that a file describes.

    Raises
    ------
    ConfigError
        If the file is not sound.
    """
    text, file = read_tables(path, ("seeds", "base", "variants", "until"), "comparison")
    variants, seeds = file.get("variants", {}), read_seeds(file, str(path))
    if not isinstance(variants, Mapping) or not variants:
        raise ConfigError(f"{path}: a comparison needs at least one table [variants.NAME]")
    members: dict[str, Member] = {}
    for name, options in variants.items():
        source = f"{path}: [variants.{name}]"
        if not isinstance(options, Mapping):
            raise ConfigError(f"{source} is not a table of options")
        for seed in seeds:
            own = f"{folder_name(name)}-seed{seed}"
            if own in members:
                raise ConfigError(f"{source}: its folder {own} is another variant's: choose a name that differs more")
            members[own] = Member(own, {"variant": name}, {**options, "seed": seed}, source)
    until = file.get("until", {})
    if not isinstance(until, Mapping) or not all(isinstance(goal, int | float) for goal in until.values()):
        raise ConfigError(f"{path}: until is a table of metrics and numbers, such as [until] gradient_norm = 0.1")
    return Comparison(folder, text, file.get("base", {}), tuple(members.values()), until=until)


@dataclass(frozen=True)
class Comparison(Study):
    """Variants of a base run, each with several seeds; ``until`` gives metrics values to reach."""

    kind: ClassVar[str] = "comparison"
    file: ClassVar[str] = "compare.toml"

    until: Mapping[str, float] = field(default_factory=dict)

    def draw(self, path: Path | None = None, metric: str | None = None) -> Path:
        """Draw how the variants converge (`hpcfed.plots.comparison`): all metrics."""
        from hpcfed import plots

        if metric is not None:
            raise ConfigError("--metric is for sweeps: the picture of a comparison shows all metrics")
        variants: dict[str, list[RunFolder]] = {}
        for member in self.members:
            variants.setdefault(member.values["variant"], []).append(self.run_folder(member))
        return plots.comparison(variants, path or self.folder / "compare.png")

    def keep(self) -> None:
        """Keep the table in ``compare.txt``."""
        temporary = self.folder / f"compare.txt.{os.getpid()}"
        temporary.write_text(self.table() + "\n", encoding="utf-8")
        os.replace(temporary, self.folder / "compare.txt")

    def table(self) -> str:
        """The last metrics of each variant, and when metrics got as far as ``until`` says: mean and standard deviation
        over the seeds that have finished."""
        variants: dict[str, list[dict[str, Any]]] = {}
        for row in self.rows():
            variants.setdefault(row["variant"], []).append(row)
        lines: list[dict[str, str]] = []
        for name, rows in variants.items():
            states = [row["status"] for row in rows]
            diverged = f", {states.count('diverged')} diverged" if "diverged" in states else ""
            line = {"variant": name, "runs": f"{states.count('finished')}/{len(rows)}{diverged}"}
            for column in COLUMNS:
                values = [row[column] for row in rows if row["status"] == "finished" and row.get(column) is not None]
                if values:
                    line[column] = _mean(values)
            lines.append(line | self._arrivals(name))
        return aligned(lines)

    def _arrivals(self, variant: str) -> dict[str, str]:
        """The first recorded round, and the samples until then, at which metrics are as good as ``until`` says."""
        if not self.until:
            return {}
        members = [member for member in self.members if member.values["variant"] == variant]
        histories = [self.run_folder(member).history() for member in members]
        cells: dict[str, str] = {}
        for metric, goal in self.until.items():
            good = operator.ge if metric in RISING else operator.le
            found = [
                next((each for each in history if each.get(metric) is not None and good(each[metric], goal)), None)
                for history in histories
            ]
            there = [record for record in found if record is not None]
            missing = f" ({len(there)} of {len(found)})" if len(there) < len(found) else ""
            for key in ("round", "samples"):
                values = [record[key] for record in there if key in record]
                cells[f"{key} at {metric} {goal:g}"] = (_mean(values) if values else "-") + missing
        return cells


def _mean(values: Sequence[float]) -> str:
    spread = f" ± {statistics.stdev(values):.2g}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.5g}{spread}"
