"""``hpcfed doctor --measure``: the profile of a machine, measured by the ranks that are to run on it."""

from __future__ import annotations

import datetime
import itertools
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hpcfed import __version__
from hpcfed.doctor.system import disk_speed, memory_limit, proc_size
from hpcfed.environment import usable_cores
from hpcfed.errors import ConfigError
from hpcfed.federation import Federation, PerClient
from hpcfed.planning.network import Layout
from hpcfed.planning.profile import ASSUMED_BETWEEN, ASSUMED_WITHIN, Link, Profile, Timing, default_path
from hpcfed.ranks.communicator import Communicator, together

# Bytes of the messages that two ranks exchange, and of the arrays whose mean all ranks compute.
MESSAGES = (8, 1 << 10, 1 << 16, 1 << 20, 1 << 22)
ARRAYS = (1 << 10, 1 << 16, 1 << 20, 1 << 24)
# At least so many series of calls, of which the fastest counts.
SERIES = 7
# Bytes that are copied in memory, and written to the disk.
COPIED, WRITTEN = 1 << 26, 1 << 26


@dataclass(frozen=True)
class Measurement:
    """The job of ``hpcfed doctor --measure``: measure, print, and keep the profile."""

    out: Path | None = None

    def execute(self, communicator: Communicator) -> None:
        """Measure the machine. Every rank must call it."""
        profile = measure(communicator)
        path = self.out or default_path()
        with together(communicator):
            if communicator.rank == 0:
                profile.write(path)
        if communicator.rank == 0:
            print(f"{table(profile)}\nprofile {path}", flush=True)


def measure(communicator: Communicator) -> Profile:
    """The profile, on every rank.

    Raises
    ------
    ConfigError
        On every rank, if the current folder cannot be written.
    """
    disk = 0.0
    with together(communicator):
        if communicator.rank == 0:
            disk = _disk()
    facts = communicator.gather((socket.gethostname(), usable_cores(), _memory()))
    nodes, crowd = communicator.nodes(), max(communicator.gather(communicator.local_size))
    cores = min(cores for _, cores, _ in facts)
    timings: list[Timing] = []
    within = _link(communicator, True, timings)
    between = _link(communicator, False, timings)
    for size in ARRAYS:
        array = np.ones(size // 4, np.float32)
        fed = Federation(communicator.size, communicator=communicator)
        message = PerClient({communicator.rank: array})
        for what, action in (
            ("ordered mean", lambda: fed.mean(message)),  # noqa: B023
            ("Allreduce", lambda: communicator.sum(array)),  # noqa: B023
        ):
            timings.append(Timing(what, size, _time(communicator, action, *_repeats(size))))
    turns = crowd / cores
    crowding = 1.0
    if within is not None and turns > 1:
        steps = max(1, Layout(1, crowd).crowd.bit_length())
        small = next(timing.seconds for timing in timings if timing.what == "Allreduce")
        crowding = small / steps / (within.latency * turns)
    source = np.ones(COPIED // 8)
    target = np.empty_like(source)
    copying = _time(communicator, lambda: np.copyto(target, source), 5)
    return Profile(
        hosts=tuple(dict.fromkeys(host for host, _, _ in facts)),
        ranks=communicator.size,
        cores=cores,
        memory=min(memory for _, _, memory in facts),
        memory_speed=2 * COPIED * crowd / copying,
        disk_speed=communicator.broadcast(disk),
        crowding=crowding,
        within=within,
        between=between if len(set(nodes)) > 1 else None,
        timings=tuple(timings),
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        hpcfed=__version__,
    )


def table(profile: Profile) -> str:
    """The profile for a reader."""
    rows = [
        ("nodes", f"{len(profile.hosts)} with {profile.ranks} ranks in all: {', '.join(profile.hosts)}"),
        ("cores", f"{profile.cores} a node"),
        ("memory", f"{profile.memory / 2**30:.3g} GiB a node, copied at {_speed(profile.memory_speed)} by all ranks"),
        ("disk", f"{_speed(profile.disk_speed)} written and synchronized in {Path.cwd()}"),
    ]
    for name, link in (("within a node", profile.within), ("between nodes", profile.between)):
        if link is None:
            rows.append((name, "not measured: start on several ranks, or nodes"))
        else:
            speeds = f"{_speed(link.rank_speed)} a rank, {_speed(link.node_speed)} a node"
            rows.append((name, f"latency {1e6 * link.latency:.3g} us, {speeds}"))
    rows += [(timing.what, f"{timing.size:>10,} bytes  {1e3 * timing.seconds:10.4g} ms") for timing in profile.timings]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:{width}}  {text}" for name, text in rows)


def _speed(number: float) -> str:
    return f"{number / 1e9:.3g} GB/s" if number >= 1e9 else f"{number / 1e6:.3g} MB/s"


def _link(communicator: Communicator, near: bool, timings: list[Timing]) -> Link | None:
    """How ranks of a node (``near``), or of different nodes, talk; None where there are no two."""
    nodes = communicator.nodes()
    first = next((rank for rank, (a, b) in enumerate(itertools.pairwise(nodes)) if (a == b) == near), None)
    if first is None:
        return None
    found = _pair(communicator, first, near)
    kind = "message within a node" if near else "message between nodes"
    timings += [Timing(kind, size, seconds) for size, seconds in found.items()]
    latency, largest = found[MESSAGES[0]], MESSAGES[-1]
    rank_speed = largest / max(found[largest] - latency, 1e-9)
    here = nodes[communicator.rank]
    partners = [(node == here) == near and rank != communicator.rank for rank, node in enumerate(nodes)]
    most = max(communicator.gather(sum(partners)))
    small = _everyone(communicator, partners, MESSAGES[0], _repeats(MESSAGES[0] * most, near))
    size = max(1, largest // most)
    large = _everyone(communicator, partners, size, _repeats(size * most, near))
    sent = max(nodes.count(node) for node in nodes) * most * size
    turns = max(1.0, communicator.local_size / usable_cores())
    assumed = ASSUMED_WITHIN if near else ASSUMED_BETWEEN  # of further messages, where a rank sends but one
    message = max((small - latency) / (most - 1) / turns, 1e-9) if most > 1 else min(latency, assumed.message)
    return Link(latency, communicator.broadcast(message), rank_speed, sent / max(large - small, 1e-9))


def _pair(communicator: Communicator, first: int, near: bool) -> dict[int, float]:
    """Seconds of an exchange between two neighbours, by the bytes that each sends, while all others sleep."""
    group = communicator.split((first, 2) if first else (2,))
    found: dict[int, float] = {}
    if group is not None and communicator.rank in (first, first + 1):
        nothing = np.empty(0, np.uint8)
        for size in MESSAGES:
            piece = np.zeros(size, np.uint8)
            outgoing, incoming = [[nothing], [nothing]], [0, 0]
            outgoing[1 - group.rank], incoming[1 - group.rank] = [piece], size
            found[size] = _time(group, lambda: group.exchange(outgoing, incoming), *_repeats(size, near))  # noqa: B023
    communicator.wait()
    return dict(communicator.broadcast(found, first))


def _everyone(communicator: Communicator, partners: list[bool], size: int, repeats: tuple[int, int]) -> float:
    """Seconds of an exchange in which every rank sends so many bytes to each of its partners."""
    piece, nothing = np.zeros(size, np.uint8), np.empty(0, np.uint8)
    outgoing = [[piece if partner else nothing] for partner in partners]
    incoming = [size if partner else 0 for partner in partners]
    return _time(communicator, lambda: communicator.exchange(outgoing, incoming), *repeats)


def _time(communicator: Communicator, action: Callable[[], object], series: int, length: int = 1) -> float:
    """Seconds that the slowest rank takes, of the fastest of some series: what others do here only adds to them."""
    action()
    seconds = []
    for _ in range(series):
        communicator.sum(np.zeros(1))
        start = time.perf_counter()
        for _ in range(length):
            action()
        seconds.append((time.perf_counter() - start) / length)
    return float(communicator.maximum(np.array(seconds)).min())


def _repeats(size: int, near: bool = True) -> tuple[int, int]:
    """How many series of how many calls: of more than one between nodes, where ranks begin up to a latency apart."""
    calls = int(np.clip((1 << 25) // max(size, 1), SERIES, 101))
    return (calls, 1) if near else (SERIES, calls // SERIES)


def _disk() -> float:
    """Bytes a second that reach the disk of the current folder."""
    try:
        return disk_speed(".", WRITTEN)
    except OSError as error:
        raise ConfigError(
            f"the speed of the disk cannot be measured in {Path.cwd()}: {error.strerror}: change to a folder that can "
            "be written, or plan by a --profile that was measured elsewhere"
        ) from error


def _memory() -> int:
    """Bytes that the processes of this node may use."""
    total, limit = proc_size("meminfo", "MemTotal"), memory_limit()
    return total if limit is None else min(total, limit)
