"""`hpcfed compare`: several runs from one file."""

from __future__ import annotations

import json
import re
import shutil
import statistics
from pathlib import Path

import numpy as np
import pytest

from hpcfed.plots.curves import _statistics

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


def test_the_table_says_when_a_metric_got_as_far_as_asked(compare, tmp_path):
    done = compare(FILE + "\n[until]\nobjective = 15.5\n")
    first = []
    for seed in (3, 4):
        lines = (tmp_path / "out" / f"plain-seed{seed}" / "metrics.jsonl").read_text().splitlines()
        first.append(next(record["round"] for record in map(json.loads, lines) if record["objective"] <= 15.5))
    assert max(first) > min(first) > 0
    header, *rows = (re.split(r"\s{2,}", line) for line in (tmp_path / "out" / "compare.txt").read_text().splitlines())
    cells = {row[0]: dict(zip(header, row, strict=True)) for row in rows}
    assert cells["plain"]["round at objective 15.5"].startswith(f"{statistics.fmean(first):g} ± ")
    assert cells["wild"]["round at objective 15.5"] == "- (0 of 2)"
    assert done.status == 0


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
    assert "0/2, 2 diverged" in next(line for line in table.splitlines() if line.startswith("wild"))
    alone = hpcfed(
        "toy:Quadratics", "--size", "20", "--rounds", "6", "--seed", "4", "--quantize", "2", "--out",
        str(tmp_path / "alone"), PYTHONPATH=HERE,
    )  # fmt: skip
    assert alone.status == 0, alone.err
    assert last(tmp_path / "alone")["objective"] == last(out / "2-levels-seed4")["objective"]

    before = {path: path.stat().st_mtime_ns for path in out.glob("*/*")}  # of what has diverged, too
    again = hpcfed("resume", str(out), PYTHONPATH=HERE)
    assert again.status == 0, again.err
    assert table in again.out
    assert {path: path.stat().st_mtime_ns for path in out.glob("*/*")} == before
    rows = json.loads(hpcfed("show", str(out), "--json").out)["comparison"]
    assert [row["objective"] for row in rows if row["variant"] == "plain"] == objectives
    assert "diverged" in json.loads((out / "wild-seed3" / "diverged.json").read_text())["reason"]


def test_groups_are_drawn_by_mean_and_standard_deviation():
    """At the rounds that all runs have; a metric that one of them lacks is not a number there."""
    values = {0: [5.0, 7.0, 6.0], 10: [1.0, 2.0, 4.5], 20: [0.5, 0.7, 0.9]}
    histories = [
        [
            {"round": number, "objective": row[run], "paper_bits_up": 10 * number, "seconds": {"total": row[run] + 1}}
            for number, row in values.items()
            if not (run == 1 and number == 20)
        ]
        for run in range(3)
    ]
    histories[2][1]["psnr"] = 30.0
    means, deviations = _statistics(histories)
    assert [record["round"] for record in means] == [0, 10]
    np.testing.assert_allclose([record["objective"] for record in means], [6.0, 2.5])
    np.testing.assert_allclose([record["objective"] for record in deviations], [1.0, np.std([1, 2, 4.5], ddof=1)])
    np.testing.assert_allclose([record["seconds.total"] for record in means], [7.0, 3.5])
    assert all(np.isnan(record["psnr"]) for record in means)


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
        (FILE.replace("quantize = 2", "momentum = 2"), "[variants.2 levels]: --momentum"),
        (FILE.replace("[variants.plain]", '[variants."2?levels"]'), "choose a name that differs more"),
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
