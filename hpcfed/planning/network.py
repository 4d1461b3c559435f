"""A model of the time that collective calls take.

Each call is a number of steps, each with a latency, and a number of bytes that go over the links of a node and between
nodes (Thakur, Rabenseifner, Gropp: Optimization of collective communication operations in MPICH, 2005):

- ``exchange`` (Alltoallv): a message to every other rank, all under way together;
- ``join`` (Allgatherv): a ring of ``R - 1`` steps that carries all bytes past every rank; ``log2 R`` steps if small;
- ``reduce`` (Allreduce): ``log2 R`` steps with everything, or ``2 log2 R`` with twice the bytes over R if large;
- ``gather`` and ``broadcast`` of small objects: ``log2 R`` steps for their sizes, as many for themselves.

Ranks of a node follow one another. Where they outnumber the cores, a step waits until each has had its turn.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from hpcfed.planning.profile import ASSUMED_BETWEEN, ASSUMED_WITHIN, Profile

# Bytes from which MPI libraries prefer algorithms with more steps and fewer bytes.
LARGE = 1 << 16


@dataclass(frozen=True)
class Layout:
    """Ranks on nodes, in blocks of equal size (the last one may be smaller)."""

    nodes: int
    ranks: int

    @property
    def crowd(self) -> int:
        """Ranks of a node."""
        return -(-self.ranks // self.nodes)


@dataclass(frozen=True)
class Call:
    """A collective call as one rank makes it.

    Attributes
    ----------
    kind : what it does.
    near, far : bytes that the rank sends to others of its node and to other nodes; of a ``join`` or ``gather`` the
        bytes of all ranks together, of a ``broadcast`` or ``reduce`` those of the array, are in ``near``.
    on_node : whether only the ranks of the node take part.
    """

    kind: Literal["exchange", "join", "gather", "broadcast", "reduce"]
    near: int
    far: int = 0
    on_node: bool = False


@dataclass(frozen=True)
class Network:
    """The time of calls among ranks that are laid out on the nodes of a machine."""

    layout: Layout
    profile: Profile

    @property
    def waiting(self) -> float:
        """How many times longer a rank waits for others because ranks share cores."""
        turns = self.layout.crowd / self.profile.cores
        return turns * self.profile.crowding if turns > 1 else 1.0

    def seconds(self, call: Call) -> float:
        """How long a call takes from when the last rank has made it."""
        crowd = self.layout.crowd
        nodes = 1 if call.on_node else self.layout.nodes
        ranks = min(crowd, self.layout.ranks) if call.on_node else self.layout.ranks
        if ranks == 1:
            return 0.0
        within, between = self.profile.within or ASSUMED_WITHIN, self.profile.between or ASSUMED_BETWEEN
        slowest = between if nodes > 1 else within

        def steps(number: float) -> float:
            return number * slowest.latency * self.waiting

        def tree() -> float:
            """Up or down a tree: first within the nodes, then between them."""
            inner = _log(crowd) * within.latency * self.waiting
            return inner + (_log(nodes) * between.latency if nodes > 1 else 0.0)

        if call.kind == "exchange":
            # The latency is that of an exchange of one message.
            messages = (crowd - 1) * within.message + (ranks - crowd) * between.message - slowest.message
            far = between.carry(call.far, crowd) if nodes > 1 else 0.0
            return slowest.latency + messages * self.waiting + within.carry(call.near, crowd) + far
        passed = call.near * (ranks - 1) / ranks
        if call.kind == "join":
            # Of the ring only one rank of a node sends to another node.
            bytes_time = within.carry(passed, crowd) if crowd > 1 else 0.0
            if nodes > 1:
                bytes_time = max(bytes_time, passed / between.rank_speed)
            return (steps(ranks - 1) if call.near > LARGE else tree()) + bytes_time
        if call.kind == "reduce":
            large = call.near > LARGE
            size = 2 * passed if large else call.near * _log(ranks)
            far = between.carry(2 * call.near * (nodes - 1) / nodes / crowd, crowd) if nodes > 1 else 0.0
            return (2 if large else 1) * tree() + within.carry(size, crowd) + far
        far = passed / between.rank_speed if nodes > 1 else 0.0
        return 2 * tree() + (within.carry(passed, crowd) if crowd > 1 else 0.0) + far


def _log(number: int) -> int:
    """Steps in which something reaches so many ranks."""
    return math.ceil(math.log2(number)) if number > 1 else 0
