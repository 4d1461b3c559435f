"""The commands that hand on what came out: ``show``, ``plot`` and ``report`` to readers, ``export`` to programs."""

from __future__ import annotations

import json
from pathlib import Path

import click

from hpcfed.cli import studies
from hpcfed.errors import ConfigError
from hpcfed.export import FORMATS
from hpcfed.run import run_folder


@click.command(short_help="Print what a run, sweep or comparison is and how far it has come.")
@click.argument("directory", metavar="DIR")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def show(directory: str, as_json: bool) -> None:
    """Print what the run, sweep or comparison in DIR is and how far it has come."""
    from hpcfed.run import summary
    from hpcfed.run.recorder import strict

    study = studies.found(directory)
    if study is not None:
        rows = [strict(row) for row in study.rows()] if as_json else []
        click.echo(json.dumps({study.kind: rows}, allow_nan=False) if as_json else study.table())
        return
    facts = summary.facts(run_folder.open_existing(directory))
    click.echo(json.dumps(strict(facts), allow_nan=False) if as_json else summary.table(facts))


@click.command(short_help="Draw one run, several over one another, a sweep or a comparison.")
@click.argument("directories", metavar="DIR...", nargs=-1, required=True)
@click.option("--out", type=str, help="Picture to write  [default: DIR/convergence.png, compare.png for several].")
@click.option("--metric", metavar="NAME", help="What to draw of a sweep  [default: objective].")
def plot(directories: tuple[str, ...], out: str | None, metric: str | None) -> None:
    """Draw the convergence of one run, or of several over one another, and the pictures of a finished one.

    Of a sweep: the last METRIC against each option that was varied. Of a comparison: its variants.
    """
    from hpcfed import plots

    study = studies.found(directories[0]) if len(directories) == 1 else None
    if study is not None:
        click.echo(study.draw(Path(out) if out else None, metric))
        return
    if metric is not None:
        raise ConfigError(f"--metric {metric} is for a sweep: of runs all metrics are drawn")
    folders = [run_folder.open_existing(directory) for directory in directories]
    for picture in plots.draw(folders, Path(out) if out else None):
        click.echo(picture)


@click.command(short_help="Write a reconstruction as TIFF, NIfTI, NRRD, MHA, DICOM or Zarr.")
@click.argument("directory", metavar="DIR")
@click.option("--to", type=click.Choice(list(FORMATS)), required=True, help="The format.")
@click.option("--out", metavar="PATH", help="File or folder to write  [default: in DIR, named after the dataset].")
@click.option("--dataset", default="volume", show_default=True, metavar="NAME", help="Which volume of result.h5.")
@click.option(
    "--voxel-size",
    type=click.FloatRange(min=0, min_open=True),
    metavar="MM",
    help="Edge of a voxel in mm  [default: the scan's, or 1].",
)
def export(directory: str, to: str, out: str | None, dataset: str, voxel_size: float | None) -> None:
    """Write a volume of the finished run in DIR for other programs.

    The size of voxels, the directions of the axes and where the volume comes from (command, digest) are written, too,
    as far as the format has room for them. A DICOM series is marked as not for diagnosis.
    """
    from hpcfed.export import export as write

    folder = run_folder.open_existing(directory)
    click.echo(write(folder, to, Path(out) if out else None, dataset, voxel_size))


@click.command(short_help="Write all about a run, sweep or comparison as one HTML page.")
@click.argument("directory", metavar="DIR")
@click.option("--out", metavar="FILE", help="Page to write  [default: DIR/report.html].")
def report(directory: str, out: str | None) -> None:
    """Write what there is to know about the run, sweep or comparison in DIR as one HTML page.

    The page is a single file with its pictures in it: it can be mailed, printed and read without a network.
    """
    from hpcfed import report as reports

    path = Path(out) if out else Path(directory) / "report.html"
    study = studies.found(directory)
    click.echo(reports.of_study(study, path) if study else reports.of_run(run_folder.open_existing(directory), path))
