"""``hpcfed launch``: start ranks by whatever starts them here, pass signals on, and tell how the run ended."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from hpcfed.cluster.outcome import STATUS_FILE
from hpcfed.environment import usable_cores
from hpcfed.errors import ConfigError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Launcher:
    """What starts ranks.

    Attributes
    ----------
    kind : ``"srun"``, or whose ``mpirun`` it is: ``"Open MPI"``, ``"MPICH"`` or ``"Intel MPI"``.
    program : its path.
    """

    kind: str
    program: str

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
        elif crowded:  # pinned ranks would share some cores and leave others
            if self.kind == "MPICH":
                options += ["-bind-to", "none"]
            else:
                environment["I_MPI_PIN"] = "0"
        return Start([self.program, *options, *command], environment)


@dataclass(frozen=True)
class Start:
    """A command and the variables to add to its environment."""

    command: list[str]
    environment: dict[str, str] = field(default_factory=dict)


def find(environment: Mapping[str, str] = os.environ) -> Launcher:
    """The launcher: srun within an allocation whose SLURM has PMIx, else the mpirun of this Python or of the PATH.

    Raises
    ------
    ConfigError
        If there is none, or one of an unknown kind.
    """
    srun = shutil.which("srun", path=environment.get("PATH"))
    if "SLURM_JOB_ID" in environment and srun and "pmix" in _said([srun, "--mpi=list"]):
        return Launcher("srun", srun)
    beside = str(Path(sys.executable).parent)
    for name in ("mpirun", "mpiexec"):
        program = shutil.which(name, path=beside) or shutil.which(name, path=environment.get("PATH"))
        if program:
            return Launcher(_kind(program), program)
    raise ConfigError(
        "no mpirun, mpiexec or srun is on the PATH: load your cluster's MPI module, or pip install 'hpcfed[mpi]'"
    )


def _kind(program: str) -> str:
    said = _said([program, "--version"])
    for words, kind in (("Open MPI", "Open MPI"), ("OpenRTE", "Open MPI"), ("Intel", "Intel MPI"), ("HYDRA", "MPICH")):
        if words in said:
            return kind
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
        status = ranks.wait()
        if said.is_file():
            return int(said.read_text(encoding="ascii"))
        if status == 0:
            logger.error("the ranks have ended without a word, a node may be lost: hpcfed resume goes on")
            return 1
        return 128 - status if status < 0 else status


def _shared_folder() -> str | None:
    """The working directory, which all nodes see as the run folder must be; the temporary one if it is read-only."""
    return os.getcwd() if os.access(os.getcwd(), os.W_OK) else None
