"""Questions to the system: the MPI library, limits, versions, sizes."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

GIBI, MEBI = 1 << 30, 1 << 20


@dataclass(frozen=True)
class Library:
    """An MPI library: ``family`` is ``Open MPI`` or ``MPICH`` (with its kin), whose launchers do not mix."""

    family: str
    version: str
    path: str


def loaded_library() -> Library:
    """The MPI library that mpi4py has loaded, or loads now."""
    from mpi4py import MPI

    words = MPI.Get_library_version().strip("\0 \n").splitlines()[0]
    mapped = re.search(r"/\S*/libmpi[\w-]*\.so\S*", Path("/proc/self/maps").read_text())
    return Library(family(words) or MPI.get_vendor()[0], words.split(", ")[0], mapped[0] if mapped else "path unknown")


def library_of_new_process() -> Library:
    """The MPI library as a process of its own finds it: loading one that is broken may kill the process.

    Raises
    ------
    RuntimeError
        If none can be loaded.
    """
    script = (
        "import dataclasses, json, mpi4py; mpi4py.rc(initialize=False, finalize=False); "
        "from hpcfed.doctor.system import loaded_library; print(json.dumps(dataclasses.asdict(loaded_library())))"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(place for place in sys.path if place)}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=60)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise RuntimeError(last)
    return Library(**json.loads(done.stdout.splitlines()[-1]))


def family(text: str) -> str:
    """The family of an MPI library or launcher from what it says about its version; empty if unknown."""
    names = {"Open MPI": r"open.?mpi|open.?rte|prrte", "MPICH": r"mpich|hydra|mvapich|intel\(r\) mpi|cray mpi"}
    return next((name for name, pattern in names.items() if re.search(pattern, text, re.IGNORECASE)), "")


def memory_limit(root: Path = Path("/")) -> int | None:
    """The memory in bytes that the control groups leave to this process, None if it is unlimited."""
    limits = _limits(root, "memory", "memory.max", "memory.limit_in_bytes")
    return min((int(text) for text in limits if text.isdigit()), default=None)


def memory_headroom(root: Path = Path("/")) -> int | None:
    """The memory in bytes that the control groups let this process still take, None if it is unlimited.

    What they count as used, less the file pages that the kernel gives back at once.
    """
    limits = _limits(root, "memory", "memory.max", "memory.limit_in_bytes")
    used = _limits(root, "memory", "memory.current", "memory.usage_in_bytes")
    details = _limits(root, "memory", "memory.stat", "memory.stat")
    rooms = []
    for limit, usage, detail in zip(limits, used, details, strict=False):
        if limit.isdigit() and usage.isdigit():
            pages = re.search(r"^(?:total_)?inactive_file (\d+)", detail, re.MULTILINE)
            rooms.append(max(0, int(limit) - int(usage) + (int(pages[1]) if pages else 0)))
    return min(rooms, default=None)


def core_limit(root: Path = Path("/")) -> float | None:
    """The cores, possibly a fraction, that the control groups leave to this process, None if they do not say."""
    limits = _limits(root, "cpu", "cpu.max", "cpu.cfs_quota_us")
    quotas = [text.split() for text in limits]
    # Version 2 says "quota period" or "max period", version 1 "quota" or -1; the usual period is 100 ms.
    return min(
        (int(quota) / int(period[0] if period else 100_000) for quota, *period in quotas if quota.isdigit()),
        default=None,
    )


def _limits(root: Path, controller: str, unified: str, legacy: str) -> Iterator[str]:
    """What a limit file (by its name in version 2 and 1) says in this process's control group and all above it."""
    try:
        groups = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in groups:
        _, controllers, group = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        base = root / "sys/fs/cgroup" / controllers
        place = base / group.lstrip("/")
        for folder in (place, *place.parents):
            file = folder / (legacy if controllers else unified)
            if file.is_file():
                yield file.read_text().strip()
            if folder == base:
                break


def proc_size(file: str, name: str) -> int:
    """A size in bytes from a file of /proc, 0 if it is not there."""
    try:
        found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc", file).read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) * 1024 if found else 0


def disk_speed(folder: str | Path, size: int) -> float:
    """Bytes a second that are on the disk of a folder when the call returns."""
    block = bytes(size)
    with tempfile.TemporaryFile(dir=folder) as file:
        start = time.perf_counter()
        file.write(block)
        file.flush()
        os.fsync(file.fileno())
        return size / (time.perf_counter() - start)


def output(*command: str) -> str:
    """What a command prints, started as if no launcher had started this process."""
    own = ("OMPI_COMM_", "PMIX_", "PMI_", "PRTE_LAUNCHED", "SLURM_PROCID")
    env = {name: value for name, value in os.environ.items() if not name.startswith(own)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=20)
    return done.stdout + done.stderr


def version(package: str) -> str:
    """The version of an installed package, which is not imported."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def human_size(number: int) -> str:
    """Bytes in words."""
    return f"{number / GIBI:.1f} GiB" if number >= GIBI else f"{number / MEBI:.0f} MiB"


def plural(number: int, thing: str) -> str:
    """A number of things in words."""
    return f"{number} {thing}{'s' if number != 1 else ''}"
