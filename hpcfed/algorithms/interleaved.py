"""Interleaved-ShuffleG: in every epoch private records first, public ones afterwards, and noise in all steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hpcfed.algorithms.budget import Mixed, PrivateShuffled, share
from hpcfed.privacy.schedule import Schedule


@dataclass(frozen=True)
class Interleaved(Mixed, PrivateShuffled):
    """Every epoch sees ``n_d = floor(p n)`` private records and then ``n - n_d`` public ones: Interleaved-ShuffleG of
    arXiv 2502.03652.

    The noise of the m public steps hides the private ones, too: an epoch costs ``2 (C/(b sigma))^2 / (m + 1)``. That
    needs steps that do not expand distances (`hpcfed.privacy.certify`): a step size above 2/L is refused, and a loss
    that is not known to be harmless pays the full price. With other orders than rr the same n_d records are seen in
    every epoch.
    """

    method: ClassVar[str] = "interleaved"

    def schedule(self, private: int) -> Schedule:
        seen = max(1, share(self.private_fraction, private))
        return Schedule(self.method, self.horizon, private, seen, batch=self.record_batch)
