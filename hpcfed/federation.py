"""The federation: the only door between clients.

A method speaks in its verbs (`Federation.map`, `mean`, `total`, `largest`) and never in ranks. Clients are owned by
ranks in blocks of consecutive ids. Values that live with clients are `PerClient`; every other value is replicated:
each rank computes it from replicated inputs, and there is no server rank.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import numpy as np

from hpcfed import devices
from hpcfed.errors import everywhere, portable
from hpcfed.exchange import on_devices, sharing, sums
from hpcfed.exchange.parcel import Parcel
from hpcfed.exchange.routes import Routes
from hpcfed.ledger import Ledger
from hpcfed.ranks.communicator import Communicator, SerialCommunicator, together
from hpcfed.run.journal import Journal
from hpcfed.streams import Purpose, Streams

T = TypeVar("T")

# Calls of a round are numbered from 0, those of the measurements after it from here.
MEASUREMENT_CALLS = 1 << 20


class PerClient(Mapping[int, T], Generic[T]):
    """Values that live with their clients: on each rank a mapping from the ids of its own clients, in id order."""

    def __init__(self, values: Mapping[int, T]) -> None:
        self._values = dict(sorted(values.items()))

    def __getitem__(self, client: int) -> T:
        return self._values[client]

    def __iter__(self) -> Iterator[int]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def unzip(self, count: int) -> tuple[PerClient[Any], ...]:
        """From values that are tuples of ``count`` things, that many `PerClient`.

        The count is an argument because a rank whose clients sit the round out has no tuple to look at.
        """
        return tuple(PerClient({client: value[place] for client, value in self.items()}) for place in range(count))  # type: ignore[index]


@dataclass(frozen=True)
class Federation:
    """Clients, and what may pass between them.

    Parameters
    ----------
    num_clients : number of clients, ids ``0 .. num_clients - 1``.
    streams : the run's random numbers.
    communicator : the ranks; serial by default.
    compressor : applied to the messages that a method calls lossy, if any.
    sum_order : ``"client"`` adds in client order, giving the same bits on any number of ranks; ``"any"`` makes each
        sum one plain Allreduce.
    weights : weights of the clients in weighted means, in id order; equal ones by default.
    device : where this rank's clients compute.
    routes : chooses the way that quantized messages go.
    residuals : this round's `hpcfed.exchange.feedback.Residuals` under error feedback, None without it.
    journal : the run's journal, for `note`.
    absent : ids, in order, of clients that have left: they take part in nothing. Each of the others remains what it is
        in a federation of ``num_clients``, but means are over those present.
    """

    num_clients: int
    streams: Streams = field(default_factory=lambda: Streams(0))
    communicator: Communicator = field(default_factory=SerialCommunicator)
    compressor: Any = None
    sum_order: str = "client"
    weights: tuple[float, ...] | None = None
    device: devices.Device = field(default_factory=devices.Device)
    clients: PerClient[Any] = field(default_factory=lambda: PerClient({}))
    ledger: Ledger = field(default_factory=Ledger)
    routes: Routes = field(default_factory=Routes)
    residuals: Any = None
    journal: Journal = field(default_factory=Journal)
    absent: tuple[int, ...] = ()
    round: int = 0
    cohort: tuple[int, ...] = ()
    _calls: Iterator[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        if not self.cohort:
            gone = set(self.absent)
            present = tuple(client for client in range(self.num_clients) if client not in gone)
            object.__setattr__(self, "cohort", present)

    # -- who takes part ------------------------------------------------------------------------------------------

    def at(self, round: int) -> Federation:
        """This federation in another round; streams of different rounds are independent."""
        return replace(self, round=round, cohort=(), _calls=itertools.count())

    def beside(self, round: int) -> Federation:
        """This federation as measurements after a round use it: with streams that the round itself does not touch."""
        return replace(self.at(round), _calls=itertools.count(MEASUREMENT_CALLS))

    def sample(self, count: int | None) -> Federation:
        """This round's cohort: ``count`` clients, uniformly without replacement, the same on every rank.

        None stands for all clients, and so does a count of more than are present.
        """
        if count is None or count == self.num_clients:
            return self
        if not 0 < count < self.num_clients:
            raise ValueError(f"a cohort of {count} out of {self.num_clients} clients")
        present = self.num_present
        if count >= present:
            return self
        self.ledger.participants = count
        stream = self.streams.generator(Purpose.COHORT, self.round, next(self._calls))
        chosen = sorted(stream.choice(present, size=count, replace=False).tolist())
        if self.absent:
            everyone = self.at(self.round).cohort
            chosen = [everyone[place] for place in chosen]
        return replace(self, cohort=tuple(chosen))

    @property
    def num_present(self) -> int:
        """How many clients have not left."""
        return self.num_clients - len(self.absent)

    def place(self, client: int) -> int:
        """Which one it is of those present, counted from 0."""
        return client - bisect.bisect_left(self.absent, client)

    def owner(self, client: int) -> int:
        """The rank that a client lives on: blocks of consecutive ids, sizes differing by at most one."""
        return ((self.place(client) + 1) * self.communicator.size - 1) // self.num_present

    @property
    def local(self) -> tuple[int, ...]:
        """The cohort's clients on this rank."""
        return tuple(client for client in self.cohort if self.owner(client) == self.communicator.rank)

    @property
    def writes(self) -> bool:
        """Whether this rank is the one that writes the results."""
        return self.communicator.rank == 0

    @property
    def any_client(self) -> Any:
        """One of this rank's clients, to ask for what all clients share."""
        return next(iter(self.clients.values()))

    # -- work at the clients -------------------------------------------------------------------------------------

    def build(self, function: Callable[[int, np.random.Generator], Any]) -> Federation:
        """This federation with its clients made by ``function(id, rng)``, each on its own rank.

        An error at any client is raised on every rank, the one with the lowest id if there are several.
        """
        made: dict[int, Any] = {}
        with together(self.communicator):
            for client in self.local:
                try:
                    made[client] = function(client, self.streams.generator(Purpose.DATA, client=client))
                except Exception as error:
                    error.add_note(f"client {client}, while its data were built")
                    raise
        return replace(self, clients=PerClient(made))

    def map(self, function: Callable[..., T], *args: Any) -> PerClient[T]:
        """``function(client, rng, *args)`` for the cohort's clients, one after another in id order.

        An argument that is a `PerClient` is replaced by the client's own value. ``rng`` is the client's stream of
        this round and call.
        """
        call = next(self._calls)
        results: dict[int, T] = {}
        with self.ledger.clock("compute"):
            for client in self.local:
                rng = self.streams.generator(Purpose.CLIENT, self.round, call, client)
                own = [arg[client] if isinstance(arg, PerClient) else arg for arg in args]
                try:
                    results[client] = function(self.clients[client], rng, *own)
                except Exception as error:
                    error.add_note(f"client {client}, round {self.round}")
                    raise
        return PerClient(results)

    # -- between clients -----------------------------------------------------------------------------------------

    def mean(
        self, values: PerClient[Any], *, lossy: bool = False, weighted: bool = False, broadcast: float = 1.0
    ) -> Any:
        """The mean over the cohort of arrays of one shape (or of numbers), on every rank.

        Parameters
        ----------
        values : one array or number for each client of the cohort.
        lossy : the run's compressor may touch these messages.
        weighted : weight the clients by ``weights``, normalised over the cohort, instead of equally.
        broadcast : the part of the mean that counts among the papers' bits down: less than all where every rank takes a
            step that in the paper the server takes, which then broadcasts less than the mean.
        """
        weights = [self.weights[client] for client in self.cohort] if weighted and self.weights else None
        divisor = float(len(self.cohort)) if weights is None else float(np.sum(weights))
        return self._combine(values, weights, divisor, lossy, broadcast=broadcast)

    def mean_heard(self, values: PerClient[Any]) -> tuple[Any, PerClient[Any]]:
        """The mean of lossy messages, and what the others have heard of each client's: what rounding has left of it.

        For methods whose clients and server keep the same things in mind.
        """
        heard: dict[int, Any] = {}
        mean = self._combine(values, None, float(len(self.cohort)), True, heard)
        backends = {client: devices.backend(value) for client, value in values.items()}
        return mean, PerClient(
            {client: devices.from_host(value, backends[client], self.device) for client, value in heard.items()}
        )

    def total(self, values: PerClient[Any]) -> Any:
        """The sum over the cohort of arrays of one shape (or of numbers), on every rank."""
        return self._combine(values, None, 1.0)

    def _combine(
        self,
        values: PerClient[Any],
        weights: Sequence[float] | None,
        divisor: float,
        lossy: bool = False,
        heard: dict[int, Any] | None = None,
        broadcast: float = 1.0,
    ) -> Any:
        call = next(self._calls)
        self.ledger.offered |= lossy
        owners = tuple(self.owner(client) for client in self.cohort)
        with self.ledger.clock("exchange"):
            direct = self.device.direct and heard is None and (not lossy or self.compressor is None)
            sent = {
                client: value if direct and devices.stays(value) else devices.to_host(value)
                for client, value in values.items()
            }
            # A rank whose clients sit the round out cannot know what is being sent: the first participant tells it.
            here = next(iter(values), None)
            form = None
            if here is not None:
                own = sent[here]
                kinds = devices.backend(values[here]), devices.backend(own)
                form = (tuple(own.shape), devices.host_type(own), *kinds)
            if len(set(owners)) < self.communicator.size:
                form = self.communicator.broadcast(form, owners[0])
            shape, dtype, backend, kind = form  # type: ignore[misc]
        parcel = Parcel(
            communicator=self.communicator,
            cohort=self.cohort,
            owners=owners,
            rng=lambda client: self.streams.generator(Purpose.COMPRESSION, self.round, call, client),
            weights=weights,
            divisor=divisor,
            ledger=self.ledger,
            mean_rng=lambda part: self.streams.generator(
                Purpose.COMPRESSION, self.round, call, self.num_clients + part
            ),
            routes=self.routes,
            residuals=self.residuals if lossy else None,
            heard=heard,
            broadcast=broadcast,
        )
        compressor = self.compressor if lossy else None
        with self.ledger.clock("exchange"):
            if kind == "torch":  # the same on every rank, as the types and devices of the values are
                return on_devices.combine(parcel, sent, shape, dtype, self.device, self.sum_order)
            result = sums.combine(parcel, sent, shape, dtype, compressor, self.sum_order)
        return devices.from_host(result, backend, self.device)

    def largest(self, values: PerClient[Any]) -> Any:
        """The elementwise maximum over the cohort of arrays of one shape (or of numbers), on every rank."""
        everyone = self.collect(values)
        return np.max(np.stack(everyone), axis=0) if np.ndim(everyone[0]) else max(everyone)

    def collect(self, values: PerClient[T]) -> list[T]:
        """The cohort's small picklable values, in id order, on every rank: for diagnostics, never for models."""
        with self.ledger.clock("exchange"):
            gathered = self.communicator.gather(dict(values))
        merged = {client: value for part in gathered for client, value in part.items()}
        return [merged[client] for client in self.cohort]

    def once(self, function: Callable[[], T]) -> T:
        """``function()`` called on one rank, its result (an array or anything picklable) on every rank.

        An error that it raises is raised on every rank.
        """
        result: Any = None
        failure: BaseException | None = None
        if self.communicator.rank == 0:
            try:
                result = function()
            except Exception as error:
                failure = portable(error)
        self.communicator.wait()
        is_array, failure = self.communicator.broadcast((isinstance(result, np.ndarray), failure))
        if failure is not None:
            raise everywhere(failure)
        if is_array:
            return self.communicator.broadcast_array(result)  # type: ignore[return-value]
        return self.communicator.broadcast(result)  # type: ignore[no-any-return]

    def shared_out(self, function: Callable[[slice], Any], like: Any, axis: int, unit: int) -> Any:
        """An array of the shape and type of ``like``, from what ``function(piece)`` gives of it, on every rank.

        For work on replicated values that every rank would do alike: a piece is computed by one rank of each node, and
        passed on to its others. A rank with a GPU computes all, in one piece.

        Parameters
        ----------
        function : the part of the result in which the index of ``axis`` is in a slice, from replicated values alone.
            It must not use the federation.
        unit : the pieces are ``[i unit, (i + 1) unit)``, on any number of ranks.
        """
        if not isinstance(like, np.ndarray):
            return function(slice(0, like.shape[axis]))
        return sharing.shared_out(self.communicator, function, like.shape, like.dtype, axis, unit)

    def note(self, entry: Mapping[str, Any], since: int) -> list[dict[str, Any]]:
        """Enter something into the run's journal, before it happens; the entries from number ``since`` on.

        What is noted survives a crash: the entries are those of all attempts at this run, in the order of their
        writing. Every rank must call it, with the same entry.
        """

        def write() -> list[dict[str, Any]]:
            self.journal.add(entry)
            return self.journal.entries[since:]

        return self.once(write)
