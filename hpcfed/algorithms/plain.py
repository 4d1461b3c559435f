"""Shuffled gradient steps on private records without any privacy: what noise costs is measured against it."""

from __future__ import annotations

from dataclasses import dataclass

from hpcfed.algorithms.shuffled import Plan, Population, Shuffled, ShuffledState, unaccountable
from hpcfed.federation import Federation
from hpcfed.protocols import Report


@dataclass(frozen=True)
class Plain(Shuffled):
    """Every epoch sees all private records, without noise, and clipped only if asked: nothing is private.

    The orders are those of random reshuffling (rr), shuffling once (so) and incremental gradients (ig).
    """

    def split(self, private: int, public: int, number: int) -> tuple[int, int]:
        return private, 0

    def plan(self, population: Population, size: int, fed: Federation) -> Plan:
        population.refuse_empty(0, "plain")
        return super().plan(population, size, fed)

    def report(self, state: ShuffledState, fed: Federation) -> Report:
        return unaccountable("plain", "NONE: gradients of private records carry no noise", private=False, epsilon=None)
