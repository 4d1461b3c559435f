"""What is known of a machine: how fast ranks talk, within a node and between nodes, and what a node has."""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

from annotated_types import Ge, Le, MinLen

from hpcfed.errors import ConfigError

# Numbers from which time and memory can be computed.
Count = Annotated[int, Ge(1), Le(10**18)]
Quantity = Annotated[float, Ge(1e-18), Le(1e18)]
# Characters of a wrong value, or of its name, that are shown.
_SHOWN = 40


class _Closed:
    """What is read from a file has no other members than those it declares."""

    __pydantic_config__: ClassVar[Mapping[str, Any]] = {"extra": "forbid"}


@dataclass(frozen=True)
class Link(_Closed):
    """How ranks talk over one kind of way, in the manner of LogGP (Alexandrov et al., SPAA 1995).

    Attributes
    ----------
    latency : seconds until an exchange of next to nothing between two ranks is over: LogGP's L + 2o.
    message : seconds for each further message of a rank: its g.
    rank_speed : bytes a second that one rank sends while it receives as many: 1 over its G.
    node_speed : bytes a second that all ranks of a node together send at most.
    """

    latency: Quantity
    message: Quantity
    rank_speed: Quantity
    node_speed: Quantity

    def carry(self, size: float, ranks: int) -> float:
        """Seconds in which each of some ranks of a node sends this many bytes, all at once."""
        return max(size / self.rank_speed, size * ranks / self.node_speed)


@dataclass(frozen=True)
class Timing(_Closed):
    """A measured time: of a ``message`` or a collective (``ordered mean``, ``Allreduce``) of so many bytes."""

    what: str
    size: Count
    seconds: Quantity


# What is assumed of a way that no measurement has gone: shared memory, and a network of 25 Gbit/s.
ASSUMED_WITHIN = Link(latency=1e-5, message=2e-6, rank_speed=3e9, node_speed=1e10)
ASSUMED_BETWEEN = Link(latency=3e-5, message=3e-6, rank_speed=2.5e9, node_speed=3e9)


@dataclass(frozen=True)
class Profile(_Closed):
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

    hosts: Annotated[tuple[str, ...], MinLen(1)]
    ranks: Count
    cores: Count
    memory: Count
    memory_speed: Quantity
    disk_speed: Quantity
    crowding: Quantity = 1.0
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
            with tempfile.TemporaryDirectory(dir=path.parent, prefix=".hpcfed-profile-") as folder:
                whole = Path(folder) / path.name
                whole.write_text(json.dumps(dataclasses.asdict(self), indent=2) + "\n", encoding="utf-8")
                os.replace(whole, path)
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
    from pydantic import TypeAdapter, ValidationError

    remedy = "measure it with hpcfed doctor --measure, on several ranks"
    try:
        text = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"--profile {path} cannot be read: {error.strerror}: name another, or {remedy}") from error
    try:
        return TypeAdapter(Profile).validate_json(text, strict=True)
    except ValidationError as error:
        wrong = error.errors(include_url=False)[0]
        place = _shown(".".join(map(str, wrong["loc"])))[1:-1]
        value = f" = {_shown(wrong['input'])}" if place and wrong["type"] != "missing" else ""
        said = wrong["msg"][:1].lower() + wrong["msg"][1:]
        reason = f"{place}{value}: {said}" if place else said
        raise ConfigError(f"--profile {path} is no profile of a machine ({reason}): {remedy}") from None


def _shown(value: Any) -> str:
    """A value as JSON has it, or the beginning of a long one."""
    text = json.dumps(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}...{text[-1]}"
