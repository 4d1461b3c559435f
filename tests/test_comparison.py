"""`hpcfed compare`: several runs from one file."""

from __future__ import annotations

import json
import shutil
import statistics
from pathlib import Path

import pytest

HERE = str(Path(__file__).parent)
FILE = """
seeds = [3, 4]

[base.run]
rounds = 6

[base.workload]
name = "toy:Quadratics"
size = 20

[variants.plain]

[variants."2 levels"]
quantize = 2

[variants.wild]
step = 1e30
"""


@pytest.fixture
def compare(hpcfed, tmp_path):
    """``compare(text)``: run ``hpcfed compare`` on a file with this text, always in the same folder."""

    def go(text=FILE):
        (tmp_path / "study.toml").write_text(text)
        return hpcfed("compare", str(tmp_path / "study.toml"), "--out", str(tmp_path / "out"), PYTHONPATH=HERE)

    return go


def last(folder: Path) -> dict:
    return json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])


def test_variants_and_seeds_are_run_and_tabulated(compare, hpcfed, tmp_path):
    done = compare()
    assert done.status == 0, done.err
    out = tmp_path / "out"
    assert (out / "compare.png").stat().st_size > 5000
    names = {path.name for path in out.iterdir() if path.is_dir()}
    assert names == {f"{name}-seed{seed}" for name in ("plain", "2-levels", "wild") for seed in (3, 4)}
    table = (out / "compare.txt").read_text()
    assert table in done.out
    objectives = [last(out / f"plain-seed{seed}")["objective"] for seed in (3, 4)]
    assert f"{statistics.fmean(objectives):.5g} ± {statistics.stdev(objectives):.2g}" in table
    assert "0/2" in next(line for line in table.splitlines() if line.startswith("wild"))
    alone = hpcfed(
        "toy:Quadratics", "--size", "20", "--rounds", "6", "--seed", "4", "--quantize", "2", "--out",
        str(tmp_path / "alone"), PYTHONPATH=HERE,
    )  # fmt: skip
    assert alone.status == 0, alone.err
    assert last(tmp_path / "alone")["objective"] == last(out / "2-levels-seed4")["objective"]


def test_it_goes_on_where_it_stopped(compare, tmp_path):
    text = FILE.partition("[variants.wild]")[0]
    assert compare(text).status == 0
    kept, redone = tmp_path / "out/plain-seed3", tmp_path / "out/plain-seed4"
    before = (kept / "result.h5").stat().st_mtime_ns
    expected = last(redone)["objective"]
    shutil.rmtree(redone)
    again = compare(text)
    assert again.status == 0, again.err
    assert (kept / "result.h5").stat().st_mtime_ns == before
    assert last(redone)["objective"] == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "at least one table [variants.NAME]"),
        ("speed = 3", "speed is no part of a comparison"),
        (FILE.replace("[3, 4]", "[]"), "seeds = []"),
        (FILE.replace("[3, 4]", "[-1]"), "seeds = [-1]"),
        (FILE.replace("quantize = 2", "quantize = -2"), "--quantize -2"),
        (FILE.replace("quantize = 2", "momentum = 2"), "--momentum"),
    ],
)
def test_a_file_that_is_not_sound_runs_nothing(compare, tmp_path, text, words):
    done = compare(text)
    assert done.status == 2
    assert words in done.err
    assert done.err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_the_folder_of_another_comparison_is_refused(compare):
    text = FILE.partition("[variants.wild]")[0]
    assert compare(text).status == 0
    refused = compare(text.replace("size = 20", "size = 21"))
    assert refused.status == 2
    assert "holds another comparison" in refused.err
