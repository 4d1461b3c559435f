"""Ranks that are lost on the way: their clients are taken over, or dropped, or the run ends in good order."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path

import h5py
import numpy as np
import pytest
import test_vm_pdfp as vm
from conftest import finish, start
from test_communicator import on_ranks

from hpcfed import devices
from hpcfed.algorithms.vm_pdfp import VmPdfp
from hpcfed.config import assemble
from hpcfed.errors import ConfigError
from hpcfed.federation import Federation, PerClient
from hpcfed.operators.total_variation import TotalVariation
from hpcfed.run import recovery, state_hdf5
from hpcfed.run.checkpoint import Checkpoint, absent, latest
from hpcfed.run.result import read_attributes
from hpcfed.run.run_folder import RunFolder
from hpcfed.streams import Purpose, Streams
from hpcfed.studies import sweep
from hpcfed.workloads.ct import Ct

TESTS = str(Path(__file__).parent)
ROUNDS = 8
SERIAL = [sys.executable, "-m", "hpcfed"]
LOSING = ["losing:Quadratics", "--clients", "7", "--rounds", str(ROUNDS)]
METHODS = {
    "stateless": ["--algorithm", "losing:Descent", "--quantize", "4", "--participants", "5"],
    "stateful": ["--algorithm", "losing:Momentum", "--quantize", "4", "--batch", "1", "--checkpoint-every", "2"],
}


def tolerant(ranks, *words):
    """The command that starts ranks which may outlive one another."""
    return [str(Path(sys.executable).parent / "mpirun"), "--with-ft", "ulfm", "-n", str(ranks), *SERIAL, *words]


def run(folder, command, deaths="", **environment):
    done = finish(start([*command, "--out", str(folder)], PYTHONPATH=TESTS, HPCFED_TEST_LOSE=deaths, **environment), 90)
    assert "Traceback" not in done.err, done.err
    return done


def ours(done):
    """What we have said, without what is said of the way of messages."""
    lines = done.err.replace("\0", "\n").splitlines()
    return [line for line in lines if line.startswith("hpcfed:") and "messages of" not in line]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Folders of whole runs on one rank, by method."""
    folders = {}
    for name, options in METHODS.items():
        folders[name] = tmp_path_factory.mktemp(name) / "run"
        assert run(folders[name], [*SERIAL, *LOSING, *options]).status == 0
    return folders


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("method", "deaths", "onward"),
    [
        ("stateless", "0@round:4", ["rank 0 was lost in round 4: client 0 is taken over", "from round 4 on"]),
        ("stateless", "2@sent:8 1@recording:3", ["rank 1 was lost in round 3", "rank 2 was lost in round 8"]),
        ("stateless", "3@build 0@result", ["rank 3 was lost before the first round", "from the first round", "rank 0"]),
        ("stateful", "1@init", ["rank 1 was lost", "clients 1-2 are taken over", "from the first round"]),
        ("stateful", "0@completing:4", ["rank 0 was lost in round 4", "from round 2's checkpoint"]),
        ("stateful", "0@round:2 2@round:5 3@sent:5", ["rank 0", "from the first round", "from round 4's checkpoint"]),
        ("stateful", "3@writing:6 1@round:5 2@recording:8", ["rank 1", "round 4's", "rank 3", "rank 2"]),
    ],
)
def test_clients_of_lost_ranks_are_taken_over(tmp_path, undisturbed, method, deaths, onward):
    folder = tmp_path / "run"
    done = run(folder, tolerant(4, *LOSING, *METHODS[method], "--on-failure", "takeover"), deaths)
    whole = undisturbed[method]
    assert read_attributes(folder / "result.h5")["digest"] == read_attributes(whole / "result.h5")["digest"]
    said = "\n".join(ours(done))
    for words in onward:
        assert words in said, done.err
    assert done.out.count("run folder") == 1  # who speaks at the end has learned that it is the first now
    records, expected = RunFolder(folder).history(), RunFolder(whole).history()
    assert [record["round"] for record in records] == list(range(ROUNDS + 1))
    for record, other in zip(records, expected, strict=True):
        for name in ("objective", "participants", "paper_bits_up", "paper_bits_down"):
            assert record[name] == other[name], name
    with h5py.File(folder / "result.h5") as file:
        assert len(file["provenance"].attrs["losses"].splitlines()) == len(deaths.split())


@pytest.mark.mpi
@pytest.mark.parametrize("environment", [{}, {"HPCFED_TEST_ALONE": "1"}], ids=["together", "alone"])
def test_a_rank_that_somebody_has_stopped_is_taken_for_lost(tmp_path, undisturbed, environment):
    """It cannot wake up later: it is ended, and so mpirun, which would wait for it, ends, too."""
    folder = tmp_path / "run"
    launch = [*SERIAL, "launch", "-n", "3", "--on-failure", "takeover", *LOSING, *METHODS["stateless"]]
    done = run(folder, launch, "0@round:4", HPCFED_TEST_SIGNAL="SIGSTOP", **environment)
    assert done.status == 0
    assert "--with-ft ulfm" in done.err
    whole = undisturbed["stateless"]
    assert read_attributes(folder / "result.h5")["digest"] == read_attributes(whole / "result.h5")["digest"]


def minimizer(clients, size=1003):
    """Of the toy's mean over these clients, in closed form."""
    streams = Streams(0)
    targets = {i: streams.generator(Purpose.DATA, client=i).standard_normal(size).astype(np.float32) for i in clients}
    weights = {i: 1.0 + i % 3 for i in clients}
    return sum(weights[i] * targets[i].astype(float) for i in clients) / sum(weights.values())


@pytest.mark.mpi
@pytest.mark.parametrize("method", ["losing:Descent", "losing:Forgetful"])
def test_the_federation_goes_on_without_the_clients_of_a_lost_rank(tmp_path, method):
    """It ends at the minimizer over those left; who resumes it does not find the others again."""
    folder = tmp_path / "run"
    words = [*LOSING, "--algorithm", method, "--rounds", "80", "--checkpoint-every", "3", "--on-failure", "drop"]
    done = run(folder, tolerant(4, *words), "1@round:5")
    begun = 3 if method == "losing:Forgetful" else 4
    assert any("the federation goes on without clients 1-2" in line for line in ours(done)), done.err
    records = RunFolder(folder).history()
    assert [record["round"] for record in records] == list(range(81))
    assert [record.get("clients") for record in records] == (begun + 1) * [None] + (80 - begun) * [5]
    assert [record["participants"] for record in records[1:]] == begun * [7] + (80 - begun) * [5]
    expected = minimizer([0, 3, 4, 5, 6])
    with h5py.File(folder / "result.h5") as file:
        np.testing.assert_allclose(file["x"], expected, atol=1e-5)
    assert not np.allclose(expected, minimizer(range(7)), atol=1e-2)
    assert absent(latest(folder / "checkpoints")) == (1, 2)
    resumed = finish(start([*SERIAL, "resume", str(folder), "--rounds", "90"], PYTHONPATH=TESTS), 60)
    assert resumed.status == 0
    assert RunFolder(folder).history()[-1]["clients"] == 5
    with h5py.File(folder / "result.h5") as file:
        np.testing.assert_allclose(file["x"], expected, atol=1e-5)


@pytest.mark.mpi
class TestStopping:
    """Without --on-failure the loss of a rank is the end, from which the run can be resumed."""

    words = (*LOSING, *METHODS["stateful"])

    @pytest.mark.parametrize("tolerates", [False, True])
    def test_it_ends_with_status_1_and_says_how_to_resume(self, tmp_path, undisturbed, tolerates):
        folder = tmp_path / "run"
        launch = [*SERIAL, "launch", "-n", "3", *self.words]
        done = run(folder, tolerant(3, *self.words) if tolerates else launch, "0@round:5")
        assert tolerates or done.status == 1  # mpirun alone reports what it likes
        said = [line for line in ours(done) if "hpcfed resume" in line]
        assert len(said) == 1, done.err
        assert f"go on with hpcfed resume {folder}" in said[0]
        if tolerates:
            assert said[0].startswith("hpcfed: rank 0 lost: ")
        assert not RunFolder(folder).finished
        resumed = finish(start([*SERIAL, "resume", str(folder)], PYTHONPATH=TESTS), 60)
        assert resumed.status == 0, resumed.err
        digest = read_attributes(folder / "result.h5")["digest"]
        assert digest == read_attributes(undisturbed["stateful"] / "result.h5")["digest"]

    def test_ranks_that_cannot_outlive_one_another_are_refused(self, mpirun, tmp_path):
        done = mpirun(2, *self.words, "--on-failure", "takeover", "--out", str(tmp_path / "run"), PYTHONPATH=TESTS)
        assert done.status == 2
        assert len(ours(done)) == 1
        assert "hpcfed launch --on-failure takeover" in ours(done)[0]
        assert not (tmp_path / "run").exists()


def test_one_process_may_be_told_what_does_not_concern_it(tmp_path, undisturbed):
    folder = tmp_path / "run"
    assert run(folder, [*SERIAL, *LOSING, *METHODS["stateless"], "--on-failure", "drop"]).status == 0
    digest = read_attributes(folder / "result.h5")["digest"]
    assert digest == read_attributes(undisturbed["stateless"] / "result.h5")["digest"]


class TestRefusals:
    def test_clients_whose_estimates_are_in_a_sum_cannot_leave(self):
        with pytest.raises(ConfigError, match="--on-failure drop: what clients of mfcgd keep"):
            assemble({"workload": "maml", "algorithm": "mfcgd", "on_failure": "drop"})

    def test_a_study_has_no_ranks_to_lose(self, tmp_path):
        file = tmp_path / "s.toml"
        file.write_text(
            '[base.workload]\nname = "logreg"\n[base.run]\non_failure = "takeover"\n[sweep]\nstep = [0.1, 0.2]\n'
        )
        with pytest.raises(ConfigError, match="--on-failure takeover is for single runs"):
            sweep.read(file, tmp_path / "s").prepare("", 1)


# -- clients that have left --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_no_verb_asks_clients_that_have_left(ranks):
    def verbs(communicator):
        fed = Federation(7, communicator=communicator, weights=(1, 2, 3, 4, 5, 6, 7), absent=(1, 2, 6))
        fed = fed.build(lambda client, rng: client)
        values = fed.map(lambda client, rng: np.full(3, float(client)))
        sampled = [fed.at(number).sample(3).cohort for number in range(30)]
        return (
            fed.mean(values).tolist(),
            fed.mean(values, weighted=True).tolist(),
            fed.total(values).tolist(),
            fed.largest(values).tolist(),
            fed.collect(fed.map(lambda client, rng: client)),
            sampled,
            fed.sample(5).cohort,
            len(fed.local),
        )

    for mean, weighted, total, largest, collected, sampled, many, local in on_ranks(ranks, verbs):
        assert collected == [0, 3, 4, 5] == list(many)
        np.testing.assert_allclose(mean, 3 * [12 / 4])
        np.testing.assert_allclose(weighted, 3 * [(4 * 3 + 5 * 4 + 6 * 5) / (1 + 4 + 5 + 6)])
        np.testing.assert_allclose(total, 3 * [12])
        np.testing.assert_allclose(largest, 3 * [5])
        assert {client for cohort in sampled for client in cohort} == {0, 3, 4, 5}
        assert all(len(cohort) == 3 for cohort in sampled)
        assert local == 4 // ranks


def test_stored_gradients_of_those_who_left_are_forgotten():
    """What is known of the mean gradient is that of the others, and the steps settle where their sum is stationary."""
    method, everyone = VmPdfp(participants=2, metric="plain"), vm.federation()
    state = method.init(everyone.at(0), np.zeros(vm.SHAPE))
    for number in range(1, 30):
        state = method.round(state, everyone.at(number))
    left = replace(everyone, absent=(1,), cohort=())
    state = method.forget(state, left.at(29))
    np.testing.assert_allclose(state.mean, np.mean([state.stored[client] for client in (0, 2, 3)], axis=0))
    for number in range(30, 1500):
        state = method.round(state, left.at(number))
    gradient = np.mean([left.clients[client].gradient(state.x) for client in (0, 2, 3)], axis=0)
    pull = left.clients[0].regularizer.adjoint(state.v)
    assert np.linalg.norm(gradient + pull) < 1e-6 * np.linalg.norm(pull)


def test_a_scan_is_measured_by_those_who_are_left():
    """Its objective is their mean, and all of its slices and rows are still looked at."""
    workload = Ct(shape=(12, 12, 3), views=10, detector="18", clients=5, mu=0.1)
    problem = workload.build(Federation(5, streams=Streams(0), absent=(0, 2)))
    x = np.random.default_rng(1).random((12, 12, 3), dtype=np.float32)
    metrics = problem.metrics(x, problem.fed.beside(0))
    clients = problem.fed.clients.values()
    tv = TotalVariation((12, 12, 3), 0.1).value(x)
    np.testing.assert_allclose(metrics["objective"], np.mean([client.value(x) for client in clients]) + tv, rtol=1e-6)
    squared = np.mean((x - problem.truth) ** 2, dtype=float)
    np.testing.assert_allclose(metrics["psnr"], -10 * np.log10(squared), rtol=1e-6)


# -- where the others go on --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Inner:
    number: int
    nothing: None = None


@dataclass(frozen=True)
class State:
    x: np.ndarray
    inner: Inner
    own: PerClient


@pytest.mark.parametrize("piece", [7, 1 << 27])
def test_who_is_a_round_behind_is_sent_the_state(monkeypatch, piece):
    """By messages of any size, with what the rounds have cost; nobody goes on if nobody knows of a round."""
    monkeypatch.setattr(recovery, "PIECE", piece)
    rounds = [4, None, 5, 4, 5]
    x = np.random.default_rng(0).standard_normal((3, 2)).astype(np.float32)

    def meet(communicator):
        number = rounds[communicator.rank]
        state = State(x + (number or 0), Inner(number or 0), PerClient({communicator.rank: np.empty(0)}))
        own = None if number is None else Checkpoint(number, state, {}, {"samples": 10 * number})
        assert recovery.furthest(communicator, None, State, devices.Device()) is None
        return recovery.furthest(communicator, own, State, devices.Device())

    for found in on_ranks(5, meet):
        assert (found.round, found.totals, found.state.inner) == (5, {"samples": 50}, Inner(5))
        np.testing.assert_array_equal(found.state.x, x + np.float32(5))
        assert found.state.x.dtype == np.float32


def test_a_loss_in_words():
    loss = recovery.Loss((3,), (6, 7, 8), 17)
    assert loss.told(False, "from round 15's checkpoint") == (
        "rank 3 was lost in round 17: clients 6-8 are taken over by the others, from round 15's checkpoint"
    )
    assert recovery.Loss((1, 4, 5), (2,), 0).told(True, "from the first round") == (
        "ranks 1, 4-5 were lost before the first round: the federation goes on without client 2, from the first round"
    )


def test_what_clients_keep():
    """Empty arrays are nothing: methods that need no memory in some configuration have such."""
    kept = [
        (PerClient({0: np.ones(2)}), True),
        (PerClient({0: np.empty(0), 1: np.empty((3, 0))}), False),
        (PerClient({}), False),
        (PerClient({0: Inner(3)}), True),
    ]
    for own, keeps in kept:
        assert state_hdf5.keeps(State(np.ones(3), Inner(1), own)) is keeps
