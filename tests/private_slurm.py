"""A SLURM of one's own for the tests: real daemons, as root, in a folder, on free ports of the loopback interface."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from glob import glob
from pathlib import Path
from types import TracebackType

PACKAGES = "slurm-wlm munge libpmix2"
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun")
PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
# For so long its daemons may take to find one another.
START_SECONDS = 60.0
# Debian puts the library by which srun and the ranks talk here.
PMIX = "/usr/lib/*/pmix2/lib/libpmix.so.2"

# Neither systemd nor cgroups, no accounting; cores that the machine need not have. What makes tests wait is short:
# a job that is put back stays out of the queue until its old credential has expired, a step that is told to end gets
# KillWait to do so. What would go wrong on a busy machine is long: a node that is slow to answer is not lost.
CONFIGURATION = """\
ClusterName=private
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
AuthInfo=socket={folder}/munge,cred_expire=5
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdPidFile={folder}/%n/pid
SlurmdLogFile={folder}/%n.log
SlurmdSpoolDir={folder}/%n/spool
TmpFS={folder}/%n/tmp
ProctrackType=proctrack/linuxproc
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,batch_sched_delay=0
ReturnToService=2
KillWait=2
MessageTimeout=60
SlurmdTimeout=300
"""
NODE = "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=8\n"
PARTITION = "PartitionName=main Nodes=ALL Default=YES\n"


def missing() -> str | None:
    """Why no private SLURM can run here and what to do about it; None if one can."""
    if sys.platform != "linux":
        return "SLURM runs on Linux"
    absent = [program for program in PROGRAMS if shutil.which(program, path=PATH) is None]
    if not glob(PMIX):
        absent.append("libpmix.so.2")
    if absent:
        return f"without {', '.join(absent)}: apt-get install {PACKAGES}"
    if os.geteuid() != 0:
        return "a private SLURM must be started by root"
    return None


class PrivateSlurm:
    """munged, slurmctld and a slurmd for each node, from ``with`` to its end.

    Attributes
    ----------
    environment : what a command of SLURM needs in its environment to ask this one.
    """

    def __init__(self, folder: Path, nodes: Sequence[str]) -> None:
        self.folder, self.nodes = folder, nodes
        self.environment = {"SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> PrivateSlurm:
        _name_pmix()
        self._configure()
        try:
            self._start("munged", "--foreground", "--force", "--num-threads=2", *self._munge_options())
            self._until((self.folder / "munge").is_socket)
            self._start("slurmctld", "-D", "-c")
            for node in self.nodes:
                for part in ("spool", "tmp"):
                    (self.folder / node / part).mkdir(parents=True)
                self._start("slurmd", "-D", "-c", "-N", node, SLURMD_NODENAME=node)
            self._until(lambda: self._states() == ["idle"] * len(self.nodes))
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing here is worth an orderly end; the daemons go first, so that none starts anything in between."""
        for daemon in self._daemons.values():
            daemon.kill()
            daemon.wait()
        for process in self.processes():
            _kill(process)

    def processes(self, **named: str) -> list[int]:
        """The ids of all processes of this SLURM and its jobs whose environment has these variables."""
        wanted = {f"{name}={value}" for name, value in {**self.environment, **named}.items()}
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):  # it has ended, or is somebody else's
                if wanted <= set(path.read_text(errors="replace").split("\0")):
                    found.append(int(path.parent.name))
        return found

    def lose_node(self, name: str) -> None:
        """Kill a node's daemon and all that it has started, at once; it does not come back."""
        for process in self.processes(SLURMD_NODENAME=name):
            _kill(process)
        self._daemons.pop(f"slurmd {name}").wait()

    def _configure(self) -> None:
        host = socket.gethostname().split(".")[0]
        (self.folder / "state").mkdir(parents=True)
        port, *ports = _free_ports(1 + len(self.nodes))
        text = CONFIGURATION.format(host=host, port=port, folder=self.folder)
        lines = [NODE.format(name=name, host=host, port=port) for name, port in zip(self.nodes, ports, strict=True)]
        (self.folder / "slurm.conf").write_text("".join([text, *lines, PARTITION]))
        (self.folder / "cgroup.conf").touch()
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)

    def _munge_options(self) -> list[str]:
        files = {"socket": "munge", "key-file": "munge.key", "pid-file": "munge.pid", "seed-file": "munge.seed"}
        return [f"--{option}={self.folder / name}" for option, name in files.items()]

    def _start(self, program: str, *options: str, **named: str) -> None:
        path = shutil.which(program, path=PATH)
        assert path is not None
        name = " ".join([program, *named.values()])
        with (self.folder / f"{name}.err").open("ab") as said:
            self._daemons[name] = subprocess.Popen(
                [path, *options],
                env=os.environ | self.environment | named,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                start_new_session=True,
            )

    def _states(self) -> list[str]:
        command = ["sinfo", "--noheader", "--Node", "--format=%T"]
        env = os.environ | self.environment
        return subprocess.run(command, env=env, capture_output=True, text=True, check=False).stdout.split()

    def _until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not condition():
            ended = [name for name, daemon in self._daemons.items() if daemon.poll() is not None]
            if ended or time.monotonic() > deadline:
                raise RuntimeError(f"SLURM did not come up; ended: {', '.join(ended) or 'none'}\n{self._said()}")
            time.sleep(0.05)

    def _said(self) -> str:
        """The last lines of all logs."""
        logs = sorted([*self.folder.glob("*.log"), *self.folder.glob("*.err")])
        return "\n".join(f"-- {log.name}\n" + "\n".join(log.read_text().splitlines()[-20:]) for log in logs)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def _name_pmix() -> None:
    """Give the library the name under which SLURM looks for it, which Debian has in the package for developers only."""
    for library in map(Path, glob(PMIX)):
        with contextlib.suppress(FileExistsError):
            library.with_name("libpmix.so").symlink_to(library.name)


def _kill(process: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)
