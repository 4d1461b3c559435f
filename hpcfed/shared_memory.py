"""Memory that the ranks of one node share: what one rank writes all can read, without a message.

It has no name (``memfd_create``): the other ranks open it as a file of rank 0's process, and it ends with the last
process that maps it, so that no end of a run, however violent, leaves anything behind. The size of ``/dev/shm``, which
containers keep small, does not matter.
"""

from __future__ import annotations

import errno
import itertools
import logging
import mmap
import os
import secrets
import sys
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from hpcfed.communicator import Communicator

logger = logging.getLogger(__name__)

Bytes = NDArray[np.uint8]

# What ranks may put up for one another, for each rank. Pages take memory when they are first written to and keep it: a
# node holds twice the arrays of the largest sum so far, at most this for each of its ranks.
BYTES_A_RANK = 1 << 25
# The beginning: a token by which the ranks know it, and the number of rank 0's file of the result that is being made.
HEADER = 1 << 12
# Results of fewer bytes are copied: to map them takes longer.
SMALLEST_MAPPED = 1 << 19
# Results that may be mapped at a time: each keeps a file open, of which a process may have about a thousand.
MOST_MAPPED = 128


class SharedMemory:
    """Memory of all ranks of a communicator on one node; made by `share`.

    Attributes
    ----------
    room : bytes that `desk` offers.
    """

    def __init__(self, whole: mmap.mmap, owner: int, leads: bool) -> None:
        memory = np.frombuffer(whole, np.uint8)
        self.file_of_result = memory[:HEADER].view(np.int64)[2:3]
        self.small = memory[HEADER : HEADER + SMALLEST_MAPPED]
        self._desks = itertools.cycle(np.split(memory[HEADER + SMALLEST_MAPPED :], 2))
        self.room = (memory.size - HEADER - SMALLEST_MAPPED) // 2
        self.owner, self.leads = owner, leads
        self._maps: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()

    def desk(self) -> Bytes:
        """Bytes that every rank reads and writes, with a barrier between what one writes and another reads.

        There are two desks, which take turns: who has passed the barrier of one knows that all have left the other.
        """
        return next(self._desks)

    def mapped(self, file: int, size: int) -> Bytes:
        """The bytes of a file, without copying them before they are changed; closes the file."""
        pages = mmap.mmap(file, size, access=mmap.ACCESS_COPY)
        os.close(file)
        whole = np.frombuffer(pages, np.uint8)
        if len(self._maps) >= MOST_MAPPED:
            return whole.copy()
        self._maps.add(pages)
        return whole

    def result(self, size: int, own: bool = False) -> Result:
        """Room for ``size`` bytes that the ranks are about to write together, or each for itself (``own``)."""
        return Result(self, size, own)


class Result:
    """Bytes that the ranks write together, each its own part, and of which each then has a copy of its own.

    Large ones are not copied: every rank maps the same pages, and has a copy of those alone that it changes later. In
    order, with a barrier between one and the next: make it, `open` it and `write` the parts, `taken`.
    """

    def __init__(self, memory: SharedMemory, size: int, own: bool) -> None:
        self._memory, self._size, self._own = memory, size, own
        self._mapped = size >= SMALLEST_MAPPED and not own
        self._file: int | None = None
        self._bytes = np.empty(size, np.uint8) if own else memory.small[:size]
        if self._mapped and memory.leads:
            self._file = _new_file(size)
            memory.file_of_result[0] = self._file

    def open(self) -> None:
        """Find what rank 0 has made."""
        if self._mapped and self._file is None:
            self._file = _file_of(self._memory.owner, int(self._memory.file_of_result[0]))

    def write(self, start: int, part: NDArray[Any]) -> None:
        """Let the bytes from ``start`` be those of a contiguous array."""
        if self._file is None:
            self._bytes[start : start + part.nbytes] = part.view(np.uint8)
        elif os.pwrite(self._file, part.data, start) != part.nbytes:
            raise MemoryError(f"{part.nbytes} bytes of a sum do not fit into memory")

    def taken(self) -> Bytes:
        """All bytes, as if they were this rank's alone: they may be changed, and live as long as they are used."""
        if self._file is None:
            return self._bytes if self._own else self._bytes.copy()
        return self._memory.mapped(self._file, self._size)


def share(communicator: Communicator) -> SharedMemory | None:
    """Memory of all ranks of a communicator. Every rank must call it.

    None on every rank if they are not all on one node, or if the system refuses to one of them what it takes; rank 0
    says so.
    """
    if communicator.size == 1 or len(set(communicator.nodes())) > 1:
        return None
    size = HEADER + SMALLEST_MAPPED + BYTES_A_RANK * communicator.size
    file, whole, refusal, offer = -1, None, None, None
    if communicator.rank == 0:
        try:
            file = _new_file(size)
            whole = mmap.mmap(file, size)
            token = secrets.token_bytes(16)
            whole[: len(token)] = token
            offer = (os.getpid(), file, token)
        except OSError as error:
            refusal = str(error)
    offer = communicator.broadcast(offer)
    if communicator.rank != 0 and offer is not None:
        owner, number, token = offer
        try:
            file = _file_of(owner, number)
            whole = mmap.mmap(file, size)
            # In another container the same number may be another process.
            if whole[: len(token)] != token:
                raise OSError(errno.ESRCH, "the processes of the ranks do not see one another")
        except (OSError, ValueError) as error:
            refusal = str(error)
    refusals = [each for each in communicator.gather(refusal) if each is not None]
    if file >= 0:
        os.close(file)
    if refusals:
        if communicator.rank == 0:
            logger.info("the ranks share no memory (%s): sums in client order take messages and more time", refusals[0])
        return None
    assert whole is not None
    assert offer is not None
    return SharedMemory(whole, offer[0], communicator.rank == 0)


def _new_file(size: int) -> int:
    """A file in memory, all zeros, which takes no memory until it is written to."""
    if sys.platform != "linux":
        raise OSError(errno.ENOSYS, "the system has no memfd_create")
    file = os.memfd_create("hpcfed")
    os.truncate(file, size)
    return file


def _file_of(process: int, number: int) -> int:
    """Another process's open file, opened here."""
    return os.open(f"/proc/{process}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
