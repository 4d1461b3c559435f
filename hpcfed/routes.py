"""Which way quantized messages go, chosen by an estimate of the time that each way takes.

- ``owners``: the messages' segments go to the ranks that own them, which decode and add them and pass the mean round.
  Each message is decoded once, but the way back is not compressed, unless the mean is quantized anew.
- ``node``: every node receives all messages, and its ranks are the owners of its own mean. Nothing leaves a node as a
  float; each message is decoded once a node.
- ``gather``: every rank receives all messages whole and decodes them itself. Nothing is sent as a float, and with few
  ranks that outweighs the decoding.

All add in client order in float64, so they give the same bits, and the choice may depend on what was measured.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hpcfed.communicator import Communicator

logger = logging.getLogger(__name__)

# Bytes a second and rank through shared memory, where nothing is measured because the choice hardly matters.
SHARED_MEMORY = 2e9
# Bytes that each rank sends to measure the links between nodes: more than a shaped link lets through in a burst.
PROBE_BYTES = 1 << 22
# Seconds to decode a level and to start a collective call.
DECODING = 1e-9
CALL = 5e-5


@dataclass
class Routes:
    """The chooser of a run; it measures the links once, if there are several nodes, and says each new choice once."""

    bytes_per_second: float | None = None
    _chosen: set[tuple[str, int, int]] = field(default_factory=set)
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
        chosen = min(estimates, key=lambda name: estimates[name])
        if (chosen, clients, elements) not in self._chosen:
            self._chosen.add((chosen, clients, elements))
            costs = ", ".join(f"{name} about {1e3 * seconds:.2g} ms" for name, seconds in estimates.items())
            logger.info("%d messages of %d values go by way of %s: %s", clients, elements, chosen, costs)
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
