"""Locks of run folders: one job at a time, whatever becomes of it."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import finish, mpi_command, start
from test_interruption import ROUNDS, SERIAL, TESTS, TOY, Ranks, go_on, spoke_once, uninterrupted, until  # noqa: F401
from test_on_failure import LOSING, METHODS, tolerant

from hpcfed.errors import ConfigError
from hpcfed.run import lock, run_folder
from hpcfed.run.lock import locked
from hpcfed.run.result import read_attributes

SLOW = [*TOY, "--hurt", "slow"]


@pytest.fixture
def holder():
    """``holder(path, then)``: a process that has locked the file and then does what ``then`` says."""
    begun = []

    def begin(path, then="input()", **environment):
        code = f"""
import os, subprocess, sys, time
from pathlib import Path
from hpcfed.run.lock import locked
with locked(Path({str(path)!r})):
    print("locked", flush=True)
    {then}
"""
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            env=os.environ | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        begun.append(process)
        assert process.stdout.readline() == "locked\n"
        return process

    yield begin
    for process in begun:
        process.kill()
        process.communicate()


def free(path):
    with locked(path):
        return True


class TestOneProcessAtATime:
    def test_the_other_is_told_who_and_since_when_and_what_to_do(self, tmp_path, holder):
        path = tmp_path / ".lock"
        process = holder(path, SLURM_JOB_ID="42")
        before = path.read_bytes()
        with pytest.raises(ConfigError) as refused, locked(path):
            pass
        words = str(refused.value)
        year = time.strftime("%Y")
        for word in (str(tmp_path), "SLURM job 42", f"process {process.pid}", os.uname().nodename, f"since {year}-"):
            assert word in words
        assert "wait for it" in words
        assert f"remove {path}" in words
        assert "\n" not in words
        assert path.read_bytes() == before

    def test_it_goes_with_its_process_and_not_with_what_that_has_started(self, tmp_path, holder):
        """Children that are forked, or get all descriptors that can be inherited, live on."""
        path = tmp_path / ".lock"
        then = (
            "other = subprocess.Popen(['sleep', '60'], close_fds=False, stdout=subprocess.DEVNULL)\n"
            "    reader, writer = os.pipe()\n"
            "    forked = os.fork() or (os.write(writer, b'.'), time.sleep(60))\n"
            "    os.read(reader, 1)  # until then the child holds what it was forked with\n"
            "    print(other.pid, forked, flush=True)\n"
            "    input()"
        )
        process = holder(path, then)
        children = [int(word) for word in process.stdout.readline().split()]
        try:
            with pytest.raises(ConfigError, match="another job"):
                free(path)
            process.kill()
            process.wait()
            assert free(path)
        finally:
            for child in children:
                os.kill(child, 9)

    def test_when_it_has_left_the_file_names_nobody(self, tmp_path):
        with locked(tmp_path / ".lock"):
            assert f"process {os.getpid()} " in (tmp_path / ".lock").read_text()
            with locked(Path(f"{tmp_path}/../{tmp_path.name}/.lock")):  # what a process has locked it may enter
                pass
            assert b"another job" in subprocess.run(_attempt(tmp_path), check=False, capture_output=True).stderr
        assert (tmp_path / ".lock").read_text() == ""
        subprocess.run(_attempt(tmp_path), check=True)

    def test_after_an_error_it_is_free_and_names_nobody(self, tmp_path):
        with pytest.raises(ZeroDivisionError), locked(tmp_path / ".lock"):
            1 / 0  # noqa: B018
        assert (tmp_path / ".lock").read_text() == ""
        subprocess.run(_attempt(tmp_path), check=True)

    def test_removed_by_who_knows_that_nobody_is_there(self, tmp_path, holder):
        """As a lost node's lock may stay on its file server."""
        path = tmp_path / ".lock"
        holder(path)
        path.unlink()
        assert free(path)

    def test_a_file_that_says_nothing_sensible(self, tmp_path, holder):
        path = tmp_path / ".lock"
        holder(path)
        for text in (b"", b"\xff\0\x1b[2J", b"\n\nx"):
            path.write_bytes(text)
            with pytest.raises(ConfigError, match="does not say which"):
                free(path)

    def test_who_may_write_in_the_folder_may_lock_it(self, tmp_path):
        tmp_path.chmod(0o775)
        assert free(tmp_path / ".lock")
        assert (tmp_path / ".lock").stat().st_mode & 0o777 == 0o664

    def test_a_file_that_cannot_be_made(self, tmp_path):
        with pytest.raises(ConfigError, match=r"cannot be locked: .*cp -r"):
            free(tmp_path / "none" / ".lock")


def _attempt(folder):
    return [sys.executable, "-c", f"from hpcfed.run.lock import *\nwith locked(Path({str(folder)!r}) / '.lock'): pass"]


class TestPatience:
    def test_who_is_patient_is_served(self, tmp_path, holder):
        path = tmp_path / ".lock"
        process = holder(path, "time.sleep(1)")
        with locked(path, 60):
            assert process.wait() == 0

    def test_a_job_that_was_put_back_into_the_queue_waits_for_its_lost_node(self, tmp_path, holder, monkeypatch):
        path = tmp_path / ".lock"
        holder(path, "time.sleep(1)")
        monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
        assert free(path)

    def test_patience_has_an_end(self, tmp_path, holder, monkeypatch):
        path = tmp_path / ".lock"
        holder(path)
        monkeypatch.setattr(lock, "PATIENCE", 0.3)
        monkeypatch.setenv("SLURM_RESTART_COUNT", "3")
        with pytest.raises(ConfigError, match="another job"):
            free(path)


@pytest.mark.parametrize("number", [errno.ENOTSUP, errno.ENOLCK, errno.ENOSYS])
def test_a_file_system_without_locks_is_no_mistake(tmp_path, monkeypatch, number):
    def none(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", none)
    with locked(tmp_path / ".lock"):
        assert f"process {os.getpid()} " in (tmp_path / ".lock").read_text()


def test_a_disk_that_is_full_is_no_reason_to_refuse(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    assert free(tmp_path / ".lock")


def test_of_two_that_find_an_empty_folder_one_makes_the_run(tmp_path, monkeypatch):
    """The other has looked before the first one made anything."""
    monkeypatch.setattr(Path, "exists", lambda path: False)
    run_folder.create(str(tmp_path / "run"), "ct")
    with pytest.raises(ConfigError, match=r"exists already: .*hpcfed resume"):
        run_folder.create(str(tmp_path / "run"), "ct")


# -- runs --------------------------------------------------------------------------------------------------------------


def test_a_run_in_progress_is_not_resumed_beside_it_but_after_its_kill(tmp_path, uninterrupted):  # noqa: F811
    run = Ranks([*SERIAL, *SLOW], tmp_path / "run")
    try:
        run.wait_for_round(1)
        history = run.folder.history()
        beside = finish(start([*SERIAL, "resume", str(run.folder.path)], PYTHONPATH=TESTS), 60)
        assert beside.status == 2
        spoke_once(beside, f"another job is at work in {run.folder.path}", f"process {run.process.pid} ")
        shown = finish(start([*SERIAL, "show", str(run.folder.path)], PYTHONPATH=TESTS), 60)
        assert shown.status == 0  # who reads is never refused
        assert run.folder.history()[: len(history)] == history
    finally:
        run.process.kill()
        run.finish()
    assert not run.folder.finished
    assert go_on(run.folder.path) == uninterrupted


def test_a_run_of_a_sweep_is_locked_the_sweep_is_not(tmp_path, holder):
    """Jobs share a sweep; a run of it that somebody else resumes ends the job that meets it."""
    file = tmp_path / "sweep.toml"
    file.write_text('[base.run]\nrounds = 2\n[base.workload]\nname = "toy:Quadratics"\n[sweep]\nseeds = [0, 1]\n')
    words = [*SERIAL, "sweep", str(file), "--out", str(tmp_path / "out")]
    assert finish(start([*words, "--part", "1/2"], PYTHONPATH=TESTS), 60).status == 0
    other = tmp_path / "out" / "1-seed1"
    other.mkdir()
    process = holder(other / ".lock")
    met = finish(start([*words, "--part", "2/2"], PYTHONPATH=TESTS), 60)
    assert met.status == 2
    spoke_once(met, f"another job is at work in {other}", f"process {process.pid} ")
    process.communicate("\n")
    assert finish(start([*words, "--part", "2/2"], PYTHONPATH=TESTS), 60).status == 0
    alone = finish(
        start([*SERIAL, "toy:Quadratics", "--rounds=2", "--seed=1", f"--out={tmp_path}/1"], PYTHONPATH=TESTS), 60
    )
    assert alone.status == 0
    digests = [read_attributes(folder / "result.h5")["digest"] for folder in (other, tmp_path / "1")]
    assert digests[0] == digests[1]


@pytest.mark.mpi
class TestOnRanks:
    def test_all_ranks_leave_with_one_line(self, tmp_path):
        run = Ranks([*mpi_command(2), *SLOW], tmp_path / "run")
        try:
            run.wait_for_round(1)
            beside = finish(start([*mpi_command(2), "resume", str(run.folder.path)], PYTHONPATH=TESTS), 60)
            assert beside.status == 2
            spoke_once(beside, f"another job is at work in {run.folder.path}", f"process {run.alive()[0]} ")
        finally:
            run.process.terminate()
            run.finish()

    def test_the_lock_goes_over_to_the_rank_that_takes_over(self, tmp_path):
        """Rank 0 is killed; whoever writes then is named to the one that comes beside it."""
        words = [*LOSING, *METHODS["stateful"], "--pause", "0.5", "--on-failure", "takeover", "--rounds", str(ROUNDS)]
        os.environ["HPCFED_TEST_LOSE"] = "0@round:2"
        try:
            run = Ranks(tolerant(3, *words), tmp_path / "run")
        finally:
            del os.environ["HPCFED_TEST_LOSE"]
        run.wait_for_round(3)
        beside = finish(start([*SERIAL, "resume", str(run.folder.path)], PYTHONPATH=TESTS), 60)
        ranks = run.alive()
        done = run.finish()
        assert beside.status == 2
        spoke_once(beside, f"another job is at work in {run.folder.path}")
        assert int(re.search(r"process (\d+) on", beside.err)[1]) == ranks[1]
        assert "Traceback" not in done.err
        assert run.folder.finished
        assert [record["round"] for record in run.folder.history()] == list(range(ROUNDS + 1))
