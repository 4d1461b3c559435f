"""Priv-Pub-ShuffleG: private epochs first, public ones afterwards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hpcfed.algorithms.budget import Switching, share


@dataclass(frozen=True)
class PrivPub(Switching):
    """Epochs 1 to S see private records, with noise, the others as many public ones, without: Priv-Pub-ShuffleG of
    arXiv 2502.03652, with ``S = floor(p K)``.

    Public epochs cost nothing; ``rho = 2 S (C/(b sigma))^2``.
    """

    method: ClassVar[str] = "priv-pub"

    def last_before(self) -> int:
        return max(1, share(self.private_fraction, self.horizon))
