"""Checkpoints written beside the rounds, and disks that take no more."""

from __future__ import annotations

import logging
import resource
import shutil
import sys
import threading
import time
from pathlib import Path

import h5py
import numpy as np
import pytest
import toy
from conftest import finish, start
from test_checkpoint import CLIENTS, Plain, State, same, state_on
from test_communicator import on_ranks

from hpcfed import hdf5
from hpcfed.config import assemble
from hpcfed.errors import DivergedError, HpcfedError
from hpcfed.federation import Federation
from hpcfed.ranks.communicator import SerialCommunicator
from hpcfed.run import checkpoint
from hpcfed.run.checkpoint import Checkpoint, Writer, latest, load, round_of, verify
from hpcfed.run.result import read_attributes
from hpcfed.run.run_folder import RunFolder, create
from hpcfed.run.runner import Run

TESTS = str(Path(__file__).parent)
SERIAL = [sys.executable, "-m", "hpcfed"]


@pytest.fixture
def slow(monkeypatch):
    """Files that are closed only when ``slow.set()`` has been called, however small the state."""
    let_go = threading.Event()
    write_files = checkpoint._write_files

    def wait_and_write(final, saved, fed):
        if fed.communicator.rank == fed.communicator.size - 1:
            assert let_go.wait(30)
        return write_files(final, saved, fed)

    monkeypatch.setattr(checkpoint, "_write_files", wait_and_write)
    monkeypatch.setattr(checkpoint, "WORTH_A_THREAD", 0)
    yield let_go
    let_go.set()


@pytest.fixture
def small_files():
    """No file may grow beyond a megabyte: a disk that is full, by the same calls and errors of the system."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def at(number, state):
    return Checkpoint(number, state, {"total": 1.0}, {"wire_bytes_up": 7})


def until(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


class TestBesideTheRounds:
    @pytest.mark.parametrize("ranks", [1, 3])
    def test_it_counts_once_the_slowest_rank_has_written(self, tmp_path, slow, ranks):
        def one(comm):
            fed = Federation(CLIENTS, communicator=comm)
            writer = Writer(tmp_path, fed)
            writer.begin(at(4, state_on(fed)))
            writer.settle()
            before = latest(tmp_path), writer.last_round
            comm.wait()
            if comm.rank == 0:
                slow.set()
            until(lambda: not writer.busy)
            comm.wait()
            writer.settle()
            return before, writer.last_round

        assert on_ranks(ranks, one) == [((None, 0), 4)] * ranks
        verify(tmp_path / "round-00000004")
        fed = Federation(CLIENTS)
        same(load(latest(tmp_path), State, fed).state, state_on(fed))

    def test_the_next_one_waits_for_it(self, tmp_path, slow):
        writer = Writer(tmp_path, Federation(CLIENTS))
        writer.begin(at(1, Plain(np.ones(3))))
        threading.Timer(0.2, slow.set).start()
        writer.begin(at(2, Plain(np.ones(3))))
        assert writer.last_round == 1
        writer.finish()
        assert sorted(round_of(path) for path in tmp_path.iterdir()) == [1, 2]

    def test_a_small_one_is_complete_at_once(self, tmp_path):
        writer = Writer(tmp_path, Federation(CLIENTS))
        writer.begin(at(1, Plain(np.ones(3))))
        assert round_of(latest(tmp_path)) == 1 == writer.last_round

    def test_so_many_are_kept(self, tmp_path):
        writer = Writer(tmp_path, Federation(CLIENTS), keep=3)
        for number in range(1, 6):
            writer.begin(at(number, Plain(np.ones(3))))
        assert sorted(round_of(path) for path in tmp_path.iterdir()) == [3, 4, 5]

    def run(self, tmp_path, rounds=6, **options):
        run = {"rounds": rounds, "checkpoint_every": "2", "out": str(tmp_path / "run")}
        config = assemble({"workload": "toy:Quadratics", **run, **options})
        return Run(config, create(str(tmp_path / "run"), "toy"), "", progress=False)

    def test_rounds_go_on_meanwhile_and_the_state_is_that_of_its_own_round(self, tmp_path, slow, monkeypatch):
        """Round 3 is recorded while the checkpoint of round 2 is being written."""
        run = self.run(tmp_path, checkpoint_every="4", rounds=7)
        seen = []
        release = checkpoint.Writer.settle

        def settle(writer):
            seen.append((RunFolder(run.folder.path).history()[-1]["round"], writer.busy))
            if seen[-1][0] == 6:
                slow.set()
            release(writer)

        monkeypatch.setattr(checkpoint.Writer, "settle", settle)
        run.execute(SerialCommunicator())
        assert (5, True) in seen
        saved = load(run.folder.checkpoints / "round-00000004", toy.Variables, Federation(5)).state
        short = self.run(tmp_path / "short", rounds=4)
        short.execute(SerialCommunicator())
        alone = load(latest(short.folder.checkpoints), toy.Variables, Federation(5)).state
        assert saved.x.tobytes() == alone.x.tobytes()
        assert [saved.momentum[client].tobytes() for client in range(5)] == [
            alone.momentum[client].tobytes() for client in range(5)
        ]

    def test_a_run_that_diverges_completes_it_first(self, tmp_path, slow):
        threading.Timer(0.5, slow.set).start()
        run = self.run(tmp_path, hurt="nan")
        with pytest.raises(DivergedError):
            run.execute(SerialCommunicator())
        assert round_of(latest(run.folder.checkpoints)) == 2


class TestFullDisk:
    def test_the_last_good_one_stays_and_a_line_says_so(self, tmp_path, caplog, small_files):
        """On one of three ranks a file grows too large; the next checkpoint, which does not, is written."""

        def large(fed):
            return state_on(fed) if fed.communicator.rank < 2 else state_on(fed, 200_000)

        def one(comm):
            fed = Federation(CLIENTS, communicator=comm)
            writer = Writer(tmp_path, fed)
            writer.begin(at(1, state_on(fed)))
            writer.begin(at(2, large(fed)))
            writer.finish()
            comm.wait()
            after = writer.last_round, sorted(path.name for path in tmp_path.iterdir())
            comm.wait()
            writer.begin(at(3, state_on(fed)))
            writer.finish()
            return after, writer.last_round

        assert on_ranks(3, one) == [((1, ["round-00000001"]), 3)] * 3
        lines = {record.getMessage() for record in caplog.records if record.levelno == logging.WARNING}
        (line,) = lines
        assert "round-00000002" in line
        assert "File too large" in line
        assert "\n" not in line

    def test_hdf5_never_hears_of_it(self, tmp_path, small_files):
        """It would be left with a file that it can neither write nor close."""
        kinds = h5py.h5f.OBJ_FILE | h5py.h5f.OBJ_GROUP | h5py.h5f.OBJ_DATASET
        open_before = h5py.h5f.get_obj_count(h5py.h5f.OBJ_ALL, kinds)
        for _ in range(3):
            with pytest.raises(OSError, match="File too large"), hdf5.new_file(tmp_path / "a.h5") as file:
                file["group/x"] = np.ones(1 << 20)
            assert not (tmp_path / "a.h5").exists()
        with hdf5.new_file(tmp_path / "b.h5") as file:
            file["x"] = np.ones(3)
        assert h5py.h5f.get_obj_count(h5py.h5f.OBJ_ALL, kinds) == open_before

    @pytest.mark.skipif(shutil.which("bash") is None, reason="ulimit is bash's")
    def test_the_run_goes_on(self, tmp_path):
        """The clients' file is too large, the result is not."""
        done = self.limited(tmp_path / "run", "--size", "100000")
        assert done.status == 0, done.err
        lines = [line for line in done.err.splitlines() if line.startswith("hpcfed: checkpoint")]
        assert len(lines) == 2
        assert all("cannot be written: File too large" in line for line in lines)
        assert read_attributes(tmp_path / "run" / "result.h5")["digest"]
        assert list((tmp_path / "run" / "checkpoints").iterdir()) == []

    @pytest.mark.skipif(shutil.which("bash") is None, reason="ulimit is bash's")
    def test_a_result_that_cannot_be_written_is_an_error(self, tmp_path):
        done = self.limited(tmp_path / "run", "--size", "400000", "--algorithm", "toy:Descent")
        assert done.status == 1
        assert "Traceback" not in done.err
        (line,) = (line for line in done.err.splitlines() if line.startswith("hpcfed: result"))
        assert "File too large" in line
        assert f"hpcfed resume {tmp_path / 'run'}" in line
        assert not RunFolder(tmp_path / "run").finished
        resumed = finish(start([*SERIAL, "resume", str(tmp_path / "run")], PYTHONPATH=TESTS), 60)
        assert resumed.status == 0, resumed.err
        whole = [*SERIAL, "toy:Quadratics", "--rounds", "4", "--size", "400000", "--algorithm", "toy:Descent"]
        assert finish(start([*whole, "--out", str(tmp_path / "whole")], PYTHONPATH=TESTS), 60).status == 0
        digests = {read_attributes(tmp_path / name / "result.h5")["digest"] for name in ("run", "whole")}
        assert len(digests) == 1

    @staticmethod
    def limited(folder, *options):
        command = [*SERIAL, "toy:Quadratics", "--rounds", "4", "--checkpoint-every", "2", *options]
        return finish(
            start(["bash", "-c", 'ulimit -f 1024; exec "$@"', "-", *command, "--out", str(folder)], PYTHONPATH=TESTS),
            60,
        )

    def test_a_stop_without_a_checkpoint_says_where_it_goes_on(self, tmp_path, monkeypatch):
        """Rounds 3 and 4 cannot be saved: the signal is obeyed all the same."""

        class Stop:
            def asked(self):
                return len(RunFolder(tmp_path / "run").history()) > 3

        run = TestBesideTheRounds().run(tmp_path)
        prepare = checkpoint._write_files

        def full(final, saved, fed):
            if saved.round > 2:
                raise OSError(28, "No space left on device")
            return prepare(final, saved, fed)

        monkeypatch.setattr(checkpoint, "_write_files", full)
        with pytest.raises(HpcfedError, match=r"after round 3 of 6, the last checkpoint is of round 2") as caught:
            run.execute(SerialCommunicator(), Stop())
        assert caught.value.status == 75

    def test_a_stop_before_anything_could_be_saved_is_a_failure(self, tmp_path, monkeypatch):
        """With status 75 a job would be started again, and stop at the same place, for ever."""

        def full(final, saved, fed):
            raise OSError(28, "No space left on device")

        class Stop:
            def asked(self):
                return len(RunFolder(tmp_path / "run").history()) > 3

        run = TestBesideTheRounds().run(tmp_path)
        monkeypatch.setattr(checkpoint, "_write_files", full)
        with pytest.raises(HpcfedError, match="after round 3 of 6, and no checkpoint could be written") as caught:
            run.execute(SerialCommunicator(), Stop())
        assert caught.value.status == 1

    @pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder that nobody may write")
    def test_a_folder_that_may_not_be_written_is_a_warning(self, caplog):
        writer = Writer(Path("/proc/self/checkpoints"), Federation(CLIENTS))
        writer.begin(at(1, Plain(np.ones(3))))
        writer.finish()
        (line,) = (record.getMessage() for record in caplog.records)
        assert "cannot be written" in line
        assert writer.last_round == 0
