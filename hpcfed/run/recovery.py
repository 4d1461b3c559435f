"""Going on after ranks were lost, where the others outlive them (`Communicator.tolerant`)."""

from __future__ import annotations

import gc
import io
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from hpcfed.devices import Device
from hpcfed.errors import RankLostError
from hpcfed.federation import Federation
from hpcfed.ranks.communicator import Communicator
from hpcfed.run import checkpoint, state_hdf5
from hpcfed.run.checkpoint import Checkpoint
from hpcfed.run.journal import Journal
from hpcfed.run.run_folder import RunFolder

logger = logging.getLogger(__name__)

# Bytes of a state that one message carries.
PIECE = 1 << 27


@dataclass(frozen=True)
class Loss:
    """Ranks that were lost together.

    Attributes
    ----------
    ranks : by the numbers that they had when the job began.
    clients : theirs.
    round : that was being done, 0 before the first.
    """

    ranks: tuple[int, ...]
    clients: tuple[int, ...]
    round: int

    def told(self, dropped: bool, onward: str) -> str:
        """One line of what happened to its clients; ``onward`` says where the run goes on."""
        was = "was" if len(self.ranks) == 1 else "were"
        time = f"in round {self.round}" if self.round else "before the first round"
        clients = f"{'client' if len(self.clients) == 1 else 'clients'} {_listed(self.clients)}"
        what = (
            f"the federation goes on without {clients}, {onward}"
            if dropped
            else f"{clients} {'is' if len(self.clients) == 1 else 'are'} taken over by the others, {onward}"
        )
        return f"{named(self.ranks)} {was} lost {time}: {what}"


@dataclass
class Endurance:
    """What a rank knows of a run, to go on after the loss of others.

    Attributes
    ----------
    on_failure : as `hpcfed.config.RunOptions` has it.
    num_clients, absent : clients of the federation, and those that have left it.
    round : that is being done, 0 before the first.
    standing : where the run stands at the end of a round, if clients keep nothing that is lost with their rank.
    losses : that nobody has been told of yet.
    """

    communicator: Communicator
    on_failure: str
    num_clients: int
    absent: tuple[int, ...] = ()
    round: int = 0
    standing: Checkpoint | None = None
    losses: tuple[Loss, ...] = ()

    def __post_init__(self) -> None:
        self.active = self.communicator.tolerant and self.on_failure != "stop"
        self.drops = self.on_failure == "drop"
        fed, members = self.federation(), self.communicator.members
        self._owners = {client: members[fed.owner(client)] for client in fed.cohort} if self.active else {}

    def federation(self, **options: Any) -> Federation:
        """That of the clients that are present."""
        return Federation(self.num_clients, communicator=self.communicator, absent=self.absent, **options)

    def renewed(self) -> Endurance:
        """What it knows after a loss, when the ranks that are left are together again."""
        lost = {*self._owners.values()} - {*self.communicator.members}
        clients = tuple(client for client, rank in self._owners.items() if rank in lost)
        return replace(
            self,
            absent=tuple(sorted({*self.absent, *clients})) if self.drops else self.absent,
            losses=(*self.losses, Loss(tuple(sorted(lost)), clients, self.round)),
        )

    def reach(self, number: int, state: Any, keeps: bool, totals: dict[str, int]) -> None:
        """Remember where the run stands after a round; ``keeps``: whether any client on any rank does."""
        if self.active:
            self.standing = None if keeps else Checkpoint(number, state, {}, totals)

    def regroup(self, fed: Federation, state_type: type, folder: RunFolder) -> Checkpoint | Path | None:
        """Where the run goes on after losses, which are told; None if it is at the beginning.

        It is where the rank stands that has done most, or the last checkpoint.
        """
        self.standing = furthest(self.communicator, self.standing, state_type, fed.device)
        begin: Checkpoint | Path | None = self.standing
        if self.standing is not None:
            onward = f"from round {self.standing.round + 1} on"
        else:
            begin = newest = fed.once(lambda: checkpoint.latest(folder.checkpoints))
            onward = f"from round {checkpoint.round_of(newest)}'s checkpoint" if newest else "from the first round"
        if fed.writes:
            journal = Journal(folder.losses)
            for loss in self.losses:
                text = loss.told(self.drops, onward)
                logger.warning("%s", text)
                journal.add({"ranks": loss.ranks, "clients": loss.clients, "round": loss.round, "text": text})
        return begin


def named(ranks: Sequence[int]) -> str:
    """The ranks in words."""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {_listed(ranks)}"


def _listed(numbers: Sequence[int]) -> str:
    """Numbers in ascending order, runs of them as ``6-8``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ", ".join("-".join(map(str, run)) for run in runs)


def understood(error: Exception, communicator: Communicator) -> Exception:
    """The error, or a `RankLostError` if it has come of the loss of a rank, as when a file of its process is gone."""
    if isinstance(error, RankLostError) or getattr(error, "everywhere", False) or not communicator.lost():
        return error
    return RankLostError(f"a rank was lost ({type(error).__name__}: {error})")


def completed(attempt: Callable[[], None], communicator: Communicator) -> bool:
    """Make an attempt at something; whether it came to its end without the loss of a rank, the same on every rank.

    After a loss the ranks that are left are together again when this returns. An error that all ranks hold is an end,
    too, and is raised.
    """
    ended: Exception | None = None
    fine = False
    try:
        attempt()
        fine = True
    except Exception as error:
        fine = bool(getattr(error, "everywhere", False))
        if fine:
            ended = error
        elif not isinstance(understood(error, communicator), RankLostError):
            raise
    if communicator.agree(fine):
        if ended is not None:
            raise ended
        return True
    communicator.recover()
    if communicator.rank == 0:  # now this rank speaks
        logging.getLogger("hpcfed").setLevel(logging.INFO)
    gc.collect()  # what the attempt had in memory
    return False


def furthest(communicator: Communicator, own: Checkpoint | None, state_type: type, device: Device) -> Checkpoint | None:
    """Where the rank stands that has done most rounds, on every rank; None if no rank knows of one.

    Ranks are at most a round apart: who is behind is sent the state, of which clients keep nothing.
    """
    rounds = communicator.gather(-1 if own is None else own.round)
    most = max(rounds)
    if most < 0:
        return None
    root = rounds.index(most)
    ahead = own is not None and own.round == most
    if min(rounds) < most:
        packed = _passed_on(communicator, root, _packed(own) if communicator.rank == root else b"")
        totals = communicator.broadcast(own.totals if own is not None else None, root)
        if not ahead:
            own = Checkpoint(most, _unpacked(packed, state_type, device), {}, totals)
    return own


def _packed(standing: Checkpoint | None) -> bytes:
    """A state as the bytes of a file that a checkpoint would have."""
    assert standing is not None
    room = io.BytesIO()
    with h5py.File(room, "w") as file:  # type: ignore[arg-type]
        state_hdf5.write(file, "state", standing.state, replicated=True)
    return room.getvalue()


def _unpacked(packed: bytes, state_type: type, device: Device) -> Any:
    with h5py.File(io.BytesIO(packed), "r") as file:  # type: ignore[arg-type]
        return state_hdf5.read(file, "state", state_type, [], [], device)


def _passed_on(communicator: Communicator, root: int, message: bytes) -> bytes:
    """The bytes of one rank on every rank, of any number."""
    size = communicator.broadcast(len(message), root)
    own, whole = np.frombuffer(message, np.uint8), np.empty(size, np.uint8)
    for start in range(0, size, PIECE):
        stop = min(start + PIECE, size)
        lengths = [stop - start if rank == root else 0 for rank in range(communicator.size)]
        communicator.join(own[start:stop], lengths, whole[start:stop])
    return whole.tobytes()
