"""DP-ShuffleG: noisy passes over the private records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hpcfed.algorithms.budget import PrivateShuffled


@dataclass(frozen=True)
class DpShuffle(PrivateShuffled):
    """Every epoch sees all private records: DP-ShuffleG of arXiv 2502.03652.

    An epoch is a Gaussian mechanism, with one private record in each step and no gain from the random order: K epochs
    cost ``rho = 2 K (C/(b sigma))^2``. Bounded gradients are all that it takes, and every iterate could be released.
    """

    method: ClassVar[str] = "dp-shuffle"
