"""Plans: the model of the network on closed cases, rehearsals against real runs, and the commands."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
import toy
from hypothesis import given, settings, strategies

from hpcfed import config, environment
from hpcfed.errors import ConfigError, DivergedError
from hpcfed.exchange import sums
from hpcfed.federation import Federation
from hpcfed.planning import measure, plan, profile, rehearsal
from hpcfed.planning.network import LARGE, Call, Layout, Network
from hpcfed.planning.profile import Link, Profile
from hpcfed.planning.rehearsal import Rehearsed, Stage, Tape, Troupe
from hpcfed.ranks.communicator import SerialCommunicator

MIB = 1 << 20
WITHIN = Link(latency=1e-6, message=1e-7, rank_speed=1e9, node_speed=4e9)
BETWEEN = Link(latency=1e-4, message=1e-5, rank_speed=1e8, node_speed=2e8)
MACHINE = Profile(
    hosts=("one",),
    ranks=2,
    cores=8,
    memory=1 << 34,
    memory_speed=1e10,
    disk_speed=1e8,
    within=WITHIN,
    between=BETWEEN,
)


def network(nodes: int, ranks: int, **facts: object) -> Network:
    return Network(Layout(nodes, ranks), dataclasses.replace(MACHINE, **facts))


# -- the network -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["exchange", "join", "reduce", "gather", "broadcast"])
def test_one_rank_waits_for_nobody(kind):
    assert network(1, 1).seconds(Call(kind, MIB)) == 0.0
    assert network(3, 3).seconds(Call(kind, MIB, on_node=True)) == 0.0


def test_two_ranks_take_the_latency_and_the_time_of_the_bytes():
    assert network(1, 2).seconds(Call("exchange", 10**6)) == pytest.approx(1e-6 + 1e-3)
    assert network(2, 2).seconds(Call("exchange", 0, 10**6)) == pytest.approx(1e-4 + 1e-2)


def test_each_further_message_takes_its_time():
    """Of the three messages of a rank to its own node, and two to another one, the latency has the first."""
    assert network(1, 4).seconds(Call("exchange", 0)) == pytest.approx(1e-6 + 2e-7)
    assert network(2, 4).seconds(Call("exchange", 0)) == pytest.approx(1e-4 + 1e-7 + 1e-5)


def test_many_ranks_share_what_a_node_can_send():
    """Eight ranks of a node that each send a megabyte: 8 MB at 4 GB/s; to other nodes 8 MB at 200 MB/s."""
    near = network(1, 8).seconds(Call("exchange", 10**6)) - network(1, 8).seconds(Call("exchange", 0))
    far = network(2, 16).seconds(Call("exchange", 0, 10**6)) - network(2, 16).seconds(Call("exchange", 0))
    assert near == pytest.approx(2e-3)
    assert far == pytest.approx(4e-2)


def test_a_ring_carries_all_bytes_over_each_link_but_once_between_nodes():
    """``R - 1`` steps; ``n (R - 1)/R`` bytes past each rank, of which one a node sends to another node."""
    size = 10**7
    assert network(1, 4).seconds(Call("join", size)) == pytest.approx(3e-6 + 0.75e7 / 1e9)
    assert network(4, 4).seconds(Call("join", size)) == pytest.approx(3e-4 + 0.75e7 / 1e8)
    assert network(2, 8).seconds(Call("join", size)) == pytest.approx(7e-4 + 7 / 8 * 1e7 / 1e8)


def test_a_large_reduction_sends_twice_the_bytes():
    """``2 log2 R`` steps and ``2 n (R - 1)/R`` bytes (Rabenseifner's algorithm)."""
    assert network(1, 4).seconds(Call("reduce", 10**7)) == pytest.approx(4e-6 + 1.5e7 / 1e9)


def test_small_objects_climb_a_tree():
    assert network(1, 8).seconds(Call("reduce", 8)) == pytest.approx(3e-6 + 24 / 1e9 * 2)
    assert network(8, 8).seconds(Call("gather", 0)) == pytest.approx(2 * 3e-4)


def test_ranks_that_share_cores_wait_for_their_turns():
    alone, shared = network(1, 8), network(1, 8, cores=2, crowding=3.0)
    assert (alone.waiting, shared.waiting) == (1.0, 12.0)
    call = Call("join", LARGE)
    passed = LARGE * 7 / 8 * 8 / 4e9
    assert shared.seconds(call) - passed == pytest.approx(12 * (alone.seconds(call) - passed))


@pytest.mark.parametrize("kind", ["exchange", "join", "reduce", "gather", "broadcast"])
def test_more_bytes_and_more_nodes_take_longer(kind):
    sizes = [network(4, 16).seconds(Call(kind, size, size)) for size in (0, 10**3, 10**5, 10**7)]
    nodes = [network(count, 4 * count).seconds(Call(kind, 10**7, 10**7)) for count in (2, 4, 64)]
    for times in (sizes, nodes):
        assert all(later > before for before, later in itertools.pairwise(times))


# -- rehearsals --------------------------------------------------------------------------------------------------------


def troupe(clients: int, layout: Layout, most: int) -> Troupe:
    tape = Tape()
    return Troupe(clients, communicator=Stage(layout, tape), tape=tape, most=most)


def test_a_troupe_that_is_whole_computes_the_mean():
    built = troupe(5, Layout(1, 1), 5).build(lambda number, rng: rng.standard_normal(100))
    mean = built.mean(built.map(lambda client, rng: client))
    real = Federation(5).build(lambda number, rng: rng.standard_normal(100))
    np.testing.assert_array_equal(mean, real.mean(real.map(lambda client, rng: client)))


def test_messages_have_the_sizes_of_an_ordered_mean():
    """Each rank sends ``1/R`` of each client's array to each other rank, then all pass their means round."""
    size, layout = 4096, Layout(2, 8)
    built = troupe(24, layout, 1).build(lambda number, rng: np.full(size, 3.0, np.float32))
    built.tape.clear()
    mean = built.mean(built.map(lambda client, rng: client))
    np.testing.assert_array_equal(mean, np.full(size, 3.0, np.float32))
    part = 3 * 4 * size // 8  # three clients a rank
    assert built.tape.calls == [Call("exchange", 3 * part, 4 * part), Call("join", 4 * size)]
    assert built.ledger.traffic["wire_bytes_up"] == 3 * 4 * size
    assert built.ledger.traffic["wire_bytes_down"] == 4 * size


@pytest.mark.parametrize("most", [1, 2, 4])
def test_clients_that_are_not_built_cost_as_much(most):
    """Each of four clients works for ten ticks."""
    ticks = itertools.count()
    built = troupe(12, Layout(1, 3), most).build(lambda number, rng: number)
    built.tape.clock = lambda: 0.1 * next(ticks)
    built.map(lambda client, rng: [next(ticks) for _ in range(10)])
    assert built.tape.mapping == pytest.approx(most + 0.1)
    assert built.tape.clients == pytest.approx(4 * (most + 0.1) / most)


def test_on_one_node_the_arrays_lie_in_shared_memory():
    """The ranks meet when their arrays are in place, and once more when all parts of the mean are."""
    size = 1 << 18
    built = troupe(8, Layout(1, 4), 1).build(lambda number, rng: np.full(size, 3.0, np.float32))
    built.tape.clear()
    mean = built.mean(built.map(lambda client, rng: client))
    np.testing.assert_array_equal(mean, np.full(size, 3.0, np.float32))
    assert built.tape.calls == [Call("reduce", 0)] * 2
    assert built.ledger.traffic["wire_bytes_up"] == 2 * 4 * size


def test_a_cohort_is_spread_evenly():
    built = troupe(12, Layout(1, 3), 1).build(lambda number, rng: number)
    cohort = built.sample(6)
    assert cohort.cohort == (0, 2, 4, 6, 8, 10)
    assert cohort.local == (0,)
    assert built.sample(12) is built
    assert built.sample(None) is built


def test_diagnostics_of_all_clients_are_there():
    built = troupe(6, Layout(1, 3), 1).build(lambda number, rng: number)
    assert built.collect(built.map(lambda client, rng: client)) == [0] * 6
    assert built.largest(built.map(lambda client, rng: client + 7)) == 7


def assembled(**given: object) -> config.RunConfig:
    return config.assemble({"workload": "toy:Quadratics", **given})


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_memory_is_that_of_the_arrays(ranks):
    """Each client holds its target, its momentum and the next one; two models and the passes of a sum come on top."""
    environment.return_freed_memory()  # as the command does
    count, size = 10, 8 * MIB
    run = assembled(clients=count, size=str(size // 4))
    one, two = (rehearsal.rehearse(run, Layout(1, ranks), built) for built in (1, 2))
    assert two.held - one.held == pytest.approx(3 * size, rel=0.15)  # target, old and new momentum; pages in use vary
    passes = 4 * 4 * sums.ELEMENTS_A_PASS  # sent, received, added up
    assert 5 * size <= one.held < 8 * size + passes
    made = plan.assess(run, Layout(1, ranks), MACHINE, [one, two])
    share = count // ranks
    lowest = (3 * share + 2) * size
    assert lowest < made.memory - max(one.resident, two.resident) < lowest + 3 * size + passes


@pytest.mark.parametrize("words", [{}, {"quantize": "20"}, {"algorithm": "toy:Descent", "participants": "4"}])
def test_bytes_are_those_that_a_run_counts(words, hpcfed, tmp_path):
    flags = [f"--{name}={value}" for name, value in {"rounds": 4, "out": tmp_path / "run", **words}.items()]
    env = {"PYTHONPATH": str(Path(toy.__file__).parent)}
    done = hpcfed("toy:Quadratics", *flags, **env)
    assert done.status == 0, done.err
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    made = plan.make(assembled(**words), 1, 1, MACHINE)
    rounds = records[-1]["round"]
    tolerance = 0.05 if "quantize" in words else 0.0
    assert made.bytes_up == pytest.approx(records[-1]["wire_bytes_up"] / rounds, rel=tolerance)
    assert made.bytes_down == pytest.approx(records[-1]["wire_bytes_down"] / rounds, rel=tolerance)


@pytest.mark.parametrize(
    "words",
    [
        {"quantize": "20"},
        {"quantize": "20", "route": "gather"},
        {"quantize": "20", "route": "node"},
        {"quantize": "20", "quantize_down": "20", "size": "8192"},
        {"quantize": "20", "error_feedback": True},
        {"quantize": "3", "compressor": "grid"},
        {"sum_order": "any"},
        {"algorithm": "fedavg", "step": "auto"},
    ],
    ids=str,
)
@pytest.mark.parametrize("clients", [8, 11], ids=["equal", "unequal"])
def test_whatever_travels_can_be_rehearsed(words, clients):
    made = plan.make(assembled(clients=clients, **words), 2, 4, MACHINE)
    assert plan.make(assembled(clients=clients, **words), 1, 4, MACHINE).network < made.network
    assert made.bytes_up > 0
    assert made.bytes_down > 0


# -- the plan ----------------------------------------------------------------------------------------------------------


def rehearsed(**facts: object) -> Rehearsed:
    traffic = {"wire_bytes_up": 300, "wire_bytes_down": 70}
    usual = Rehearsed(2.0, 1.0, (Call("join", 10**7),), traffic, messages=3, held=10 * MIB, resident=100 * MIB)
    return dataclasses.replace(usual, **facts)


def test_what_one_rank_does_becomes_the_plan():
    """32 clients on 16 ranks that share 8 cores, rehearsed with one and with two clients."""
    layout = Layout(1, 16)
    made = plan.assess(assembled(clients=32), layout, MACHINE, [rehearsed(), rehearsed(held=14 * MIB)])
    assert (made.compute, made.overhead) == (4.0, 2.0)
    assert made.network == Network(layout, MACHINE).seconds(Call("join", 10**7))
    assert made.seconds == made.compute + made.overhead + made.network
    assert made.memory == 114 * MIB
    assert made.memory_node == 16 * made.memory
    assert (made.bytes_up, made.bytes_down) == (3200, 16 * 70)


def test_memory_grows_with_each_client():
    plays = [rehearsed(), rehearsed(held=14 * MIB)]
    made = plan.assess(assembled(clients=1000), Layout(1, 10), MACHINE, plays)
    assert made.memory == (100 + 10 + 99 * 4) * MIB


def test_what_is_assumed_is_said():
    machine = dataclasses.replace(MACHINE, within=None, between=None, cores=1)
    notes = " ".join(plan.assess(assembled(clients=8), Layout(2, 4), machine, [rehearsed()]).notes)
    assert "within a node were not measured" in notes
    assert "between nodes were not measured" in notes
    assert "1 of 2 clients" in notes
    assert "share 1 core" in notes
    assert plan.assess(assembled(clients=4), Layout(2, 4), MACHINE, [rehearsed()]).notes == ()


def test_more_memory_than_there_is_stands_out():
    made = plan.assess(assembled(clients=4), Layout(1, 4), MACHINE, [rehearsed(held=MACHINE.memory)])
    assert "TOO MUCH" in plan.table(made)
    assert "TOO MUCH" not in plan.table(plan.assess(assembled(clients=4), Layout(1, 4), MACHINE, [rehearsed()]))


def test_a_rehearsal_that_diverges_tells_what_it_has_seen(monkeypatch):
    """Two rounds are enough; what is made up has no minimum that it must approach."""
    rounds = []

    def diverges(self, state, fed):
        rounds.append(fed.round)
        if len(rounds) == last:
            raise DivergedError("infinite")
        return state

    monkeypatch.setattr(type(assembled().algorithm.options), "round", diverges)
    last = rehearsal.ROUNDS[0] + 1
    assert rehearsal.rehearse(assembled(), Layout(1, 2), 1).clients >= 0
    last = rehearsal.ROUNDS[0]
    rounds.clear()
    with pytest.raises(DivergedError, match="infinite"):
        rehearsal.rehearse(assembled(), Layout(1, 2), 1)


@pytest.mark.parametrize(("nodes", "ranks", "what"), [(1, 6, "6 ranks for --clients 5"), (4, 3, "--nodes 4")])
def test_impossible_layouts_are_refused(nodes, ranks, what):
    with pytest.raises(ConfigError, match=what):
        plan.make(assembled(), nodes, ranks, MACHINE)


# -- profiles ----------------------------------------------------------------------------------------------------------


def test_a_profile_comes_back_as_it_was_written(tmp_path):
    path = tmp_path / "new" / "profile.json"
    for machine in (MACHINE, measure.measure(SerialCommunicator())):
        machine.write(path)
        assert profile.read(path) == machine


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"cores": 0}, "cores = 0"),
        ({"cores": -1}, "cores = -1"),
        ({"cores": 2.5}, r"cores = 2\.5"),
        ({"cores": True}, "cores = true"),
        ({"cores": None}, "cores = null"),
        ({"ranks": "2"}, 'ranks = "2"'),
        ({"memory": 10**400}, r"memory = 1000+\.\.\.0: "),
        ({"memory_speed": "fast"}, 'memory_speed = "fast"'),
        ({"memory_speed": 1e-300}, "memory_speed = 1e-300"),
        ({"disk_speed": float("nan")}, "disk_speed = NaN"),
        ({"crowding": float("inf")}, "crowding = Infinity"),
        ({"within": {"latency": 1.0}}, r"within\.message"),
        ({"within": dataclasses.asdict(WITHIN) | {"latency": -1.0}}, r"within\.latency = -1\.0"),
        ({"within": [1]}, r"within = \[1\]"),
        ({"hosts": 3}, "hosts = 3"),
        ({"hosts": []}, r"hosts = \[\]"),
        ({"timings": [{"what": "Allreduce"}]}, r"timings\.0\.size"),
        ({"timings": [{"what": 3, "size": "a", "seconds": None}]}, r"timings\.0\.what = 3"),
        ({"created": 5}, "created = 5"),
        ({"surprise": 1}, "surprise = 1"),
        ({100 * "a\nb": 1}, r"\(a\\nba"),
    ],
)
def test_a_damaged_profile_is_refused(tmp_path, change, what):
    path = tmp_path / "profile.json"
    MACHINE.write(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    refused(path, what)


def refused(path: Path, what: str) -> None:
    """It is named in a line, with what is wrong with it and what to do."""
    with pytest.raises(ConfigError, match=what) as refusal:
        profile.read(path)
    words = str(refusal.value)
    assert f"--profile {path} " in words
    assert "measure it with hpcfed doctor --measure" in words
    assert "\n" not in words
    assert len(words) < 400 + len(str(path))


@pytest.mark.parametrize(
    "text", [b"", b"[1]", b"null", b'{"hosts": ["a"', b"\xff\xfe\0", b"[" * 100_000, b"1" + b"0" * 10_000]
)
def test_a_file_that_is_no_profile_at_all(tmp_path, text):
    path = tmp_path / "profile.json"
    path.write_bytes(text)
    refused(path, "no profile of a machine")


def test_a_file_that_cannot_be_read(tmp_path):
    refused(tmp_path, "cannot be read: Is a directory")
    refused(tmp_path / "none.json", "cannot be read: No such file")


JSON = strategies.recursive(
    strategies.none() | strategies.booleans() | strategies.integers() | strategies.floats() | strategies.text(),
    lambda inner: strategies.lists(inner) | strategies.dictionaries(strategies.text(), inner),
    max_leaves=8,
)
NAMES = [field.name for kind in (Profile, Link) for field in dataclasses.fields(kind)]


@given(
    changes=strategies.dictionaries(strategies.sampled_from(NAMES) | strategies.text(), JSON),
    inside=strategies.booleans(),
    whole=JSON,
)
@settings(max_examples=300, deadline=None)
def test_whatever_json_it_is_a_profile_or_refused(tmp_path_factory, changes, inside, whole):
    """And what is accepted is written, and can be planned with."""
    path = tmp_path_factory.getbasetemp() / "arbitrary.json"
    good = json.loads(json.dumps(dataclasses.asdict(MACHINE)))
    changed = good | {"within": good["within"] | changes} if inside else good | changes
    for facts in (changed, whole):
        path.write_text(json.dumps(facts))
        try:
            machine = profile.read(path)
        except ConfigError:
            refused(path, "no profile of a machine")
            continue
        machine.write(path)
        assert profile.read(path) == machine
        assert measure.table(machine)
        calls = Network(Layout(2, 8), machine)
        assert 0 < calls.seconds(Call("join", 1 << 20, 1 << 20)) < float("inf")


@pytest.mark.parametrize("out", ["", "file/profile.json"])
def test_a_profile_that_cannot_be_written_says_so_and_leaves_nothing(tmp_path, out):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cannot be written: .*choose another --out"):
        MACHINE.write(tmp_path / out)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_folder_that_cannot_be_written_has_no_speed(monkeypatch):
    def read_only(*_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr("tempfile.TemporaryFile", read_only)
    with pytest.raises(ConfigError, match=r"Read-only file system: .*--profile") as refusal:
        measure.measure(SerialCommunicator())
    assert str(Path.cwd()) in str(refusal.value)


# -- the commands ------------------------------------------------------------------------------------------------------


def test_command(hpcfed, tmp_path):
    MACHINE.write(tmp_path / "machine.json")
    words = ["plan", "logreg", "--clients=6", "--ranks=3", f"--profile={tmp_path / 'machine.json'}"]
    done = hpcfed(*words)
    assert done.status == 0, done.err
    assert re.search(r"^run +6 clients on 3 ranks of 1 node$", done.out, re.MULTILINE)
    facts = json.loads(hpcfed(*words, "--json").out)
    assert facts["clients_a_rank"] == 2
    assert facts["seconds"] == pytest.approx(facts["compute"] + facts["overhead"] + facts["network"])
    # x of 30 weights and the dual variable of [G; I], in float64, from each client.
    assert facts["bytes_up"] % (6 * 8) == 0
    assert facts["bytes_up"] >= 6 * 8 * 60


def test_mistakes_show_as_those_of_a_run(hpcfed, tmp_path):
    for words in (["ct", "--views", "3"], ["logreg", "--mu1", "-1"]):
        ours, theirs = hpcfed("plan", *words), hpcfed(*words)
        assert ours.status == theirs.status != 0
        assert ours.err.split(" (see")[0] == theirs.err.split(" (see")[0]
        assert ours.err.count("\n") == 1
    missing = hpcfed("plan", "logreg", "--profile", str(tmp_path / "none.json"))
    assert missing.status == 2
    assert "none.json cannot be read" in missing.err
    assert "give --measure" in hpcfed("doctor", "--out", "profile.json").err


@pytest.mark.mpi
def test_measuring_on_two_ranks(mpirun, tmp_path):
    path = tmp_path / "profile.json"
    done = mpirun(2, "doctor", "--measure", "--out", str(path))
    assert done.status == 0, done.err
    found = profile.read(path)
    assert found.ranks == 2
    assert found.within is not None
    assert found.between is None
    assert {timing.what for timing in found.timings} == {"message within a node", "ordered mean", "Allreduce"}
    assert f"profile {path}" in done.out
