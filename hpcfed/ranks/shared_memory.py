"""Memory that the ranks of one node share: what one rank writes all can read, without a message.

It has no name (``memfd_create``): the other ranks open it as a file of the first one's process, and it ends with the
last process that maps it, so that no end of a run, however violent, leaves anything behind. The size of ``/dev/shm``,
which containers keep small, does not matter.
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

from hpcfed.environment import usable_cores

if TYPE_CHECKING:
    from hpcfed.ranks.communicator import Communicator

logger = logging.getLogger(__name__)

Bytes = NDArray[np.uint8]

# What ranks may put up for one another, for each rank. Pages take memory when they are first written to and keep it: a
# node holds twice the arrays of the largest sum so far, at most this for each of its ranks.
BYTES_A_RANK = 1 << 25
# Bytes of the token, at the beginning, by which the ranks know the memory.
TOKEN = 16
# Results of fewer bytes are copied: to map them takes longer.
SMALLEST_MAPPED = 1 << 19
# Results that may be mapped at a time: each keeps a file open, of which a process may have about a thousand.
MOST_MAPPED = 128
# Files of results that are kept when nobody reads them any more, for the next result of the same size: to get memory
# that is new takes as long as to write it. One that no result took so often in a row is given up.
FILES, IDLE = 16, 16


class SharedMemory:
    """Memory of all ranks of a node; made by `share`.

    Attributes
    ----------
    crowded : whether there are more ranks than cores.
    additions : how many a rank has done for the sums so far.
    plans : what they have worked out and may need again.
    """

    crowded = False
    additions = 0.0

    def __init__(self, whole: mmap.mmap, owner: int, rank: int, ranks: int) -> None:
        memory = np.frombuffer(whole, np.uint8)
        notices, readers, _ = np.split(memory[TOKEN : header(ranks)], (_NOTICES, _NOTICES + ranks * (FILES + 1)))
        self._files = _Files(notices.view(np.int64), readers.reshape(ranks, FILES + 1), owner, rank)
        self.plans: dict[Any, Any] = {}
        self.small = memory[header(ranks) : header(ranks) + SMALLEST_MAPPED]
        self._desks = itertools.cycle(np.split(memory[header(ranks) + SMALLEST_MAPPED :], 2))

    def desk(self) -> Bytes:
        """Bytes that every rank reads and writes, as many as there is `room`, a barrier between writing and reading.

        There are two desks, which take turns: who has passed the barrier of one knows that all have left the other.
        """
        return next(self._desks)

    def result(self, size: int, own: bool = False) -> Result:
        """Room for ``size`` bytes that the ranks are about to write together, or each for itself (``own``)."""
        return Result(self, self._files, size, own)


class Result:
    """Bytes that the ranks write together, each its own part, and of which each then has a copy of its own.

    Large ones are not copied: every rank maps the same pages, and has a copy of those alone that it changes later. In
    order, with a barrier between one and the next: make it, `open` it and write parts of `bytes`, `taken`.
    """

    def __init__(self, memory: SharedMemory, files: _Files, size: int, own: bool) -> None:
        self._files, self._size, self._own = files, size, own
        self._mapped = size >= SMALLEST_MAPPED and not own
        if self._mapped:
            files.choose(size)
        else:
            self.bytes = np.empty(size, np.uint8) if own else memory.small[:size]

    def open(self) -> None:
        """Find what the first rank has made."""
        if self._mapped:
            self._place = self._files.open(self._size)
            self.bytes = self._files.shared(self._place)

    def taken(self) -> Bytes:
        """All bytes, as if they were this rank's alone: they may be changed, and live as long as they are used."""
        if self._mapped:
            return self._files.private(self._place)
        return self.bytes if self._own else self.bytes.copy()


# Of the files of results: which is in use, and the descriptor and the serial number of each.
_NOTICES = 8 * (1 + 2 * (FILES + 1))


class _File:
    """A file in memory that this process has open and mapped."""

    def __init__(self, descriptor: int, size: int, serial: int) -> None:
        self.descriptor, self.size, self.serial, self.used = descriptor, size, serial, serial
        weakref.finalize(self, os.close, descriptor).atexit = False
        self.bytes = np.frombuffer(mmap.mmap(descriptor, size), np.uint8)


class _Files:
    """The files of results, as one rank has them open. The first rank makes them and says which is in use.

    Beside those that are kept there is one place for what is too many.
    """

    def __init__(self, notices: NDArray[np.int64], readers: Bytes, owner: int, rank: int) -> None:
        self._current, self._descriptors, self._serials = np.split(notices, (1, FILES + 2))
        self._readers, self._reading = readers, readers[rank]
        self._owner, self._leads, self._count = owner, rank == 0, 0
        self._open: list[_File | None] = [None] * (FILES + 1)
        self._maps: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()

    def choose(self, size: int) -> None:
        """Make a file for the next result, if this is the first rank, or take one that nobody reads."""
        if not self._leads:
            return
        self._count += 1
        free = self._readers.max(axis=0) == 0
        for place, file in enumerate(self._open[:FILES]):
            if file is not None and free[place]:
                if file.size == size:
                    file.used, self._current[0] = self._count, place
                    return
                if self._count - file.used > IDLE:
                    self._open[place], self._serials[place] = None, 0
        place = next((place for place in range(FILES) if self._open[place] is None), FILES)
        self._open[place] = file = _File(_new_file(size), size, self._count)
        self._current[0], self._descriptors[place], self._serials[place] = place, file.descriptor, file.serial

    def open(self, size: int) -> int:
        """The place of the file in use, which from now on is read; what the first rank has given up is closed."""
        for place, file in enumerate(self._open):
            if file is not None and file.serial != self._serials[place]:
                self._open[place] = None
        place = int(self._current[0])
        if self._open[place] is None:
            descriptor = _file_of(self._owner, int(self._descriptors[place]))
            self._open[place] = _File(descriptor, size, int(self._serials[place]))
        self._reading[place] = 1
        return place

    def shared(self, place: int) -> Bytes:
        """The bytes of a file, to write for all ranks."""
        file = self._open[place]
        assert file is not None
        return file.bytes

    def private(self, place: int) -> Bytes:
        """The bytes of a file, to read and to change, which is read until the last array of them is gone."""
        file = self._open[place]
        assert file is not None
        pages = mmap.mmap(file.descriptor, file.size, access=mmap.ACCESS_COPY)
        weakref.finalize(pages, self._reading.__setitem__, place, 0).atexit = False
        if place == FILES:
            self._open[place] = None
        whole = np.frombuffer(pages, np.uint8)
        if len(self._maps) >= MOST_MAPPED:
            return whole.copy()
        self._maps.add(pages)
        return whole


def header(ranks: int) -> int:
    """Bytes before what the ranks share: what they know the memory by, and what they say of files."""
    return -(-(TOKEN + _NOTICES + ranks * (FILES + 1)) // mmap.PAGESIZE) * mmap.PAGESIZE


def extent(ranks: int) -> int:
    """Bytes of the memory of so many ranks."""
    return header(ranks) + SMALLEST_MAPPED + 2 * room(ranks)


def room(ranks: int) -> int:
    """Bytes of a desk that so many ranks share."""
    return BYTES_A_RANK // 2 * ranks


def share(communicator: Communicator) -> SharedMemory | None:
    """Memory of those ranks of a communicator that are on this node. Every rank must call it.

    None on every rank if there is only one, or if the system refuses to one of them what it takes; rank 0 says so.
    """
    if communicator.size == 1:
        return None
    node = communicator.on_node()
    size = extent(node.size)
    file, whole, refusal, offer = -1, None, None, None
    if node.rank == 0:
        try:
            file = _new_file(size)
            whole = mmap.mmap(file, size)
            token = secrets.token_bytes(TOKEN)
            whole[: len(token)] = token
            offer = (os.getpid(), file, token, node.size > usable_cores())
        except OSError as error:
            refusal = str(error)
    offer = node.broadcast(offer)
    if node.rank != 0 and offer is not None:
        owner, number, token, _ = offer
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
    memory = SharedMemory(whole, offer[0], node.rank, node.size)
    memory.crowded = offer[-1]
    return memory


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
