"""Work on replicated values that every rank would do alike, shared out among the ranks of each node."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcfed.ranks.communicator import Communicator

Array = NDArray[Any]

# Arrays of fewer elements every rank makes alone: for ranks to meet takes longer.
ELEMENTS_ALONE = 1 << 15
# Elements that ranks without shared memory pass on at a time, all ranks of a node together.
ELEMENTS_A_MESSAGE = 1 << 26


def shared_out(
    communicator: Communicator,
    function: Callable[[slice], Array],
    shape: Sequence[int],
    dtype: Any,
    axis: int,
    unit: int,
) -> Array:
    """The array whose pieces ``[i unit, (i + 1) unit)`` along an axis are ``function(piece)``, on every rank.

    A piece is computed by one rank of each node. Where these share memory, they write the pieces there, and a large
    array lies in it once for all of them, copied only where a rank changes it.
    """
    length = shape[axis]
    pieces = [slice(start, min(start + unit, length)) for start in range(0, length, unit)]
    if len(pieces) == 1:
        return function(pieces[0])
    if communicator.size == 1 or math.prod(shape) < ELEMENTS_ALONE:
        return _filled(np.empty(shape, dtype), function, pieces, axis)
    node, memory = communicator.on_node(), communicator.shared()
    # Rank 0 has one of the pieces, however few there are.
    borders = [-(-len(pieces) * rank // node.size) for rank in range(node.size + 1)]
    own = pieces[borders[node.rank] : borders[node.rank + 1]]
    if memory is None:
        return _passed_on(node, [function(piece) for piece in own], pieces, borders, shape, dtype, axis)
    result = memory.result(math.prod(shape) * np.dtype(dtype).itemsize)
    node.barrier()
    result.open()
    if own:
        _filled(result.bytes.view(dtype).reshape(shape), function, own, axis)
    node.barrier()
    joined: Array = result.taken().view(dtype).reshape(shape)
    return joined


def _filled(out: Array, function: Callable[[slice], Array], pieces: Sequence[slice], axis: int) -> Array:
    for piece in pieces:
        out[_place(piece, axis)] = function(piece)
    return out


def _place(piece: slice, axis: int) -> tuple[slice, ...]:
    return (*(slice(None) for _ in range(axis)), piece)


def _passed_on(
    node: Communicator,
    own: Sequence[Array],
    pieces: Sequence[slice],
    borders: Sequence[int],
    shape: Sequence[int],
    dtype: Any,
    axis: int,
) -> Array:
    """The array from what the ranks have computed, by messages of a limited size."""
    across = math.prod(shape) // shape[axis]
    ends = [across * pieces[last - 1].stop if last else 0 for last in borders]
    mine = np.concatenate([np.empty(0, dtype), *(np.ascontiguousarray(each).reshape(-1) for each in own)])
    flat = np.empty(math.prod(shape), dtype)
    step = max(1, ELEMENTS_A_MESSAGE // node.size)
    for start in range(0, max(stop - first for first, stop in itertools.pairwise(ends)), step):
        lengths = [min(max(stop - first - start, 0), step) for first, stop in itertools.pairwise(ends)]
        message = np.empty(sum(lengths), dtype)
        node.join(mine[start : start + step], lengths, message)
        sent = np.split(message, np.cumsum(lengths)[:-1])
        for first, part in zip(ends[:-1], sent, strict=True):
            flat[first + start : first + start + part.size] = part
    out = np.empty(shape, dtype)
    for piece in pieces:
        room = out[_place(piece, axis)]
        room[:] = flat[across * piece.start : across * piece.stop].reshape(room.shape)
    return out
