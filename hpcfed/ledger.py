"""What a run has cost so far: seconds by kind of work, oracle calls, bytes and bits sent."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from hpcfed.ranks.communicator import Communicator

TRAFFIC = ("wire_bytes_up", "wire_bytes_down", "paper_bits_up", "paper_bits_down")
WORK = ("samples", "gradients", "jacobian_products", "hessian_products")


@dataclass
class Ledger:
    """Cumulative cost of a run: this rank's share of the traffic and of the clients' work, and its time.

    Attributes
    ----------
    seconds : wall-clock seconds by kind: ``setup`` (data, start, first state), ``compute`` (client work), ``exchange``
        (waiting for others included), ``metrics``, ``checkpoint``. What is left of the run's time is ``other``.
    traffic : ``wire_bytes_up``, bytes that clients handed over for averaging, headers included, whether or not the
        receiver lives on the same rank; ``wire_bytes_down``, bytes of averages delivered to ranks; ``paper_bits_up``
        and ``paper_bits_down``, what the papers count for a star: each participant's message once (Elias-coded if
        quantized, 32 bits a real otherwise), each average broadcast once at 32 bits a real. Sums over all clients.
    work : what the clients' data were asked for, by the capabilities that count it: ``samples`` evaluated (at each
        point anew), ``gradients`` (of any map, at one point), products of a vector with a Jacobian and with a Hessian
        (or mixed second derivatives). Sums over this rank's clients.
    participants : how many clients the last sample had, None if all took part since it was reset.
    offered : whether the method has sent a message that a compressor may touch.
    """

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("compute", "exchange"), 0.0))
    traffic: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TRAFFIC, 0))
    work: dict[str, int] = field(default_factory=lambda: dict.fromkeys(WORK, 0))
    participants: int | None = None
    offered: bool = False
    counting: bool = True
    _running: list[str] = field(default_factory=list)

    @contextlib.contextmanager
    def clock(self, kind: str) -> Iterator[None]:
        """Charge the block's time to ``kind``; inside another clock's block the outer kind is charged alone."""
        if self._running:
            yield
            return
        self._running.append(kind)
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[kind] = self.seconds.get(kind, 0.0) + time.perf_counter() - start
            self._running.pop()

    @contextlib.contextmanager
    def uncounted(self) -> Iterator[None]:
        """Messages inside the block are measurements, not part of the method: they are not counted."""
        before, self.counting = self.counting, False
        try:
            yield
        finally:
            self.counting = before

    def count(self, **amounts: int) -> None:
        """Add to the clients' work, unless what goes on is a measurement."""
        if self.counting:
            for name, amount in amounts.items():
                self.work[name] += amount

    def totals(self, communicator: Communicator) -> dict[str, int]:
        """The traffic and the work of all ranks together."""
        return self.consult(communicator)[0]

    def consult(self, communicator: Communicator, *seen: bool) -> tuple[dict[str, int], list[bool]]:
        """The totals, and of each thing that a rank may have seen whether any has: one collective call for both."""
        both = self.traffic | self.work
        told = communicator.sum(np.array([*both.values(), *seen], np.int64)).tolist()
        return dict(zip(both, told, strict=False)), [count > 0 for count in told[len(both) :]]

    def carry_on(self, totals: Mapping[str, int]) -> None:
        """Go on from the totals of an interrupted run. One rank does so for all."""
        for amounts in (self.traffic, self.work):
            amounts |= {name: totals[name] for name in amounts if name in totals}

    def send(self, **amounts: int) -> None:
        """Add to the traffic."""
        if self.counting:
            for name, amount in amounts.items():
                self.traffic[name] += amount
