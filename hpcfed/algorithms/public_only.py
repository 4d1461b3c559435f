"""Passes over the public records alone: what a private method has to beat."""

from __future__ import annotations

from dataclasses import dataclass

from hpcfed.algorithms.shuffled import Plan, Population, Shuffled, ShuffledState, unaccountable
from hpcfed.federation import Federation
from hpcfed.protocols import Report


@dataclass(frozen=True)
class PublicOnly(Shuffled):
    """Every epoch sees all public records of a client, without noise; private records are only measured."""

    def split(self, private: int, public: int, number: int) -> tuple[int, int]:
        return 0, public

    def plan(self, population: Population, size: int, fed: Federation) -> Plan:
        population.refuse_empty(1, "public-only")
        return super().plan(population, size, fed)

    def report(self, state: ShuffledState, fed: Federation) -> Report:
        told = "the models depend on public records only, and cost private ones nothing"
        return unaccountable("public-only", told, private=True, epsilon=0.0)
