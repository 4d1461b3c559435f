"""``hpcfed launch``: start ranks by whatever starts them here, pass signals on, and tell how the run ended."""

from __future__ import annotations

import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from hpcfed.cluster.outcome import FOLDER, STATUS_FILE
from hpcfed.environment import usable_cores
from hpcfed.errors import ConfigError

logger = logging.getLogger(__name__)

# For so long a run that has ended may take to leave.
STAY_SECONDS = 10.0


@dataclass(frozen=True)
class Launcher:
    """What starts ranks.

    Attributes
    ----------
    kind : ``"srun"``, or whose ``mpirun`` it is: ``"Open MPI"``, ``"MPICH"`` or ``"Intel MPI"``.
    program : its path.
    tolerant : whether it shall let ranks outlive one another.
    """

    kind: str
    program: str
    tolerant: bool = False

    def line(self, ranks: int | None, command: Sequence[str], *, cores: int, root: bool = False) -> Start:
        """The command that starts so many ranks of ``command`` on nodes with so many cores, and what it needs.

        Parameters
        ----------
        ranks : None leaves the number to the allocation.
        root : whether the superuser starts it, which Open MPI refuses unless it is told.
        """
        options = [] if ranks is None else ["-n", str(ranks)]
        crowded = ranks is not None and ranks > cores
        environment: dict[str, str] = {}
        if self.kind == "srun":
            options = ["--mpi=pmix", *options]
        elif self.kind == "Open MPI":
            options += ["--bind-to", "none"]
            if crowded:
                options += ["--map-by", ":OVERSUBSCRIBE"]
            if root:
                options.append("--allow-run-as-root")
            if self.tolerant:  # whichever rank will have to tell how it ended
                options += ["--with-ft", "ulfm", "-x", STATUS_FILE]
        elif crowded:  # pinned ranks would share some cores and leave others
            if self.kind == "MPICH":
                options += ["-bind-to", "none"]
            else:
                environment["I_MPI_PIN"] = "0"
        return Start([self.program, *options, *command], environment, self.tolerant)


@dataclass(frozen=True)
class Start:
    """A command, the variables to add to its environment, and whether its ranks outlive one another."""

    command: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    tolerant: bool = False


def find(environment: Mapping[str, str] = os.environ, tolerant: bool = False) -> Launcher:
    """The launcher: srun within an allocation whose SLURM has PMIx, else the mpirun of this Python or of the PATH.

    One that lets ranks outlive one another (``tolerant``) is Open MPI's alone: srun ends all if one ends badly.

    Raises
    ------
    ConfigError
        If there is none, or one of an unknown kind.
    """
    srun = shutil.which("srun", path=environment.get("PATH"))
    if not tolerant and "SLURM_JOB_ID" in environment and srun and "pmix" in _said([srun, "--mpi=list"]):
        return Launcher("srun", srun)
    beside = str(Path(sys.executable).parent)
    for name in ("mpirun", "mpiexec"):
        program = shutil.which(name, path=beside) or shutil.which(name, path=environment.get("PATH"))
        if program:
            kind, said = _kind(program)
            if tolerant and (kind != "Open MPI" or not re.search(r"(?:Open MPI|prte)\D*([5-9]|\d\d)\.", said)):
                raise ConfigError(
                    f"--on-failure: {program} is {' '.join(said.split()[:4])}, and only Open MPI from version 5 on "
                    "lets ranks outlive one another: pip install 'hpcfed[mpi]' has it, or leave --on-failure out"
                )
            return Launcher(kind, program, tolerant)
    raise ConfigError(
        "no mpirun, mpiexec or srun is on the PATH: load your cluster's MPI module, or pip install 'hpcfed[mpi]'"
    )


def _kind(program: str) -> tuple[str, str]:
    """Whose program it is, and what it says of its version."""
    said = _said([program, "--version"])
    for words, kind in (("Open MPI", "Open MPI"), ("OpenRTE", "Open MPI"), ("Intel", "Intel MPI"), ("HYDRA", "MPICH")):
        if words in said:
            return kind, said
    raise ConfigError(f"{program} is of no known kind: start the ranks yourself: {program} -n RANKS hpcfed ...")


def _said(command: Sequence[str]) -> str:
    """What a command prints; nothing if it cannot be started."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout + done.stderr


def default_ranks(environment: Mapping[str, str] = os.environ) -> int | None:
    """How many ranks are started unless told: what the allocation has (None), else the cores that may be used."""
    return None if "SLURM_NTASKS" in environment else usable_cores()


def run(start: Start) -> int:
    """Start the ranks, pass signals on, wait; the status that rank 0 left, or that the launcher reports.

    Where the ranks were killed, or their node was lost, it is 1, whatever the launcher reports.

    SIGTERM, SIGUSR1 and the first Ctrl-C reach the ranks as SIGUSR1: they write a checkpoint and leave with 75. The
    second Ctrl-C ends them.
    """
    with tempfile.TemporaryDirectory(prefix=".hpcfed-launch-", dir=_shared_folder()) as folder:
        said = Path(folder) / "status"
        environment = os.environ | start.environment | {STATUS_FILE: str(said)}
        # In a group of its own, so that Ctrl-C reaches the ranks through this process alone.
        ranks = subprocess.Popen(start.command, env=environment, stdin=subprocess.DEVNULL, process_group=0)
        asked = False

        def pass_on(number: int, frame: object) -> None:
            nonlocal asked
            final, asked = asked and number == signal.SIGINT, True
            with suppress(ProcessLookupError):
                ranks.send_signal(signal.SIGTERM if final else signal.SIGUSR1)

        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            signal.signal(number, pass_on)
        if start.tolerant:
            _end_those_who_stay(ranks, said)
        status = ranks.wait()
        if said.is_file():
            return int(said.read_text(encoding="ascii"))
        status = 128 - status if status < 0 else status
        told = said.with_name(FOLDER)
        if status and (asked or (status < 128 and not told.is_file())):  # stopped, or never begun
            return status
        folder_name = told.read_text(encoding="utf-8") if told.is_file() else "DIR"
        logger.error(
            "the ranks have ended without a word, one may have been killed or a node lost: go on with hpcfed resume %s",
            folder_name,
        )
        return 1


def _end_those_who_stay(ranks: subprocess.Popen[bytes], said: Path) -> None:
    """Wait for the ranks; a while after the run has ended, end those that somebody has stopped and mpirun waits for."""
    while ranks.poll() is None and not said.is_file():
        time.sleep(0.1)
    for end in (ranks.terminate, ranks.kill):
        with suppress(subprocess.TimeoutExpired):
            ranks.wait(STAY_SECONDS)
            return
        end()


def _shared_folder() -> str | None:
    """The working directory, which all nodes see as the run folder must be; the temporary one if it is read-only."""
    return os.getcwd() if os.access(os.getcwd(), os.W_OK) else None
