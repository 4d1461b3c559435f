"""How the arrays of clients become one sum, with the same bits on any number of ranks.

Three ways:

- *in order* (the default): an array is cut into one segment for each rank; each client's segments, compressed or not,
  travel to the ranks that own them, which add them up in client order in float64 and pass the result round. The
  traffic is that of an Allreduce. Where it is cheaper (`hpcfed.exchange.routes`), all compressed messages go to each
  node, whose ranks are the owners of its own sum, or to each rank, which adds them up itself. Uncompressed arrays do
  not travel within a node: its ranks add them up in memory that they share, and from node to node goes the sum so far
  (`hpcfed.exchange.chain`), where that is cheaper.
- *of integers*: clients round to a common grid, so their messages are small integers, whose sums are exact in any
  order: the ranks of a node add theirs up in their memory, and between nodes there is an Allreduce.
- *in any order*: one plain floating-point Allreduce, whose bits depend on the number of ranks and on the MPI library.

Tensors on GPUs come here as arrays, except those that MPI takes as they are (`hpcfed.exchange.on_devices`).
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcfed.compressors.raw import Raw, divide
from hpcfed.errors import ConfigError
from hpcfed.exchange import chain
from hpcfed.exchange.chain import cuts
from hpcfed.exchange.parcel import Parcel
from hpcfed.ranks import shared_memory
from hpcfed.ranks.communicator import Communicator, together
from hpcfed.ranks.shared_memory import Result

Array = NDArray[Any]

# Segments begin at multiples of this, so that packed levels of any width begin at a byte.
ALIGNMENT = 8
# Elements of 4 bytes that one pass sends, over all clients of a rank: bounds the buffers to tens of megabytes.
ELEMENTS_A_PASS = 1 << 22
# Elements that are encoded, and decoded and added up, at a time: few enough that their sum stays in the cache.
ELEMENTS_A_PIECE = 1 << 17
# A mean that is quantized on its way back is cut into parts that do not depend on the ranks: about 64, but not smaller
# nor larger than this many elements. Each needs a stream, which takes longer to make than a small part to quantize.
SMALLEST_PART, LARGEST_PART = 1 << 10, 1 << 16


def combine(
    parcel: Parcel,
    values: Mapping[int, Array],
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    compressor: Any = None,
    sum_order: str = "client",
) -> Array:
    """The weighted sum of the cohort's arrays, on every rank, in the arrays' own type.

    ``values`` holds this rank's clients of the cohort; ``shape`` and ``dtype`` are those of every client's array.
    """
    for client, value in values.items():
        if value.shape != shape or value.dtype != dtype:
            raise ValueError(f"client {client} offers {value.dtype} {value.shape} where others offer {dtype} {shape}")
    if compressor is not None and parcel.residuals is not None:
        values = {client: parcel.residuals.correct(client, value) for client, value in values.items()}
    if parcel.heard is not None and compressor is None:
        parcel.heard.update(values)
    if compressor is not None and compressor.kind == "integer":
        result = _sum_of_integers(parcel, values, compressor, shape, dtype)
    elif sum_order == "any" and compressor is None:
        result = _sum_in_any_order(parcel, values, shape, dtype)
    elif compressor is None and (memory := chain.memory_for(parcel, math.prod(shape), dtype)) is not None:
        result = chain.sum_in_memory(parcel, memory, values, shape, dtype)
    else:
        return _sum_in_order(parcel, values, compressor or Raw(), shape, dtype)
    count_broadcast(parcel, result.nbytes, 32 * result.size)
    return result


def count_broadcast(parcel: Parcel, wire_bytes: int, paper_bits: int) -> None:
    """Every rank gets the mean; the papers' server broadcasts it, or a part of it, once."""
    bits = round(parcel.broadcast * paper_bits) if parcel.communicator.rank == 0 else 0
    parcel.ledger.send(wire_bytes_down=wire_bytes, paper_bits_down=bits)


def _sum_in_order(parcel: Parcel, values: Mapping[int, Array], codec: Any, shape: Any, dtype: Any) -> Array:
    communicator, ledger = parcel.communicator, parcel.ledger
    raw = isinstance(codec, Raw)
    if raw:  # it can fail nowhere and needs no stream: making one takes longer than a small message
        messages = {client: codec.encode(value, None) for client, value in values.items()}
    else:
        with together(communicator):
            messages = {client: codec.encode(value, parcel.rng(client)) for client, value in values.items()}
    factor = 1.0
    if not raw and parcel.remembers:
        factor = 1.0 if parcel.residuals is None else codec.contraction(shape)
        for client, value in values.items():
            said = factor * messages[client].decoded().astype(dtype, copy=False).reshape(shape)
            parcel.remember(client, value, said)
    travel = _Travel(parcel, codec, messages, shape, dtype, parcel.divisor / factor)
    if raw:
        result = travel.by_owners()
    elif codec.quantize_down:
        result = travel.by_owners(codec.for_mean())
    else:
        message = codec.expected_bytes(shape)
        clients, size = len(parcel.cohort), math.prod(shape)
        route = parcel.routes.choose(communicator, codec.route, clients, size, message, size * dtype.itemsize)
        result = travel.by_gathering() if route == "gather" else travel.by_owners(each_node=route == "node")
    if not raw and communicator.size > 1:
        parcel.routes.tell_formats(messages.values(), result.size)
    if ledger.counting:  # the papers' bits of quantized messages take time to count
        bits = sum(message.paper_bits for message in messages.values())
        ledger.send(wire_bytes_up=travel.sent, paper_bits_up=bits)
        count_broadcast(parcel, travel.received, travel.mean_bits)
    return result.reshape(shape)


class _Travel:
    """The way of one cohort's messages to their mean, on every rank, in passes of bounded size.

    Attributes
    ----------
    sent, received : bytes that this rank's clients handed over, and of the mean (or what it is made of) got here.
    mean_bits : the papers' bits of the mean.
    """

    def __init__(
        self, parcel: Parcel, codec: Any, messages: Mapping[int, Any], shape: Any, dtype: Any, divisor: float
    ) -> None:
        self.parcel, self.codec, self.messages, self.shape, self.dtype = parcel, codec, messages, shape, dtype
        self.divisor, self.size = divisor, math.prod(shape)
        self.here = [client for client in parcel.cohort if client in messages]
        self.counts = np.bincount(parcel.owners, minlength=parcel.communicator.size).tolist()
        self.sent = self.received = self.mean_bits = 0

    def by_owners(self, mean_codec: Any = None, each_node: bool = False) -> Array:
        """Each rank adds up its own segment and passes it round, quantized by ``mean_codec`` if there is one.

        For ``each_node`` the result is made on every node, and its segments are passed round among its ranks alone.
        Ranks that share memory write them there instead.
        """
        communicator = self.parcel.communicator
        group = communicator.on_node() if each_node else communicator
        crowds = _crowds(communicator.nodes() if each_node else [0] * communicator.size)
        part, place = ALIGNMENT, None
        if mean_codec is not None:
            part = min(max(ALIGNMENT * (self.size // (64 * ALIGNMENT)), SMALLEST_PART), LARGEST_PART)
        elif each_node or max(communicator.nodes()) == 0:
            place = self._shared_place(group)
        result = np.empty(self.size, self.dtype) if place is None else place.bytes.view(self.dtype)
        step = part * max(ELEMENTS_A_PASS // (part * max(self.counts)), communicator.size)
        for first in range(0, self.size, step):
            last = min(first + step, self.size)
            borders = cuts(first, last, group.size, part)
            start, stop = borders[group.rank], borders[group.rank + 1]
            segments = {
                (size, place): self._segments(*cut)
                for size in {size for size, _ in crowds}
                for place, cut in enumerate(itertools.pairwise(cuts(first, last, size, part)))
            }
            outgoing = [segments[crowd] for crowd in crowds]
            sizes = self._sizes_from_all(outgoing, start, stop)
            received = communicator.exchange(outgoing, [sum(each) for each in sizes])
            total = np.empty(stop - start, self.dtype) if place is None else result[start:stop]
            self._add_up(received, sizes, start, stop, total)
            if mean_codec is None:
                if place is None:
                    group.join(total, np.diff(borders).tolist(), result[first:last])
                self.received += (last - first) * result.itemsize + each_node * sum(each.size for each in received)
                self.mean_bits += 32 * (last - first)
            else:
                self._pass_round_quantized(mean_codec, total, borders, part, result)
        if place is not None:
            group.barrier()
            result = place.taken().view(self.dtype)
        return result

    def _shared_place(self, node: Communicator) -> Result | None:
        """Where all ranks of a node see the result, if that saves time."""
        memory = self.parcel.communicator.shared()
        if memory is None or node.size == 1 or self.size * self.dtype.itemsize < shared_memory.SMALLEST_MAPPED:
            return None
        place = memory.result(self.size * self.dtype.itemsize)
        node.barrier()
        place.open()
        return place

    def by_gathering(self) -> Array:
        """Every rank gets all messages and adds them up itself."""
        communicator = self.parcel.communicator
        all_bytes = len(self.parcel.cohort) * self.codec.expected_bytes(self.shape)
        passes = max(1, math.ceil(all_bytes / (4 * ELEMENTS_A_PASS)))
        step = ALIGNMENT * max(1, math.ceil(self.size / (ALIGNMENT * passes)))
        result = np.empty(self.size, self.dtype)
        for first in range(0, self.size, step):
            last = min(first + step, self.size)
            own = self._segments(first, last)
            sizes = _sizes(communicator, own, [len(_pieces(first, last)) * count for count in self.counts])
            received = _gathered(communicator, own, [sum(each) for each in sizes])
            self._add_up(received, sizes, first, last, result[first:last])
            self.received += sum(part.size for part in received)
        self.mean_bits = 32 * self.size
        return result

    def _segments(self, start: int, stop: int) -> list[Array]:
        """What this rank's clients say of elements ``[start, stop)``: client after client, piece after piece."""
        pieces = _pieces(start, stop)
        segments = [self.messages[client].segment(*piece) for client in self.here for piece in pieces]
        self.sent += sum(segment.size for segment in segments)
        return segments

    def _sizes_from_all(self, outgoing: list[list[Array]], start: int, stop: int) -> list[list[int]]:
        """For each rank, the bytes of the segments that its clients send here."""
        pieces = _pieces(start, stop)
        known = [self.codec.segment_bytes(self.shape, self.dtype, *piece) for piece in pieces]
        if None not in known:
            return [known * count for count in self.counts]
        sizes = [[np.array([part.size for part in parts], np.int64).view(np.uint8)] for parts in outgoing]
        told = self.parcel.communicator.exchange(sizes, [8 * len(pieces) * count for count in self.counts])
        return [each.view(np.int64).tolist() for each in told]

    def _add_up(
        self, received: Sequence[Array], sizes: Sequence[Sequence[int]], start: int, stop: int, out: Array
    ) -> None:
        """Write the mean of elements ``[start, stop)``, the segments of all ranks added in client order, to ``out``."""
        ends = [list(itertools.accumulate(each)) for each in sizes]
        pieces = _pieces(start, stop)
        # Where each participant's segments begin among those of its rank.
        before = [0] * len(received)
        places = []
        for owner in self.parcel.owners:
            places.append(before[owner])
            before[owner] += len(pieces)
        weights = [1.0] * len(places) if self.parcel.weights is None else self.parcel.weights
        room = np.empty(max(last - first for first, last in pieces))
        for number, (first, last) in enumerate(pieces):
            total = room[: last - first]
            total[:] = 0
            for owner, place, weight in zip(self.parcel.owners, places, weights, strict=True):
                end = ends[owner][place + number]
                segment = received[owner][end - sizes[owner][place + number] : end]
                self.codec.accumulate(total, segment, self.shape, self.dtype, first, last, weight)
            divide(total, self.divisor)
            out[first - start : last - start] = total

    def _pass_round_quantized(self, codec: Any, own: Array, cuts: Sequence[int], part: int, result: Array) -> None:
        """Fill ``result[cuts[0]:cuts[-1]]`` from the ranks' pieces, each part quantized as a message of its own."""
        communicator, draw = self.parcel.communicator, self.parcel.mean_rng
        if draw is None:
            raise ValueError("a quantized mean needs streams")
        begin = cuts[communicator.rank]
        pieces = []
        for start in range(0, own.size, part):
            message = codec.encode(own[start : start + part], draw((begin + start) // part))
            pieces.append(message.segment(0, message.levels.size))
            # Each part counts where it is made; the sum over ranks is the mean's.
            self.parcel.ledger.send(paper_bits_down=round(self.parcel.broadcast * message.paper_bits))
        parts = [len(range(first, last, part)) for first, last in itertools.pairwise(cuts)]
        sizes = _sizes(communicator, pieces, parts)
        received = _gathered(communicator, pieces, [sum(each) for each in sizes])
        for (first, last), segments, lengths in zip(itertools.pairwise(cuts), received, sizes, strict=True):
            place = 0
            for start, length in zip(range(first, last, part), lengths, strict=True):
                stop = min(start + part, last)
                total = np.zeros(stop - start)
                shape = (stop - start,)
                codec.accumulate(total, segments[place : place + length], shape, self.dtype, 0, stop - start)
                result[start:stop] = total
                place += length
        self.received += sum(segments.size for segments in received)


def _crowds(nodes: Sequence[int]) -> list[tuple[int, int]]:
    """For each rank, how many are on its node, and its place among them."""
    sizes, before = Counter(nodes), Counter[int]()
    crowds = []
    for node in nodes:
        crowds.append((sizes[node], before[node]))
        before[node] += 1
    return crowds


def _pieces(start: int, stop: int) -> list[tuple[int, int]]:
    """``[start, stop)`` cut into pieces of `ELEMENTS_A_PIECE`; one piece if it is empty."""
    borders = range(start, max(stop, start + 1), ELEMENTS_A_PIECE)
    return [(first, min(first + ELEMENTS_A_PIECE, stop)) for first in borders]


def _sizes(communicator: Communicator, own: Sequence[Array], counts: Sequence[int]) -> list[list[int]]:
    """The bytes of each rank's segments, of which rank r has ``counts[r]``."""
    out = np.empty(sum(counts), np.int64)
    communicator.join(np.array([segment.size for segment in own], np.int64), counts, out)
    return [each.tolist() for each in np.split(out, np.cumsum(counts)[:-1])]


def _gathered(communicator: Communicator, own: Sequence[Array], lengths: Sequence[int]) -> list[Array]:
    """The bytes of all ranks, ``lengths[r]`` of rank r, on every rank."""
    out = np.empty(sum(lengths), np.uint8)
    communicator.join(np.concatenate([np.empty(0, np.uint8), *own]), lengths, out)
    return np.split(out, np.cumsum(lengths)[:-1])


def _sum_of_integers(parcel: Parcel, values: Mapping[int, Array], compressor: Any, shape: Any, dtype: Any) -> Array:
    if parcel.weights is not None:
        raise ConfigError("--compressor grid sums integers and cannot weight clients: use --compressor qsgd")
    communicator, count = parcel.communicator, len(parcel.cohort)
    # A rank without participants still takes part in both reductions, with zeros.
    nothing = np.zeros(shape, dtype)
    with together(communicator):
        scales = [compressor.scales(value) for value in values.values()] or [compressor.scales(nothing)]
    common = communicator.maximum(np.max(scales, axis=0))
    levels = [compressor.encode(value, common, parcel.rng(client), count) for client, value in values.items()]
    if parcel.remembers:
        for (client, value), own in zip(values.items(), levels, strict=True):
            parcel.remember(client, value, compressor.decode(own, common, 1, dtype))
    # The first client's levels are this rank's own array: the others are added to it in place.
    total = levels[0] if levels else np.zeros(shape, compressor.level_type(count))
    for more in levels[1:]:
        total += more

    def decode(part: Array, start: int, out: Array) -> None:
        compressor.decode_part(part, start, out, shape, common, count)
        if parcel.divisor != count:
            out *= np.asarray(count / parcel.divisor, dtype)

    parcel.ledger.send(
        wire_bytes_up=sum(each.nbytes + common.nbytes for each in levels),
        paper_bits_up=sum(compressor.paper_bits(shape) for _ in levels),
    )
    return chain.sum_of_integers(communicator, total, dtype, decode)


def _sum_in_any_order(parcel: Parcel, values: Mapping[int, Array], shape: Any, dtype: Any) -> Array:
    weighted = [
        value if parcel.weights is None else value * np.asarray(parcel.weights[parcel.cohort.index(client)], dtype)
        for client, value in values.items()
    ]
    total = weighted[0] if weighted else np.zeros(shape, dtype)
    for value in weighted[1:]:
        total = total + value
    parcel.ledger.send(wire_bytes_up=total.nbytes * len(values), paper_bits_up=32 * total.size * len(values))
    result: Array = parcel.communicator.sum(total) / np.asarray(parcel.divisor, dtype)
    return result
