"""A rehearsal: one rank's part of a run, done by this process alone.

The method's own code runs on a federation that believes it has all its ranks. A few of the rank's clients are built,
with as much data as they will have; the work of the others is that of these again. What other ranks would have sent is
made up from what this one sends: the numbers are worthless, but every array has its size, every message its bytes, and
everything that a rank computes takes the time that it takes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib
import math
import mmap
import os
import pickle
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from hpcfed import devices, environment
from hpcfed.config import RunConfig
from hpcfed.doctor.system import proc_size
from hpcfed.errors import ConfigError, DivergedError
from hpcfed.exchange.feedback import ErrorFeedback
from hpcfed.exchange.routes import Routes
from hpcfed.federation import Federation, PerClient
from hpcfed.planning.network import Call, Layout
from hpcfed.ranks.communicator import Bytes, SerialCommunicator
from hpcfed.ranks.shared_memory import SharedMemory, extent
from hpcfed.streams import Streams

T = TypeVar("T")


# At least and at most so many rounds are played, and more than the least only within so many seconds.
ROUNDS, ENOUGH = (2, 50), 0.5


@dataclass
class Tape:
    """What a round did.

    Attributes
    ----------
    clock : what tells the seconds.
    acting : whether sums are made as they will be; before the first round nobody looks, and they are only made up.
    calls : the collective calls.
    messages : clients for which this rank sent the last message.
    clients : seconds that the busiest rank's clients would have worked.
    mapping, made_up : seconds that the clients here have worked, and in which other ranks' messages were made up.
    """

    clock: Callable[[], float] = time.perf_counter
    acting: bool = True
    calls: list[Call] = field(default_factory=list)
    messages: int = 0
    clients: float = 0.0
    mapping: float = 0.0
    made_up: float = 0.0

    def clear(self) -> None:
        """Begin another round."""
        self.calls.clear()
        self.clients = self.mapping = self.made_up = 0.0

    @contextlib.contextmanager
    def making_up(self) -> Iterator[None]:
        """The block's time is not the run's."""
        start = self.clock()
        try:
            yield
        finally:
            self.made_up += self.clock() - start


class Stage(SerialCommunicator):
    """Rank 0 of a layout, whose other ranks do as it does."""

    def __init__(self, layout: Layout, tape: Tape, on_node: bool = False) -> None:
        self.layout, self.tape, self._alone = layout, tape, on_node
        self.size = min(layout.crowd, layout.ranks) if on_node else layout.ranks
        self.local_size = min(layout.crowd, layout.ranks)

    def _note(self, kind: Any, near: int, far: int = 0) -> None:
        self.tape.calls.append(Call(kind, near, far, self._alone))

    def broadcast(self, value: Any, root: int = 0) -> Any:
        with self.tape.making_up():
            self._note("broadcast", len(pickle.dumps(value)))
        return value

    def broadcast_array(self, array: NDArray[Any] | None) -> NDArray[Any]:
        assert array is not None
        self._note("broadcast", array.nbytes)
        return array

    def gather(self, value: Any) -> list[Any]:
        with self.tape.making_up():
            self._note("gather", len(pickle.dumps(value)) * self.size)
            return [value] * self.size

    def exchange(self, outgoing: Sequence[Sequence[Bytes]], incoming: Sequence[int]) -> list[Bytes]:
        with self.tape.making_up():
            sent = [sum(part.size for part in parts) for parts in outgoing]
            near = slice(1, self.local_size)
            busier = (
                max(sum(sent[near]), sum(incoming[near])),
                max(sum(sent[self.local_size :]), sum(incoming[self.local_size :])),
            )
            self._note("exchange", *busier)
            own = np.concatenate([np.empty(0, np.uint8), *outgoing[0]])
            received = np.empty(sum(incoming), np.uint8)
            pieces = np.split(received, np.cumsum(incoming)[:-1])
            for piece in pieces:
                piece[:] = np.resize(own, piece.size)
            return pieces

    def join(self, segment: NDArray[Any], lengths: Sequence[int], out: NDArray[Any]) -> None:
        with self.tape.making_up():
            self._note("join", sum(lengths) * out.itemsize)
            for place in np.split(out, np.cumsum(lengths)[:-1]):
                place[:] = np.resize(segment, place.size)

    def maximum(self, array: NDArray[Any]) -> NDArray[Any]:
        return self.sum(array)

    def sum(self, array: NDArray[Any]) -> NDArray[Any]:
        with self.tape.making_up():
            self._note("reduce", array.nbytes)
            return np.copy(array)

    def nodes(self) -> list[int]:
        return [rank // self.layout.crowd for rank in range(self.size)]

    def shared(self) -> SharedMemory | None:
        return self._shared if self.size > 1 else None

    @cached_property
    def _shared(self) -> SharedMemory:
        """As the ranks of the node would share it, though this one alone writes to it."""
        whole = mmap.mmap(-1, extent(self.local_size))
        return SharedMemory(whole, os.getpid(), 0, self.local_size)

    def barrier(self) -> None:
        self._note("reduce", 0)

    def on_node(self) -> Stage:
        return Stage(self.layout, self.tape, on_node=True)

    def across_nodes(self) -> Stage:
        return Stage(Layout(self.layout.nodes, self.layout.nodes), self.tape)


@dataclass(frozen=True)
class Troupe(Federation):
    """A federation on a `Stage` that builds at most ``most`` of its rank's clients, who play the others, too."""

    tape: Tape = field(default_factory=Tape)
    most: int = 1

    @property
    def local(self) -> tuple[int, ...]:
        return tuple(client for client in self._owned if client < self.most)

    @property
    def _owned(self) -> tuple[int, ...]:
        """The cohort's clients on this rank; rank 0 has the lowest ids."""
        return tuple(client for client in self.cohort if self.owner(client) == 0)

    def sample(self, count: int | None) -> Federation:
        """A cohort that is spread evenly over the clients and has the first one in it."""
        cohort = super().sample(count)
        if cohort is self or count is None:
            return self
        return dataclasses.replace(cohort, cohort=tuple(place * self.num_clients // count for place in range(count)))

    def map(self, function: Callable[..., T], *args: Any) -> PerClient[T]:
        start = self.tape.clock()
        results = super().map(function, *args)
        elapsed = self.tape.clock() - start
        busiest = max(Counter(self.owner(client) for client in self.cohort).values())
        self.tape.clients += elapsed * busiest / len(self.local)
        self.tape.mapping += elapsed
        return results

    def collect(self, values: PerClient[T]) -> list[T]:
        with self.ledger.clock("exchange"):
            self.communicator.gather(dict(values))
        own = list(values.values())
        return [own[place % len(own)] for place in range(len(self.cohort))]

    def _combine(
        self,
        values: PerClient[Any],
        weights: Sequence[float] | None,
        divisor: float,
        lossy: bool = False,
        heard: dict[int, Any] | None = None,
        broadcast: float = 1.0,
    ) -> Any:
        own = list(values.values())
        factor = (len(self.cohort) if weights is None else sum(weights)) / divisor
        if not self.tape.acting:
            if heard is not None:
                heard.update(values)
            return factor * own[0]
        self.tape.messages = len(self._owned)
        everyone = PerClient({client: own[place % len(own)] for place, client in enumerate(self._owned)})
        result = super()._combine(everyone, weights, divisor, lossy, heard, broadcast)
        if heard is not None:
            for client in heard.keys() - values.keys():
                del heard[client]
        if len(own) == len(self.cohort):
            return result
        with self.tape.making_up():  # sensible numbers, as if all clients were like the first
            if np.ndim(result) == 0:
                return factor * own[0]
            result[...] = own[0] if factor == 1 else factor * own[0]
        return result


@dataclass(frozen=True)
class Rehearsed:
    """What a rehearsal found of one round.

    Attributes
    ----------
    clients : seconds of the work of the busiest rank's clients.
    rest : seconds of what else a rank does itself: coding, adding up, and what every rank computes alike.
    calls : what it would have called.
    traffic : what the ledger of this rank counted (`hpcfed.ledger.Ledger`), ``messages`` clients a message.
    messages : clients of the cohort that this rank spoke for.
    held : most bytes that its arrays took at once, from building on.
    resident : bytes of this process without them: the interpreter, and code that was loaded.
    """

    clients: float
    rest: float
    calls: tuple[Call, ...]
    traffic: Mapping[str, int]
    messages: int
    held: int = 0
    resident: int = 0


def rehearse(config: RunConfig, layout: Layout, built: int, link_speed: float | None = None) -> Rehearsed:
    """Play rank 0's part of some rounds; the times are those of the fastest.

    Parameters
    ----------
    built : clients to build, at most as many as the rank has.
    link_speed : bytes a second between nodes, which decides on ways of quantized messages; None on one node.

    Raises
    ------
    ConfigError
        If the method takes from other ranks what cannot be made up.
    """
    _forget_peak()
    try:
        with np.errstate(all="ignore"):
            found = _play(config, layout, built, link_speed)
    except (IndexError, KeyError, ValueError) as error:  # a method that reads what other ranks say
        raise ConfigError(
            f"{config.algorithm.name} cannot be planned on {layout.ranks} ranks: its messages differ between clients "
            f"or ranks ({type(error).__name__}: {error}): plan it on one rank, or without --quantize-down"
        ) from error
    peak = proc_size("self/status", "VmHWM")
    gc.collect()  # what a play gives back is what its arrays took
    resident = proc_size("self/status", "VmRSS")
    return dataclasses.replace(found, held=max(0, peak - resident), resident=resident)


def _play(config: RunConfig, layout: Layout, built: int, link_speed: float | None) -> Rehearsed:
    workload, compressor = config.workload.options, config.compressor.options
    device = devices.choose(config.run.device, 0)
    tape = Tape(_clock(device), acting=False)
    fed = Troupe(
        num_clients=workload.clients,
        streams=Streams(config.run.seed),
        # A node of its own for every rank while the problem is built: what must fit into memory here is one rank.
        communicator=Stage(Layout(layout.ranks, layout.ranks), tape),
        compressor=compressor if compressor.quantize else None,
        sum_order=config.run.sum_order,
        device=device,
        routes=Routes(link_speed),
        tape=tape,
        most=built,
    )
    for module in (*workload.compiled, *getattr(fed.compressor, "compiled", ())):
        importlib.import_module(module)
    problem = workload.build(fed)
    method = config.algorithm.options
    algorithm = ErrorFeedback(method) if config.run.error_feedback else method
    fed = dataclasses.replace(problem.fed, communicator=Stage(layout, tape))
    state = algorithm.init(fed.at(0), problem.start())
    with fed.ledger.uncounted():
        problem.metrics(algorithm.solution(state), fed.beside(0))  # no part of a round, but of a run's memory
    tape.acting = True
    best, spent, number = (math.inf, math.inf), 0.0, 0
    traffic: dict[str, int] = {}
    calls: tuple[Call, ...] = ()
    while number < ROUNDS[0] or (number < ROUNDS[1] and spent < ENOUGH):
        number += 1
        tape.clear()
        before = dict(fed.ledger.traffic)
        start = tape.clock()
        try:
            state = algorithm.round(state, fed.at(number))
            fed.ledger.consult(fed.communicator, False, False, False)  # as after each round of a run
        except DivergedError:
            if number <= ROUNDS[0]:
                raise
            break  # what one client says, as if all were like it, may lead away from any minimum
        elapsed = tape.clock() - start
        spent += elapsed
        best = min(best, (tape.clients, elapsed - tape.mapping - tape.made_up), key=sum)
        traffic = {name: amount - before[name] for name, amount in fed.ledger.traffic.items()}
        calls = tuple(tape.calls)
    return Rehearsed(*best, calls, traffic, tape.messages)


def _clock(device: devices.Device) -> Callable[[], float]:
    """Processor seconds where one thread does all: others' work on this machine does not add to them."""
    one_thread = all(os.environ.get(name) == "1" for name in environment.THREADS)
    return time.process_time if one_thread and not device.is_gpu else time.perf_counter


def _forget_peak() -> None:
    """Let the kernel measure this process's peak anew. Where it cannot, peaks only grow, as they mostly do anyway."""
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as file:
        file.write("5")
