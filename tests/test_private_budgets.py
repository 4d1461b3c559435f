"""Budgets of private methods: calibrated noise, ledgers that miss no release, also after a crash, and reports."""

from __future__ import annotations

import dataclasses
import json
import signal
import sys

import h5py
import numpy as np
import pytest
from record_problems import DELTA, METHODS, PRIVATE, Holder, federation, go, points

from hpcfed import config
from hpcfed.algorithms.dp_sgd import DpSgd
from hpcfed.algorithms.dp_shuffle import DpShuffle
from hpcfed.algorithms.interleaved import Interleaved
from hpcfed.algorithms.plain import Plain
from hpcfed.algorithms.priv_pub import PrivPub
from hpcfed.algorithms.pub_priv import PubPriv
from hpcfed.algorithms.public_only import PublicOnly
from hpcfed.cli import commands
from hpcfed.errors import ConfigError, DataError
from hpcfed.privacy import poisson
from hpcfed.privacy.calibration import epsilon_of_rho
from hpcfed.ranks.communicator import SerialCommunicator
from hpcfed.run import checkpoint
from hpcfed.run.journal import Journal
from hpcfed.run.runner import STOP_SIGNALS

# -- budgets ----------------------------------------------------------------------------------------------------------


def planned(method, *clients, **options):
    fed = federation(*clients)
    return dataclasses.replace(method, **options).init(fed.at(0), np.zeros(clients[0].private.shape[1]))


@pytest.mark.parametrize(
    ("method", "sigmas"),
    [
        (DpShuffle(), (756.60, 161.09, 85.97)),
        (PubPriv(), (659.59, 140.44, 74.95)),
        (PrivPub(), (650.85, 138.58, 73.95)),
        (Interleaved(), (47.756, 10.168, 5.426)),
    ],
)
def test_noise_for_budgets_of_the_paper(method, sigmas):
    """C = 10, K = 50, delta = 1e-6, p = 0.75, n = 1000, in the convention G = C."""
    client = Holder(points(1000), points(1000))
    for epsilon, sigma in zip((1, 5, 10), sigmas, strict=True):
        state = planned(method, client, clip=10.0, epsilon=float(epsilon), epochs=50)
        assert state.plan.noise == pytest.approx(sigma, rel=2e-4)


@pytest.mark.parametrize(("epsilon", "noise"), [(1.0, 1.233), (5.0, 0.629), (10.0, 0.525)])
def test_noise_of_dp_sgd(epsilon, noise):
    """n = 1000, batch 1, K = 50, delta = 1e-6: published for Poisson samples, records added or removed."""
    found = poisson.multiplier(1e-3, 50_000, epsilon, DELTA)
    assert found == pytest.approx(noise, abs=1e-3)
    assert poisson.epsilon(1e-3, found, 50_000, DELTA) <= epsilon
    assert poisson.epsilon(1.0, 2.0, 0, DELTA) == 0


@pytest.mark.parametrize("method", METHODS)
def test_every_client_keeps_to_the_budget(method):
    """Clients of unequal sizes: the one with the dearest epochs spends all of it, nobody more."""
    clients = [Holder(points(count), points(50)) for count in (4, 9, 40)]
    fed, private = federation(*clients), method(clip=0.5, epsilon=2.0, epochs=5)
    state = go(private, fed, np.zeros(3), 5)
    spent = [ledger.epsilon(DELTA) for ledger in state.ledgers.values()]
    assert max(spent) == pytest.approx(2.0, rel=1e-9)
    assert max(spent) <= 2.0
    assert (min(spent) < 1.9) == (method is Interleaved)
    assert [len(ledger.entries) for ledger in state.ledgers.values()] == [5, 5, 5]


def test_sigma_may_be_given():
    state = go(DpShuffle(clip=2.0, sigma=10.0, epochs=3), federation(Holder(points(9), points(1))), np.zeros(3), 3)
    assert state.ledgers[0].rho == pytest.approx(3 * 2 * (2.0 / 10.0) ** 2)


def test_a_loss_that_is_not_known_to_be_harmless_pays_in_full():
    """Softmax regression, interleaved: the noise and the ledger are those of epochs without public steps."""
    client = Holder(np.ones((8, 2)), np.ones((8, 2)), "softmax", smoothness=1.0)
    fed, method = federation(client), Interleaved(clip=1.0, epsilon=1.0, epochs=3, eta="50")
    state = go(method, fed, np.zeros(4), 3)
    plain = planned(DpShuffle(), client, clip=1.0, epsilon=1.0, epochs=3)
    assert state.plan.noise == pytest.approx(plain.plan.noise)
    assert not state.ledgers[0].amplified.any()
    facts = json.loads(method.report(state, fed.at(3)).files["privacy.json"])
    assert facts["epsilon"] == pytest.approx(1.0)
    assert "softmax" in facts["amplification"][0]
    assert facts["clients"][0]["amplified_epochs"] == 0


@pytest.mark.parametrize(("eta", "refused"), [("2.1/L", True), ("0.53", True), ("1.9/L", False), ("auto", False)])
def test_steps_that_may_expand_are_refused_where_privacy_depends_on_it(eta, refused):
    client = Holder(points(8), points(8), smoothness=4.0)
    options = {"clip": 1.0, "epsilon": 1.0, "epochs": 3, "eta": eta}
    if refused:
        with pytest.raises(ConfigError, match=r"2/L = 0\.5.*expand"):
            planned(Interleaved(), client, **options)
    else:
        assert planned(Interleaved(), client, **options).plan.eta <= 0.5
    planned(DpShuffle(), client, **options)  # whose privacy does not


def test_the_automatic_step_is_short_where_there_is_noise():
    client = Holder(points(100), points(100), smoothness=2.0)
    quiet, loud = (planned(DpShuffle(), client, clip=1.0, epochs=5, sigma=sigma).plan for sigma in (1e-6, 100.0))
    assert quiet.eta == quiet.public_eta == loud.public_eta == pytest.approx(1 / (100 * 2.0))
    # The minimum of the bound's leading terms, by brute force.
    etas = np.geomspace(1e-7, 1e-1, 20_001)
    terms = (1.0 / 2.0) ** 2 / (etas * 500) + 2 * (1 + np.log(5)) * etas * 3 * 100.0**2
    assert loud.eta == pytest.approx(etas[terms.argmin()], rel=1e-2)
    assert planned(Plain(), client).plan.eta == pytest.approx(1 / 200)


@pytest.mark.parametrize(
    ("method", "client", "options", "word"),
    [
        (DpShuffle(), {}, {"clip": None}, "--clip"),
        (DpSgd(), {}, {"clip": None}, "--clip"),
        (DpShuffle(), {}, {"epsilon": 0.0}, "epsilon = 0"),
        (Interleaved(), {}, {"epsilon": -1.0}, "epsilon = -1"),
        (DpShuffle(), {}, {"delta": 1.0}, "delta = 1"),
        (DpSgd(), {}, {"delta": 1.5}, "delta = 1.5"),
        (DpShuffle(), {}, {"epochs": None}, "--epochs"),
        (DpShuffle(), {"private": points(0)}, {}, "client 0 has no private"),
        (Interleaved(), {"private": points(0)}, {}, "client 0 has no private"),
        (Interleaved(), {"public": points(0)}, {}, "client 0 has no public"),
        (PubPriv(), {"public": points(0)}, {"switch": 1}, "client 0 has no public"),
        (PrivPub(), {"public": points(0)}, {}, "client 0 has no public"),
        (PrivPub(), {}, {"switch": 0}, "--switch 0"),
        (PubPriv(), {}, {"switch": 3}, "--switch 3"),
        (DpShuffle(), {"smoothness": np.inf}, {}, "--eta auto"),
    ],
)
def test_what_is_no_private_run(method, client, options, word):
    holder = dataclasses.replace(Holder(points(8), points(8)), **client)
    given = {"clip": 1.0, "epochs": 3} | options
    with pytest.raises(ConfigError) as refused:
        planned(method, holder, **given)
    assert word in str(refused.value)
    assert "\n" not in str(refused.value)
    assert refused.value.everywhere


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"epsilon": 1.0, "sigma": 1.0}, "--sigma"),
        ({"eta": "fast"}, "--eta fast"),
    ],
)
def test_options_that_contradict_themselves(options, word):
    with pytest.raises(ConfigError, match=word):
        DpShuffle(**options)
    with pytest.raises(ConfigError, match="--public-eta fast"):
        PubPriv(public_eta="fast")


def test_no_noise_is_no_option():
    with pytest.raises(ConfigError, match="--sigma 0"):
        config.assemble({"workload": "private", "algorithm": "dp-shuffle", "sigma": "0"})
    # Nor for somebody who does not use the command line.
    fed, method = federation(Holder(points(4), points(1))), DpShuffle(clip=1.0, sigma=1.0, epochs=1)
    state = method.init(fed.at(0), np.zeros(3))
    silenced = dataclasses.replace(state, plan=dataclasses.replace(state.plan, noise=0.0))
    with pytest.raises(ConfigError, match="sigma = 0"):
        method.round(silenced, fed.at(1))


def test_a_missing_package_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(ConfigError, match=r"pip install 'hpcfed\[privacy\]'"):
        planned(DpSgd(), Holder(points(8), points(1)), clip=1.0, epochs=2)


# -- rounds and budgets -----------------------------------------------------------------------------------------------


def test_the_budget_is_for_the_rounds_of_the_run():
    given = {"workload": "private", "algorithm": "interleaved", "clip": "1"}
    run = config.assemble({**given, "rounds": "30"})
    assert run.algorithm.options.epochs == 30
    assert config.assemble({**given, "rounds": "30", "epochs": "40"}).algorithm.options.epochs == 40
    with pytest.raises(ConfigError, match="--rounds 50 exceeds --epochs 40"):
        config.assemble({**given, "rounds": "50", "epochs": "40"})
    with pytest.raises(ConfigError, match="--tune"):
        config.assemble({**given, "rng": "secure", "tune": "eta"})


@pytest.mark.parametrize("method", PRIVATE)
def test_no_round_comes_after_the_budget(method):
    fed = federation(Holder(points(8), points(8)))
    private = method(clip=1.0, sigma=1.0, epochs=2)
    state = go(private, fed, np.zeros(3), 2)
    with pytest.raises(ConfigError, match="round 3 exceeds --epochs 2"):
        private.round(state, fed.at(3))


@pytest.mark.parametrize("method", METHODS)
def test_a_resumed_run_goes_on_bit_by_bit_ledgers_included(method, tmp_path):
    fed = federation(*[Holder(points(count), points(20)) for count in (6, 9)])
    private = method(clip=1.0, epsilon=3.0, epochs=4)
    halfway = go(private, fed, np.zeros(3), 2)
    whole = go(private, fed, None, 2, halfway, 3)
    checkpoint.save(tmp_path, checkpoint.Checkpoint(2, halfway, {}, {}), fed)
    loaded = checkpoint.load(tmp_path / "round-00000002", private.state_type, fed).state
    resumed = go(private, fed, None, 2, loaded, 3)
    assert resumed.x.tobytes() == whole.x.tobytes()
    assert resumed.plan == whole.plan
    for client, ledger in whole.ledgers.items():
        assert resumed.ledgers[client].entries.dtype == ledger.entries.dtype
        assert resumed.ledgers[client].entries.tobytes() == ledger.entries.tobytes()
        assert ledger.epsilon(DELTA) <= 3.0


class TestCrashes:
    """Rounds 1 and 2 are saved, 3 and 4 are done, the process dies, and a new one goes on from what was saved."""

    def crashed(self, method, folder, keep=None):
        clients = [Holder(points(6), points(6)), Holder(points(8), points(8))]
        path = folder / "journal.jsonl"
        fed = federation(*clients, journal=Journal(path))
        saved = go(method, fed, np.zeros(3), 2)
        go(method, fed, None, 2, saved, 3)
        if keep is not None:
            path.write_bytes(keep(path.read_bytes()))
        return go(method, federation(*clients, journal=Journal(path)), None, 3, saved, 3)

    @pytest.mark.parametrize("method", METHODS)
    def test_fresh_noise_is_charged_again(self, method, tmp_path):
        private = method(clip=1.0, epsilon=1.0, epochs=5, rng="secure")
        state = self.crashed(private, tmp_path)
        for ledger in state.ledgers.values():
            assert ledger.entries["round"].tolist() == [1, 2, 3, 4, 3, 4, 5]
        costs = state.ledgers[0].entries["rho"]
        assert costs[4] == costs[2]
        assert costs[5] == costs[3]
        assert max(ledger.epsilon(DELTA) for ledger in state.ledgers.values()) > 1.1
        lines = [json.loads(line) for line in (tmp_path / "journal.jsonl").read_text().splitlines()]
        assert [line["round"] for line in lines] == [1, 2, 3, 4, 3, 4, 5]

    def test_the_same_noise_is_the_same_release(self, tmp_path):
        state = self.crashed(DpShuffle(clip=1.0, epsilon=1.0, epochs=5), tmp_path)
        assert state.ledgers[0].entries["round"].tolist() == [1, 2, 3, 4, 5]
        assert not (tmp_path / "journal.jsonl").exists()

    def test_a_line_that_was_cut_off_announced_nothing(self, tmp_path):
        private = DpShuffle(clip=1.0, epsilon=1.0, epochs=5, rng="secure")
        state = self.crashed(private, tmp_path, keep=lambda text: text[:-3])
        assert state.ledgers[0].entries["round"].tolist() == [1, 2, 3, 3, 4, 5]

    def test_a_journal_that_was_lost_is_missed(self, tmp_path):
        private = DpShuffle(clip=1.0, epsilon=1.0, epochs=5, rng="secure")
        with pytest.raises(DataError, match="journal"):
            self.crashed(private, tmp_path, keep=lambda text: b"")

    def test_a_journal_that_was_damaged_is_refused(self, tmp_path):
        private = DpShuffle(clip=1.0, epsilon=1.0, epochs=5, rng="secure")
        with pytest.raises(DataError, match="damaged"):
            self.crashed(private, tmp_path, keep=lambda text: b"?\n" + text)

    def test_of_dp_sgd(self, tmp_path):
        private = DpSgd(clip=1.0, sigma=1.0, epochs=5, rng="secure")
        assert self.crashed(private, tmp_path).charged == 7
        assert self.crashed(dataclasses.replace(private, rng="seeded"), tmp_path).charged == 5

    def test_the_charge_is_on_the_disk_before_anything_is_sent(self, tmp_path):
        """A client that fails in its pass: nothing was sent, and the charge stands."""
        path = tmp_path / "journal.jsonl"
        client = Holder(points(6), points(6))
        fed = federation(client, journal=Journal(path))
        private = DpShuffle(clip=1.0, epsilon=1.0, epochs=5, rng="secure")
        state = private.init(fed.at(0), np.zeros(3))
        noted = []
        client.noisy_pass = lambda *args: noted.append(path.read_text()) or args[0]
        private.round(state, fed.at(1))
        assert noted == ['{"round": 1}\n']


# -- reports ----------------------------------------------------------------------------------------------------------


def reported(method, rounds=3):
    fed = federation(*[Holder(points(count), points(20)) for count in (6, 9, 9)])
    said = method.report(go(method, fed, np.zeros(3), rounds), fed.at(rounds))
    return said, json.loads(said.files["privacy.json"])


@pytest.mark.parametrize("method", METHODS)
def test_a_report_says_what_is_claimed_and_what_is_not(method):
    said, facts = reported(method(clip=1.0, epsilon=2.0, epochs=3))
    assert facts["epsilon"] == pytest.approx(2.0)
    assert facts["private"] is False
    assert "NO privacy" in said.text
    assert facts["adjacency"] == "replace one record"
    for text in (said.text, json.dumps(facts)):
        for word in (
            "threat",
            "each client's iterate",
            "metrics.jsonl",
            "not_claimed" if text != said.text else "not claimed",
        ):
            assert word in text
    assert [each["client"] for each in facts["clients"]] == [0, 1, 2]
    assert facts["epsilon"] == max(each["epsilon"] for each in facts["clients"])
    table = said.arrays["privacy"]
    assert table["client"].tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    for client, ledger in facts["ledgers"].items():
        own = table[table["client"] == int(client)]
        assert [entry["rho"] for entry in ledger["entries"]] == own["rho"].tolist()
        assert epsilon_of_rho(own["rho"].sum(), DELTA) == pytest.approx(facts["clients"][int(client)]["epsilon"])
    _, secure = reported(method(clip=1.0, epsilon=2.0, epochs=3, rng="secure"))
    assert secure["private"] is True


def test_other_reports():
    said, facts = reported(DpSgd(clip=1.0, sigma=5.0, epochs=3))
    assert facts["adjacency"] == "add or remove one record"
    assert "add or remove one record" in said.text
    assert facts["epsilon"] == max(each["epsilon"] for each in facts["clients"]) > 0
    said, facts = reported(Plain())
    assert facts["private"] is False
    assert "NONE" in said.text
    said, facts = reported(PublicOnly())
    assert facts["epsilon"] == 0
    assert "metrics.jsonl" in said.text


@pytest.fixture
def command(capsys):
    """``command(*args)``: the command line in this process; what it printed."""
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}

    def go(*args):
        session = commands.Session(SerialCommunicator(), {})
        commands.commands.main(list(args), prog_name="hpcfed", standalone_mode=False, obj=session)
        return capsys.readouterr().out

    yield go
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_a_run_leaves_its_report_and_goes_on_after_a_crash(command, tmp_path, caplog):
    """The last checkpoint is lost with the result: the rounds after the one before are charged twice."""
    caplog.set_level("INFO", "hpcfed")
    folder = tmp_path / "run"
    size = ("--records", "40", "--public-records", "40", "--dimension", "3", "--clients", "2")
    private = ("--algorithm", "dp-shuffle", "--clip", "1", "--rng", "secure", "--checkpoint-every", "3")
    command("private", *size, *private, "--rounds", "5", "--out", str(folder))
    assert "replace one record" in caplog.text
    facts = json.loads((folder / "privacy.json").read_text())
    assert facts["epsilon"] == pytest.approx(1.0)
    assert facts["private"] is True
    with h5py.File(folder / "result.h5") as file:
        assert file["privacy"]["round"].tolist() == [1, 2, 3, 4, 5] * 2
    for lost in (folder / "checkpoints" / "round-00000005").iterdir():
        lost.unlink()
    (folder / "result.h5").unlink()
    with pytest.raises(ConfigError, match="--rounds 9 exceeds --epochs 5"):
        command("resume", str(folder), "--rounds", "9")
    command("resume", str(folder))
    assert "2 rounds that an interrupted attempt had released" in caplog.text
    facts = json.loads((folder / "privacy.json").read_text())
    assert [each["private_epochs"] for each in facts["clients"]] == [7, 7]
    assert facts["epsilon"] > 1.1


def test_the_commands_and_the_workload_share_a_name(command):
    shown = command("private", "--help")
    assert "hpcfed private budget" in shown
    assert "hpcfed private audit" in shown
    budget = command(
        "private", "budget", "--epsilon", "1", "--delta", "1e-6", "--epochs", "50", "--clip", "1", "--json"
    )
    assert json.loads(budget)["sigma"] == pytest.approx(75.6601, rel=1e-5)
    listed = [line.split()[0] for line in command("--help").splitlines() if line.startswith("  ") and line.split()]
    assert listed.count("private") == 1
