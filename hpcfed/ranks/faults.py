"""Ranks that are lost while the others go on: what MPI tells of them, and what must be done at once.

Only Open MPI, from version 5 on and started with ``mpirun --with-ft ulfm``, lets ranks outlive one another (User-Level
Failure Mitigation, Bland et al. 2013). What is needed of mpi4py is handed in by `hpcfed.ranks.mpi`.
"""

from __future__ import annotations

import itertools
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from hpcfed.errors import RankLostError
from hpcfed.ranks import sentinel

logger = logging.getLogger(__name__)

SWITCH = "OMPI_MCA_mpi_ft_enable"  # which mpirun --with-ft ulfm sets
# For so long a rank that meets another error looks whether the loss of a rank explains it.
PATIENCE_SECONDS = 2.0


def tolerated(environment: Mapping[str, str]) -> bool:
    """Whether the launcher lets ranks outlive one another."""
    return environment.get(SWITCH, "").lower() in ("1", "t", "true", "enabled", "yes", "y")


class Kin:
    """A communicator of mpi4py and all that were made from it: who notices a loss in one revokes them all.

    So nobody waits for ever in one of them for a rank that has noticed in another.

    Attributes
    ----------
    root : the communicator, watched.
    members : for each of its ranks the rank that it had when the job began.
    neighbours : processes of the job that this one sees.
    """

    def __init__(self, mpi: Any, comm: Any, members: Sequence[int], neighbours: Neighbours | None = None) -> None:
        self._mpi, self._comm = mpi, comm
        self._comms: list[Any] = []
        self._news = (mpi.ERR_PROC_FAILED, mpi.ERR_PROC_FAILED_PENDING, mpi.ERR_REVOKED)
        self.root = self.watched(comm)
        self.members = tuple(members)
        self.neighbours = neighbours or Neighbours(comm.Get_rank(), self.root.allgather(_process()))

    def watched(self, made: Any) -> Any:
        """What a call has made; communicators and requests are watched from now on."""
        if isinstance(made, self._mpi.Comm) and made != self._mpi.COMM_NULL:
            self._comms.append(made)
            return Watched(made, self)
        return Watched(made, self) if isinstance(made, self._mpi.Request) else made

    def explained(self, error: Exception) -> Exception:
        """The error of a call: a `RankLostError`, with everything revoked, if that is its reason."""
        if error.Get_error_class() not in self._news and not self.lost():  # type: ignore[attr-defined]
            return error
        self.revoke()
        return RankLostError("start again, or go on with hpcfed resume")

    def revoke(self) -> None:
        """Wake up whoever waits in one of the communicators."""
        for comm in self._comms:
            with suppress(self._mpi.Exception):
                comm.Revoke()

    def lost(self) -> bool:
        """Whether a rank is lost, which may take a moment to become known."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            try:
                self._comm.Iprobe(self._mpi.ANY_SOURCE)  # lets the news come in
            except self._mpi.Exception:
                return True
            if self._comm.Is_revoked() or self._comm.Get_failed().Get_size():
                return True
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)

    def agree(self, fine: bool) -> bool:
        """Whether all ranks say so and none is lost; the same verdict on every rank that is left."""
        try:
            return bool(self._comm.Agree(int(fine)))
        except self._mpi.Exception:
            return False

    def shrunk(self) -> Kin:
        """The kin of a communicator of the ranks that are left, in their order; every one of them must call it.

        The processes of the others, where this one sees them, are ended: one that was merely stopped must not wake up
        and write.
        """
        self.revoke()
        comm = self._comm.Shrink()
        places = self._mpi.Group.Translate_ranks(comm.Get_group(), list(range(comm.Get_size())), self._comm.Get_group())
        left = [self.members[place] for place in places]
        for rank in set(self.members) - set(left):
            self.neighbours.end(rank)
        return Kin(self._mpi, comm, left, self.neighbours)


class Watched:
    """An mpi4py communicator or request whose calls raise a `RankLostError` where they fail because a rank is lost.

    What its calls make is watched, too.
    """

    def __init__(self, inner: Any, kin: Kin) -> None:
        self.inner, self.kin = inner, kin

    def __getattr__(self, name: str) -> Any:
        function, kin = getattr(self.inner, name), self.kin

        def call(*args: Any, **options: Any) -> Any:
            try:
                made = function(*args, **options)
            except kin._mpi.Exception as error:
                raise kin.explained(error) from None
            return kin.watched(made)

        self.__dict__[name] = call  # the next time it is found without asking
        return call


class Neighbours:
    """The processes of the job that this one can end: those on its machine and in its name space.

    They are held by file descriptors, so that a number which another process has got since ends nobody.

    Parameters
    ----------
    own : this process's rank.
    told : for each rank, what `_process` says there.
    """

    def __init__(self, own: int, told: Sequence[tuple[str, int]]) -> None:
        self._files: dict[int, tuple[int, int]] = {}  # rank -> descriptor, number
        here, _ = told[own]
        for rank in itertools.chain(range(own + 1, len(told)), range(own + 1)):  # the next one first, this one last
            where, number = told[rank]
            if where and where == here:
                with suppress(OSError, AttributeError):  # of old systems, which have no such descriptors
                    self._files[rank] = os.pidfd_open(number), number
        self._sentinel: subprocess.Popen[bytes] | None = None

    def end(self, rank: int) -> None:
        """End the process, if it is in sight and still there."""
        if rank in self._files:
            with suppress(OSError):
                signal.pidfd_send_signal(self._files[rank][0], signal.SIGKILL)

    def watch(self) -> None:
        """From now on, end those that somebody has stopped: see `hpcfed.ranks.sentinel`."""
        if self._sentinel is not None or not self._files:
            return
        watched = [f"{file}:{number}" for file, number in self._files.values()]
        # What asks a group of processes to end, or to write a checkpoint, is for the rank: the sentinel ends with it.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - {signal.SIGTSTP})
        try:
            self._sentinel = subprocess.Popen(
                [sys.executable, "-I", "-S", sentinel.__file__, *watched],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # whoever reads the rank's must not wait for this one
                stderr=subprocess.DEVNULL,
                pass_fds=[file for file, _ in self._files.values()],
            )
        except OSError as error:
            logger.warning("ranks that somebody stops are not ended (%s): the others would wait for them", error)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _process() -> tuple[str, int]:
    """The machine and the name space of this process, empty where the system does not say, and its number there."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            machine = file.read().strip()
        return f"{machine} {os.readlink('/proc/self/ns/pid')}", os.getpid()
    except OSError:
        return "", os.getpid()
