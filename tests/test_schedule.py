"""Groups of ranks that draw runs: how they are made, who gets what, and how they end."""

from __future__ import annotations

import math
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_communicator import on_ranks

from hpcfed.errors import ConfigError, DivergedError, Interrupted
from hpcfed.ranks.communicator import SerialCommunicator
from hpcfed.run import runner
from hpcfed.run.run_folder import RunFolder
from hpcfed.run.runner import Run
from hpcfed.studies import schedule
from hpcfed.studies.schedule import Queue, Schedule, group_sizes, longest_first, status

SMALL = st.integers(1, 40)


@given(SMALL, st.integers(0, 40), SMALL, st.none() | SMALL)
def test_groups_are_fair_and_no_rank_is_without_a_client(ranks, runs, clients, wanted):
    if wanted is not None and wanted > ranks:
        with pytest.raises(ConfigError, match=f"--groups {wanted}"):
            group_sizes(ranks, runs, clients, wanted)
        return
    sizes = group_sizes(ranks, runs, clients, wanted)
    assert len(sizes) == min(runs, wanted or math.ceil(ranks / clients))
    assert all(1 <= size <= clients for size in sizes)
    assert sum(sizes) <= ranks
    if sizes:
        assert max(sizes) - min(sizes) <= 1
        # Ranks are left over only where every group has a rank for each client.
        assert sum(sizes) == ranks or set(sizes) == {clients} or max(sizes) == clients


def test_every_number_is_drawn_once_whoever_asks(tmp_path):
    Queue(tmp_path / "queue").open()
    drawn = [[] for _ in range(4)]

    def ask(own):
        queue = Queue(tmp_path / "queue")
        for _ in range(50):
            own.append(queue.draw())
            assert own == sorted(own)

    threads = [threading.Thread(target=ask, args=[own]) for own in drawn]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(number for own in drawn for number in own) == list(range(200))


def test_the_stop_sign_is_seen_by_all_and_gone_in_the_next_job(tmp_path):
    first, other = Queue(tmp_path / "queue"), Queue(tmp_path / "queue")
    first.open()
    assert not other.stopped()
    other.stop()
    assert first.stopped()
    assert other.draw() == 0
    again = Queue(tmp_path / "queue")
    again.open()  # after a kill the folder is still there
    assert (again.stopped(), again.draw()) == (False, 0)
    again.close()
    assert not (tmp_path / "queue").exists()


def test_two_jobs_do_not_share_a_queue(tmp_path):
    code = f"""
from pathlib import Path
from hpcfed.studies.schedule import Queue
queue = Queue(Path({str(tmp_path)!r}) / "queue")
queue.open()
print("open", flush=True)
input()
"""
    other = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdout.readline() == "open\n"
    with pytest.raises(ConfigError, match="another job is at work"):
        Queue(tmp_path / "queue").open()
    other.kill()
    other.communicate()
    Queue(tmp_path / "queue").open()


# -- a schedule on simulated ranks -------------------------------------------------------------------------------------


class Play:
    """Stands for a run: notes on which ranks it was done, and ends as it is told."""

    def __init__(self, folder, ends="well", rounds=1):
        self.folder, self.ends, self.resume_from = RunFolder(folder), ends, None
        self.config = SimpleNamespace(run=SimpleNamespace(rounds=rounds))
        self.ranks = []
        folder.mkdir()

    def execute(self, group, stop):
        self.ranks.append(group.local_rank)
        group.wait()
        if self.ends == "diverged":
            raise DivergedError("too far").on_all_ranks()
        if self.ends == "failed":
            raise ConfigError("no such data").on_all_ranks()
        if self.ends == "told":
            stop.wished = True
        if any(group.gather(stop.asked())):  # as a run does: what one rank sees, all do
            raise Interrupted("told to stop").on_all_ranks()


@pytest.fixture
def play(monkeypatch, tmp_path):
    """``play(ranks, sizes, ends)``: a schedule on simulated ranks, where signals cannot be caught."""
    monkeypatch.setattr(runner, "STOP_SIGNALS", ())
    monkeypatch.setattr(schedule, "LOOK_SECONDS", 0.0)
    kept = []

    def go(ranks, sizes, ends):
        runs = tuple(Play(tmp_path / f"run{place}", each) for place, each in enumerate(ends))
        job = Schedule(runs, sizes, tmp_path / "queue", "hpcfed resume here", 0, lambda: kept.append(1))
        outcomes = [error for (error,) in on_ranks(ranks, lambda comm: (_error(job, comm),))]
        assert not (tmp_path / "queue").exists()
        assert len(kept) >= len(sizes)
        return runs, outcomes

    return go


def _error(job, communicator):
    try:
        job.execute(communicator)
    except Exception as error:
        return error
    return None


def test_each_run_is_done_once_by_one_whole_group(play):
    runs, outcomes = play(6, [2, 2, 1], ["well"] * 9)
    assert outcomes == [None] * 6
    for run in runs:
        assert sorted(run.ranks) in ([0, 1], [2, 3], [4])


def test_a_run_that_diverges_is_marked_and_the_others_are_done(play):
    runs, outcomes = play(3, [2, 1], ["well", "diverged", "well", "diverged", "well"])
    assert outcomes == [None] * 3
    assert [status(run.folder) for run in runs] == ["pending", "diverged", "pending", "diverged", "pending"]
    assert all(run.ranks for run in runs)


@pytest.mark.parametrize(
    ("ends", "kind", "words"), [("failed", ConfigError, "no such data"), ("told", Interrupted, "hpcfed resume here")]
)
def test_an_error_or_a_signal_in_one_group_ends_all_on_every_rank(play, ends, kind, words):
    runs, outcomes = play(4, [2, 1], ["well", "well", ends, *["well"] * 500])
    assert all(type(error) is kind and words in str(error) for error in outcomes)
    assert all(error.everywhere for error in outcomes)
    assert not runs[-1].ranks
    if ends == "failed":
        assert all(error.__notes__ == ["run run2"] for error in outcomes)


def test_an_error_counts_more_than_that_the_others_were_stopped(play, monkeypatch):
    both = threading.Barrier(2, timeout=30)  # neither group stops before the other has begun
    execute = Play.execute
    monkeypatch.setattr(Play, "execute", lambda *args: (both.wait(), execute(*args)))
    _, outcomes = play(2, [1, 1], ["told", "failed"])
    assert [type(error) for error in outcomes] == [ConfigError] * 2


def test_what_another_job_has_done_in_the_meantime_is_passed_over(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "STOP_SIGNALS", ())
    runs = tuple(Play(tmp_path / f"run{place}") for place in range(4))
    for place in (0, 3):
        schedule.mark_diverged(runs[place].folder, "too far")
    Schedule(runs, [1], tmp_path / "queue", "", 0, lambda: None).execute(SerialCommunicator())
    assert [len(run.ranks) for run in runs] == [0, 1, 1, 0]


def test_the_longest_runs_come_first(tmp_path):
    def run(rounds, done=None):
        config = SimpleNamespace(run=SimpleNamespace(rounds=rounds))
        return Run(config, RunFolder(tmp_path), "", None if done is None else tmp_path / f"round-{done:08d}")

    few, many, nearly_done = run(10), run(50), run(60, 55)
    assert longest_first([few, many, nearly_done]) == (many, few, nearly_done)
