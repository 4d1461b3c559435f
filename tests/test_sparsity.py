"""The picture of a pruned network shows the kept weights that are in the result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import pytest
import tomli_w
from matplotlib.image import imread

from hpcfed import plots
from hpcfed.errors import DataError
from hpcfed.plots.sparsity import sparsity
from hpcfed.run.run_folder import RunFolder
from hpcfed.workloads.prune import Prune


def make_run(path: Path, layers: Any, names: Any = None) -> RunFolder:
    path.mkdir()
    tables = {"workload": {"name": "prune", "clients": 8}, "algorithm": {"name": "fedds"}}
    (path / "config.toml").write_text(tomli_w.dumps(tables))
    with h5py.File(path / "result.h5", "w") as file:
        dataset = file.create_dataset("layers", data=layers)
        if names is not None:
            dataset.attrs["names"] = names
    return RunFolder(path)


def test_it_is_drawn_of_every_pruned_network():
    assert plots.PICTURES["sparsity"] is sparsity
    assert "sparsity" in Prune.pictures


def test_bars_are_the_kept_shares(tmp_path, drawn):
    run = make_run(tmp_path / "one", [[3, 4], [1, 20], [500, 2000]], ["first", "4.conv1", "last"])
    assert sparsity(run, tmp_path / "s.png") == tmp_path / "s.png"
    (figure,) = drawn
    (axes,) = figure.axes
    assert [bar.get_height() for bar in axes.patches] == [0.75, 0.05, 0.25]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["first", "4.conv1", "last"]
    assert axes.lines[0].get_ydata()[0] == 504 / 2024
    assert {"4", "20", "2k"} <= {text.get_text() for text in axes.texts}
    assert "504 of 2,024 weights are kept" in figure.get_suptitle()


def test_layers_without_names_are_numbered(tmp_path, drawn):
    sparsity(make_run(tmp_path / "one", [[1, 2], [2, 2]]), tmp_path / "s.png")
    assert [label.get_text() for label in drawn[0].axes[0].get_xticklabels()] == ["0", "1"]


def test_it_is_written(tmp_path):
    path = sparsity(make_run(tmp_path / "one", [[3, 4], [1, 20]], ["a", "b"]), tmp_path / "s.png")
    assert imread(path).std() > 0


@pytest.mark.parametrize("layers", [[1.0, 2.0], [[1, 2, 3]]])
def test_another_table_is_an_error(tmp_path, layers):
    with pytest.raises(DataError, match="no table layers"):
        sparsity(make_run(tmp_path / "one", layers), tmp_path / "s.png")


def test_names_that_do_not_fit_are_an_error(tmp_path):
    with pytest.raises(DataError, match="names 1 layers, but its table has 2"):
        sparsity(make_run(tmp_path / "one", [[1, 2], [2, 2]], ["a"]), tmp_path / "s.png")


def test_no_result_is_an_error(tmp_path):
    run = make_run(tmp_path / "one", [[1, 2]])
    run.result.unlink()
    with pytest.raises(DataError, match="cannot be read"):
        sparsity(run, tmp_path / "s.png")
