"""Sums of tensors on GPUs, where MPI takes them as they are (`hpcfed.ranks.cuda_aware`): none goes to the host.

In client order, segments of the clients' tensors go to the ranks that own them, which add them up in float64 and pass
the result round, as `hpcfed.exchange.sums` does with arrays, in the same order and arithmetic: to the same bits. In any
order, each rank adds up its own clients and one Allreduce the ranks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from hpcfed import devices
from hpcfed.devices import Device
from hpcfed.exchange.chain import cuts
from hpcfed.exchange.parcel import Parcel
from hpcfed.exchange.sums import count_broadcast

# Elements that one pass sends, over all clients of a rank: enough to keep a GPU busy, and few beside its memory.
ELEMENTS_A_PASS = 1 << 24
# Segments begin at multiples of this, where a GPU reads fastest.
ALIGNMENT = 1 << 7


def combine(
    parcel: Parcel,
    values: Mapping[int, Any],
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    device: Device,
    sum_order: str = "client",
) -> Any:
    """The weighted sum of the cohort's tensors, on every rank's device, in the tensors' own type.

    ``values`` holds this rank's clients of the cohort, in their order, and the cohort's owners come rank after rank;
    ``shape`` and ``dtype`` are those of every client's tensor.
    """
    for client, value in values.items():
        offered = devices.host_type(value)
        if tuple(value.shape) != shape or offered != dtype or not devices.stays(value):
            raise ValueError(
                f"client {client} offers {offered} {tuple(value.shape)} where others offer {dtype} {shape} on a GPU"
            )
    size = math.prod(shape)
    flat = {client: value.detach().reshape(-1) for client, value in values.items()}
    add_up = _sum_in_any_order if sum_order == "any" else _sum_in_order
    result = add_up(parcel, flat, size, dtype, device)
    parcel.ledger.send(wire_bytes_up=size * dtype.itemsize * len(flat), paper_bits_up=32 * size * len(flat))
    count_broadcast(parcel, size * dtype.itemsize, 32 * size)
    return result.reshape(shape)


def _sum_in_order(parcel: Parcel, values: Mapping[int, Any], size: int, dtype: np.dtype[Any], device: Device) -> Any:
    import torch

    communicator, kind = parcel.communicator, getattr(torch, dtype.name)
    ranks, own, nothing = communicator.size, list(values.values()), torch.empty(0, dtype=kind, device=device.name)
    counts = np.bincount(parcel.owners, minlength=ranks).tolist()
    weights = [1.0] * len(parcel.cohort) if parcel.weights is None else parcel.weights
    # Not a number: by one of those a GPU divides as by a product with its inverse.
    divisor = torch.tensor(parcel.divisor, dtype=torch.float64, device=device.name)
    result = nothing.new_empty(size)
    step = max(ELEMENTS_A_PASS // max(counts), ranks)
    for first in range(0, size, step):
        last = min(first + step, size)
        borders = cuts(first, last, ranks, ALIGNMENT)
        segments, lengths = list(itertools.pairwise(borders)), np.diff(borders).tolist()
        length = lengths[communicator.rank]
        outgoing = torch.cat([nothing, *(tensor[start:stop] for start, stop in segments for tensor in own)])
        received = nothing.new_empty((len(weights), length))
        with device.at_rest():
            communicator.trade(
                outgoing, [len(own) * each for each in lengths], received.view(-1), [each * length for each in counts]
            )
        total = torch.zeros(length, dtype=torch.float64, device=device.name)
        for segment, weight in zip(received, weights, strict=True):
            # Two steps, each of which rounds: with `alpha` a GPU would round once.
            total += segment if weight == 1.0 else segment.to(torch.float64) * weight
        total /= divisor
        segment = total.to(kind)
        with device.at_rest():
            communicator.join(segment, lengths, result[first:last])
    return result


def _sum_in_any_order(
    parcel: Parcel, values: Mapping[int, Any], size: int, dtype: np.dtype[Any], device: Device
) -> Any:
    import torch

    kind = getattr(torch, dtype.name)
    total = torch.zeros(size, dtype=kind, device=device.name)
    for client, value in values.items():
        total += value if parcel.weights is None else value * parcel.weights[parcel.cohort.index(client)]
    result = torch.empty_like(total)
    with device.at_rest():
        parcel.communicator.sum_into(total, result)
    result /= torch.tensor(parcel.divisor, dtype=kind, device=device.name)
    return result
