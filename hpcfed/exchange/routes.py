"""Which way messages go between nodes, chosen by an estimate of the time that each way takes.

Quantized messages:

- ``owners``: the messages' segments go to the ranks that own them, which decode and add them and pass the mean round.
  Each message is decoded once, but the way back is not compressed, unless the mean is quantized anew.
- ``node``: every node receives all messages, and its ranks are the owners of its own mean. Nothing leaves a node as a
  float; each message is decoded once a node.
- ``gather``: every rank receives all messages whole and decodes them itself. Nothing is sent as a float, and with few
  ranks that outweighs the decoding.

Uncompressed arrays go to owners, too, or along a ``chain``: every node hands the sum so far to the next one
(`hpcfed.exchange.chain`), so that its link carries one float64 array instead of its clients'.

All add in client order in float64, so they give the same bits, and the choice may depend on what was measured.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hpcfed.ranks.communicator import Communicator

logger = logging.getLogger(__name__)

# Bytes a second and rank through shared memory, where nothing is measured because the choice hardly matters.
SHARED_MEMORY = 2e9
# Bytes that each rank sends to measure the links between nodes: more than a shaped link lets through in a burst.
PROBE_BYTES = 1 << 22
# Elements that a rank of a chain hands to the next node at a time: few, so that the last node soon has something to do,
# but worth a message.
ELEMENTS_A_HOP = 1 << 16
# Seconds to decode a level and to start a collective call.
DECODING = 1e-9
CALL = 5e-5


@dataclass
class Routes:
    """The chooser of a run; it measures the links once, if there are several nodes, and says each new choice once."""

    bytes_per_second: float | None = None
    _chosen: set[tuple[str, str]] = field(default_factory=set)
    _told: set[int] = field(default_factory=set)

    def choose(
        self, communicator: Communicator, wanted: str, clients: int, elements: int, message: float, mean: int
    ) -> str:
        """``"owners"``, ``"node"`` or ``"gather"``, the same on every rank.

        Parameters
        ----------
        wanted : one of them, or ``"auto"``.
        clients : number of messages.
        elements, message : values, and estimated bytes, of one of them.
        mean : bytes of the mean that owners pass round.
        """
        if wanted != "auto" or communicator.size == 1:
            return "owners" if wanted == "auto" else wanted
        ranks, speed = communicator.size, self._speed(communicator)
        remote = (ranks - 1) / ranks
        decoding = DECODING * clients * elements
        estimates = {
            "owners": 2 * CALL + remote * (message * clients / ranks + mean) / speed + decoding / ranks,
            "gather": CALL + remote * message * clients / speed + decoding,
        }
        nodes = len(set(communicator.nodes()))
        if 1 < nodes < ranks:
            crowd = ranks / nodes
            sent = (nodes - 1) * message * clients / ranks
            joined = (crowd - 1) / crowd * mean
            estimates["node"] = 2 * CALL + sent / speed + joined / SHARED_MEMORY + decoding / crowd
        return self._cheapest(f"{clients} messages of {elements} values", estimates)

    def chains(self, communicator: Communicator, clients: Mapping[int, int], elements: int, message: int) -> bool:
        """Whether a chain of nodes adds up uncompressed arrays sooner than owners; all ranks must ask.

        Parameters
        ----------
        clients : number of messages, by node.
        elements, message : values and bytes of one of them.
        """
        ranks, crowds, everyone = communicator.size, Counter(communicator.nodes()), sum(clients.values())
        if self.bytes_per_second is None and message * everyone < PROBE_BYTES:
            return False  # to measure the links would take longer
        count = len(crowds)
        crowd = ranks / count
        # Of what each rank of a node sent to each other rank in the measurement, this went through the node's link.
        link = self._speed(communicator) * crowd * (ranks - crowd) / (ranks - 1)
        owned = message * max(everyone - clients.get(node, 0) for node in crowds) / count
        owners = 2 * CALL + (owned + message * (ranks - 1) / ranks) / link
        hops = max(1.0, elements / min(crowds.values()) / ELEMENTS_A_HOP)
        steps = hops + 2 * (count - 1)
        inner = message if count > 2 else 0
        chain = steps * (CALL + (8 * elements + inner) / hops / link)
        return self._cheapest(f"{everyone} arrays of {elements} values", {"owners": owners, "chain": chain}) == "chain"

    def _cheapest(self, what: str, estimates: Mapping[str, float]) -> str:
        chosen = min(estimates, key=lambda name: estimates[name])
        if (what, chosen) not in self._chosen:
            self._chosen.add((what, chosen))
            costs = ", ".join(f"{name} about {1e3 * seconds:.2g} ms" for name, seconds in estimates.items())
            logger.info("%s go by way of %s: %s", what, chosen, costs)
        return chosen

    def tell_formats(self, messages: Iterable[Any], elements: int) -> None:
        """Say once in which formats messages of this size have travelled (`hpcfed.compressors.formats`)."""
        if elements in self._told:
            return
        formats: Counter[str] = sum((message.formats for message in messages), Counter())
        if formats:
            self._told.add(elements)
            shown = ", ".join(f"{count} as {name}" for name, count in sorted(formats.items()))
            logger.info("pieces of messages of %d values on this rank: %s", elements, shown)

    def _speed(self, communicator: Communicator) -> float:
        """Bytes a second that a rank sends while all ranks send, as the slowest rank sees it."""
        if self.bytes_per_second is None:
            self.bytes_per_second = SHARED_MEMORY
            if communicator.local_size < communicator.size:
                piece = np.zeros(PROBE_BYTES // communicator.size, np.uint8)
                communicator.wait()
                start = time.perf_counter()
                communicator.exchange([[piece]] * communicator.size, [piece.size] * communicator.size)
                elapsed = communicator.maximum(np.array([time.perf_counter() - start]))[0]
                self.bytes_per_second = float(piece.size * (communicator.size - 1) / elapsed)
                logger.info("links between nodes carry %.3g MB/s a rank", self.bytes_per_second / 1e6)
        return self.bytes_per_second
