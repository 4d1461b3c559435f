"""Memory: what a node has left, and refusing what cannot fit before anything is allocated."""

from __future__ import annotations

from collections.abc import Mapping

from hpcfed.devices import Device
from hpcfed.errors import ConfigError
from hpcfed.ranks.communicator import Communicator


def available() -> int:
    """Bytes that the processes of this node may still take, by its kernel and by its control groups.

    0 where the system does not say.
    """
    from hpcfed.doctor.system import memory_headroom, proc_size

    free, headroom = proc_size("meminfo", "MemAvailable"), memory_headroom()
    return free if headroom is None else min(free, headroom)


def require(communicator: Communicator, device: Device, needs: Mapping[str, int], remedy: str) -> None:
    """Refuse a problem whose arrays do not fit beside one another on a node, or in a rank's share of its GPU.

    Every rank must call it, before it allocates what it names.

    Parameters
    ----------
    device : where this rank's clients compute.
    needs : bytes that this rank will hold at once, by what for.
    remedy : what the user can do about it.

    Raises
    ------
    ConfigError
        On all ranks, with the numbers of the node that lacks most, if its ranks together need more than it has left.
    """
    from hpcfed.doctor.system import human_size, plural

    room = device.memory if device.is_gpu else available()
    places = list(range(communicator.size)) if device.is_gpu else communicator.nodes()
    told = communicator.gather((dict(needs), room))
    lacking: list[tuple[int, str]] = []
    for place in set(places):
        here = [told[rank] for rank in range(communicator.size) if places[rank] == place]
        total, room = sum(sum(parts.values()) for parts, _ in here), min(room for _, room in here)
        if room and total > room:
            largest = max((parts for parts, _ in here), key=lambda parts: sum(parts.values()))
            listed = ", ".join(f"{name} {human_size(size)}" for name, size in largest.items())
            who = plural(len(here), "rank") + (" on this GPU" if device.is_gpu else " on one node")
            numbers = f"{human_size(total)} for {who} ({listed} in one), but {human_size(room)} are available"
            lacking.append((total - room, numbers))
    if lacking:
        raise ConfigError(f"the problem needs {max(lacking)[1]}: {remedy}").on_all_ranks()
