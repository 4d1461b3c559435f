"""Checkpoints: HDF5, keyed by client id, so that what 17 ranks saved 4 ranks can resume.

A checkpoint is a folder ``round-00000040`` with ``state.h5`` (replicated values and counters, written by rank 0) and,
for methods whose clients keep state, ``clients-0003.h5`` for each rank that owns clients. It is written under a
temporary name, flushed to the disk and renamed, so a killed run leaves either a whole checkpoint or none. The file
``SHA256SUMS`` inside lists every file's checksum (``sha256sum -c`` checks it). The last two checkpoints are kept.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import logging
import os
import re
import shutil
import types
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from hpcfed import devices
from hpcfed.communicator import Communicator, together
from hpcfed.errors import CheckpointError
from hpcfed.federation import Federation, PerClient

logger = logging.getLogger(__name__)

KEEP = 2
SUMS = "SHA256SUMS"
FORMAT = 1
_CLIENTS = "PerClient"


@dataclass(frozen=True)
class Checkpoint:
    """Where a run stood: the state after ``round`` rounds and what it had cost."""

    round: int
    state: Any
    seconds: dict[str, float]
    totals: dict[str, int]


def save(folder: Path, checkpoint: Checkpoint, fed: Federation) -> None:
    """Write a checkpoint into ``folder`` and drop all but the last two. Every rank must call it.

    Raises
    ------
    CheckpointError
        On every rank, if any rank cannot write; earlier checkpoints are as they were.
    """
    communicator = fed.communicator
    first = communicator.rank == 0
    final = folder / f"round-{checkpoint.round:08d}"
    temporary = final.with_suffix(".tmp")
    written: list[Path] = []
    with _writing(communicator, final):
        if first:
            for left_behind in folder.glob("*.tmp"):
                shutil.rmtree(left_behind, ignore_errors=True)
            temporary.mkdir(parents=True)
    with _writing(communicator, final):
        if _has_clients(checkpoint.state):
            written.append(temporary / f"clients-{communicator.rank:04d}.h5")
            with _new_file(written[-1]) as file:
                _write(file, "state", checkpoint.state, replicated=False)
        if first:
            written.append(temporary / "state.h5")
            with _new_file(written[-1]) as file:
                file.attrs.update(format=FORMAT, round=checkpoint.round, num_clients=fed.num_clients)
                file.create_group("seconds").attrs.update(checkpoint.seconds)
                file.create_group("totals").attrs.update(checkpoint.totals)
                _write(file, "state", checkpoint.state, replicated=True)
        sums = [f"{_sha256(path)}  {path.name}\n" for path in written]
    everyone = communicator.gather(sums)
    with _writing(communicator, final):
        if first:
            # state.h5, which every checkpoint has, comes last: a list that was cut short lacks it.
            (temporary / SUMS).write_text(
                "".join(line for part in reversed(everyone) for line in part), encoding="ascii"
            )
            _sync(temporary / SUMS)
            _sync(temporary)
            shutil.rmtree(final, ignore_errors=True)
            os.replace(temporary, final)
            _sync(folder)
            # What claims to be of a later round is what this run found damaged when it resumed.
            trusted = [path for path in _found(folder) if round_of(path) <= checkpoint.round]
            for old in set(_found(folder)) - set(trusted[-KEEP:]):
                shutil.rmtree(old, ignore_errors=True)


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
        if file.attrs.get("format") != FORMAT:
            raise CheckpointError(
                f"checkpoint {path} has format {file.attrs.get('format')}, this hpcfed reads {FORMAT}"
            )
        if file.attrs["num_clients"] != fed.num_clients:
            raise CheckpointError(
                f"checkpoint {path} is of {file.attrs['num_clients']} clients, the run of {fed.num_clients}"
            )
        opened = [_open(part) for part in sorted(path.glob("clients-*.h5"))]
        try:
            state = _read(file, "state", state_type, opened, fed.local, fed.device)
        except (KeyError, TypeError) as error:
            raise CheckpointError(f"checkpoint {path} does not hold a {state_type.__name__}: {error}") from error
        finally:
            for other in opened:
                other.close()
        return Checkpoint(
            round=int(file.attrs["round"]),
            state=state,
            seconds={name: float(value) for name, value in file["seconds"].attrs.items()},
            totals={name: int(value) for name, value in file["totals"].attrs.items()},
        )


# -- a state as HDF5: a dataclass is a group, an array a dataset, a PerClient a group in the files of the clients --


def _write(group: Any, name: str, value: Any, *, replicated: bool) -> None:
    if dataclasses.is_dataclass(value):
        inner = group.require_group(name)
        for field in dataclasses.fields(value):
            _write(inner, field.name, getattr(value, field.name), replicated=replicated)
    elif isinstance(value, PerClient):
        inner = group.require_group(name)
        inner.attrs["kind"] = _CLIENTS
        if not replicated:
            for client, own in value.items():
                _write(inner, str(client), own, replicated=True)
    elif replicated and value is None:
        group.require_group(name).attrs["kind"] = "None"
    elif replicated:
        array = devices.to_host(value) if devices.backend(value) == "torch" else np.asarray(value)
        dataset = group.create_dataset(name, data=array)
        dataset.attrs["backend"] = devices.backend(value)
        dataset.attrs["number"] = not hasattr(value, "shape")


def _read(group: Any, name: str, hint: Any, files: list[Any], own: Sequence[int], device: devices.Device) -> Any:
    item = group[name]
    kind = item.attrs.get("kind")
    if kind == "None":
        return None
    if kind == _CLIENTS:
        inner_hint = (*typing.get_args(hint), Any)[0]
        values = {}
        for client in own:
            holders = [file[item.name] for file in files if str(client) in file[item.name]]
            if holders:  # a client outside the cohort that left these values has none
                values[client] = _read(holders[0], str(client), inner_hint, [], [], device)
        return PerClient(values)
    if isinstance(item, h5py.Group):
        state_type = _dataclass_of(hint)
        hints = typing.get_type_hints(state_type)
        return state_type(
            **{
                field.name: _read(item, field.name, hints[field.name], files, own, device)
                for field in dataclasses.fields(state_type)
            }
        )
    array = item[()]
    if item.attrs["number"]:
        return array.item()
    return devices.from_host(array, "torch", device) if item.attrs["backend"] == "torch" else np.asarray(array)


def _dataclass_of(hint: Any) -> Any:
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        hint = next(arg for arg in typing.get_args(hint) if arg is not types.NoneType)
    if not dataclasses.is_dataclass(hint):
        raise TypeError(f"{hint} is not a dataclass")
    return hint


def keeps_clients(state_type: type) -> bool:
    """Whether states of this type have values that live with their clients."""
    hints = typing.get_type_hints(state_type)
    return any(
        (typing.get_origin(hint) or hint) is PerClient
        or (isinstance(hint, type) and dataclasses.is_dataclass(hint) and keeps_clients(hint))
        for hint in (hints[field.name] for field in dataclasses.fields(state_type))
    )


def _has_clients(state: Any) -> bool:
    if not dataclasses.is_dataclass(state):
        return isinstance(state, PerClient)
    return any(_has_clients(getattr(state, field.name)) for field in dataclasses.fields(state))


# -- files ------------------------------------------------------------------------------------------------------------


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


@contextlib.contextmanager
def _new_file(path: Path) -> Iterator[Any]:
    """An HDF5 file that is on the disk when the block ends."""
    with h5py.File(str(path), "w") as file:
        yield file
    _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _writing(communicator: Communicator, path: Path) -> Iterator[None]:
    """A block of writing, `together`; what the system says against it becomes a CheckpointError."""
    with together(communicator):
        try:
            yield
        except (OSError, RuntimeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise CheckpointError(f"checkpoint {path} cannot be written: {reason}") from error
