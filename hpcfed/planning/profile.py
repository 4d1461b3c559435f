"""What is known of a machine: how fast ranks talk, within a node and between nodes, and what a node has."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcfed.errors import ConfigError


@dataclass(frozen=True)
class Link:
    """How ranks talk over one kind of way, in the manner of LogGP (Alexandrov et al., SPAA 1995).

    Attributes
    ----------
    latency : seconds until an exchange of next to nothing between two ranks is over: LogGP's L + 2o.
    message : seconds for each further message of a rank: its g.
    rank_speed : bytes a second that one rank sends while it receives as many: 1 over its G.
    node_speed : bytes a second that all ranks of a node together send at most.
    """

    latency: float
    message: float
    rank_speed: float
    node_speed: float

    def carry(self, size: float, ranks: int) -> float:
        """Seconds in which each of some ranks of a node sends this many bytes, all at once."""
        return max(size / self.rank_speed, size * ranks / self.node_speed)


@dataclass(frozen=True)
class Timing:
    """A measured time: of a ``message`` or a collective (``ordered mean``, ``Allreduce``) of so many bytes."""

    what: str
    size: int
    seconds: float


# What is assumed of a way that no measurement has gone: shared memory, and a network of 25 Gbit/s.
ASSUMED_WITHIN = Link(latency=1e-5, message=2e-6, rank_speed=3e9, node_speed=1e10)
ASSUMED_BETWEEN = Link(latency=3e-5, message=3e-6, rank_speed=2.5e9, node_speed=3e9)


@dataclass(frozen=True)
class Profile:
    """A machine as ``hpcfed doctor --measure`` found it. Speeds are bytes a second.

    Attributes
    ----------
    hosts, ranks : the nodes that were measured, with so many ranks in all.
    cores : cores of a node that ranks may use.
    memory : bytes that the ranks of a node may use.
    memory_speed : bytes a second that all ranks of a node together read and write when they copy large arrays.
    disk_speed : bytes a second that reach the disk of the folder in which it was measured.
    crowding : seconds of a step of a collective call where ranks outnumber the cores, in units of what it takes two
        ranks times the ranks a core.
    within, between : links of a node and between nodes; None where there was none.
    timings : what was measured.
    """

    hosts: tuple[str, ...]
    ranks: int
    cores: int
    memory: int
    memory_speed: float
    disk_speed: float
    crowding: float = 1.0
    within: Link | None = None
    between: Link | None = None
    timings: tuple[Timing, ...] = ()
    created: str = ""
    hpcfed: str = ""

    def write(self, path: Path) -> None:
        """Write it as JSON; a reader never meets half a file.

        Raises
        ------
        ConfigError
            If the file cannot be written.
        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False) as file:
                json.dump(dataclasses.asdict(self), file, indent=2)
                file.write("\n")
            os.replace(file.name, path)
        except OSError as error:
            raise ConfigError(
                f"the profile {path} cannot be written: {error.strerror}: choose another --out"
            ) from error


def default_path() -> Path:
    """Where the profile of this user's machine lies: ``$XDG_CACHE_HOME/hpcfed/profile.json``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "hpcfed" / "profile.json"


def read(path: Path) -> Profile:
    """The profile in a file.

    Raises
    ------
    ConfigError
        If there is none, or if it is not one.
    """
    remedy = "measure it with hpcfed doctor --measure, on several ranks"
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--profile {path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    except ValueError as error:
        raise ConfigError(f"--profile {path} is not JSON: {error}: {remedy}") from error
    try:
        links = {name: Link(**facts[name]) if facts[name] else None for name in ("within", "between")}
        timings = tuple(Timing(**timing) for timing in facts["timings"])
        profile = Profile(**{**facts, **links, "hosts": tuple(facts["hosts"]), "timings": timings})
        _check(dataclasses.asdict(profile))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"--profile {path} is no profile of a machine ({error}): {remedy}") from error
    return profile


def _check(facts: Mapping[str, Any], place: str = "") -> None:
    """Every number is one that time and memory can be computed from."""
    texts = ("hosts", "created", "hpcfed", "timings")
    for name, value in facts.items():
        if isinstance(value, Mapping):
            _check(value, f"{name}.")
        elif name not in texts and value is not None and not 0 < value < math.inf:
            raise ValueError(f"{place}{name} = {value}")
