"""Sums in client order in memory that the ranks of a node share, handed on from node to node.

The ranks put their clients' arrays where all ranks of their node see them, and each adds up its part. On one node that
is all. Of several nodes the one with the first clients adds up theirs and hands the sums, in float64, to the next node,
which adds its own clients, and so on; the last node divides, and the result goes back along the chain. So the clients
of a node cross the network as one array, however many they are, and every element is added up as one process would do
it: in the same order and arithmetic, to the same bits.

This goes on in pieces: while one node adds its clients to one piece, the next one does so to the piece before. The
ranks with the same place on their nodes are a chain of their own, for their part of the elements.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcfed.compressors.raw import add_up, load_kernel
from hpcfed.exchange import routes
from hpcfed.exchange.parcel import Parcel
from hpcfed.ranks.communicator import Communicator
from hpcfed.ranks.shared_memory import SharedMemory, room

Array = NDArray[Any]

# Integers that are added up at a time, so that they stay in the cache; the unit of a rank's part (a page of float32).
ELEMENTS_A_BLOCK, PAGE = 1 << 14, 1 << 10
# Elements of all clients that every rank adds up itself, on one node: what it adds until the ranks have met once more.
# That takes longer where ranks share cores (the second).
ELEMENTS_ALONE = 1 << 14, 1 << 16
# Bytes of integers from which on it pays that the ranks meet twice.
SMALLEST_INTEGERS = 1 << 18
# Additions, in all sums so far, after which a rank loads compiled ones: they have taken about as long as that.
ADDITIONS = 1 << 26
# Plans that are kept: as many as there are kinds of messages in a round, unless the cohort changes.
PLANS = 64


def memory_for(parcel: Parcel, size: int, dtype: np.dtype[Any]) -> SharedMemory | None:
    """The memory for `sum_in_memory` of arrays of that many elements; None where it cannot be, or others are faster."""
    communicator = parcel.communicator
    memory, nodes = communicator.shared(), communicator.nodes()
    if memory is None or max(nodes) == 0:
        return memory
    homes = [nodes[owner] for owner in parcel.owners]
    chained = homes == sorted(homes) and parcel.routes.chains(communicator, Counter(homes), size, size * dtype.itemsize)
    return memory if chained else None


def sum_in_memory(
    parcel: Parcel, memory: SharedMemory, values: Mapping[int, Array], shape: tuple[int, ...], dtype: np.dtype[Any]
) -> Array:
    """The weighted sum of the cohort's arrays, on every rank; the cohort's clients must come node after node."""
    size = math.prod(shape)
    parcel.ledger.send(wire_bytes_up=size * dtype.itemsize * len(values), paper_bits_up=32 * size * len(values))
    key = size, dtype.itemsize, parcel.owners
    plan = memory.plans.get(key)
    if plan is None:
        if len(memory.plans) >= PLANS:
            memory.plans.clear()
        plan = memory.plans[key] = _plan(parcel.communicator, memory.crowded, parcel.owners, size, dtype.itemsize)
    before, memory.additions = memory.additions, memory.additions + plan.additions
    if before < ADDITIONS <= memory.additions:
        with parcel.communicator.first_on_node():
            load_kernel()
    return _Link(parcel, memory, plan, values, size, dtype).mean().reshape(shape)


@dataclass(frozen=True)
class _Plan:
    """What one rank does for sums of one size over one cohort.

    Attributes
    ----------
    here, last : this rank's node and the last one.
    crowd : places in the cohort of the participants on this node.
    alone : whether the rank adds up everything itself.
    additions : of one rank.
    pieces : elements that it adds up before it hands them on, as many pieces on every rank.
    passes : by their first piece, the elements that are on the desk at a time, and those of this rank's part.
    """

    here: int
    last: int
    crowd: tuple[int, ...]
    alone: bool
    additions: float
    pieces: list[tuple[int, int]] = field(default_factory=list)
    passes: dict[int, tuple[int, int, int, int]] = field(default_factory=dict)


def _plan(communicator: Communicator, crowded: bool, owners: Sequence[int], size: int, itemsize: int) -> _Plan:
    nodes, homes = communicator.nodes(), [communicator.nodes()[owner] for owner in owners]
    here, ranks, clients = nodes[communicator.rank], Counter(nodes), Counter(homes)
    plan = _Plan(
        here=here,
        last=max(nodes),
        crowd=tuple(place for place, home in enumerate(homes) if home == here),
        alone=len(ranks) == 1 and len(homes) * size <= ELEMENTS_ALONE[crowded],
        additions=len(homes) * size / len(nodes),
    )
    # As much as all desks have room for.
    step = min(room(ranks[node]) // (itemsize * max(clients[node], 1)) for node in ranks)
    parts, part = (1, 0) if plan.alone else (min(ranks.values()), nodes[: communicator.rank].count(here))
    hop = routes.ELEMENTS_A_HOP if plan.last else step
    for first in range(0, size, step):
        last = min(first + step, size)
        borders = cuts(first, last, parts, PAGE)
        start, stop = borders[part : part + 2] if part < parts else (last, last)
        plan.passes[len(plan.pieces)] = first, last, start, stop
        for offset in range(0, max(end - begin for begin, end in itertools.pairwise(borders)), hop):
            plan.pieces.append((min(start + offset, stop), min(start + offset + hop, stop)))
    return plan


class _Link:
    """One rank's part in one sum."""

    def __init__(
        self,
        parcel: Parcel,
        memory: SharedMemory,
        plan: _Plan,
        values: Mapping[int, Array],
        size: int,
        dtype: np.dtype[Any],
    ) -> None:
        communicator = parcel.communicator
        self.memory, self.plan, self.divisor, self.dtype = memory, plan, parcel.divisor, dtype
        self.node = communicator.on_node() if plan.last else communicator
        self.lane = communicator.across_nodes() if plan.last else None
        self.weights = [1.0 if parcel.weights is None else parcel.weights[place] for place in plan.crowd]
        # The arrays that are this rank's, by their rows among those of the node.
        clients = [parcel.cohort[place] for place in plan.crowd]
        self.own = {clients.index(client): np.ascontiguousarray(value).reshape(-1) for client, value in values.items()}
        self.result = memory.result(size * dtype.itemsize, plan.alone)
        handed_on = plan.pieces if plan.here < plan.last else ()
        self.total = np.empty(max((stop - start for start, stop in handed_on), default=0))

    def mean(self) -> Array:
        """The flat sum, divided."""
        here, last, pieces = self.plan.here, self.plan.last, self.plan.pieces
        handed, returned = np.empty(0), np.empty(0, self.dtype)
        steps = len(pieces) + 2 * last
        for step in range(steps):
            # From the last node a piece comes back as many steps later as it took there.
            there, back = step - here, step - 2 * last + here
            if 0 <= there < len(pieces):
                handed = self._add_up(there, handed)
            if here == last:
                returned = handed
            elif 0 <= back < len(pieces):
                place = self._place(back)
                place[:] = returned
                returned = place
            if step + 1 < steps:
                handed, returned = self._pass_on(there, back, handed, returned)
        if not self.plan.alone:
            self.node.barrier()
        return self.result.taken().view(self.dtype)

    def _add_up(self, piece: int, handed: Array) -> Array:
        """A piece of what the nodes before have handed on with this node's clients added; on the last one, divided."""
        if piece in self.plan.passes:
            self._lay_out(*self.plan.passes[piece])
        start, stop = self.plan.pieces[piece]
        arrays = [array[start - self.first : stop - self.first] for array in self.arrays]
        before = handed[: stop - start] if self.plan.here else np.empty(0)
        if self.plan.here == self.plan.last:
            out, divisor = self._place(piece), self.divisor
        else:
            out, divisor = self.total[: stop - start], 1.0
        add_up(arrays, self.weights, divisor, out, before)
        return out

    def _place(self, piece: int) -> Array:
        """Where a piece of the result belongs."""
        start, stop = (border * self.dtype.itemsize for border in self.plan.pieces[piece])
        return self.result.bytes[start:stop].view(self.dtype)

    def _lay_out(self, first: int, last: int, start: int, stop: int) -> None:
        """Begin a pass: put what others will add up where they see it."""
        count, length = len(self.weights), last - first
        desk = self.memory.desk()[: count * length * self.dtype.itemsize].view(self.dtype).reshape(count, length)
        self.first, self.arrays = first, list(desk)
        for row, value in self.own.items():
            own, there = value[first:last], desk[row]
            self.arrays[row] = own
            for others in (slice(length),) if self.plan.alone else (slice(start - first), slice(stop - first, length)):
                there[others] = own[others]
        self.node.barrier()
        self.result.open()

    def _pass_on(self, there: int, back: int, handed: Array, returned: Array) -> tuple[Array, Array]:
        """Give sums to the next node, and of the result to the one before; what they give in turn."""
        if self.lane is None:
            return handed, returned
        here, last = self.plan.here, self.plan.last
        outgoing: list[list[Array]] = [[] for _ in range(last + 1)]
        incoming = [0] * (last + 1)
        if here < last:
            outgoing[here + 1] = [handed[: self._length(there)].view(np.uint8)]
            incoming[here + 1] = self._length(back + 1) * self.dtype.itemsize
        if here > 0:
            outgoing[here - 1] = [returned[: self._length(back)].view(np.uint8)]
            incoming[here - 1] = self._length(there + 1) * self.total.itemsize
        received = self.lane.exchange(outgoing, incoming)
        if here > 0:
            handed = received[here - 1].view(np.float64)
        if here < last:
            returned = received[here + 1].view(self.dtype)
        return handed, returned

    def _length(self, piece: int) -> int:
        """Elements of a piece; none of those before the first and after the last."""
        if not 0 <= piece < len(self.plan.pieces):
            return 0
        start, stop = self.plan.pieces[piece]
        return stop - start


def sum_of_integers(
    communicator: Communicator, levels: Array, dtype: np.dtype[Any], decode: Callable[[Array, int, Array], None]
) -> Array:
    """What ``decode`` makes of the sum of every rank's array of integers, on every rank: exact in any order.

    The ranks of a node add theirs up in their memory, and what crosses to other nodes is one Allreduce for each place.

    Parameters
    ----------
    decode : ``decode(total, start, out)`` writes what the sum's elements from ``start`` on stand for to `out`. Each
        rank of a node does that for its part.
    """
    memory, ranks = communicator.shared(), Counter(communicator.nodes())
    if memory is None or levels.nbytes < SMALLEST_INTEGERS or max(ranks.values()) == 1:
        mean = np.empty(levels.shape, dtype)
        decode(communicator.sum(levels).reshape(-1), 0, mean.reshape(-1))
        return mean
    node = communicator.on_node() if len(ranks) > 1 else communicator
    lane = communicator.across_nodes() if len(ranks) > 1 else None
    flat, parts = levels.reshape(-1), min(ranks.values())
    result = memory.result(flat.size * dtype.itemsize)
    step = room(1) // levels.itemsize
    for first in range(0, flat.size, step):
        length = min(step, flat.size - first)
        borders = cuts(0, length, parts, PAGE)
        start, stop = borders[node.rank : node.rank + 2] if node.rank < parts else (length, length)
        desk = memory.desk()[: node.size * length * flat.itemsize].view(flat.dtype).reshape(node.size, length)
        own = flat[first : first + length]
        for others in (slice(start), slice(stop, length)):
            desk[node.rank, others] = own[others]
        node.barrier()
        result.open()
        total = own[start:stop].copy()
        for begin in range(start, stop, ELEMENTS_A_BLOCK):
            block = slice(begin, min(begin + ELEMENTS_A_BLOCK, stop))
            for other in range(node.size):
                if other != node.rank:
                    total[begin - start : block.stop - start] += desk[other, block]
        if lane is not None:
            total = lane.sum(total)
        decode(total, first + start, result.bytes.view(dtype)[first + start : first + stop])
    node.barrier()
    return result.taken().view(dtype).reshape(levels.shape)


def cuts(first: int, last: int, parts: int, unit: int) -> list[int]:
    """Borders of ``parts`` nearly equal pieces of ``[first, last)``, each at a multiple of the unit from first."""
    units = -(-(last - first) // unit)
    return [min(first + unit * (units * part // parts), last) for part in range(parts + 1)]
