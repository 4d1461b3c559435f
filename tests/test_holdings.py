"""The picture of who holds what shows the counts that are in the result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import tomli_w
from matplotlib.figure import Figure
from matplotlib.image import imread

from hpcfed import plots
from hpcfed.errors import DataError
from hpcfed.plots.holdings import holdings
from hpcfed.run.run_folder import RunFolder


def make_run(path: Path, counts: Any, classes: Any = None) -> RunFolder:
    path.mkdir()
    tables = {"workload": {"name": "ct", "clients": len(counts)}, "algorithm": {"name": "fpdfp"}}
    (path / "config.toml").write_text(tomli_w.dumps(tables))
    with h5py.File(path / "result.h5", "w") as file:
        dataset = file.create_dataset("holdings", data=counts)
        if classes is not None:
            dataset.attrs["classes"] = classes
    return RunFolder(path)


def bars(axes: Any) -> list[list[tuple[float, float]]]:
    """From where to where each class reaches in each bar, gaps left out."""
    stacks = []
    for patch in axes.patches:
        values, edges, baseline = patch.get_data()
        wide = np.diff(edges) > 0.5
        stacks.append(list(zip(np.asarray(baseline)[wide].tolist(), np.asarray(values)[wide].tolist(), strict=True)))
    return stacks


def names(figure: Figure) -> list[str]:
    (legend,) = figure.legends
    return [text.get_text() for text in legend.get_texts()]


def test_it_is_one_of_the_pictures():
    assert plots.PICTURES["holdings"] is holdings


def test_bars_are_the_counts_and_their_shares(tmp_path, drawn):
    run = make_run(tmp_path / "one", [[3, 1], [0, 5], [2, 2]], [-1.0, 1.0])
    assert holdings(run, tmp_path / "h.png") == tmp_path / "h.png"
    (figure,) = drawn
    upper, lower = figure.axes
    assert bars(upper) == [[(0, 3), (0, 0), (0, 2)], [(3, 4), (0, 5), (2, 4)]]
    assert bars(lower) == [[(0, 0.75), (0, 0), (0, 0.5)], [(0.75, 1), (0, 1), (0.5, 1)]]
    assert sorted(names(figure)) == ["-1", "1"]
    assert list(lower.get_xticks()) == [0, 1, 2]
    assert upper.patches[0].get_facecolor() != upper.patches[1].get_facecolor()


def test_between_few_bars_there_are_gaps(tmp_path, drawn):
    holdings(make_run(tmp_path / "one", [[3, 1], [0, 5]]), tmp_path / "h.png")
    values, edges, baseline = drawn[0].axes[0].patches[1].get_data()
    assert len(values) == 3
    assert edges[2] - edges[1] > 0.1
    assert values[1] == baseline[1] == 0


def test_many_clients_are_sorted(tmp_path, drawn):
    counts = np.random.default_rng(0).integers(1, 100, (1000, 2))
    holdings(make_run(tmp_path / "one", counts, [0, 1]), tmp_path / "h.png")
    upper, lower = drawn[0].axes
    tops = [top for _, top in bars(upper)[-1]]
    assert tops == sorted(counts.sum(axis=1), reverse=True)
    shares = [top for _, top in bars(lower)[0]]
    assert shares == sorted(shares, reverse=True)
    np.testing.assert_allclose(sorted(shares), sorted(counts[:, 0] / counts.sum(axis=1)))


def test_many_classes_are_grouped(tmp_path, drawn):
    counts = np.arange(3 * 25).reshape(3, 25)
    holdings(make_run(tmp_path / "one", counts), tmp_path / "h.png")
    (figure,) = drawn
    assert len(names(figure)) == 10
    assert "0 to 2" in names(figure)
    assert [top for _, top in bars(figure.axes[0])[-1]] == counts.sum(axis=1).tolist()


def test_classes_may_have_names(tmp_path, drawn):
    holdings(make_run(tmp_path / "one", [[3, 1]], ["cat", "dog"]), tmp_path / "h.png")
    assert sorted(names(drawn[0])) == ["cat", "dog"]


def test_a_client_without_samples_has_no_bar(tmp_path, drawn):
    holdings(make_run(tmp_path / "one", [[0, 0], [1, 1]]), tmp_path / "h.png")
    assert bars(drawn[0].axes[1])[1] == [(0, 0), (0.5, 1)]


def test_the_file_is_a_picture(tmp_path):
    path = holdings(make_run(tmp_path / "one", [[3, 1], [0, 5]]), tmp_path / "h.png")
    assert imread(path).std() > 0.05


def test_what_is_missing_is_said(tmp_path):
    with pytest.raises(DataError, match="no table holdings"):
        holdings(make_run(tmp_path / "flat", [1, 2]), tmp_path / "h.png")
    with pytest.raises(DataError, match="names 3 classes for 2 columns"):
        holdings(make_run(tmp_path / "odd", [[1, 2]], [1, 2, 3]), tmp_path / "h.png")
    run = make_run(tmp_path / "cut", [[1, 2]])
    run.result.write_bytes(run.result.read_bytes()[:100])
    with pytest.raises(DataError, match="cannot be read"):
        holdings(run, tmp_path / "h.png")
