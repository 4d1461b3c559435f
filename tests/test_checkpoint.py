"""Checkpoints: whole, keyed by client, and never trusted when they are damaged."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from test_communicator import on_ranks

from hpcfed.errors import CheckpointError
from hpcfed.federation import Federation, PerClient
from hpcfed.run.checkpoint import Checkpoint, latest, load, round_of, save, verify


@dataclass(frozen=True)
class Own:
    """What one client keeps."""

    vector: np.ndarray
    count: int


@dataclass(frozen=True)
class Inner:
    """A nested part of a state."""

    matrix: np.ndarray
    momentum: PerClient[Any]


@dataclass(frozen=True)
class State:
    """Every kind of field that a state may have."""

    x: np.ndarray
    inner: Inner
    own: PerClient[Own]
    step: float = 0.1
    count: int = 3
    flag: bool = True
    scalar: np.ndarray = field(default_factory=lambda: np.array(2.5, np.float32))
    empty: np.ndarray = field(default_factory=lambda: np.empty((0, 3)))
    nothing: Inner | None = None
    maybe: Inner | None = None


@dataclass(frozen=True)
class Plain:
    """Replicated alone."""

    x: np.ndarray


@dataclass(frozen=True)
class Cohort:
    """What the last round's cohort left."""

    own: PerClient[Any]


CLIENTS = 5


def value(client, size=4):
    return np.random.default_rng(client).standard_normal(size)


def state_on(fed, size=4):
    inner = Inner(np.arange(6.0).reshape(2, 3).T, PerClient({c: value(c).astype(np.float32) for c in fed.local}))
    own = PerClient({client: Own(value(client, size), 10 * client) for client in fed.local})
    return State(np.float32([1, np.pi]), inner, own, 1 / 3, maybe=Inner(np.eye(2), inner.momentum))


def write(folder, number=1, state=None, ranks=1, totals=None):
    """A checkpoint written on some ranks."""

    def one(comm):
        fed = Federation(CLIENTS, communicator=comm)
        own = state_on(fed) if state is None else state
        save(folder, Checkpoint(number, own, {"compute": 1.5, "total": 2.25}, totals or {"wire_bytes_up": 7}), fed)

    on_ranks(ranks, one)
    return folder / f"round-{number:08d}"


def plain(number):
    return Plain(np.full(3, float(number)))


def same(a, b):
    assert type(a) is type(b)
    if isinstance(a, np.ndarray):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert a.tobytes() == b.tobytes()
    elif hasattr(a, "__dataclass_fields__"):
        for name in a.__dataclass_fields__:
            same(getattr(a, name), getattr(b, name))
    elif isinstance(a, PerClient):
        assert list(a) == list(b)
        for client in a:
            same(a[client], b[client])
    else:
        assert a == b


class TestRoundTrip:
    @pytest.mark.parametrize(("saved_on", "loaded_on"), [(1, 1), (1, 3), (5, 2), (3, 5), (2, 1)])
    def test_what_some_ranks_saved_any_others_load(self, tmp_path, saved_on, loaded_on):
        path = write(tmp_path, 7, ranks=saved_on)

        def check(comm):
            fed = Federation(CLIENTS, communicator=comm)
            loaded = load(path, State, fed)
            same(loaded.state, state_on(fed))
            assert loaded.round == 7
            assert loaded.seconds == {"compute": 1.5, "total": 2.25}
            assert loaded.totals == {"wire_bytes_up": 7}

        verify(path)
        on_ranks(loaded_on, check)

    def test_counters_beyond_32_bits(self, tmp_path):
        path = write(tmp_path, state=plain(0), totals={"paper_bits_up": 1 << 60})
        assert load(path, Plain, Federation(CLIENTS)).totals == {"paper_bits_up": 1 << 60}

    def test_values_that_are_not_numbers_survive(self, tmp_path):
        x = np.array([np.nan, np.inf, -0.0, 5e-324])
        loaded = load(write(tmp_path, state=Plain(x)), Plain, Federation(CLIENTS))
        assert loaded.state.x.tobytes() == x.tobytes()

    def test_clients_of_a_state_without_them_write_no_files(self, tmp_path):
        path = write(tmp_path, ranks=3, state=plain(0))
        assert sorted(entry.name for entry in path.iterdir()) == ["SHA256SUMS", "state.h5"]

    def test_the_files_are_hdf5_and_their_checksums_those_of_sha256sum(self, tmp_path):
        import subprocess

        path = write(tmp_path, ranks=2)
        with h5py.File(path / "state.h5") as file:
            np.testing.assert_array_equal(file["state/x"], np.float32([1, np.pi]))
        with h5py.File(path / "clients-0001.h5") as file:
            np.testing.assert_array_equal(file["state/own/4/vector"], value(4))
        if shutil.which("sha256sum"):
            subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=path, check=True)

    def test_another_number_of_clients_is_refused(self, tmp_path):
        with pytest.raises(CheckpointError, match=r"5 clients.*of 6: restore clients"):
            load(write(tmp_path), State, Federation(6))

    def test_another_state_is_refused(self, tmp_path):
        with pytest.raises(CheckpointError, match="State"):
            load(write(tmp_path, state=plain(0)), State, Federation(CLIENTS))

    def test_a_state_with_more_fields_is_refused(self, tmp_path):
        """What its method has dropped since may have mattered."""
        with pytest.raises(CheckpointError, match=r"a Plain: it also has count, .*: go on with the method"):
            load(write(tmp_path), Plain, Federation(CLIENTS))

    def test_another_format_is_refused(self, tmp_path):
        path = write(tmp_path)
        with h5py.File(path / "state.h5", "r+") as file:
            file.attrs["format"] = 7
        with pytest.raises(CheckpointError, match=r"format 7, this hpcfed reads 1 and 2: go on with the hpcfed that"):
            load(path, State, Federation(CLIENTS))

    @pytest.mark.parametrize("ranks", [1, 5])
    def test_values_of_a_cohort_alone_survive(self, tmp_path, ranks):
        """What a method keeps of its last cohort: the other clients have nothing, then and after."""

        def check(comm):
            fed = Federation(CLIENTS, communicator=comm)
            return tuple(client for part in comm.gather(list(load(path, Cohort, fed).state.own)) for client in part)

        def keep(comm):
            fed = Federation(CLIENTS, communicator=comm).build(lambda client, rng: client).at(1).sample(2)
            save(tmp_path, Checkpoint(1, Cohort(fed.map(lambda client, rng: value(client))), {}, {}), fed)
            return fed.cohort

        (cohort,) = set(on_ranks(ranks, keep))
        path = latest(tmp_path)
        assert set(on_ranks(3, check)) == {cohort}


class TestTheLastTwo:
    def test_two_are_kept(self, tmp_path):
        for number in (3, 8, 10, 100_000_000):
            write(tmp_path, number, plain(number))
        assert sorted(round_of(path) for path in tmp_path.iterdir()) == [10, 100_000_000]
        assert round_of(latest(tmp_path)) == 100_000_000

    def test_a_round_may_be_saved_again(self, tmp_path):
        write(tmp_path, 4, plain(1))
        write(tmp_path, 4, plain(2))
        assert load(latest(tmp_path), Plain, Federation(CLIENTS)).state.x[0] == 2

    def test_there_may_be_none(self, tmp_path):
        assert latest(tmp_path) is None
        assert latest(tmp_path / "not there") is None

    def test_a_damaged_one_is_not_one_of_the_two(self, tmp_path):
        """After going back from round 9 to 4, the run writes 5 and 6: both must stay, so that one may be damaged."""
        write(tmp_path, 4, plain(4))
        damaged = write(tmp_path, 9, plain(9))
        (damaged / "state.h5").write_bytes(b"")
        for number in (5, 6):
            write(tmp_path, number, plain(number))
        (tmp_path / "round-00000006" / "state.h5").write_bytes(b"")
        assert round_of(latest(tmp_path)) == 5


def shorten(path, name):
    content = (path / name).read_bytes()
    (path / name).write_bytes(content[:-1])


def flip(path, name):
    content = bytearray((path / name).read_bytes())
    content[len(content) // 2] ^= 1
    (path / name).write_bytes(content)


def drop_last_line(path, name):
    lines = (path / name).read_text().splitlines(keepends=True)
    (path / name).write_text("".join(lines[:-1]))


def remove(path, name):
    (path / name).unlink()


DAMAGE = [
    *((harm, name) for harm in (shorten, flip, remove) for name in ("state.h5", "clients-0000.h5", "clients-0002.h5")),
    *((harm, "SHA256SUMS") for harm in (flip, remove, drop_last_line)),
    (lambda path, name: (path / name).write_bytes(b""), "SHA256SUMS"),
    (lambda path, name: (path / name).write_bytes(b"\xff\xfe no sums"), "SHA256SUMS"),
]


class TestDamage:
    @pytest.mark.parametrize(("harm", "name"), DAMAGE)
    def test_it_is_noticed_and_the_one_before_taken_with_a_warning(self, tmp_path, caplog, harm, name):
        write(tmp_path, 10, ranks=3)
        newest = write(tmp_path, 20, ranks=3)
        harm(newest, name)
        with pytest.raises(CheckpointError, match=str(newest)):
            verify(newest)
        assert round_of(latest(tmp_path)) == 10
        (message,) = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
        assert str(newest) in message
        assert "round-00000010" in message
        assert "\n" not in message

    def test_without_a_whole_one_the_error_names_each_and_the_remedy(self, tmp_path):
        for number in (10, 20):
            flip(write(tmp_path, number), "state.h5")
        with pytest.raises(CheckpointError, match=r"round-00000020.*round-00000010.*start the run again") as caught:
            latest(tmp_path)
        assert "\n" not in str(caught.value)
        assert caught.value.status == 1

    def test_a_file_that_is_no_hdf5_is_a_clear_error(self, tmp_path):
        path = write(tmp_path)
        (path / "state.h5").write_bytes(b"not HDF5")
        with pytest.raises(CheckpointError, match=r"state\.h5 is damaged"):
            load(path, State, Federation(CLIENTS))


class TestWriting:
    def leave(self, folder):
        return sorted(entry.name for entry in folder.iterdir())

    def test_half_of_a_checkpoint_is_none(self, tmp_path, monkeypatch):
        """A run that dies before the rename leaves a temporary folder, which nobody reads and the next one replaces."""
        write(tmp_path, 1, plain(1))

        class Killed(BaseException):
            pass

        def die(*args):
            raise Killed

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", die)
            with pytest.raises(Killed):
                write(tmp_path, 2, plain(2))
        assert "round-00000002" not in self.leave(tmp_path)
        assert round_of(latest(tmp_path)) == 1
        write(tmp_path, 2, plain(22))
        assert load(latest(tmp_path), Plain, Federation(CLIENTS)).state.x[0] == 22
        assert self.leave(tmp_path) == ["round-00000001", "round-00000002"]

    def test_everything_is_on_the_disk_before_the_rename(self, tmp_path, monkeypatch):
        """Every file and the folder that holds them are flushed first; the folder above, after."""
        events = []
        fsync, rename = os.fsync, os.replace

        def note_fsync(descriptor):
            events.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
            fsync(descriptor)

        def note_rename(source, target):
            events.append("rename")
            rename(source, target)

        monkeypatch.setattr(os, "fsync", note_fsync)
        monkeypatch.setattr(os, "replace", note_rename)
        write(tmp_path, 1)
        place = events.index("rename")
        assert {"state.h5", "clients-0000.h5", "SHA256SUMS", "round-00000001.tmp"} <= set(events[:place])
        assert tmp_path.name in events[place:]

    @pytest.mark.parametrize("ranks", [1, 3])
    def test_a_failure_on_one_rank_is_every_ranks_and_harms_nothing(self, tmp_path, monkeypatch, ranks):
        write(tmp_path, 1, ranks=ranks)
        before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        h5file = h5py.File

        def full(file, mode="r"):
            if str(getattr(file, "name", file)).endswith(f"clients-{ranks - 1:04d}.h5"):
                raise OSError(28, "No space left on device")
            return h5file(file, mode)

        monkeypatch.setattr(h5py, "File", full)

        def attempt(comm):
            fed = Federation(CLIENTS, communicator=comm)
            with pytest.raises(CheckpointError, match=r"round-00000002 .*No space left on device") as caught:
                save(tmp_path, Checkpoint(2, state_on(fed), {}, {}), fed)
            return caught.value.everywhere

        assert on_ranks(ranks, attempt) == [True] * ranks
        monkeypatch.undo()
        assert round_of(latest(tmp_path)) == 1
        assert {path: path.read_bytes() for path in before} == before

    def test_a_folder_that_cannot_be_is_a_clear_error(self, tmp_path):
        (tmp_path / "checkpoints").write_text("a file")
        with pytest.raises(CheckpointError, match="cannot be written"):
            write(tmp_path / "checkpoints", 1, plain(1))
