"""Signals, kills, failures and damage: what is left behind, and that going on from it changes no bit."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import time
import uuid
from pathlib import Path

import pytest
from conftest import finish, mpi_command, start

from hpcfed.run.checkpoint import latest, round_of
from hpcfed.run.result import read_attributes
from hpcfed.run.run_folder import RunFolder

TESTS = str(Path(__file__).parent)
ROUNDS = 8
TOY = ["toy:Quadratics", "--rounds", str(ROUNDS), "--quantize", "4", "--batch", "1", "--checkpoint-every", "2"]
SERIAL = [sys.executable, "-m", "hpcfed"]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The digest of the whole run."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert finish(start([*SERIAL, *TOY, "--out", str(folder)], PYTHONPATH=TESTS), 60).status == 0
    return read_attributes(folder / "result.h5")["digest"]


class Ranks:
    """A run in progress, whose processes can be found by a mark in their environment."""

    def __init__(self, command, folder):
        self.mark = uuid.uuid4().hex
        self.folder = RunFolder(folder)
        command = [*command, "--out", str(folder)]
        self.process = start(command, PYTHONPATH=TESTS, HPCFED_TEST_MARK=self.mark)

    def alive(self):
        """Process ids of its ranks, by rank (one process alone is rank 0), without zombies."""
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                environment = (entry / "environ").read_text(errors="replace")
                if self.mark in environment and "hpcfed\0" in (entry / "cmdline").read_text():
                    rank = re.search(r"OMPI_COMM_WORLD_RANK=(\d+)", environment)
                    if rank or b"mpirun" not in (entry / "cmdline").read_bytes():
                        found[int(rank[1]) if rank else 0] = int(entry.name)
        return found

    def wait_for_round(self, number):
        until(lambda: any(record["round"] >= number for record in self.folder.history()), 60)

    def finish(self):
        return finish(self.process, 60)


def until(condition, seconds):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.02)


def spoke_once(done, *words):
    """Exactly one line of ours on the error stream (mpirun adds its own), no traceback.

    What is said of the way that messages go does not count.
    """
    # mpirun may leave a NUL where one of its own messages ends.
    lines = done.err.replace("\0", "\n").splitlines()
    ours = [line for line in lines if line.lstrip().startswith("hpcfed:") and "messages of" not in line]
    assert len(ours) == 1, done.err
    assert "Traceback" not in done.err
    for word in words:
        assert word in ours[0]


def go_on(folder, command=SERIAL):
    """Resume it, without what went wrong at its clients, and return the digest."""
    config = folder / "config.toml"
    config.write_text(re.sub("hurt = .*", 'hurt = ""', config.read_text()))
    done = finish(start([*command, "resume", str(folder)], PYTHONPATH=TESTS), 60)
    assert done.status == 0, done.err
    return read_attributes(folder / "result.h5")["digest"]


class TestAlone:
    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
    def test_a_signal_ends_the_round_writes_a_checkpoint_and_leaves_with_75(self, tmp_path, uninterrupted, number):
        run = Ranks([*SERIAL, *TOY, "--hurt", "slow"], tmp_path / "run")
        run.wait_for_round(1)
        run.process.send_signal(number)
        done = run.finish()
        assert done.status == 75
        spoke_once(done, f"hpcfed resume {run.folder.path}")
        assert not run.folder.finished
        stopped = round_of(latest(run.folder.checkpoints))
        assert stopped == run.folder.history()[-1]["round"] < ROUNDS
        assert go_on(run.folder.path) == uninterrupted
        assert [record["round"] for record in run.folder.history()] == list(range(ROUNDS + 1))

    def test_a_damaged_checkpoint_is_passed_over_with_a_warning(self, hpcfed, tmp_path, uninterrupted):
        folder = self.failed_after_four(hpcfed, tmp_path)
        (folder / "checkpoints" / "round-00000004" / "state.h5").write_bytes(b"half")
        done = hpcfed("resume", str(folder), PYTHONPATH=TESTS)
        assert done.status == 0
        spoke_once(done, "round-00000004", "damaged", "going back to round-00000002")
        assert read_attributes(folder / "result.h5")["digest"] == uninterrupted
        assert [record["round"] for record in RunFolder(folder).history()] == list(range(ROUNDS + 1))

    def test_without_a_whole_checkpoint_it_says_so(self, hpcfed, tmp_path):
        folder = self.failed_after_four(hpcfed, tmp_path)
        for path in (folder / "checkpoints").iterdir():
            (path / "state.h5").unlink()
        history = RunFolder(folder).history()
        done = hpcfed("resume", str(folder), PYTHONPATH=TESTS)
        assert done.status == 1
        spoke_once(done, "no whole checkpoint is left", "start the run again")
        assert RunFolder(folder).history() == history

    def test_a_kill_between_checkpoint_and_result_leaves_a_run_that_can_end(self, hpcfed, tmp_path, uninterrupted):
        folder = tmp_path / "run"
        assert hpcfed(*TOY, "--out", str(folder), PYTHONPATH=TESTS).status == 0
        (folder / "result.h5").rename(folder / "result.tmp")
        assert go_on(folder) == uninterrupted

    @staticmethod
    def failed_after_four(hpcfed, tmp_path):
        """A run of 4 rounds that looks as if 8 had been asked for: checkpoints of rounds 2 and 4."""
        folder = tmp_path / "run"
        assert hpcfed(*TOY, "--rounds", "4", "--out", str(folder), PYTHONPATH=TESTS).status == 0
        (folder / "result.h5").unlink()
        config = folder / "config.toml"
        config.write_text(config.read_text().replace("rounds = 4", f"rounds = {ROUNDS}"))
        assert sorted(round_of(path) for path in (folder / "checkpoints").iterdir()) == [2, 4]
        return folder


@pytest.mark.mpi
class TestOnRanks:
    @pytest.mark.parametrize(("number", "target"), [(signal.SIGUSR1, "mpirun"), (signal.SIGTERM, "rank 1")])
    def test_a_signal_to_any_rank_stops_all_of_them_in_good_order(self, tmp_path, uninterrupted, number, target):
        run = Ranks([*mpi_command(2), *TOY, "--hurt", "slow"], tmp_path / "run")
        run.wait_for_round(1)
        os.kill(run.process.pid if target == "mpirun" else run.alive()[1], number)
        done = run.finish()
        assert done.status == 75, done.err
        spoke_once(done, "checkpoint written", f"hpcfed resume {run.folder.path}")
        assert 1 <= round_of(latest(run.folder.checkpoints)) < ROUNDS
        assert go_on(run.folder.path, mpi_command(3) if target == "mpirun" else SERIAL) == uninterrupted

    def test_sigterm_to_mpirun_leaves_a_checkpoint(self, tmp_path, uninterrupted):
        """Open MPI's mpirun then leaves with a status of its own."""
        run = Ranks([*mpi_command(2), *TOY, "--hurt", "slow", "--checkpoint-every", "0"], tmp_path / "run")
        run.wait_for_round(1)
        run.process.terminate()
        assert run.finish().status != 0
        assert 1 <= round_of(latest(run.folder.checkpoints)) < ROUNDS
        assert go_on(run.folder.path) == uninterrupted

    def test_a_killed_rank_takes_all_with_it_and_leaves_the_checkpoints(self, tmp_path, uninterrupted):
        run = Ranks([*mpi_command(3), *TOY, "--hurt", "slow"], tmp_path / "run")
        run.wait_for_round(5)
        os.kill(run.alive()[1], signal.SIGKILL)
        until(lambda: not run.alive(), 5)
        done = run.finish()
        assert done.status != 0
        assert "Traceback" not in done.err
        assert not run.folder.finished
        assert round_of(latest(run.folder.checkpoints)) >= 4
        assert go_on(run.folder.path, mpi_command(2)) == uninterrupted

    def test_a_rank_that_raises_takes_all_with_it_and_says_why_once(self, tmp_path, uninterrupted):
        run = Ranks([*mpi_command(3), *TOY, "--hurt", "raise"], tmp_path / "run")
        run.wait_for_round(2)
        until(lambda: not run.alive(), 5)
        done = run.finish()
        assert done.status == 1
        spoke_once(done, "RuntimeError: something is wrong here", "client 1, round 3")
        assert round_of(latest(run.folder.checkpoints)) == 2
        assert go_on(run.folder.path) == uninterrupted

    def test_numbers_that_stop_being_numbers_are_told_once(self, mpirun, tmp_path):
        done = mpirun(3, *TOY, "--quantize", "0", "--hurt", "nan", "--out", str(tmp_path / "run"), PYTHONPATH=TESTS)
        assert done.status == 1
        spoke_once(done, "diverged", "round 3")
        assert round_of(latest(tmp_path / "run" / "checkpoints")) == 2

    def test_data_that_cannot_be_built_are_told_once(self, mpirun, tmp_path):
        done = mpirun(3, *TOY, "--fail", "2", "--out", str(tmp_path / "run"), PYTHONPATH=TESTS)
        assert done.status == 1
        spoke_once(done, "ValueError: cannot be built", "client 2", "toy.py:")

    def test_a_mistake_is_told_once_and_before_anything_is_made(self, mpirun, tmp_path):
        done = mpirun(2, *TOY, "--step", "fast", "--out", str(tmp_path / "run"), PYTHONPATH=TESTS)
        assert done.status == 2
        spoke_once(done, "--step fast")
        assert not (tmp_path / "run").exists()

    def test_more_ranks_than_clients_are_refused(self, mpirun, tmp_path):
        done = mpirun(3, *TOY, "--clients", "2", "--out", str(tmp_path / "run"), PYTHONPATH=TESTS)
        assert done.status == 2
        spoke_once(done, "3 ranks for --clients 2")
        assert not (tmp_path / "run").exists()

    def test_a_mistake_that_only_the_problem_knows_is_told_once(self, mpirun, tmp_path):
        small = ["ct", "--shape", "8,8,2", "--views", "4", "--detector", "12", "--clients", "2", "--device", "cpu"]
        done = mpirun(2, *small, "--algorithm", "fpdfp", "--lam", "1", "--out", str(tmp_path / "run"))
        assert done.status == 2
        spoke_once(done, "--lam 1")

    def test_a_run_of_other_clients_is_told_once(self, mpirun, hpcfed, tmp_path):
        """A checkpoint that does not belong to the configuration beside it."""
        folder = TestAlone.failed_after_four(hpcfed, tmp_path)
        config = folder / "config.toml"
        config.write_text(config.read_text().replace("clients = 5", "clients = 6"))
        done = mpirun(2, "resume", str(folder), PYTHONPATH=TESTS)
        assert done.status == 1
        spoke_once(done, "5 clients", "6")
