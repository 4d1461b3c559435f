"""The commands that hand on what came out: ``export`` to other programs, ``report`` to readers."""

from __future__ import annotations

from pathlib import Path

import click

from hpcfed import cli_studies, run_folder
from hpcfed.export import FORMATS


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
    study = cli_studies.found(directory)
    click.echo(reports.of_study(study, path) if study else reports.of_run(run_folder.open_existing(directory), path))
