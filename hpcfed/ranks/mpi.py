"""The ranks of an MPI job: the only file that imports mpi4py, which is loaded where a launcher started several."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from hpcfed.errors import RankLostError
from hpcfed.ranks import cuda_aware, faults, shared_memory
from hpcfed.ranks.communicator import Bytes, Communicator, joined
from hpcfed.ranks.cuda_aware import Answer
from hpcfed.ranks.shared_memory import SharedMemory


class MpiCommunicator:
    """The ranks of ``MPI.COMM_WORLD`` (or of any mpi4py communicator that is given)."""

    # A message of more than this many elements is sent in pieces: MPI counts are 32-bit integers.
    piece = 1 << 28
    nap_seconds = 0.002

    def __init__(self, comm: Any = None, local_rank: int | None = None) -> None:
        from mpi4py import MPI

        self._mpi = MPI
        if comm is None:
            comm = MPI.COMM_WORLD
            if faults.tolerated(os.environ):
                comm = faults.Kin(MPI, comm, range(comm.Get_size())).root
        self._settle(comm, local_rank)

    def _settle(self, comm: Any, local_rank: int | None) -> None:
        self._comm = comm
        self.tolerant = isinstance(comm, faults.Watched)
        self.members: tuple[int, ...] = comm.kin.members if self.tolerant else tuple(range(comm.Get_size()))
        self.rank: int = self._comm.Get_rank()
        self.size: int = self._comm.Get_size()
        self._node = self._comm.Split_type(self._mpi.COMM_TYPE_SHARED)
        self._first_on_node: bool = self._node.Get_rank() == 0
        self.local_rank: int = self._node.Get_rank() if local_rank is None else local_rank
        self.local_size: int = self._node.Get_size()

    def broadcast(self, value: Any, root: int = 0) -> Any:
        return self._comm.bcast(value, root)

    def broadcast_array(self, array: NDArray[Any] | None) -> NDArray[Any]:
        shape, dtype = self._comm.bcast(None if array is None else (array.shape, array.dtype))
        result = np.ascontiguousarray(array) if array is not None else np.empty(shape, dtype)
        flat = result.reshape(-1)
        for start in range(0, flat.size, self.piece):
            self._comm.Bcast(flat[start : start + self.piece])
        return result

    def gather(self, value: Any) -> list[Any]:
        return list(self._comm.allgather(value))

    def exchange(self, outgoing: Sequence[Sequence[Bytes]], incoming: Sequence[int]) -> list[Bytes]:
        packed = joined([part for parts in outgoing for part in parts])
        counts = [sum(part.size for part in parts) for parts in outgoing]
        received = np.empty(sum(incoming), np.uint8)
        byte = self._mpi.BYTE
        self._comm.Alltoallv([packed, counts, _starts(counts), byte], [received, incoming, _starts(incoming), byte])
        return np.split(received, np.cumsum(incoming)[:-1])

    def join(self, segment: NDArray[Any], lengths: Sequence[int], out: NDArray[Any]) -> None:
        self._comm.Allgatherv([segment, self._mpi.BYTE], self._parts(out, lengths))

    def trade(self, outgoing: Any, counts: Sequence[int], received: Any, lengths: Sequence[int]) -> None:
        self._comm.Alltoallv(self._parts(outgoing, counts), self._parts(received, lengths))

    def _parts(self, array: Any, lengths: Sequence[int]) -> list[Any]:
        """An array as MPI is told of it whose next ``lengths[r]`` elements belong to rank r."""
        counts = [length * array.itemsize for length in lengths]
        return [array, counts, _starts(counts), self._mpi.BYTE]

    def maximum(self, array: NDArray[Any]) -> NDArray[Any]:
        return self._reduce(array, self._mpi.MAX)

    def sum(self, array: NDArray[Any]) -> NDArray[Any]:
        return self._reduce(array, self._mpi.SUM)

    def _reduce(self, array: NDArray[Any], operation: Any) -> NDArray[Any]:
        result = np.empty_like(array)
        self._reduce_into(array.reshape(-1), result.reshape(-1), operation)
        return result

    def sum_into(self, array: Any, total: Any) -> None:
        self._reduce_into(array, total, self._mpi.SUM)

    def _reduce_into(self, source: Any, target: Any, operation: Any) -> None:
        for start in range(0, len(source), self.piece):
            piece = slice(start, start + self.piece)
            self._comm.Allreduce(source[piece], target[piece], operation)

    def cuda_aware(self) -> Answer:
        return cuda_aware.ask(self._mpi.Get_library_version(), self._mpi.__file__, os.environ)

    def nodes(self) -> list[int]:
        return self._nodes

    @cached_property
    def _nodes(self) -> list[int]:
        firsts = self.gather(self._node.bcast(self.rank))
        return [sorted(set(firsts)).index(first) for first in firsts]

    def on_node(self) -> Communicator:
        return self._on_node

    @cached_property
    def _on_node(self) -> MpiCommunicator:
        return MpiCommunicator(self._node, self.local_rank)

    def across_nodes(self) -> Communicator | None:
        return self._across_nodes

    @cached_property
    def _across_nodes(self) -> MpiCommunicator | None:
        place, nodes = self._node.Get_rank(), self.nodes()
        common = place < min(Counter(nodes).values())
        comm = self._comm.Split(place if common else self._mpi.UNDEFINED, nodes[self.rank])
        return MpiCommunicator(comm, self.local_rank) if common else None

    def split(self, sizes: Sequence[int]) -> Communicator | None:
        mine = next((group for group, end in enumerate(itertools.accumulate(sizes)) if self.rank < end), None)
        comm = self._comm.Split(self._mpi.UNDEFINED if mine is None else mine, self.rank)
        return None if mine is None else MpiCommunicator(comm, self.local_rank)

    @contextlib.contextmanager
    def first_on_node(self) -> Iterator[None]:
        if not self._first_on_node:
            self._sleep_until_all(self._node)
        yield
        if self._first_on_node:
            self._sleep_until_all(self._node)

    def shared(self) -> SharedMemory | None:
        return self._shared

    @cached_property
    def _shared(self) -> SharedMemory | None:
        return shared_memory.share(self)

    def barrier(self) -> None:
        self._comm.Barrier()

    def wait(self) -> None:
        self._sleep_until_all(self._comm)

    def _sleep_until_all(self, comm: Any) -> None:
        request = comm.Ibarrier()
        while not request.Test():
            time.sleep(self.nap_seconds)

    def lost(self) -> bool:
        return self.tolerant and bool(self._comm.kin.lost())

    def agree(self, fine: bool) -> bool:
        return bool(self._comm.kin.agree(fine))

    def guard(self) -> None:
        if self.tolerant:
            self._comm.kin.neighbours.watch()

    def recover(self) -> None:
        kin, mpi, local_rank = self._comm.kin, self._mpi, self.local_rank
        fine = False
        while not fine:  # another one may be lost meanwhile
            kin = kin.shrunk()
            self.__dict__.clear()  # what was made for the old ranks, too
            self._mpi, self.local_rank = mpi, local_rank
            with contextlib.suppress(RankLostError):
                self._settle(kin.root, local_rank)
                fine = True
            fine = kin.agree(fine)

    def abort(self, status: int) -> None:
        self._comm.Abort(status)

    def leave(self, status: int) -> NoReturn:
        if self.tolerant:
            os._exit(status)
        sys.exit(status)


def _starts(counts: Sequence[int]) -> list[int]:
    return [0, *np.cumsum(counts)[:-1].tolist()]
