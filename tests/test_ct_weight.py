"""``hpcfed ct --mu auto`` against the truth that it does not see, and what is kept of the search."""

from __future__ import annotations

import tomllib

import h5py
import numpy as np
import pytest
from test_ct import facts

from hpcfed.errors import ConfigError
from hpcfed.federation import Federation
from hpcfed.streams import Streams
from hpcfed.workloads.ct import Ct
from hpcfed.workloads.ct_levels import solve
from hpcfed.workloads.ct_weight import FARTHEST, _lowest, _next, weighted

RUN = ["--shape", "16,16,9", "--views", "30", "--detector", "24", "--clients", "5", "--device", "cpu", "--rounds", "4"]


def build(**options):
    workload = Ct(clients=5, mu="auto", **options)
    return workload.build(Federation(5, Streams(1)))


@pytest.mark.parametrize("noise", [0.02, 1.0])
def test_it_is_near_the_best_weight_and_the_misfit_is_the_noise(noise):
    """Within 1 dB of the best of a grid by the true volume; and, about the right weight, 1/2 |Ax - b|^2 is less than
    the noise's own energy by what the volume takes up of it, which is little."""
    problem = build(shape=(64, 64, 8), views=170, detector=96, noise=noise)
    x, _ = solve(problem, problem.start(), 60)
    found = problem.metrics(x, problem.fed)
    grid = []
    for factor in 2.0 ** np.arange(2, -4, -1):
        other = weighted(problem, problem.workload.mu * factor)
        x, _ = solve(other, x, 25)
        grid.append(other.metrics(x, other.fed)["psnr"])
    assert found["psnr"] > max(grid) - 1
    assert grid[0] < max(grid) - 2
    assert grid[-1] < max(grid) - 2
    assert 0.8 < found["misfit"] / (noise / 2 * 170 * 96 * 8) < 1.05


def test_a_cone_beam_finds_it_on_a_coarser_level():
    given = {"shape": (32, 32, 12), "views": 60, "geometry": "cone", "detector": "48,24", "noise": 0.1}
    problem = build(**given)
    psnr = {}
    for factor in (0.25, 0.5, 1.0, 2.0, 4.0):
        other = weighted(problem, problem.workload.mu * factor)
        psnr[factor] = other.metrics(solve(other, other.start(), 60)[0], other.fed)["psnr"]
    assert psnr[1.0] > max(psnr.values()) - 1.2


@pytest.mark.parametrize("least", [-6.3, -0.2, 0.0, 3.45, 4.2, 7.4])
def test_the_search_finds_the_least_of_a_parabola(least):
    errors = {}
    while (place := _next(errors)) is not None:
        errors[place] = 5 + 0.3 * (place - least) ** 2
    assert _lowest(errors) == pytest.approx(least)
    assert len(errors) <= 12


def test_the_search_ends_where_errors_only_fall():
    errors = {}
    while (place := _next(errors)) is not None:
        errors[place] = -float(place)
    assert _lowest(errors) == FARTHEST
    errors = {}
    while (place := _next(errors)) is not None:
        errors[place] = float(place)
    assert _lowest(errors) == -FARTHEST


def test_too_few_views():
    with pytest.raises(ConfigError, match="--mu auto: 10 views for 5 clients"):
        build(shape=(16, 16, 2), views=10, detector=24)


def test_clients_of_unequal_numbers_of_views():
    """11 views for 5 clients: one of them has three, of which one is set aside."""
    assert build(shape=(16, 16, 2), views=11, detector=24).workload.mu > 0


def test_the_run_folder_keeps_what_was_found(hpcfed, tmp_path):
    finished = hpcfed("ct", *RUN, "--mu", "auto", "--out", str(tmp_path / "r"))
    assert finished.status == 0, finished.err
    assert "predicts unseen views best" in finished.err
    kept = tomllib.loads((tmp_path / "r/config.toml").read_text())["workload"]
    assert (tmp_path / "r/mu.png").stat().st_size > 5000
    again = hpcfed("resume", str(tmp_path / "r"), "--rounds", "6")
    assert again.status == 0, again.err
    assert "predicts" not in again.err
    with h5py.File(tmp_path / "r/result.h5") as file:
        assert file["mu"].attrs["found"] == kept["mu"]
        weights, errors = file["mu"][()].T
    assert weights[errors.argmin()] / 2 < kept["mu"] < 2 * weights[errors.argmin()]
    number = hpcfed("run", str(tmp_path / "r/config.toml"), "--out", str(tmp_path / "n"))
    assert number.status == 0, number.err
    assert not (tmp_path / "n/mu.png").exists()
    assert not (tmp_path / "n/journal.jsonl").exists()
    assert facts(tmp_path / "n")["digest"] == facts(tmp_path / "r")["digest"]


def test_another_word_is_refused(hpcfed, tmp_path):
    finished = hpcfed("ct", *RUN, "--mu", "best", "--out", str(tmp_path / "r"))
    assert finished.status == 2
    assert "--mu best" in finished.err
    assert finished.err.count("\n") == 1
