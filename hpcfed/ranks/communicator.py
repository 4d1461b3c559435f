"""Ranks, as the rest of the package knows them: one interface, so that nothing else asks how many processes there are.

`SerialCommunicator` is one process, `hpcfed.ranks.mpi.MpiCommunicator` the ranks of an MPI job. Collective calls
must be made by every rank in the same order.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn, Protocol

import numpy as np
from numpy.typing import NDArray

from hpcfed.environment import launched_ranks
from hpcfed.errors import ConfigError, everywhere, portable
from hpcfed.ranks.cuda_aware import Answer
from hpcfed.ranks.shared_memory import SharedMemory

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
        return [joined(outgoing[0])]

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
    from hpcfed.ranks.mpi import MpiCommunicator

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


def joined(parts: Sequence[Bytes]) -> Bytes:
    """The parts one after the other; without a copy where they lie so already, as the segments of an array do."""
    if not parts:
        return np.empty(0, np.uint8)
    places = [part.__array_interface__["data"][0] for part in parts]
    if all(here + part.size == there for part, (here, there) in zip(parts, itertools.pairwise(places), strict=False)):
        return np.lib.stride_tricks.as_strided(parts[0], (sum(part.size for part in parts),), (1,), writeable=False)
    return np.concatenate(parts)


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0]
