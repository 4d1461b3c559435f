"""The commands for many runs at once, and what ``resume``, ``show`` and ``plot`` do with a folder of many."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpcfed.cluster.outcome import tell_folder
from hpcfed.errors import ConfigError, DataError

if TYPE_CHECKING:
    from hpcfed.cli.commands import Session
    from hpcfed.studies.study import Study

GROUPS = click.option(
    "--groups",
    type=click.IntRange(min=1),
    help="Groups of ranks that do runs side by side  [default: as few as leave no rank without a client].",
)


@click.command(short_help="Do the variants of a file, then draw and tabulate them.")
@click.argument("file", metavar="FILE")
@click.option(
    "--out", type=str, help="Folder of the comparison  [default: runs/NAME-of-FILE]; one that exists goes on."
)
@GROUPS
def compare(file: str, out: str | None, groups: int | None) -> None:
    """Run the variants in FILE, each with all seeds; then draw one picture and print a table.

    jobs/logreg.toml is an example. Started again with the same folder it goes on: what has finished or diverged is
    kept, half-finished runs resume. A run that diverges is a result, not the end.
    """
    from hpcfed.studies import comparison

    carry_out(comparison.read(Path(file), _folder(file, out)), groups)


@click.command(short_help="Do the runs of a grid, a list or a random sample of options.")
@click.argument("file", metavar="FILE")
@click.option("--out", type=str, help="Folder of the sweep  [default: runs/NAME-of-FILE]; one that exists goes on.")
@GROUPS
@click.option(
    "--part", metavar="K/N", help="Do the K-th of N parts: for N jobs that share the folder, such as an array."
)
def sweep(file: str, out: str | None, groups: int | None, part: str | None) -> None:
    """Run all settings of the options in FILE's table [sweep], each with all seeds.

    jobs/sweep.toml is an example. The table of the runs, sweep.csv and sweep.h5, grows as they end; at last the panels
    of sensitivity.png are drawn. Started again with the same folder it goes on: what has finished or diverged is kept,
    half-finished runs resume.
    """
    from hpcfed.studies import sweep

    carry_out(sweep.read(Path(file), _folder(file, out)), groups, _part(part))


def found(directory: str) -> Study | None:
    """The study whose folder this is, None if it is no study's."""
    from hpcfed.studies import comparison, sweep

    folder = Path(directory)
    if (file := folder / sweep.Sweep.file).is_file():
        return sweep.read(file, folder)
    if (file := folder / comparison.Comparison.file).is_file():
        return comparison.read(file, folder)
    return None


def carry_out(study: Study, groups: int | None, part: tuple[int, int] = (1, 1)) -> None:
    """Do the runs that are left; then keep, draw and tabulate what came out."""
    session: Session = click.get_current_context().obj
    tell_folder(study.folder)
    session.start(study.prepare(shlex.join(["hpcfed", *sys.argv[1:]]), session.communicator.size, groups, part))
    study.keep()
    if all(row["status"] != "pending" for row in study.rows()):
        try:
            click.echo(f"picture {study.draw()}")
        except DataError as error:  # all diverged, or there is nothing to compare: that is an outcome, too
            click.echo(error)
    click.echo(study.table())


def _folder(file: str, out: str | None) -> Path:
    return Path(out) if out else Path("runs") / Path(file).stem


def _part(text: str | None) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)/(\d+)", text or "1/1")
    number, count = map(int, match.groups()) if match else (0, 0)
    if not 1 <= number <= count:
        raise ConfigError(f"--part {text}: give the number of the part and how many there are, such as 2/4")
    return number, count
