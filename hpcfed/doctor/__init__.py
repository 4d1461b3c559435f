"""``hpcfed doctor``: look at everything that a run depends on, and say what to do where something is wrong.

There are two lists of checks: those of a node, made by its first rank, and those of all ranks, made by rank 0 from what
each tells about itself. A check is a small function that yields findings. One that fails becomes a finding itself, so
that a broken part never hides the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hpcfed.doctor import node, world
from hpcfed.doctor.findings import Finding, attempt, merge, report
from hpcfed.ranks.communicator import Communicator


@dataclass(frozen=True)
class Examination:
    """The job of ``hpcfed doctor``; ``tuned`` are the settings that hpcfed made in this process's environment."""

    tuned: Mapping[str, str]

    def execute(self, communicator: Communicator) -> None:
        """Examine everything and print the report on rank 0. Every rank must call it."""
        own = world.tell(communicator)  # before the checks of the node load more
        of_node: list[Finding] = []
        if communicator.local_rank == 0:
            of_node = [finding for check in node.CHECKS for finding in attempt(check, communicator.local_size)]
        gathered = communicator.gather((own, of_node))
        if communicator.rank == 0:
            everyone = world.World([rank for rank, _ in gathered], self.tuned)
            findings = merge([(rank.host, found) for rank, found in gathered if found])
            findings += [finding for check in world.CHECKS for finding in attempt(check, everyone)]
            print(report(findings), flush=True)
