"""Sentinels: they end ranks that somebody has stopped, leave suspended jobs alone, and end with their ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from hpcfed.ranks.sentinel import LOOK_SECONDS, LOOKS, Sentinel

# A process that is taken for a rank, among others with the numbers that it reads.
RANK = """
import signal, sys, time
from hpcfed.ranks.faults import Neighbours, _process

own, *numbers = map(int, sys.stdin.readline().split())
here, _ = _process()
neighbours = Neighbours(own, [(here, number) for number in numbers])
neighbours.watch()
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
    signal.signal(number, lambda *_: None)
print(neighbours._sentinel.pid, flush=True)
time.sleep(100)
"""


class Rank:
    """Such a process, in a process group of its own as mpirun starts ranks, and its sentinel."""

    def __init__(self):
        pipe = subprocess.PIPE
        self.process = subprocess.Popen([sys.executable, "-c", RANK], stdin=pipe, stdout=pipe, process_group=0)
        self.number = self.process.pid

    def guard(self, own, ranks):
        self.process.stdin.write(f"{own} {' '.join(str(rank.number) for rank in ranks)}\n".encode())
        self.process.stdin.flush()
        self.sentinel = int(self.process.stdout.readline())

    def signal(self, *signals):
        for number in signals:
            self.process.send_signal(number)

    def signal_group(self, *signals):
        for number in signals:
            os.killpg(self.number, number)

    @property
    def runs(self):
        return self.process.poll() is None

    def ended(self):
        """The status, once nothing of it is left, not even of its output."""
        self.process.communicate(timeout=30)
        deadline = time.monotonic() + 10
        while alive(self.sentinel) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not alive(self.sentinel)
        return self.process.returncode


def alive(number):
    """Whether there is such a process that nobody has to wait for."""
    with suppress(OSError):
        return Path(f"/proc/{number}/stat").read_text().rpartition(") ")[2][0] != "Z"
    return False


@pytest.fixture
def nodes():
    """``nodes(a, b)``: a ranks in sight of one another, and b that see nobody else of them."""
    everyone = []

    def begin(*crowds):
        made = [[Rank() for _ in range(crowd)] for crowd in crowds]
        for ranks in made:
            everyone.extend(ranks)
            for own, rank in enumerate(ranks):
                rank.guard(own, ranks)
        return made

    yield begin
    for rank in everyone:
        with suppress(ProcessLookupError):
            rank.signal_group(signal.SIGKILL)
        rank.process.communicate()


def test_stopped_ranks_are_ended_and_suspended_jobs_are_not(nodes):
    (alone,), (first, second, third), (suspended,), (another,) = nodes(1, 3, 1, 1)
    for rank in (alone, another):  # what mpirun passes on is for the rank
        rank.signal_group(signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    suspended.signal_group(signal.SIGTSTP)
    another.signal_group(signal.SIGSTOP)
    alone.signal(signal.SIGSTOP)
    first.signal_group(signal.SIGSTOP)  # with its sentinel
    second.signal(signal.SIGSTOP)
    assert [rank.ended() for rank in (alone, first, second)] == 3 * [-signal.SIGKILL]
    for rank in (suspended, another):
        rank.signal_group(signal.SIGCONT)
    time.sleep(2 * LOOK_SECONDS)
    for rank in (third, suspended, another):
        assert rank.runs
        assert alive(rank.sentinel)
        rank.signal(signal.SIGKILL)
        assert rank.ended() == -signal.SIGKILL


def test_only_looks_in_a_row_count(monkeypatch):
    """Neither those before the rank went on, nor those before the sentinel itself was stopped."""
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    sleeper = subprocess.Popen(["sleep", "100"])
    file = os.pidfd_open(sleeper.pid)

    def look(times, after=LOOK_SECONDS):
        nonlocal now
        for _ in range(times):
            now += after
            sentinel.look()

    def send(number, state):
        sleeper.send_signal(number)
        while Path(f"/proc/{sleeper.pid}/stat").read_text().rpartition(") ")[2][0] != state:
            os.sched_yield()

    try:
        sentinel = Sentinel([(file, sleeper.pid)])
        send(signal.SIGSTOP, "T")
        look(LOOKS - 1)
        send(signal.SIGCONT, "S")
        look(1)
        send(signal.SIGSTOP, "T")
        look(LOOKS - 1)
        look(1, after=1000)
        look(LOOKS - 2)
        with pytest.raises(subprocess.TimeoutExpired):
            sleeper.wait(0.2)
        look(1)
        assert sleeper.wait() == -signal.SIGKILL
        look(1)  # nobody is left
    finally:
        sleeper.kill()
        sleeper.wait()
        os.close(file)
