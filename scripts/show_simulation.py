"""Draw what runs made of a simulated scan, between the filtered back-projection that they start from and the truth.

Rows are an axial slice in the middle, one near the end of the volume, where the rays of a cone are steepest, and a
coronal plane, all in one grey window.

    mpirun -n 2 hpcfed ct --geometry cone --shape 128,128,32 --detector 256,192 --views 167 --phantom chest.npz \\
        --rounds 24 --out runs/chest
    python scripts/show_simulation.py runs/chest --out chest.png
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import matplotlib
import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray
from show_scan import saved_in_grey

from hpcfed import config
from hpcfed.federation import Federation
from hpcfed.plots.looks import STYLE
from hpcfed.run import run_folder
from hpcfed.run.run_folder import RunFolder
from hpcfed.streams import Streams

Volume = NDArray[np.float32]

SIDE, GAP, LEFT, ABOVE = 256 / 150, 0.06, 0.75, 0.4  # inches, of 150 dots


def start(folder: RunFolder) -> Volume:
    """The filtered back-projection of the run's simulated views."""
    settings = config.assemble({}, config.read_toml(folder.config))
    workload: Any = settings.workload.options
    volume: Volume = workload.build(Federation(workload.clients, Streams(settings.run.seed))).plain_start()
    return volume


def name(folder: RunFolder) -> str:
    settings = config.assemble({}, config.read_toml(folder.config))
    return f"{settings.algorithm.name}, {settings.run.rounds} rounds"


def psnr(volume: Volume, truth: Volume) -> float:
    return float(-10 * np.log10(np.mean((volume - truth) ** 2, dtype=float)))


def draw(volumes: dict[str, Volume], flip: bool) -> Figure:
    """Titled columns of planes."""
    ny, nx, nz = next(iter(volumes.values())).shape
    end = nz - 1 - nz // 10
    order = slice(None, None, -1 if flip else 1)
    planes: dict[str, Callable[[Volume], Volume]] = {
        f"slice {nz // 2}": lambda x: x[order, :, nz // 2],
        f"slice {end}": lambda x: x[order, :, end],
        f"row {ny // 2}": lambda x: x[ny // 2].T[::-1],
    }
    *_, truth = volumes.values()
    low, high = np.quantile(truth, [0.002, 0.998])
    heights = [SIDE * ny / nx, SIDE * ny / nx, SIDE * nz / nx]
    width = LEFT + len(volumes) * (SIDE + GAP)
    height = ABOVE + sum(heights) + len(heights) * GAP
    figure = Figure(figsize=(width, height))
    for column, (title, volume) in enumerate(volumes.items()):
        top = height - ABOVE
        for (label, cut), tall in zip(planes.items(), heights, strict=True):
            left = LEFT + column * (SIDE + GAP)
            axes = figure.add_axes((left / width, (top - tall) / height, SIDE / width, tall / height))
            axes.imshow(cut(volume), cmap="gray", vmin=low, vmax=high, interpolation="nearest", aspect="auto")
            axes.set_axis_off()
            if top == height - ABOVE:
                axes.set_title(title, pad=4)
            if not column:
                figure.text((LEFT - GAP) / width, (top - tall / 2) / height, label, ha="right", va="center")
            top -= tall + GAP
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="DIR", help="finished runs of the same simulated scan")
    parser.add_argument("--flip", action="store_true", help="draw the first row of a slice at the bottom")
    parser.add_argument(
        "--out", type=Path, default=Path("simulation.png"), metavar="PNG", help="[default: %(default)s]"
    )
    arguments = parser.parse_args()
    folders = [run_folder.open_existing(each) for each in arguments.runs]
    found = {"filtered back-projection": start(folders[0])}
    for folder in folders:
        with h5py.File(str(folder.result)) as file:
            found[name(folder)], truth = file["volume"][:], file["reference"][:]
    volumes = {f"{title}\n{psnr(volume, truth):.1f} dB": volume for title, volume in found.items()}
    with matplotlib.rc_context(STYLE):
        print(saved_in_grey(draw({**volumes, "truth": truth}, arguments.flip), arguments.out))


if __name__ == "__main__":
    main()
