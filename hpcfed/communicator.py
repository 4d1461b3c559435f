"""Ranks: the only file that knows what a rank is, and the only one that imports mpi4py.

`SerialCommunicator` and `MpiCommunicator` have one interface, so nothing else in the package asks how many processes
there are. Collective calls must be made by every rank in the same order.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NoReturn, Protocol

import numpy as np
from numpy.typing import NDArray

from hpcfed import cuda_aware, faults, shared_memory
from hpcfed.cuda_aware import Answer
from hpcfed.environment import launched_ranks
from hpcfed.errors import ConfigError, RankLostError, everywhere, portable
from hpcfed.shared_memory import SharedMemory

Bytes = NDArray[np.uint8]


class Communicator(Protocol):
    """What the rest of the package may ask of the ranks.

    Attributes
    ----------
    rank, size : this process and the number of processes.
    local_rank : place of this process among those of the whole job on its node. Groups of ranks on one node do not
        share local ranks, so that they take different GPUs.
    local_size : how many of the ranks are on this node.
    tolerant : whether ranks may outlive one another. Where one is lost, any call may raise a `RankLostError` on any of
        the others; all that are left then meet in `recover`. Otherwise the loss of one is the end of all.
    members : the ranks of the whole job that are left, by the numbers that they had when it began.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    tolerant: bool
    members: tuple[int, ...]

    def broadcast(self, value: Any, root: int = 0) -> Any:
        """The picklable ``value`` of rank ``root``, on every rank."""

    def broadcast_array(self, array: NDArray[Any] | None) -> NDArray[Any]:
        """Rank 0's array on every rank, of any size; the other ranks pass None."""

    def gather(self, value: Any) -> list[Any]:
        """The picklable values of all ranks, in rank order, on every rank."""

    def exchange(self, outgoing: Sequence[Sequence[Bytes]], incoming: Sequence[int]) -> list[Bytes]:
        """Send ``outgoing[r]``, joined, to rank r; returns what each rank sent here, ``incoming[r]`` bytes from r."""

    def join(self, segment: NDArray[Any], lengths: Sequence[int], out: NDArray[Any]) -> None:
        """Write the segments of all ranks, ``lengths[r]`` elements of rank r, one after the other into ``out``.

        Arrays, or, if `cuda_aware`, tensors.
        """

    def maximum(self, array: NDArray[Any]) -> NDArray[Any]:
        """The elementwise maximum over ranks."""

    def sum(self, array: NDArray[Any]) -> NDArray[Any]:
        """The elementwise sum over ranks, in the order that the MPI library likes."""

    def cuda_aware(self) -> Answer:
        """Whether the library of this rank takes tensors on GPUs, once they are `hpcfed.devices.Device.at_rest`."""

    def trade(self, outgoing: Any, counts: Sequence[int], received: Any, lengths: Sequence[int]) -> None:
        """Send ``counts[r]`` elements to rank r, in order; write ``lengths[r]`` from rank r into ``received``.

        Flat arrays, or, if `cuda_aware`, tensors.
        """

    def sum_into(self, array: Any, total: Any) -> None:
        """Write the `sum` of a flat array, or, if `cuda_aware`, of a tensor, to another."""

    def nodes(self) -> list[int]:
        """The node of each rank; every rank must call it the first time."""

    def on_node(self) -> Communicator:
        """The ranks of this rank's node, in rank order; every rank must call it the first time."""

    def across_nodes(self) -> Communicator | None:
        """The ranks with this rank's place on their nodes, in the order of the nodes, where every node has that place.

        Every rank must call it the first time.
        """

    def split(self, sizes: Sequence[int]) -> Communicator | None:
        """This rank's group where the first ``sizes[0]`` ranks are one, the next ``sizes[1]`` another, and so on.

        None on the ranks that are left over.
        """

    def first_on_node(self) -> contextlib.AbstractContextManager[None]:
        """Enter on one rank of each node first; the others enter when it has left."""

    def shared(self) -> SharedMemory | None:
        """Memory that the ranks of this node read and write, if every node has such; every rank must call it first."""

    def barrier(self) -> None:
        """Wait for all ranks, awake: for waits that are short. What they have written before, all see after it."""

    def wait(self) -> None:
        """Wait for all ranks, asleep: for waits that may be long, in which spinning would take others' cores."""

    def lost(self) -> bool:
        """Whether a rank is lost: may be asked by a rank alone, for what else has gone wrong may have that reason."""

    def agree(self, fine: bool) -> bool:
        """Whether every rank says so and none is lost; the same verdict on all that are left, who must all ask."""

    def guard(self) -> None:
        """From now on end ranks that somebody has stopped (SIGSTOP), so that they count as lost."""

    def recover(self) -> None:
        """Go on with the ranks that are left, in their order, who must all call it: rank, size and nodes change.

        What was split from this communicator, or shared through it, is of no more use.
        """

    def abort(self, status: int) -> None:
        """End all ranks at once."""

    def leave(self, status: int) -> NoReturn:
        """End this process; without MPI's leave if ranks may be lost, for whom it might wait for ever."""


class SerialCommunicator:
    """One process without MPI: every collective is the identity."""

    rank = 0
    size = 1
    local_rank = 0
    local_size = 1
    tolerant = False
    members: tuple[int, ...] = (0,)

    def broadcast(self, value: Any, root: int = 0) -> Any:
        return value

    def broadcast_array(self, array: NDArray[Any] | None) -> NDArray[Any]:
        assert array is not None
        return array

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def exchange(self, outgoing: Sequence[Sequence[Bytes]], incoming: Sequence[int]) -> list[Bytes]:
        return [_joined(outgoing[0])]

    def join(self, segment: NDArray[Any], lengths: Sequence[int], out: NDArray[Any]) -> None:
        out[:] = segment

    def maximum(self, array: NDArray[Any]) -> NDArray[Any]:
        return array

    def sum(self, array: NDArray[Any]) -> NDArray[Any]:
        return array

    def cuda_aware(self) -> Answer:
        return Answer(False, "there is no MPI")

    def trade(self, outgoing: Any, counts: Sequence[int], received: Any, lengths: Sequence[int]) -> None:
        received[:] = outgoing

    def sum_into(self, array: Any, total: Any) -> None:
        total[:] = array

    def nodes(self) -> list[int]:
        return [0]

    def on_node(self) -> Communicator:
        return self

    def across_nodes(self) -> Communicator | None:
        return self

    def split(self, sizes: Sequence[int]) -> Communicator | None:
        return self if sizes else None

    def first_on_node(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def shared(self) -> SharedMemory | None:
        return None

    def barrier(self) -> None:
        return None

    def wait(self) -> None:
        return None

    def lost(self) -> bool:
        return False

    def agree(self, fine: bool) -> bool:
        return fine

    def guard(self) -> None:
        return None

    def recover(self) -> None:
        return None

    def abort(self, status: int) -> None:
        os._exit(status)

    def leave(self, status: int) -> NoReturn:
        sys.exit(status)


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
        packed = _joined([part for parts in outgoing for part in parts])
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


@contextlib.contextmanager
def together(communicator: Communicator) -> Iterator[None]:
    """A block that fails on every rank if it fails on one, so that no rank waits for another that has left.

    The error is that of the lowest rank that has one. Every rank must enter the block; collective calls do not belong
    in it.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = portable(error)
    failures = [reported for reported in communicator.gather(failure) if reported is not None]
    if failures:
        raise everywhere(failures[0])


def connect(environment: Mapping[str, str] = os.environ) -> Communicator:
    """The communicator of this process: MPI if a launcher started it, otherwise serial without loading MPI.

    Raises
    ------
    ConfigError
        If the launcher and the MPI library do not belong together, so that every rank would believe it is alone.
    """
    expected = launched_ranks(environment)
    if expected is None:
        return SerialCommunicator()
    try:
        communicator = MpiCommunicator()
    except (ImportError, RuntimeError) as error:
        raise ConfigError(
            f"a launcher started {expected} ranks, but no MPI library can be loaded ({_first_line(error)}): "
            "load your cluster's MPI module, or install one with: pip install 'hpcfed[mpi]'"
        ) from error
    if expected and communicator.size != expected:
        raise ConfigError(
            f"the launcher started {expected} ranks on {socket.gethostname()} but MPI sees {communicator.size}: mpirun "
            "and the MPI library are of different kinds (see: hpcfed doctor); under SLURM start with srun --mpi=pmix"
        )
    return communicator


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0]


def _joined(parts: Sequence[Bytes]) -> Bytes:
    """The parts one after the other; without a copy where they lie so already, as the segments of an array do."""
    if not parts:
        return np.empty(0, np.uint8)
    places = [part.__array_interface__["data"][0] for part in parts]
    if all(here + part.size == there for part, (here, there) in zip(parts, itertools.pairwise(places), strict=False)):
        return np.lib.stride_tricks.as_strided(parts[0], (sum(part.size for part in parts),), (1,), writeable=False)
    return np.concatenate(parts)


def _starts(counts: Sequence[int]) -> list[int]:
    return [0, *np.cumsum(counts)[:-1].tolist()]
