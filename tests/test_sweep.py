"""`hpcfed sweep`: what is run, what the table says, and that a killed sweep goes on to the same numbers."""

from __future__ import annotations

import csv
import itertools
import json
import os
import signal
import sys
import time
from pathlib import Path

import h5py
import numpy as np
import pytest
from conftest import finish, mpi_command, start

from hpcfed.cli.studies import _part
from hpcfed.errors import ConfigError, DataError
from hpcfed.plots.sensitivity import best_by_value, gather, sensitivity
from hpcfed.run.run_folder import RunFolder
from hpcfed.studies.sweep import read, settings

HERE = str(Path(__file__).parent)
BASE = """
[base.run]
rounds = 6
checkpoint_every = "2"

[base.workload]
name = "toy:Quadratics"
size = 20

[base.algorithm]
name = "toy:Momentum"
"""
GRID = (
    BASE
    + """
[sweep]
seeds = [3, 4]
step = [0.2, 1e30]
quantize = [0, 8]
"""
)
# A round takes half a second in one process.
SLOW = BASE.replace("rounds = 6", "rounds = 4") + 'hurt = "slow"\n\n[sweep]\nseeds = [1, 2]\nstep = [0.1, 0.2, 0.3]\n'


def table_of(folder: Path) -> list[dict[str, str]]:
    with (folder / "sweep.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def digests(folder: Path) -> list[str]:
    return [row["digest"] for row in table_of(folder)]


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """The folder of a sweep done in one process, and what it printed."""
    place = tmp_path_factory.mktemp("swept")
    (place / "study.toml").write_text(GRID)
    command = [sys.executable, "-m", "hpcfed", "sweep", str(place / "study.toml"), "--out", str(place / "out")]
    done = finish(start(command, PYTHONPATH=HERE), 120)
    assert done.status == 0, done.err
    return place / "out", done


# -- what is asked for -------------------------------------------------------------------------------------------------


def test_a_grid_is_every_combination_and_a_list_goes_in_step():
    table = {"a": [1, 2], "b": ["x", "y"], "seeds": [5]}
    assert list(settings(table, "")) == [{"a": a, "b": b} for a, b in itertools.product([1, 2], "xy")]
    assert list(settings({**table, "mode": "list"}, "")) == [{"a": 1, "b": "x"}, {"a": 2, "b": "y"}]


def test_random_values_are_spread_as_asked_and_the_same_each_time():
    table = {
        "mode": "random", "samples": 4000, "sweep_seed": 7, "choice": ["x", "y"], "flat": {"low": -1, "high": 3.0},
        "log": {"low": 1e-4, "high": 1.0, "log": True}, "whole": {"low": 1, "high": 4},
        "scale": {"low": 1, "high": 7, "log": True},
    }  # fmt: skip
    drawn = list(settings(table, ""))
    assert drawn == list(settings(table, ""))
    assert drawn != list(settings({**table, "sweep_seed": 8}, ""))
    columns = {name: np.array([each[name] for each in drawn]) for name in drawn[0]}
    # Five standard errors of a mean of 4000.
    assert abs(np.mean(columns["choice"] == "x") - 0.5) < 5 * 0.5 / np.sqrt(4000)
    assert abs(columns["flat"].mean() - 1) < 5 * 4 / np.sqrt(12 * 4000)
    assert abs(np.log10(columns["log"]).mean() + 2) < 5 * 4 / np.sqrt(12 * 4000)
    assert (columns["flat"].min(), columns["flat"].max()) == pytest.approx((-1, 3), abs=0.02)
    for value in (1, 2, 3, 4):
        assert abs(np.mean(columns["whole"] == value) - 0.25) < 5 * np.sqrt(0.25 * 0.75 / 4000)
    # A logarithmic range of whole numbers: k has the share log((k+1)/k) / log(8).
    for value in range(1, 8):
        share = np.log((value + 1) / value) / np.log(8)
        assert abs(np.mean(columns["scale"] == value) - share) < 5 * np.sqrt(share * (1 - share) / 4000)


@pytest.mark.parametrize(
    ("sweep", "words"),
    [
        ("", "needs a table [sweep]"),
        ("[sweep]\nstep = 0.1", "[sweep] step = 0.1: give a list"),
        ("[sweep]\nstep = []", "[sweep] step = []"),
        ("[sweep]\nstep = {low = 1, high = 2}", "give a list"),
        ('[sweep]\nmode = "random"\nstep = {low = 2, high = 1}', "range such as"),
        ('[sweep]\nmode = "random"\nstep = {low = 0, high = 1, log = true}', "range such as"),
        ('[sweep]\nmode = "random"\nsamples = 0\nstep = [1]', "samples = 0"),
        ('[sweep]\nmode = "best"\nstep = [1]', "mode = 'best'"),
        ("[sweep]\nsamples = 3\nstep = [1]", 'samples belongs to mode = "random"'),
        ('[sweep]\nmode = "list"\nstep = [1, 2]\nbatch = [1]', "step 2, batch 1"),
        ("[sweep]\nseeds = [-1]\nstep = [1]", "seeds = [-1]"),
        ("[sweep]\nseed = [1]", "write seeds"),
        ("[sweep]\nstep = [0.1]\n[other]", "other is no part of a sweep"),
    ],
)
def test_a_file_that_is_not_sound_is_refused_in_a_line(tmp_path, sweep, words):
    (tmp_path / "study.toml").write_text(BASE + sweep)
    with pytest.raises(ConfigError) as refused:
        read(tmp_path / "study.toml", tmp_path / "out")
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("sweep", "groups", "words"),
    [
        ('[sweep]\nstep = [0.1, "fast"]', None, "step=fast: --step fast"),
        ("[sweep]\nmomentum = [1]", None, "--momentum"),
        ("[sweep]\nstep = [0.1]", 2, "--groups 2"),
    ],
)
def test_a_mistake_is_noticed_before_anything_is_made(tmp_path, sweep, groups, words):
    (tmp_path / "study.toml").write_text(BASE + sweep)
    with pytest.raises(ConfigError) as refused:
        read(tmp_path / "study.toml", tmp_path / "out").prepare("", 1, groups)
    assert words in str(refused.value)
    assert [path.name for path in tmp_path.iterdir()] == ["study.toml"]


@pytest.mark.parametrize("text", ["3/2", "0/2", "half"])
def test_a_part_that_is_none_is_refused(text):
    with pytest.raises(ConfigError, match=f"--part {text}"):
        _part(text)


def test_a_folder_that_holds_something_else_is_refused(tmp_path):
    (tmp_path / "study.toml").write_text(GRID)
    (tmp_path / "out").mkdir()
    study = read(tmp_path / "study.toml", tmp_path / "out")
    study.prepare("", 1)  # an empty one is as good as none
    study.prepare("", 1)
    (tmp_path / "other.toml").write_text(GRID.replace("0.2", "0.3"))
    with pytest.raises(ConfigError, match="holds another sweep"):
        read(tmp_path / "other.toml", tmp_path / "out").prepare("", 1)
    for folder, words in ((tmp_path, "is not empty"), (tmp_path / "study.toml", "cannot be made")):
        with pytest.raises(ConfigError, match=words):
            read(tmp_path / "study.toml", folder).prepare("", 1)
    assert {path.name for path in tmp_path.iterdir()} == {"study.toml", "other.toml", "out"}


# -- what comes out ----------------------------------------------------------------------------------------------------


def test_each_setting_and_seed_is_a_run_like_any_other(swept, hpcfed, tmp_path):
    folder, done = swept
    rows = table_of(folder)
    assert len(rows) == len({row["run"] for row in rows}) == 8
    assert {(row["step"], row["quantize"], row["seed"]) for row in rows} == set(
        itertools.product(("0.2", "1e+30"), ("0", "8"), ("3", "4"))
    )
    for row in rows:
        assert row["status"] == ("diverged" if row["step"] == "1e+30" else "finished")
        assert bool(row["digest"]) == (row["status"] == "finished")
        assert (folder / row["run"] / "diverged.json").exists() == (row["status"] == "diverged")
    assert "8 of 8 runs done" in done.err
    row = next(row for row in rows if (row["step"], row["quantize"], row["seed"]) == ("0.2", "8", "4"))
    alone = hpcfed(
        "toy:Quadratics", "--size", "20", "--rounds", "6", "--step", "0.2", "--quantize", "8", "--seed", "4",
        "--out", str(tmp_path / "alone"), PYTHONPATH=HERE,
    )  # fmt: skip
    assert f"digest {row['digest']}" in alone.out
    last = RunFolder(tmp_path / "alone").history()[-1]
    assert float(row["objective"]) == last["objective"]
    assert int(row["round"]) == 6
    assert float(row["seconds"]) > 0


def test_the_table_is_hdf5_too(swept):
    folder, _ = swept
    rows = table_of(folder)
    with h5py.File(folder / "sweep.h5") as file:
        assert list(file.attrs["columns"]) == list(rows[0])
        assert file.attrs["sweep"] == GRID
        np.testing.assert_array_equal(file["step"], [float(row["step"]) for row in rows])
        np.testing.assert_array_equal(file["objective"], [float(row["objective"] or "nan") for row in rows])
        assert [text.decode() for text in file["digest"]] == [row["digest"] for row in rows]


def test_show_and_plot_take_the_folder(swept, hpcfed, tmp_path):
    folder, done = swept
    study = read(folder / "sweep.toml", folder)
    assert "8 runs, 4 finished, 4 diverged" in study.table()
    assert study.table() in done.out
    rows = json.loads(hpcfed("show", str(folder), "--json").out)["sweep"]
    assert [row["digest"] or "" for row in rows] == digests(folder)
    assert (folder / "sensitivity.png").stat().st_size > 5000
    picture = tmp_path / "bits.png"
    assert hpcfed("plot", str(folder), "--metric", "paper_bits_up", "--out", str(picture)).status == 0
    assert picture.stat().st_size > 5000
    with pytest.raises(DataError, match=r"beauty: there are .*objective"):
        study.draw(picture, "beauty")


def test_nothing_is_run_twice(swept, hpcfed):
    folder, _ = swept
    before = {path: path.stat().st_mtime_ns for path in folder.glob("*/*")}
    again = hpcfed("resume", str(folder), PYTHONPATH=HERE)
    assert again.status == 0, again.err
    assert {path: path.stat().st_mtime_ns for path in folder.glob("*/*")} == before
    refused = hpcfed("resume", str(folder), "--rounds", "9", PYTHONPATH=HERE)
    assert refused.status == 2
    assert "is a sweep" in refused.err


def test_parts_share_a_folder(swept, hpcfed, tmp_path):
    (tmp_path / "study.toml").write_text(GRID)
    out = tmp_path / "out"
    for part in ("2/2", "1/2"):
        done = hpcfed("sweep", str(tmp_path / "study.toml"), "--out", str(out), "--part", part, PYTHONPATH=HERE)
        assert done.status == 0, done.err
        assert "4 of 4 runs done" in done.err
        assert (out / "sensitivity.png").exists() == (part == "1/2")
    assert digests(out) == digests(swept[0])


# -- what is drawn -----------------------------------------------------------------------------------------------------


def rows_of(values):
    """Rows of two options, two seeds; None has diverged."""
    return [
        {
            "status": "diverged" if value is None else "finished",
            "a": a,
            "b": b,
            "seed": seed,
            "psnr": value,
            "loss": value,
        }
        for (a, b), both in values.items()
        for seed, value in enumerate(both)
    ]


def test_the_strong_points_are_the_best_of_the_other_options():
    rows = rows_of({(1, "x"): (4.0, 6.0), (1, "y"): (1.0, 2.0), (2, "x"): (3.0, None), (2, "y"): (None, None)})
    rows.append({"status": "pending", "a": 9, "b": "x", "seed": 0})
    low = best_by_value(gather(rows, ["a", "b"], "loss"), "a", "loss")
    assert {key: (each.options["b"], each.mean, each.diverged) for key, each in low.items()} == {
        1: ("y", 1.5, 0),
        2: ("x", 3.0, 1),
    }
    assert low[1].deviation == pytest.approx(np.sqrt(0.5))
    high = best_by_value(gather(rows, ["a", "b"], "psnr"), "a", "psnr")
    assert high[1].mean == 5.0


def test_a_sweep_without_a_number_says_so(tmp_path):
    with pytest.raises(DataError, match="none has finished"):
        sensitivity(rows_of({(1, "x"): (None, None)}), ["a", "b"], tmp_path / "picture.png", "loss")
    with pytest.raises(DataError, match="nothing but the seed"):
        sensitivity(rows_of({(1, "x"): (1.0, 2.0)}), [], tmp_path / "picture.png", "loss")


# -- on ranks, killed --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The digests of the slow sweep, which does not depend on being slow."""
    place = tmp_path_factory.mktemp("undisturbed")
    (place / "study.toml").write_text(SLOW.replace('hurt = "slow"', ""))
    command = [sys.executable, "-m", "hpcfed", "sweep", str(place / "study.toml"), "--out", str(place / "out")]
    assert finish(start(command, PYTHONPATH=HERE), 120).status == 0
    return digests(place / "out")


def half_way(command: list[str], folder: Path):
    """The sweep's process when at least one run is finished and another half-done."""
    process = start(command, PYTHONPATH=HERE)
    deadline = time.monotonic() + 60
    while not (list(folder.glob("*/result.h5")) and unfinished(folder)):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.02)
    return process


def unfinished(folder: Path) -> list[Path]:
    found = [path.parents[1] for path in folder.glob("*/checkpoints/round-*2")]
    return [path for path in found if not (path / "result.h5").exists()]


def test_a_killed_sweep_goes_on(tmp_path, undisturbed):
    (tmp_path / "study.toml").write_text(SLOW)
    out = tmp_path / "out"
    command = [sys.executable, "-m", "hpcfed", "sweep", str(tmp_path / "study.toml"), "--out", str(out)]
    process = half_way(command, out)
    os.kill(process.pid, signal.SIGKILL)
    finish(process, 30)
    kept = {path: path.stat().st_mtime_ns for path in out.glob("*/result.h5")}
    assert len(kept) < 6
    half = {path: (path / "metrics.jsonl").read_text().splitlines()[:3] for path in unfinished(out)}
    assert half
    again = finish(start(command, PYTHONPATH=HERE), 120)
    assert again.status == 0, again.err
    assert f"{len(kept) + 1} of 6 runs done" in again.err
    assert digests(out) == undisturbed
    assert all(path.stat().st_mtime_ns == before for path, before in kept.items())
    for path, lines in half.items():  # rounds 0 to 2 were not done again: their seconds are those of the first time
        assert (path / "metrics.jsonl").read_text().splitlines()[:3] == lines


@pytest.mark.mpi
class TestOnRanks:
    def test_groups_give_the_same_bits(self, swept, mpirun, tmp_path):
        (tmp_path / "study.toml").write_text(GRID)
        out = tmp_path / "out"
        done = mpirun(
            4, "sweep", str(tmp_path / "study.toml"), "--out", str(out), "--groups", "2", PYTHONPATH=HERE
        )  # fmt: skip
        assert done.status == 0, done.err
        assert done.err.count("runs done") == 8
        assert digests(out) == digests(swept[0])

    @pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGKILL])
    def test_half_way_it_is_stopped_and_goes_on(self, tmp_path, undisturbed, number):
        (tmp_path / "study.toml").write_text(SLOW)
        out = tmp_path / "out"
        process = half_way(
            [*mpi_command(4), "sweep", str(tmp_path / "study.toml"), "--out", str(out), "--groups", "2"], out
        )
        os.kill(process.pid, number)
        done = finish(process, 60)
        if number == signal.SIGUSR1:
            assert done.status == 75, done.err
            assert done.err.count("hpcfed:") == 1
            assert f"go on with hpcfed resume {out}" in done.err
            assert not list(out.glob(".queue-*1"))
        states = [row["status"] for row in table_of(out)] if (out / "sweep.csv").exists() else []
        assert "pending" in states or number == signal.SIGKILL
        time.sleep(1.0 if number == signal.SIGKILL else 0.0)  # the ranks notice that mpirun is gone
        again = finish(start([*mpi_command(3), "resume", str(out), "--groups", "3"], PYTHONPATH=HERE), 120)
        assert again.status == 0, again.err
        assert digests(out) == undisturbed
