"""Pub-Priv-ShuffleG: public epochs first, private ones afterwards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hpcfed.algorithms.budget import Switching, share


@dataclass(frozen=True)
class PubPriv(Switching):
    """Epochs 1 to S see public records, without noise, the others as many private ones, with: Pub-Priv-ShuffleG of
    arXiv 2502.03652, with ``S = floor((1 - p) K)``.

    Public epochs cost nothing; ``rho = 2 (K - S) (C/(b sigma))^2``.
    """

    method: ClassVar[str] = "pub-priv"

    def last_before(self) -> int:
        return share(1 - self.private_fraction, self.horizon)
