"""How the arrays of clients become one sum, with the same bits on any number of ranks.

Three ways:

- *in order* (the default): an array is cut into one segment for each rank; each client's segments, compressed or not,
  travel to the ranks that own them, which add them up in client order in float64 and pass the result round. The
  traffic is that of an Allreduce.
- *of integers*: clients round to a common grid, so their messages are small integers, whose sums are exact in any
  order: one integer Allreduce.
- *in any order*: one plain floating-point Allreduce, whose bits depend on the number of ranks and on the MPI library.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcfed.communicator import Communicator
from hpcfed.compressors.raw import Raw
from hpcfed.errors import ConfigError
from hpcfed.ledger import Ledger

Array = NDArray[Any]

# Segments begin at multiples of this, so that packed levels of any width begin at a byte.
ALIGNMENT = 8
# Elements that one pass sends, over all clients of a rank: bounds the buffers to tens of megabytes.
ELEMENTS_A_PASS = 1 << 22


@dataclass(frozen=True)
class Parcel:
    """One sum over a cohort: who takes part, with what weights, over which ranks, at whose cost.

    ``rng(client)`` is a fresh stream for a client's message. The result is ``sum_i weights_i * value_i / divisor``.
    """

    communicator: Communicator
    cohort: tuple[int, ...]
    owners: tuple[int, ...]
    rng: Callable[[int], np.random.Generator]
    weights: Sequence[float] | None
    divisor: float
    ledger: Ledger


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
    if compressor is not None and compressor.kind == "integer":
        result = _sum_of_integers(parcel, values, compressor, shape, dtype)
    elif sum_order == "any" and compressor is None:
        result = _sum_in_any_order(parcel, values, shape, dtype)
    else:
        result = _sum_in_order(parcel, values, compressor or Raw(), shape, dtype)
    # Every rank gets the result; the papers' server broadcasts it once.
    broadcast = 32 * result.size if parcel.communicator.rank == 0 else 0
    parcel.ledger.send(wire_bytes_down=result.nbytes, paper_bits_down=broadcast)
    return result


def _sum_in_order(parcel: Parcel, values: Mapping[int, Array], codec: Any, shape: Any, dtype: Any) -> Array:
    communicator, ledger = parcel.communicator, parcel.ledger
    # Making a stream takes longer than a small message; what is sent as it is needs none.
    draws = not isinstance(codec, Raw)
    messages = {client: codec.encode(value, parcel.rng(client) if draws else None) for client, value in values.items()}
    here = [client for client in parcel.cohort if client in messages]
    result = np.empty(int(np.prod(shape, dtype=np.int64)), dtype)
    busiest = max(np.bincount(parcel.owners))
    step = ALIGNMENT * max(ELEMENTS_A_PASS // (ALIGNMENT * int(busiest)), communicator.size)
    sent = 0
    for first in range(0, result.size, step):
        last = min(first + step, result.size)
        cuts = _cuts(first, last, communicator.size)
        outgoing = [[messages[client].segment(start, stop) for client in here] for start, stop in _pairs(cuts)]
        start, stop = cuts[communicator.rank], cuts[communicator.rank + 1]
        bytes_each = codec.segment_bytes(shape, dtype, start, stop)
        incoming = [bytes_each * parcel.owners.count(rank) for rank in range(communicator.size)]
        received = communicator.exchange(outgoing, incoming)
        total = np.zeros(stop - start)
        places = [0] * communicator.size
        for place, owner in enumerate(parcel.owners):
            segment = received[owner][places[owner] : places[owner] + bytes_each]
            places[owner] += bytes_each
            weight = 1.0 if parcel.weights is None else parcel.weights[place]
            codec.accumulate(total, segment, shape, dtype, start, stop, weight)
        total /= parcel.divisor
        communicator.join(total.astype(dtype, copy=False), np.diff(cuts).tolist(), result[first:last])
        sent += sum(part.size for parts in outgoing for part in parts)
    if ledger.counting:  # the papers' bits of quantized messages take time to count
        bits = sum(message.paper_bits for message in messages.values())
        ledger.send(wire_bytes_up=sent, paper_bits_up=bits)
    return result.reshape(shape)


def _sum_of_integers(parcel: Parcel, values: Mapping[int, Array], compressor: Any, shape: Any, dtype: Any) -> Array:
    if parcel.weights is not None:
        raise ConfigError("--compressor grid sums integers and cannot weight clients: use --compressor qsgd")
    communicator, count = parcel.communicator, len(parcel.cohort)
    # A rank without participants still takes part in both reductions, with zeros.
    nothing = np.zeros(shape, dtype)
    scales = [compressor.scales(value) for value in values.values()] or [compressor.scales(nothing)]
    common = communicator.maximum(np.max(scales, axis=0))
    levels = [compressor.encode(value, common, parcel.rng(client), count) for client, value in values.items()]
    total = levels[0] if levels else np.zeros(shape, compressor.level_type(count))
    for more in levels[1:]:
        total += more
    total = communicator.sum(total)
    parcel.ledger.send(
        wire_bytes_up=sum(each.nbytes + common.nbytes for each in levels),
        paper_bits_up=sum(compressor.paper_bits(shape) for _ in levels),
    )
    mean: Array = compressor.decode(total, common, count, dtype)
    return mean if parcel.divisor == count else mean * np.asarray(count / parcel.divisor, dtype)


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


def _cuts(first: int, last: int, parts: int) -> list[int]:
    """Borders of ``parts`` nearly equal pieces of ``[first, last)``, each at a multiple of the alignment from first."""
    units = -(-(last - first) // ALIGNMENT)
    return [min(first + ALIGNMENT * (units * part // parts), last) for part in range(parts + 1)]


def _pairs(cuts: Sequence[int]) -> list[tuple[int, int]]:
    return list(itertools.pairwise(cuts))
