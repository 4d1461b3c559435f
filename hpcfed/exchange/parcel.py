"""What one sum over clients is given: its cohort, weights and streams, and where its costs are entered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcfed.exchange.routes import Routes
from hpcfed.ledger import Ledger
from hpcfed.ranks.communicator import Communicator

Array = NDArray[Any]


@dataclass(frozen=True)
class Parcel:
    """One sum over a cohort: who takes part, with what weights, over which ranks, at whose cost.

    ``rng(client)`` is a fresh stream for a client's message, ``mean_rng(part)`` one for a part of the mean. The result
    is ``sum_i weights_i * value_i / divisor``. ``residuals`` (`hpcfed.exchange.feedback.Residuals`) keeps what rounding
    took, ``heard`` what it has left of this rank's clients' values. ``broadcast`` is the part of the result that counts
    among the papers' bits down.
    """

    communicator: Communicator
    cohort: tuple[int, ...]
    owners: tuple[int, ...]
    rng: Callable[[int], np.random.Generator]
    weights: Sequence[float] | None
    divisor: float
    ledger: Ledger
    mean_rng: Callable[[int], np.random.Generator] | None = None
    routes: Routes = field(default_factory=Routes)
    residuals: Any = None
    heard: dict[int, Array] | None = None
    broadcast: float = 1.0

    @property
    def remembers(self) -> bool:
        """Whether somebody asks what rounding has left of the values."""
        return self.residuals is not None or self.heard is not None

    def remember(self, client: int, value: Array, said: Array) -> None:
        """``said`` is what the others have heard of a client's value."""
        if self.residuals is not None:
            self.residuals.keep(client, value - said)
        if self.heard is not None:
            self.heard[client] = said
