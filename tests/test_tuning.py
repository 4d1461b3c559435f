"""`--tune`: short runs before the first round, on quadratics whose best step is known."""

from __future__ import annotations

import json
import re
import signal
import tomllib

import numpy as np
import pytest
import toy
from conftest import finish, start
from test_interruption import SERIAL, TESTS

from hpcfed import config
from hpcfed.errors import ConfigError
from hpcfed.federation import Federation
from hpcfed.run.result import read_attributes
from hpcfed.streams import Streams

# Clients with the curvatures 1, 2, 3, 1, 2: their mean is 1.8, and a step of 1/1.8 is at the minimum after one round.
BEST = 1 / 1.8
QUADRATICS = ["toy:Quadratics", "--algorithm", "toy:Descent", "--rounds", "12", "--size", "50"]


@pytest.fixture
def run(hpcfed, tmp_path):
    """``run(name, *options)``: run the quadratics into the folder of this name, which is returned."""

    def go(name, *options, status=0):
        done = hpcfed(*QUADRATICS, *options, "--out", str(tmp_path / name), PYTHONPATH=TESTS)
        assert done.status == status, done.err
        return done if status else tmp_path / name

    return go


def table(folder, name):
    return tomllib.loads((folder / "config.toml").read_text())[name]


def tuning(folder):
    return json.loads((folder / "tuning.json").read_text())


def digest(folder):
    return read_attributes(folder / "result.h5")["digest"]


def minimum():
    """The targets' weighted mean, and the objective of any point, in closed form."""
    problem = toy.Quadratics(size=50).build(Federation(5, Streams(0)))
    clients = problem.fed.clients.values()
    weights = np.array([client.weight for client in clients])
    targets = np.stack([client.target for client in clients]).astype(float)
    best = weights @ targets / weights.sum()
    return best, lambda x: np.mean(weights / 2 * ((x - targets) ** 2).sum(axis=1))


def test_the_known_best_step_is_chosen(run):
    folder = run("tuned", "--tune", f"step=0.05,{BEST},1.0,1.05", "--tune-rounds", "3")
    assert table(folder, "algorithm")["step"] == BEST
    assert tuning(folder)["chosen"] == {"step": BEST}
    # Gradient descent: x_k - x* = (1 - 1.8 step)^k (x_0 - x*).
    best, objective = minimum()
    for tried in tuning(folder)["tried"]:
        x = best - (1 - 1.8 * tried["step"]) ** 3 * best
        assert tried["objective"] == pytest.approx(objective(x), rel=1e-5)


def test_the_run_is_the_one_with_the_chosen_value(run):
    tuned, given = run("tuned", "--tune", "step=0.1,0.5"), run("given", "--step", "0.5")
    assert digest(tuned) == digest(given)
    assert "tune" not in table(tuned, "run")
    last = [json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1]) for folder in (tuned, given)]
    assert last[0]["seconds"]["tuning"] > 0
    assert "tuning" not in last[1]["seconds"]
    for record in last:
        del record["seconds"]
    assert last[0] == last[1], "tuning is not the method's cost"


def test_the_default_is_a_tenth_of_the_rounds_and_at_least_ten(run):
    assert tuning(run("few", "--rounds", "4", "--tune", "step"))["rounds"] == 4
    assert tuning(run("some", "--rounds", "30", "--tune", "step"))["rounds"] == 10
    assert tuning(run("many", "--rounds", "150", "--tune", "step=0.1"))["rounds"] == 15


def test_step_alone_stands_for_multiples_of_the_configured_one(run):
    folder = run("tuned", "--step", "0.4", "--tune", "step")
    assert [tried["step"] for tried in tuning(folder)["tried"]] == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6])


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        ("auto", ["0.25/L", "0.5/L", "1/L", "2/L", "4/L"]),
        ("1.2/L", ["0.3/L", "0.6/L", "1.2/L", "2.4/L", "4.8/L"]),
        ("0.1", ["0.025", "0.05", "0.1", "0.2", "0.4"]),
    ],
)
def test_multiples_of_a_step_that_is_given_by_the_lipschitz_constant(step, expected):
    assembled = config.assemble({"workload": "logreg", "algorithm": "fedavg", "step": step, "tune": "step"})
    assert config.candidates(assembled) == [{"step": text} for text in expected]


def test_several_options_make_a_grid():
    given = {"workload": "logreg", "algorithm": "fedavg", "tune": "step = 0.1, 1/L; local-steps = 1,5"}
    assert config.candidates(config.assemble(given)) == [
        {"step": "0.1", "local_steps": 1},
        {"step": "0.1", "local_steps": 5},
        {"step": "1/L", "local_steps": 1},
        {"step": "1/L", "local_steps": 5},
    ]


def test_what_diverges_is_out(run):
    folder = run("tuned", "--tune", "step=1e30,1e25,0.3", "--quantize", "5")
    assert tuning(folder)["chosen"] == {"step": 0.3}
    assert [tried["objective"] for tried in tuning(folder)["tried"][:2]] == [None, None]


def test_if_all_diverge_it_says_so(run, tmp_path):
    done = run("wild", "--tune", "step=1e30,1e31", status=1)
    assert "step=1e30,1e31" in done.err.splitlines()[-1]
    assert "diverged" in done.err.splitlines()[-1]
    assert not (tmp_path / "wild" / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("tune", "words"),
    [
        ("speed=1", "'speed' is not an option of toy:Descent"),
        ("size=3", "'size' is not an option"),
        ("step=0.1,fast", "step = fast"),
        ("step=", "step ="),
        ("", "'' is not an option"),
        ("step=1;step=2", "step is there twice"),
        ("participants", "list its values"),
        ("participants=2,9", "--participants 9 exceeds --clients 5"),
    ],
)
def test_a_grid_that_cannot_be_is_refused(tune, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        config.assemble({"workload": "toy:Quadratics", "algorithm": "toy:Descent", "tune": tune})


def test_it_is_refused_before_anything_is_built(run, tmp_path):
    done = run("none", "--tune", "speed=1", "--fail", "0", status=2)
    assert "speed" in done.err
    assert done.err.count("\n") == 1
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("given", "words"),
    [({"tune_rounds": 5}, "nothing to tune"), ({"tune": "step", "tune_rounds": 101}, "exceeds --rounds 100")],
)
def test_rounds_of_tuning_that_cannot_be(given, words):
    with pytest.raises(ConfigError, match=words):
        config.assemble({"workload": "ct", "rounds": 100, **given})


@pytest.mark.parametrize("error_feedback", [False, True])
def test_a_resumed_run_does_not_search_again_and_changes_no_bit(hpcfed, tmp_path, error_feedback):
    options = ["toy:Quadratics", "--rounds", "12", "--tune", "step=0.05,0.3", "--quantize", "4", "--batch", "1"]
    options += ["--tune-rounds", "2", "--checkpoint-every", "2", *(["--error-feedback"] if error_feedback else [])]
    assert hpcfed(*options, "--out", str(tmp_path / "whole"), PYTHONPATH=TESTS).status == 0
    stopped = tmp_path / "stopped"
    failed = hpcfed(*options, "--hurt", "kill", "--out", str(stopped), PYTHONPATH=TESTS)
    assert failed.status != 0
    assert tuning(stopped)["chosen"] == tuning(tmp_path / "whole")["chosen"]
    text = (stopped / "config.toml").read_text()
    (stopped / "config.toml").write_text(re.sub("hurt = .*", 'hurt = ""', text))
    resumed = hpcfed("resume", str(stopped), PYTHONPATH=TESTS)
    assert resumed.status == 0, resumed.err
    assert "tun" not in resumed.err
    assert digest(stopped) == digest(tmp_path / "whole")


def test_a_signal_ends_the_search(tmp_path):
    command = [*SERIAL, "toy:Quadratics", "--hurt", "slow", "--tune", "step", "--tune-rounds", "2"]
    process = start([*command, "--out", str(tmp_path / "run")], PYTHONPATH=TESTS)
    while "tuning 1 of 5" not in process.stderr.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    done = finish(process, 60)
    assert done.status == 75
    assert "while tuning" in done.err.splitlines()[-1]
    assert "tuning 5 of 5" not in done.err
    assert not (tmp_path / "run").exists()


@pytest.mark.mpi
def test_same_choice_and_bits_on_any_number_of_ranks(run, mpirun, tmp_path):
    options = ["--tune", "step=0.1,0.5,1e30;participants=2,3", "--quantize", "4"]
    alone = run("alone", *options)
    done = mpirun(3, *QUADRATICS, *options, "--out", str(tmp_path / "three"), PYTHONPATH=TESTS)
    assert done.status == 0, done.err
    assert digest(tmp_path / "three") == digest(alone)
    assert tuning(tmp_path / "three") == tuning(alone)
