"""Draw what a run made of a measured scan beside the filtered back-projection, and score both against a segmentation.

Both volumes have one grey window. The score is that of the Helsinki Tomography Challenge 2022: the Matthews correlation
coefficient between the reference segmentation and the image cut at Otsu's threshold, over all pixels; 1 is perfect, 0
no better than chance.

    hpcfed ct --projections htc2022_ta_sparse_example.mat --shape 512,512,1 --nonnegative --mu 94 \\
        --rounds 400 --out runs/htc
    python scripts/show_scan.py runs/htc --segmentation htc2022_ta_full_recon_fbp_seg.png --out htc.png
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import h5py
import matplotlib
import numpy as np
import PIL.Image
from matplotlib.figure import Figure
from matplotlib.image import imread
from numpy.typing import NDArray
from skimage.filters import threshold_otsu
from sklearn.metrics import matthews_corrcoef

from hpcfed import config
from hpcfed.federation import Federation
from hpcfed.plots.looks import STYLE, save
from hpcfed.run import run_folder
from hpcfed.run.run_folder import RunFolder
from hpcfed.streams import Streams
from hpcfed.workloads.ct import Ct

Image = NDArray[np.float32]

SIDE, GAP, ABOVE = 2.6, 0.08, 0.3  # inches


def reconstructions(folder: RunFolder, z: int | None) -> dict[str, Image]:
    """A slice, the middle one by default, of the filtered back-projection and of the run's volume, in its unit."""
    with h5py.File(folder.result) as file:
        volume: Any = file["volume"]
        shape, z = volume.shape, volume.shape[2] // 2 if z is None else z
        found, scale = volume[:, :, z], volume.attrs["attenuation_scale"]
    known = config.read_toml(folder.config)["workload"]
    scan = {name: known[name] for name in ("projections", "views", "axis", "rings") if name in known}
    problem = Ct(clients=1, shape=shape, **scan).build(Federation(1, Streams(0)))
    assert problem.filtered_backprojection is not None
    filtered = problem.filtered_backprojection[:, :, z] * (problem.geometry.scale / scale)
    return {"filtered back-projection": filtered, f"total variation, $\\mu$ = {known['mu']:.3g}": found}


def segmented(image: Image) -> NDArray[np.bool_]:
    return np.asarray(image > threshold_otsu(image))


def draw(rows: list[list[tuple[str, Image]]], windows: list[tuple[float, float]]) -> Figure:
    """Rows of titled images, each row with its grey window."""
    width = max(map(len, rows)) * (SIDE + GAP) + GAP
    height = bottom = len(rows) * (SIDE + ABOVE) + GAP
    figure = Figure(figsize=(width, height))
    for row, (low, high) in zip(rows, windows, strict=True):
        bottom -= SIDE + ABOVE
        for place, (title, image) in enumerate(row):
            left = GAP + place * (SIDE + GAP)
            axes = figure.add_axes((left / width, bottom / height, SIDE / width, SIDE / height))
            axes.imshow(image, cmap="gray", vmin=low, vmax=high, interpolation="nearest")
            axes.set_title(title, pad=4)
            axes.set_axis_off()
    return figure


def saved_in_grey(figure: Figure, path: Path) -> Path:
    """Where the figure was written; of greys alone a PNG has a third of its size."""
    written = save(figure, path)
    if written.suffix == ".png":
        PIL.Image.open(written).convert("L").save(written, optimize=True)
    return written


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", metavar="DIR", help="a finished run of a measured scan")
    parser.add_argument("--slice", type=int, metavar="Z", help="[default: the middle one]")
    parser.add_argument("--segmentation", type=Path, metavar="PNG", help="reference, white where there is material")
    parser.add_argument("--zoom", metavar="Y,X,SIDE", help="draw this square of pixels alone")
    parser.add_argument("--out", type=Path, default=Path("scan.png"), metavar="PNG", help="[default: %(default)s]")
    arguments = parser.parse_args()
    images = reconstructions(run_folder.open_existing(arguments.run), arguments.slice)
    *_, best = images.values()
    window = float(min(0, np.quantile(best, 0.001))), float(np.quantile(best, 0.999))
    rows, windows = [list(images.items())], [window]
    if arguments.segmentation:
        reference = imread(arguments.segmentation)
        reference = (reference if reference.ndim == 2 else reference[:, :, 0]) > 0.5
        cut = []
        for name, image in images.items():
            above = segmented(image)
            score = matthews_corrcoef(reference.ravel(), above.ravel())
            print(f"{name}: Matthews correlation {score:.4f}, {np.mean(above != reference):.2%} of the pixels wrong")
            cut.append((f"cut at Otsu's threshold, score {score:.3f}", above))
        rows.append([*cut, ("reference", reference)])
        windows.append((0, 1))
    if arguments.zoom:
        y, x, side = map(int, arguments.zoom.split(","))
        rows = [[(title, image[y : y + side, x : x + side]) for title, image in row] for row in rows]
    with matplotlib.rc_context({**STYLE, "savefig.dpi": 110}):
        print(saved_in_grey(draw(rows, windows), arguments.out))


if __name__ == "__main__":
    main()
