"""Several runs from one file, one after another: variants of a base run, each with several seeds.

::

    seeds = [0, 1, 2]

    [base.workload]              # the base: tables as in a run's config.toml
    name = "logreg"

    [variants.plain]             # options by the names of the flags, underscores for dashes

    [variants."20 levels"]
    quantize = 20

Each run has a folder ``NAME-seedK`` in the comparison's folder. A comparison that is started again in its folder goes
on: finished runs are kept, half-finished ones resume from their checkpoints. A run that diverges is a result, not the
end.
"""

from __future__ import annotations

import logging
import re
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcfed import checkpoint, config, result, run_folder
from hpcfed.communicator import Communicator
from hpcfed.errors import ConfigError, DivergedError
from hpcfed.run_folder import RunFolder
from hpcfed.runner import Run

logger = logging.getLogger(__name__)

COLUMNS = ("objective", "psnr", "ssim", "test_accuracy", "test_loss", "paper_bits_up")


@dataclass(frozen=True)
class Comparison:
    """The runs of a comparison that are still to be done, as a job for all ranks."""

    runs: tuple[Run, ...]

    def execute(self, communicator: Communicator) -> None:
        """Do them, one after another. Every rank must call it."""
        for place, run in enumerate(self.runs, start=1):
            logger.info("run %d of %d: %s", place, len(self.runs), run.folder.path.name)
            try:
                run.execute(communicator)
            except DivergedError as error:
                logger.warning("%s: %s", run.folder.path.name, error)


def plan(path: Path) -> dict[str, dict[int, config.RunConfig]]:
    """The configurations of a comparison file, by variant and seed.

    Raises
    ------
    ConfigError
        If the file or one of its runs is not sound; nothing has been run then.
    """
    file = config.read_toml(path)
    for key in file:
        if key not in ("seeds", "base", "variants"):
            raise ConfigError(f"{path}: {key} is no part of a comparison: there are seeds, base, variants")
    base, variants, seeds = file.get("base", {}), file.get("variants", {}), file.get("seeds", [0])
    if not isinstance(variants, Mapping) or not variants:
        raise ConfigError(f"{path}: a comparison needs at least one table [variants.NAME]")
    if not isinstance(seeds, list) or not seeds or not all(type(seed) is int and seed >= 0 for seed in seeds):
        raise ConfigError(f"{path}: seeds = {seeds}: give a list of whole numbers, at least 0")
    return {
        name: {seed: config.assemble({**given, "seed": seed}, base, f"{path}: [variants.{name}]") for seed in seeds}
        for name, given in variants.items()
    }


def prepare(path: Path, folder: Path, command: str, ranks: int) -> tuple[Comparison, dict[str, list[RunFolder]]]:
    """The job that is left to do in a comparison's folder, and the folders of all its runs by variant.

    Raises
    ------
    ConfigError
        If the folder belongs to another comparison, or a run cannot be done on so many ranks.
    """
    configurations = plan(path)
    for each in configurations.values():
        for configuration in each.values():
            config.refuse_ranks(configuration, ranks)
    kept, text = folder / "compare.toml", path.read_text(encoding="utf-8")
    if kept.exists():
        if kept.read_text(encoding="utf-8") != text:
            raise ConfigError(f"--out {folder} holds another comparison: choose another folder")
    else:
        run_folder.create(str(folder), "compare")
        (folder / "checkpoints").rmdir()
        kept.write_text(text, encoding="utf-8")
    runs: list[Run] = []
    folders: dict[str, list[RunFolder]] = {}
    for name, each in configurations.items():
        for seed, configuration in each.items():
            own = RunFolder(folder / f"{re.sub(r'[^A-Za-z0-9.=_-]+', '-', name)}-seed{seed}")
            folders.setdefault(name, []).append(own)
            if own.finished and result.is_whole(own.result):
                continue
            if not own.config.exists():
                run_folder.create(str(own.path), name)
                own.write_config(configuration.to_toml())
            runs.append(Run(configuration, own, command, checkpoint.latest(own.checkpoints)))
    return Comparison(tuple(runs)), folders


def table(folders: Mapping[str, list[RunFolder]]) -> str:
    """The last metrics of each variant, mean and standard deviation over its seeds."""
    rows: list[dict[str, Any]] = []
    for name, each in folders.items():
        last = [folder.history()[-1] for folder in each if folder.history()]
        row = {"variant": name, "runs": f"{sum(folder.finished for folder in each)}/{len(each)}"}
        for column in COLUMNS:
            values = [record[column] for record in last if record.get(column) is not None]
            if values:
                spread = f" ± {statistics.stdev(values):.2g}" if len(values) > 1 else ""
                row[column] = f"{statistics.fmean(values):.5g}{spread}"
        rows.append(row)
    columns = list(dict.fromkeys(column for row in rows for column in row))
    width = {column: max(len(column), *(len(row.get(column, "-")) for row in rows)) for column in columns}
    lines = ["  ".join(f"{column.replace('_', ' '):{width[column]}}" for column in columns)]
    lines += ["  ".join(f"{row.get(column, '-'):{width[column]}}" for column in columns) for row in rows]
    return "\n".join(line.rstrip() for line in lines)
