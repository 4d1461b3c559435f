"""Checks of all ranks together, made by rank 0 from what each tells about itself."""

from __future__ import annotations

import importlib
import itertools
import os
import platform
import re
import shutil
import socket
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hpcfed import __version__, devices, environment
from hpcfed.doctor.findings import Finding
from hpcfed.doctor.system import (
    MEBI,
    Library,
    family,
    human_size,
    library_of_new_process,
    loaded_library,
    output,
    plural,
    proc_size,
)
from hpcfed.ranks.communicator import Communicator
from hpcfed.ranks.cuda_aware import SWITCH, Answer

# What chooses the way of messages in Open MPI and in MPICH.
TRANSPORT = ("OMPI_MCA_pml", "OMPI_MCA_btl", "UCX_TLS", "FI_PROVIDER")
YIELD = "OMPI_MCA_mpi_yield_when_idle"


@dataclass(frozen=True)
class Rank:
    """What a rank tells about itself.

    ``cores`` is its core mask, ``resident`` its memory in bytes, ``mpi`` None without MPI, ``seconds`` the time of
    an Allreduce of 1 MiB and ``right`` whether that gave the right sum. ``gpu`` is the one that its clients would
    compute on, ``gpus`` how many its node has, ``transport`` what was set of the way that its messages go,
    ``cuda_aware`` whether MPI takes what lies on GPUs.
    """

    host: str
    versions: str
    cores: frozenset[int]
    yields: bool
    resident: int
    mpi: Library | None
    seconds: float
    right: bool
    threads: str = "1"
    gpu: str = ""
    gpus: int = 0
    transport: str = ""
    cuda_aware: Answer = Answer(False, "")


@dataclass(frozen=True)
class World:
    """All ranks, for the checks of rank 0."""

    ranks: Sequence[Rank]
    tuned: Mapping[str, str]

    @property
    def hosts(self) -> dict[str, list[Rank]]:
        """The ranks of each node."""
        hosts: dict[str, list[Rank]] = {}
        for rank in self.ranks:
            hosts.setdefault(rank.host, []).append(rank)
        return hosts

    @property
    def serial(self) -> bool:
        """Whether no launcher started this process."""
        return self.ranks[0].mpi is None


def tell(communicator: Communicator) -> Rank:
    """This rank's facts. Nothing here may fail on one rank alone: the others would wait."""
    ones = np.full(MEBI // 4, communicator.rank + 1, np.float32)
    seconds = []
    for _ in range(11):
        start = time.perf_counter()
        total = communicator.sum(ones)
        seconds.append(time.perf_counter() - start)
    resident = proc_size("self/status", "VmRSS")
    return Rank(
        host=socket.gethostname(),
        versions=f"Python {platform.python_version()}, hpcfed {__version__}, numpy {np.__version__}",
        cores=frozenset(os.sched_getaffinity(0)),
        yields=os.environ.get(YIELD, "").lower() in ("1", "true", "yes", "enabled"),
        resident=resident,
        mpi=loaded_library() if "mpi4py.MPI" in sys.modules else None,
        seconds=statistics.median(seconds[1:]),
        right=bool(np.all(total == communicator.size * (communicator.size + 1) / 2)),
        threads=os.environ.get("OMP_NUM_THREADS", "all cores'"),
        gpu=_gpu(communicator.local_rank),
        gpus=len(list(Path("/dev").glob("nvidia[0-9]*"))),
        transport=" ".join(os.environ[name] for name in TRANSPORT if name in os.environ),
        cuda_aware=_cuda_aware(communicator),
    )


def _cuda_aware(communicator: Communicator) -> Answer:
    try:
        return communicator.cuda_aware()
    except Exception as error:
        return Answer(False, f"{type(error).__name__}: {error}")


def _gpu(local_rank: int) -> str:
    """The GPU that a rank takes, by its number on the node; empty without one."""
    try:
        device = devices.choose("auto", local_rank)
    except Exception as error:  # a driver may fail in any way, and the checks of the node say so
        return f"?, {type(error).__name__}"
    return str(device.index) if device.is_gpu else ""


def mpi_library(world: World) -> Iterator[Finding]:
    try:
        library = world.ranks[0].mpi or library_of_new_process()
    except RuntimeError as error:
        remedy = "load your cluster's MPI module, or: pip install 'hpcfed[mpi]'"
        yield Finding("!!", "MPI library", f"none can be loaded: {error}", remedy)
        return
    yield Finding("ok", "MPI library", f"{library.version}, {library.path}")
    yield from _launchers(library)
    number = re.search(r"\d+", library.version)
    if library.family == "Open MPI" and number and int(number[0]) >= 5:
        yield Finding("ok", "lost ranks", "the others can go on: hpcfed launch --on-failure takeover COMMAND")
    if not world.serial:
        yield from _gpu_messages(world)
    root = os.geteuid() == 0 and world.serial and library.family == "Open MPI"
    if root and not {"OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"} <= os.environ.keys():
        remedy = "export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"
        yield Finding("!!", "root", "Open MPI's mpirun refuses to start anything as root", remedy)


def _gpu_messages(world: World) -> Iterator[Finding]:
    """The way that tensors go: from GPU to GPU where every rank has one and a library that is fit for it."""
    answers = [rank.cuda_aware for rank in world.ranks]
    reasons = ", ".join(sorted({answer.reason for answer in answers}))
    gpus = [rank.gpu for rank in world.ranks]
    if all(answer.yes for answer in answers):
        when = "" if all(gpus) else " if every rank has one"
        text = f"MPI is ({reasons}): sums go from GPU to GPU{when}; {SWITCH}=0 makes them go by way of the host"
        yield Finding("ok", "CUDA-aware", text)
    else:
        remedy = f"if you know that it is: export {SWITCH}=1" if any(gpus) else ""
        yield Finding("--", "CUDA-aware", f"MPI is not ({reasons}): sums of GPUs go by way of the host", remedy)


def _launchers(library: Library) -> Iterator[Finding]:
    """mpirun, from the PATH or beside this Python, and srun."""
    beside = str(Path(sys.executable).parent)
    srun = shutil.which("srun")
    mpirun = shutil.which("mpirun") or shutil.which("mpiexec")
    hidden = None if mpirun else shutil.which("mpirun", path=beside) or shutil.which("mpiexec", path=beside)
    for found in (mpirun, hidden):
        if not found:
            continue
        text = output(found, "--version")
        kind, number = family(text), re.search(r"\d+\.\d[\w.]*", text)
        words = f"{found}, {kind or 'of an unknown kind'} {number[0] if number else ''}".rstrip()
        if kind and kind != library.family:
            remedy = f"put the mpirun of {library.family} first on the PATH; if it came with pip, it is in {beside}"
            yield Finding("!!", "launcher", f"{words}, but the MPI library is {library.family}", remedy)
        elif hidden:
            yield Finding("--", "launcher", f"{words}, is not on the PATH", f"export PATH={beside}:$PATH")
        else:
            yield Finding("ok", "launcher", words)
    if srun:
        needs = "" if library.family != "Open MPI" or "pmix" in output(srun, "--mpi=list") else ", without PMIx"
        remedy = "start with mpirun inside sbatch: Open MPI needs srun --mpi=pmix" if needs else ""
        yield Finding(
            "--" if needs else "ok", "launcher", f"{srun}, {output(srun, '--version').strip()}{needs}", remedy
        )
    if not (mpirun or hidden or srun):
        remedy = "load your cluster's MPI module, or: pip install 'hpcfed[mpi]'"
        yield Finding("!!", "launcher", "neither mpirun, mpiexec nor srun is on the PATH", remedy)


def ranks(world: World) -> Iterator[Finding]:
    if world.serial:
        yield Finding("--", "ranks", "one process without a launcher", "for more: mpirun -n 4 hpcfed doctor")
        return
    hosts = ", ".join(f"{host} {len(ranks)}" for host, ranks in world.hosts.items())
    yield Finding("ok", "ranks", f"{len(world.ranks)} on {plural(len(world.hosts), 'node')}: {hosts}")
    versions = {f"{rank.versions}, {rank.mpi and rank.mpi.version}" for rank in world.ranks}
    if len(versions) > 1:
        yield Finding("!!", "versions", f"differ between ranks: {'; '.join(sorted(versions))}", "use one environment")
    wrong = [str(number) for number, rank in enumerate(world.ranks) if not rank.right]
    if wrong:
        remedy = "other transports may help: export OMPI_MCA_pml=ob1 OMPI_MCA_btl=self,tcp"
        yield Finding("!!", "Allreduce", f"wrong sum on ranks {', '.join(wrong)}", remedy)
    else:
        slowest = max(rank.seconds for rank in world.ranks)
        yield Finding("ok", "Allreduce", f"right on all ranks, 1 MiB in {1e3 * slowest:.3g} ms")
    resident = max(rank.resident for rank in world.ranks)
    yield Finding("ok", "rank memory", f"at most {human_size(resident)} resident, with nothing loaded yet")


def places(world: World) -> Iterator[Finding]:
    """Where each rank is and what it has; ranks in a row that have the same are one line."""
    table = [
        f"{rank.host}: {_numbers('core', rank.cores)}, {rank.threads} thread{'s' * (rank.threads != '1')}, "
        f"{'GPU ' + rank.gpu if rank.gpu else 'no GPU'}, messages by {rank.transport or 'what MPI chooses'}"
        for rank in world.ranks
    ]
    first = 0
    for text, group in itertools.groupby(table):
        last = first + len(list(group)) - 1
        yield Finding("ok", f"rank {first}" if first == last else f"ranks {first}-{last}", text)
        first = last + 1
    for host, here in world.hosts.items():
        used, there = len({rank.gpu for rank in here} - {""}), max(rank.gpus for rank in here)
        if 0 < used < there:
            remedy = f"start at least {there} ranks on a node, or ask the scheduler for fewer GPUs"
            yield Finding("!!", "GPUs", f"{there - used} of {there} GPUs of {host} have no rank", remedy)
        masks = Counter(rank.cores for rank in here)
        if len(here) <= len(frozenset[int]().union(*masks)):  # otherwise they have to share
            for mask, count in masks.items():
                if count > len(mask):
                    remedy = "start with mpirun --map-by core, or --bind-to none"
                    text = f"{count} ranks of {host} are bound to {_numbers('core', mask)}, others are free"
                    yield Finding("!!", "binding", text, remedy)


def _numbers(thing: str, numbers: frozenset[int]) -> str:
    """Numbers in words, such as ``cores 0-3, 8``."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and spans[-1][1] == number - 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    listed = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
    return f"{thing}{'s' if len(numbers) != 1 else ''} {listed}"


def cores(world: World) -> Iterator[Finding]:
    """Ranks that outnumber the cores must give them up while they wait."""
    spins = any(rank.mpi and rank.mpi.family == "Open MPI" and not rank.yields for rank in world.ranks)
    for host, here in world.hosts.items():
        usable = frozenset[int]().union(*(rank.cores for rank in here))
        text = f"{plural(len(here), 'rank')} on {plural(len(usable), 'core')} of {host}"
        if len(here) <= len(usable):
            yield Finding("ok", "cores", text)
        elif spins:
            remedy = f"export {YIELD}=1; if the node has more cores: mpirun --bind-to none"
            yield Finding(
                "!!", "cores", f"{text}, and nothing makes waiting ranks yield: runs may be many times slower", remedy
            )
        else:
            yield Finding("--", "cores", f"{text}; waiting ranks yield", "if there are more: mpirun --bind-to none")


def threads(world: World) -> Iterator[Finding]:
    """Threads of a rank times ranks should not exceed the cores."""
    here = world.hosts[world.ranks[0].host]
    available = len(frozenset[int]().union(*(rank.cores for rank in here)))
    try:
        pools = {pool["internal_api"]: pool["num_threads"] for pool in _thread_pools()}
    except ImportError:
        counts = {name: os.environ.get(name, "") for name in environment.THREADS}
        text = ", ".join(f"{name}={value or 'unset'}" for name, value in counts.items())
        most = max(int(value) if value.isdigit() else len(world.ranks[0].cores) for value in counts.values())
    else:
        text = ", ".join(f"{name} {count}" for name, count in pools.items())
        most = max(pools.values(), default=1)
    crowded = most > 1 and len(here) * most > available
    remedy = "export " + " ".join(f"{name}=1" for name in environment.THREADS) if crowded else ""
    yield Finding("!!" if crowded else "ok", "threads", text, remedy)


def _thread_pools() -> list[dict[str, Any]]:
    """The thread pools that are loaded, where threadpoolctl is there to ask."""
    pools: list[dict[str, Any]] = importlib.import_module("threadpoolctl").threadpool_info()
    return pools


def settings(world: World) -> Iterator[Finding]:
    """Who set what: hpcfed sets only what the user has left unset."""
    wanted = environment.wanted(os.environ, environment.usable_cores())
    yours = {name: os.environ[name] for name in wanted if name in os.environ and name not in world.tuned}
    unset = [name for name in wanted if name not in os.environ]
    for who, values in (("set by hpcfed", world.tuned), ("set by you", yours)):
        if values:
            yield Finding("ok", "settings", f"{who}: " + " ".join(f"{name}={value}" for name, value in values.items()))
    if unset:
        yield Finding("--", "settings", f"left unset: {' '.join(unset)}", "without --no-mpi-tuning hpcfed sets them")


CHECKS: Sequence[Callable[[World], Iterator[Finding]]] = (mpi_library, ranks, places, cores, threads, settings)
