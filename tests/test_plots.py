"""Pictures: they show the numbers and images of the run folder, and survive what runs leave behind."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import tomli_w
from matplotlib.figure import Figure
from matplotlib.image import imread

from hpcfed import plots
from hpcfed.errors import ConfigError, DataError
from hpcfed.run.run_folder import RunFolder

CONFIG = {
    "run": {"rounds": 100, "seed": 0},
    "workload": {"name": "ct", "clients": 17, "shape": [6, 5, 4]},
    "algorithm": {"name": "fpdfp", "step": 1e-5},
    "compressor": {"name": "qsgd", "levels": 4},
}
RNG = np.random.default_rng(0)
VOLUME = RNG.random((6, 5, 4), np.float32)
REFERENCE = RNG.random((6, 5, 4), np.float32)


def record(round: int, **changes: Any) -> dict[str, Any]:
    full = {
        "round": round,
        "objective": 1e3 * (1 + 0.5**round),
        "misfit": 900.0,
        "tv": 10.0 + round,
        "psnr": 20.0 + round,
        "ssim": 0.5,
        "participants": 17,
        "paper_bits_up": 2_000_000 * round,
        "relative_change": 0.1,
        "seconds": {"total": 3.0 * round, "compute": 1.0 * round},
    }
    return {**full, **changes}


def make_run(
    path: Path, records: list[dict[str, Any]], volumes: dict[str, Any] | None = None, **config: Any
) -> RunFolder:
    """A run folder; ``config`` replaces options, written as section__key."""
    path.mkdir()
    tables: dict[str, Any] = {section: dict(table) for section, table in CONFIG.items()}
    for name, value in config.items():
        section, key = name.split("__")
        tables[section][key] = value
    (path / "config.toml").write_text(tomli_w.dumps(tables))
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in records))
    if volumes is not None:
        with h5py.File(path / "result.h5", "w") as file:
            for name, volume in volumes.items():
                file[name] = volume
    return RunFolder(path)


def panel(figure: Figure, y: str, x: str = "round") -> Any:
    """The panel of a metric (in the row that it labels) against something."""
    (left,) = [axes for axes in figure.axes if axes.get_ylabel() == y]
    row = left.get_subplotspec().rowspan
    (found,) = [
        axes
        for axes in figure.axes
        if axes.get_xlabel().startswith(x) and (axes is left if x == "round" else axes.get_subplotspec().rowspan == row)
    ]
    return found


def data(axes: Any, line: int = 0) -> tuple[list[float], list[float]]:
    x, y = axes.lines[line].get_data()
    return list(x), list(y)


def test_importing_plots_does_not_load_matplotlib():
    code = "import sys, hpcfed.plots; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# -- convergence -------------------------------------------------------------------------------------------------------


def test_curves_are_the_recorded_numbers(tmp_path, drawn):
    run = make_run(tmp_path / "one", [record(number) for number in range(5)])
    (path,) = plots.draw([run])
    assert path == tmp_path / "one" / "convergence.png"
    (figure,) = drawn
    psnr = [20.0, 21.0, 22.0, 23.0, 24.0]
    assert data(panel(figure, "PSNR, dB")) == ([0, 1, 2, 3, 4], psnr)
    bits = panel(figure, "PSNR, dB", "sent")
    assert bits.get_xlabel() == "sent by all clients, Mbit"
    assert data(bits) == ([0, 2, 4, 6, 8], psnr)
    seconds = panel(figure, "PSNR, dB", "time")
    assert seconds.get_xlabel() == "time, s"
    assert data(seconds) == ([0, 3, 6, 9, 12], psnr)
    assert data(panel(figure, "objective")) == ([0, 1, 2, 3, 4], [2000, 1500, 1250, 1125, 1062.5])
    assert "one: fpdfp, 17 clients" in figure.get_suptitle()


def test_only_metrics_that_exist_have_panels(tmp_path, drawn):
    lines = [{"round": number, "objective": 1.0 + number, "seconds": {"total": 1.0}} for number in range(3)]
    plots.draw([make_run(tmp_path / "one", lines)])
    labels = {axes.get_ylabel() for axes in drawn[0].axes} - {""}
    assert labels == {"objective"}
    assert not any(axes.get_xlabel().startswith("sent") for axes in drawn[0].axes)


def test_what_is_not_a_number_leaves_a_gap(tmp_path, drawn):
    lines = [record(number, test_loss=1.0) for number in range(4)]
    lines[1]["psnr"], lines[2]["psnr"] = math.inf, math.nan
    lines[3]["objective"] = -math.inf
    lines[2]["ssim"] = None
    lines[0].pop("relative_change")
    plots.draw([make_run(tmp_path / "one", lines)])
    assert np.isnan(data(panel(drawn[0], "PSNR, dB"))[1]).tolist() == [False, True, True, False]
    assert np.isnan(data(panel(drawn[0], "objective"))[1]).tolist() == [False, False, False, True]
    assert np.isnan(data(panel(drawn[0], "relative change"))[1]).tolist() == [True, False, False, False]
    assert all(np.isfinite(axes.get_ylim()).all() for axes in drawn[0].axes)


def test_pictures_are_written_whatever_the_numbers(tmp_path):
    lines = [record(0, psnr=math.inf, objective=0.0), record(1, psnr=math.nan), record(2, objective=-1.0)]
    run = make_run(tmp_path / "one", lines, {"volume": VOLUME, "reference": REFERENCE})
    for path in plots.draw([run]):
        assert path.parent == run.path
        assert imread(path).std() > 0


def test_a_single_record_can_be_drawn(tmp_path):
    plots.draw([make_run(tmp_path / "one", [record(0)])])
    assert (tmp_path / "one" / "convergence.png").exists()


def test_an_objective_that_starts_far_above_is_cut_off(tmp_path, drawn):
    """From 10^6 to between 110 and 100 within a tenth of the rounds: the axis ends near 110."""
    lines = [record(number, objective=1e6 if number < 5 else 100 + 10 * 0.9 ** (number - 5)) for number in range(51)]
    plots.draw([make_run(tmp_path / "one", lines)])
    low, high = panel(drawn[0], "objective").get_ylim()
    assert 95 < low <= 100
    assert 110 <= high < 115


@pytest.mark.parametrize(
    ("values", "scale"),
    [([1, 1e-2, 1e-4], "log"), ([1, 0.5, 0.2], "linear"), ([1, 1e-2, -1e-4], "linear"), ([1, 1e-2, 0], "linear")],
)
def test_logarithmic_axes_are_for_positive_values_over_a_decade(tmp_path, drawn, values, scale):
    lines = [record(number, relative_change=value) for number, value in enumerate(values)]
    plots.draw([make_run(tmp_path / "one", lines)])
    assert panel(drawn[0], "relative change").get_yscale() == scale


def test_runs_are_overlaid_and_named_by_what_sets_them_apart(tmp_path, drawn, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = [record(number) for number in range(4)]
    fewer = [record(number, psnr=30.0, paper_bits_up=1000 * number) for number in range(4)]
    runs = [
        make_run(tmp_path / "a", lines),
        make_run(tmp_path / "b", fewer, compressor__levels=9),
        make_run(tmp_path / "c", lines, algorithm__participants=5),
    ]
    assert plots.draw(runs) == [Path("compare.png")]
    (figure,) = drawn
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [
        "a: levels 4",
        "b: levels 9",
        "c: levels 4, participants 5",
    ]
    psnr = panel(figure, "PSNR, dB")
    assert [data(psnr, line)[1][0] for line in range(3)] == [20, 30, 20]
    colours = [line.get_color() for line in psnr.lines]
    assert len(set(colours)) == 3
    assert colours == [line.get_color() for line in legend.get_lines()]
    assert colours == [line.get_color() for line in panel(figure, "SSIM").lines]
    # One run sent 2000 times fewer bits than the others.
    assert panel(figure, "PSNR, dB", "sent").get_xscale() == "log"


def test_options_of_different_methods_are_not_compared(tmp_path, drawn):
    runs = [
        make_run(tmp_path / "a", [record(0), record(1)]),
        make_run(tmp_path / "b", [record(0), record(1)], algorithm__name="other", algorithm__momentum=0.9),
    ]
    plots.draw(runs)
    assert [text.get_text() for text in drawn[0].legends[0].get_texts()] == ["a: algorithm fpdfp", "b: algorithm other"]


def test_an_excess_risk_stands_for_the_objective_and_is_compared_with_public_records(tmp_path, drawn):
    lines = [record(number, excess_risk=0.5**number, public_only_risk=0.3) for number in range(6)]
    other = [record(number, excess_risk=0.6**number, public_only_risk=0.2) for number in range(6)]
    one, two = make_run(tmp_path / "one", lines), make_run(tmp_path / "two", other)
    plots.draw([one])
    plots.comparison({"a": [one], "b": [one]}, tmp_path / "same.png")
    plots.comparison({"a": [one], "b": [two]}, tmp_path / "different.png")
    for figure, levels in zip(drawn, ([0.3], [0.3], [0.3, 0.2]), strict=True):
        axes = panel(figure, "excess risk")
        assert not any(each.get_ylabel() == "objective" for each in figure.axes)
        dotted = [line for line in axes.lines if line.get_linestyle() == ":"]
        assert [line.get_ydata()[0] for line in dotted] == pytest.approx(levels)
        assert axes.get_yscale() == "log"


def test_variants_look_like_their_names(tmp_path, drawn):
    run = make_run(tmp_path / "one", [record(number) for number in range(20)])
    names = ["plain", "noisy, 1", "exact, 1", "noisy, 5", "exact, 5"]
    plots.comparison({name: [run] for name in names}, tmp_path / "picture.png")
    looks = {
        name: (line.get_color(), line.get_linestyle())
        for name, line in zip(names, panel(drawn[0], "objective").lines, strict=True)
    }
    assert len(set(looks.values())) == 5
    assert looks["noisy, 1"][0] == looks["noisy, 5"][0] != looks["exact, 1"][0]
    assert looks["noisy, 5"][1] == looks["exact, 5"][1] != looks["exact, 1"][1]


def test_many_runs_look_different(tmp_path, drawn):
    runs = [make_run(tmp_path / str(number), [record(0), record(1)]) for number in range(16)]
    plots.draw(runs, tmp_path / "many.png")
    looks = {(line.get_color(), line.get_linestyle()) for line in panel(drawn[0], "SSIM").lines}
    assert len(looks) == 16


# -- slices ------------------------------------------------------------------------------------------------------------


def images(figure: Figure) -> list[Any]:
    """The images of a figure without its colour bars."""
    return [axes.images[0] for axes in figure.axes if axes.images]


def pixels(image: Any) -> np.ndarray[Any, Any]:
    """The image as it lies on paper, first row on top."""
    array = np.asarray(image.get_array())
    return array if image.origin == "upper" else array[::-1]


def test_slices_show_the_central_planes_upright(tmp_path, drawn):
    run = make_run(tmp_path / "one", [record(7)], {"volume": VOLUME, "reference": REFERENCE})
    assert [path.name for path in plots.draw([run])] == ["convergence.png", "slices.png"]
    figure = drawn[1]
    shown = [pixels(image) for image in images(figure)]
    assert len(shown) == 9
    for row, cut in enumerate(
        (
            lambda volume: volume[:, :, 2],  # y downwards, x to the right
            lambda volume: volume[3, :, ::-1].T,  # z upwards, x to the right
            lambda volume: volume[:, 2, ::-1].T,  # z upwards, y to the right
        )
    ):
        np.testing.assert_array_equal(shown[3 * row], cut(REFERENCE))
        np.testing.assert_array_equal(shown[3 * row + 1], cut(VOLUME))
        np.testing.assert_array_equal(shown[3 * row + 2], cut(VOLUME) - cut(REFERENCE))
    assert "7 rounds, PSNR 27.00 dB, SSIM 0.5000" in figure.get_suptitle()


def test_reference_and_reconstruction_share_a_window(tmp_path, drawn):
    volumes = {"volume": 3 * VOLUME, "reference": REFERENCE}
    plots.draw([make_run(tmp_path / "one", [record(7)], volumes)])
    windows = [image.get_clim() for image in images(drawn[1])]
    planes = [REFERENCE[:, :, 2], REFERENCE[3], REFERENCE[:, 2]]
    for place in (0, 1, 3, 4, 6, 7):
        assert windows[place] == pytest.approx((0, max(plane.max() for plane in planes)))
    low, high = windows[2]
    assert low == -high
    assert windows[2] == windows[5] == windows[8]


def test_voxels_are_cubes(tmp_path, drawn):
    volume = np.zeros((40, 60, 30), np.float32)
    plots.draw([make_run(tmp_path / "one", [record(1)], {"volume": volume, "reference": volume})])
    width, height = drawn[1].get_size_inches()
    for image in images(drawn[1]):
        box, (rows, columns) = image.axes.get_position(), image.get_array().shape
        assert box.width * width / columns == pytest.approx(box.height * height / rows)


def test_without_a_reference_the_planes_lie_in_a_row(tmp_path, drawn):
    plots.draw([make_run(tmp_path / "one", [record(7)], {"volume": VOLUME})])
    shown = images(drawn[1])
    assert [image.axes.get_title() for image in shown] == ["axial, z = 2", "coronal, y = 3", "sagittal, x = 2"]
    assert len({round(image.axes.get_position().y1, 9) for image in shown}) == 1


@pytest.mark.parametrize("slices", [1, 2])
def test_thin_volumes_stay_visible(tmp_path, drawn, slices):
    volume = RNG.random((100, 100, slices), np.float32)
    plots.draw([make_run(tmp_path / "one", [record(1)], {"volume": volume, "reference": volume})])
    boxes = [image.axes.get_position() for image in images(drawn[1])]
    assert len(boxes) == (3 if slices == 1 else 9)
    width, height = drawn[1].get_size_inches()
    assert min(box.height * height for box in boxes) > 0.3
    assert min(box.width * width for box in boxes) > 1
    texts = [text.get_text() for text in drawn[1].texts]
    assert any("height × 7.5" in text for text in texts) == (slices == 2)


def test_volumes_that_are_not_finite_can_be_drawn(tmp_path):
    volume = np.full((6, 5, 4), np.nan, np.float32)
    volume[0, 0, 0] = np.inf
    path = plots.slices(make_run(tmp_path / "one", [record(1)], {"volume": volume}), tmp_path / "slices.png")
    assert imread(path).std() > 0


# -- what is not there -------------------------------------------------------------------------------------------------


def test_no_rounds_is_an_error(tmp_path):
    with pytest.raises(DataError, match="no recorded rounds"):
        plots.draw([make_run(tmp_path / "one", [])])


def test_no_number_at_all_is_an_error(tmp_path):
    with pytest.raises(DataError, match="nothing to draw"):
        plots.draw([make_run(tmp_path / "one", [{"round": 0, "objective": math.nan, "seconds": {"total": 1.0}}])])


def test_no_volume_is_an_error(tmp_path, drawn):
    with pytest.raises(DataError, match="volume"):
        plots.draw([make_run(tmp_path / "one", [record(1)], {"angles": np.zeros(3)})])


def test_a_damaged_result_is_an_error(tmp_path, drawn):
    run = make_run(tmp_path / "one", [record(1)])
    run.result.write_bytes(b"not HDF5")
    with pytest.raises(DataError, match=r"result\.h5 cannot be read"):
        plots.draw([run])


def test_a_workload_that_cannot_be_loaded_still_has_curves(tmp_path, drawn):
    run = make_run(tmp_path / "one", [record(1)], {"volume": VOLUME}, workload__name="not_a_module_here:Mine")
    assert [path.name for path in plots.draw([run])] == ["convergence.png"]


def test_out_takes_the_convergence(tmp_path):
    lines = [{"round": number, "objective": 1.0, "seconds": {"total": 1.0 * number}} for number in range(3)]
    run = make_run(tmp_path / "one", lines)
    assert plots.draw([run], tmp_path / "picture") == [tmp_path / "picture.png"]
    assert imread(tmp_path / "picture.png").ndim == 3
    plots.draw([run, run], tmp_path / "picture.pdf")
    assert (tmp_path / "picture.pdf").read_bytes().startswith(b"%PDF")
    with pytest.raises(ConfigError, match=r"use \.png"):
        plots.draw([run], tmp_path / "picture.doc")
    with pytest.raises(ConfigError, match="cannot be written"):
        plots.draw([run], tmp_path / "nowhere" / "picture.png")
