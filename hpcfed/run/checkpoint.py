"""Checkpoints: HDF5, keyed by client id, so that what 17 ranks saved 4 ranks can resume.

A run keeps the last few (two by default) in ``checkpoints/``, each a folder of files that h5py, h5dump and sha256sum
read without this package::

    round-00000040/
      state.h5            attributes format, round, num_clients, absent (ids of clients that have left, in format 2);
                          groups seconds and totals, whose attributes say what the rounds cost so far; group state: the
                          replicated values (written by rank 0)
      clients-0003.h5     group state: what rank 3's clients keep, for methods whose clients keep anything
      SHA256SUMS          the checksums of all the others (sha256sum -c SHA256SUMS)

How a state is laid out stands in `hpcfed.run.state_hdf5`.

A checkpoint is written under the name ``round-00000040.tmp``, flushed to the disk and renamed, so a killed run leaves
either a whole one or none. Ranks write at the same time, large states in a thread beside the rounds (see `Writer`).

``FORMAT`` numbers this layout, ``FORMAT_ABSENT`` that of a federation which some clients have left. Adding an attribute
or a member that a reader may pass over leaves it as it is. Whatever an older reader would misread raises it by one, and
`load` then also reads the number before, so that a run can be resumed after an update. Other numbers are refused, and
so is a state whose method has got other fields since.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from hpcfed import hdf5
from hpcfed.errors import CheckpointError
from hpcfed.federation import Federation
from hpcfed.ranks.communicator import Communicator, together
from hpcfed.run import state_hdf5

logger = logging.getLogger(__name__)

KEEP = 2
WORTH_A_THREAD = 1 << 20  # bytes of a state; smaller ones are written before a thread would have started to help
SUMS = "SHA256SUMS"
FORMAT = 1
FORMAT_ABSENT = 2


@dataclass(frozen=True)
class Checkpoint:
    """Where a run stood: the state after ``round`` rounds and what it had cost."""

    round: int
    state: Any
    seconds: dict[str, float]
    totals: dict[str, int]


def save(folder: Path, checkpoint: Checkpoint, fed: Federation, keep: int = KEEP) -> None:
    """Write a checkpoint into ``folder`` and drop all but the last ``keep``. Every rank must call it.

    Raises
    ------
    CheckpointError
        On every rank, if any rank cannot write; earlier checkpoints are as they were.
    """
    final = _prepare(folder, checkpoint.round, fed.communicator)
    _complete(final, lambda: _write_files(final, checkpoint, fed), fed.communicator, keep)


class Writer:
    """Writes the checkpoints of a run, large ones while its rounds go on. Every rank must make every call but `busy`
    and `abandon`.

    A thread of each rank writes that rank's files. It needs no copy of a state, as states never change, and it leaves
    MPI alone: once no rank is busy, `settle` makes a checkpoint of what all have written. Until then the one before is
    the last. A checkpoint that cannot be written costs a warning.

    Attributes
    ----------
    last_round : the round of the last checkpoint that it completed, 0 before.
    """

    def __init__(self, folder: Path, fed: Federation, keep: int = KEEP) -> None:
        self.last_round = 0
        self._folder, self._fed, self._keep = folder, fed, keep
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: tuple[Path, Future[list[str]]] | None = None

    @property
    def busy(self) -> bool:
        """Whether this rank is still writing."""
        return self._pending is not None and not self._pending[1].done()

    def begin(self, checkpoint: Checkpoint) -> None:
        """Begin a checkpoint, after the end of the one before. A small one is complete when this returns."""
        self.finish()
        with self._warning():
            final = _prepare(self._folder, checkpoint.round, self._fed.communicator)
            self._pending = final, self._thread.submit(_write_files, final, checkpoint, self._fed)
            if state_hdf5.size(checkpoint.state) < WORTH_A_THREAD:
                wait([self._pending[1]])
        self.settle()

    def settle(self) -> None:
        """Complete the checkpoint if all ranks have written theirs by now."""
        if self._pending is not None and not self._fed.communicator.maximum(np.array([self.busy], np.int32))[0]:
            self.finish()

    def finish(self) -> None:
        """Wait until the checkpoint is complete, if one has begun."""
        if self._pending is None:
            return
        (final, written), self._pending = self._pending, None
        with self._warning():
            _complete(final, written.result, self._fed.communicator, self._keep)
            self.last_round = round_of(final)

    def abandon(self) -> None:
        """Give up a checkpoint that has begun, once this rank's thread has left it alone. Any rank may call it."""
        if self._pending is not None:
            wait([self._pending[1]])
            self._pending = None

    @contextlib.contextmanager
    def _warning(self) -> Iterator[None]:
        try:
            yield
        except CheckpointError as error:
            logger.warning("%s; the run goes on without it", error)


def latest(folder: Path) -> Path | None:
    """The newest checkpoint whose checksums hold; damaged ones are passed over with a warning.

    None if no checkpoint was ever written.

    Raises
    ------
    CheckpointError
        If there are checkpoints, but none is whole.
    """
    damage = []
    for path in reversed(_found(folder)):
        try:
            verify(path)
        except CheckpointError as error:
            damage.append(str(error))
            continue
        for reason in damage:
            logger.warning("%s; going back to %s", reason, path.name)
        return path
    if damage:
        raise CheckpointError(f"no whole checkpoint is left: {'; '.join(damage)}; start the run again")
    return None


def last_round(folder: Path) -> int:
    """The round of the newest checkpoint, whole or not; 0 if there is none."""
    return max((round_of(path) for path in _found(folder)), default=0)


def round_of(path: Path) -> int:
    """The round after which a checkpoint was written."""
    return int(path.name.removeprefix("round-"))


def verify(path: Path) -> None:
    """Check that a checkpoint is complete and unaltered.

    Raises
    ------
    CheckpointError
        That names the file and what is wrong with it.
    """
    try:
        lines = (path / SUMS).read_text(encoding="ascii").splitlines()
        for line in lines:
            digest, _, name = line.partition("  ")
            if _sha256(path / name) != digest:
                raise CheckpointError(f"checkpoint {path / name} is damaged: its checksum does not match")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "checksums unreadable"
        raise CheckpointError(f"checkpoint {getattr(error, 'filename', None) or path} is damaged: {reason}") from error
    if not any(line.endswith("  state.h5") for line in lines):
        raise CheckpointError(f"checkpoint {path / SUMS} is damaged: it does not list state.h5")


def absent(path: Path) -> tuple[int, ...]:
    """Ids of the clients that had left the federation when the checkpoint was written."""
    with _open(path / "state.h5") as file:
        return tuple(np.asarray(file.attrs.get("absent", ()), int).tolist())


def load(path: Path, state_type: type, fed: Federation) -> Checkpoint:
    """The checkpoint, with this rank's clients in its `PerClient` fields.

    Raises
    ------
    CheckpointError
        If it does not hold a state of this type for this number of clients.
    """
    with together(fed.communicator):
        return _load(path, state_type, fed)


def _load(path: Path, state_type: type, fed: Federation) -> Checkpoint:
    with _open(path / "state.h5") as file:
        if file.attrs.get("format") not in (FORMAT, FORMAT_ABSENT):
            raise CheckpointError(
                f"checkpoint {path} has format {file.attrs.get('format')}, this hpcfed reads {FORMAT} and "
                f"{FORMAT_ABSENT}: go on with the hpcfed that wrote it"
            )
        if file.attrs["num_clients"] != fed.num_clients:
            raise CheckpointError(
                f"checkpoint {path} is of {file.attrs['num_clients']} clients, the run of {fed.num_clients}: "
                "restore clients in its config.toml, or start another run"
            )
        opened = [_open(part) for part in sorted(path.glob("clients-*.h5"))]
        try:
            state = state_hdf5.read(file, "state", state_type, opened, fed.local, fed.device)
        except (KeyError, TypeError) as error:
            raise CheckpointError(
                f"checkpoint {path} does not hold a {state_type.__name__}: {error}: go on with the "
                "method and the hpcfed that wrote it"
            ) from error
        finally:
            for other in opened:
                other.close()
        return Checkpoint(
            round=int(file.attrs["round"]),
            state=state,
            seconds={name: float(value) for name, value in file["seconds"].attrs.items()},
            totals={name: int(value) for name, value in file["totals"].attrs.items()},
        )


# -- files ------------------------------------------------------------------------------------------------------------


def _prepare(folder: Path, number: int, communicator: Communicator) -> Path:
    """Make room for the files of a checkpoint that will have the path returned."""
    final = folder / f"round-{number:08d}"
    with _writing(communicator, final):
        if communicator.rank == 0:
            for left_behind in folder.glob("*.tmp"):
                shutil.rmtree(left_behind, ignore_errors=True)
            _temporary(final).mkdir(parents=True)
    return final


def _write_files(final: Path, checkpoint: Checkpoint, fed: Federation) -> list[str]:
    """Write this rank's files; returns their lines of the list of checksums."""
    written: list[Path] = []
    if state_hdf5.has_clients(checkpoint.state):
        written.append(_temporary(final) / f"clients-{fed.communicator.rank:04d}.h5")
        with hdf5.new_file(written[-1]) as file:
            state_hdf5.write(file, "state", checkpoint.state, replicated=False)
    if fed.writes:
        written.append(_temporary(final) / "state.h5")
        with hdf5.new_file(written[-1]) as file:
            file.attrs.update(format=FORMAT, round=checkpoint.round, num_clients=fed.num_clients)
            if fed.absent:
                file.attrs.update(format=FORMAT_ABSENT, absent=fed.absent)
            file.create_group("seconds").attrs.update(checkpoint.seconds)
            file.create_group("totals").attrs.update(checkpoint.totals)
            state_hdf5.write(file, "state", checkpoint.state, replicated=True)
    return [f"{_flushed_sha256(path)}  {path.name}\n" for path in written]


def _complete(final: Path, written: Callable[[], list[str]], communicator: Communicator, keep: int) -> None:
    """Make a checkpoint of what the ranks have written, of which ``written()`` tells when it is done."""
    temporary, folder = _temporary(final), final.parent
    try:
        with _writing(communicator, final):
            sums = written()
        everyone = communicator.gather(sums)
        with _writing(communicator, final):
            if communicator.rank == 0:
                # state.h5, which every checkpoint has, comes last: a list that was cut short lacks it.
                lines = [line for part in reversed(everyone) for line in part]
                (temporary / SUMS).write_text("".join(lines), encoding="ascii")
                hdf5.sync(temporary / SUMS)
                hdf5.sync(temporary)
                shutil.rmtree(final, ignore_errors=True)
                os.replace(temporary, final)
                hdf5.sync(folder)
                # What claims to be of a later round is what this run found damaged when it resumed.
                trusted = [path for path in _found(folder) if round_of(path) <= round_of(final)]
                for old in set(_found(folder)) - set(trusted[-keep:]):
                    shutil.rmtree(old, ignore_errors=True)
    except CheckpointError:
        if communicator.rank == 0:  # what is left of it takes the room that others may need
            shutil.rmtree(temporary, ignore_errors=True)
        raise


def _temporary(final: Path) -> Path:
    return final.with_suffix(".tmp")


def _found(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("round-*") if re.fullmatch(r"round-\d{8,}", path.name))


def _open(path: Path) -> Any:
    try:
        return h5py.File(str(path), "r")
    except OSError as error:
        raise CheckpointError(f"checkpoint {path} is damaged: {error}") from error


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flushed_sha256(path: Path) -> str:
    """The checksum of a file, which is on the disk when it is known: the disk and the processor work side by side."""
    with ThreadPoolExecutor(max_workers=1) as disk:
        flushed = disk.submit(hdf5.sync, path)
        checksum = _sha256(path)
        flushed.result()
    return checksum


@contextlib.contextmanager
def _writing(communicator: Communicator, path: Path) -> Iterator[None]:
    """A block of writing, `together`; what the system says against it becomes a CheckpointError."""
    with together(communicator):
        try:
            yield
        except (OSError, RuntimeError) as error:
            reason = getattr(error, "strerror", None) or " ".join(str(error).split())
            raise CheckpointError(f"checkpoint {path} cannot be written: {reason}") from error
