"""``result.h5``: the solution and all that is needed to trust it. It is written last and marks a finished run."""

from __future__ import annotations

import datetime
import hashlib
import importlib.metadata
import os
import platform
import socket
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from hpcfed import __version__, devices, hdf5
from hpcfed.config import RunConfig
from hpcfed.errors import DataError
from hpcfed.protocols import Report
from hpcfed.run.run_folder import RunFolder

PACKAGES = ("numpy", "scipy", "h5py", "mpi4py", "numba", "astra-toolbox", "torch")


def write(
    folder: RunFolder,
    config: RunConfig,
    problem: Any,
    algorithm: Any,
    state: Any,
    report: Report,
    *,
    command: str,
    ranks: int,
    peak_memory_bytes: int,
    ended: str,
    losses: Sequence[str] = (),
) -> None:
    """Write the solution, the algorithm's other outputs and report, the history and the provenance, all or nothing."""
    for name, text in report.files.items():
        (folder.path / name).write_text(text, encoding="utf-8")
    temporary = folder.result.with_suffix(".tmp")
    solution = algorithm.solution(state)
    with hdf5.new_file(temporary) as file:
        file.attrs.update(
            workload=config.workload.name,
            algorithm=config.algorithm.name,
            clients=config.workload.options.clients,
            rounds=config.run.rounds,
            digest=digest(solution),
            config=config.to_toml(),
            ranks=ranks,
            peak_memory_bytes=peak_memory_bytes,
            ended=ended,
        )
        for name, (array, attributes) in problem.results(solution).items():
            dataset = file.create_dataset(name, data=devices.to_host(array))
            dataset.attrs.update(attributes)
        for name, array in {**algorithm.outputs(state), **report.arrays}.items():
            file.create_dataset(name, data=devices.to_host(array))
        _write_history(file.create_group("history"), folder)
        file.create_group("provenance").attrs.update(
            command=command,
            hpcfed=__version__,
            python=platform.python_version(),
            platform=platform.platform(),
            host=socket.gethostname(),
            date=datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
            **{package: _version(package) for package in PACKAGES},
            **({"losses": "\n".join(losses)} if losses else {}),
        )
    hdf5.sync(temporary)
    os.replace(temporary, folder.result)


def digest(solution: Any) -> str:
    """SHA-256 of the solution's bytes."""
    return hashlib.sha256(devices.to_host(solution).data).hexdigest()


def is_whole(path: Path) -> bool:
    """Whether a result can be read; one that was cut off cannot."""
    try:
        read_attributes(path)
    except DataError:
        return False
    return True


def read_attributes(path: Path) -> dict[str, Any]:
    """What a finished run says of itself: workload, algorithm, clients, ranks, rounds, digest.

    Raises
    ------
    DataError
        If the file is not one of ours or is damaged.
    """
    try:
        with h5py.File(str(path), "r") as file:
            return {name: value.item() if hasattr(value, "item") else value for name, value in file.attrs.items()}
    except OSError as error:
        raise DataError(f"result {path} is damaged: hpcfed resume {path.parent} writes it again") from error


def _write_history(group: Any, folder: RunFolder) -> None:
    records = folder.history()
    for name in {key: None for record in records for key in record if key != "seconds"}:
        group.create_dataset(name, data=np.array([record.get(name, np.nan) for record in records]))
    for name in {key: None for record in records for key in record["seconds"]}:
        values = [record["seconds"].get(name, 0.0) for record in records]
        group.create_dataset(f"seconds/{name}", data=np.array(values))


@cache
def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
