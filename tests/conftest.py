"""Shared fixtures: starting hpcfed in a process, with and without mpirun, and finding real data."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

# As root, with more ranks than cores, on one machine: what mpirun itself must be told.
LAUNCH = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "OMP_NUM_THREADS": "1",
}


@dataclass(frozen=True)
class Finished:
    """A process that has ended."""

    status: int
    out: str
    err: str


def start(command: list[str], **env: str) -> subprocess.Popen[str]:
    """Start a command in a process group of its own, out of reach of any MPI that runs the tests."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PMIX_", "OMPI_COMM_WORLD", "PRTE_LAUNCHED"))
    }
    return subprocess.Popen(
        command,
        env={**inherited, **LAUNCH, **env},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str], timeout: float) -> Finished:
    """Wait for it; what has not ended in time is killed and fails the test."""
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.terminate()
        try:
            out, err = process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
        pytest.fail(f"{process.args} did not end within {timeout} s\n{out}\n{err}", pytrace=False)
    return Finished(process.returncode, out, err)


def mpi_command(ranks: int, *args: str) -> list[str]:
    """``mpirun -n ranks hpcfed args`` with the mpirun beside this Python."""
    return [str(Path(sys.executable).parent / "mpirun"), "-n", str(ranks), sys.executable, "-m", "hpcfed", *args]


@pytest.fixture
def hpcfed() -> Callable[..., Finished]:
    """``hpcfed(*args)``: run the command in one process."""

    def go(*args: str, timeout: float = 120, **env: str) -> Finished:
        return finish(start([sys.executable, "-m", "hpcfed", *args], **env), timeout)

    return go


@pytest.fixture
def mpirun() -> Callable[..., Finished]:
    """``mpirun(ranks, *args)``: run the command on that many ranks."""

    def go(ranks: int, *args: str, timeout: float = 120, **env: str) -> Finished:
        return finish(start(mpi_command(ranks, *args), **env), timeout)

    return go


@pytest.fixture
def shared_data() -> Path:
    """A folder of real data, where there is one."""
    given = os.environ.get("HPCFED_TEST_DATA")
    folder = Path(given) if given else Path(__file__).resolve().parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("no folder of real data: set HPCFED_TEST_DATA to one")
    return folder


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that would have been written, in order; writing takes a second each."""
    from matplotlib.figure import Figure

    figures: list[Any] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path: figures.append(figure))
    return figures
