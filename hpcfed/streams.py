"""Random streams addressed by what they are for, never by who draws from them.

A stream is found from ``(seed, purpose, round, call, client)``. It does not depend on ranks, on the order of work or
on how many numbers were drawn before, so a run gives the same numbers on any number of ranks, and a checkpoint has
nothing random to save.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np


class Purpose(IntEnum):
    """What a stream is for. The numbers are part of every digest: append, never renumber."""

    DATA = 1
    COHORT = 2
    CLIENT = 3
    COMPRESSION = 4
    SPLIT = 5
    START = 6


@dataclass(frozen=True)
class Streams:
    """All the random numbers of a run.

    ``generator(purpose, ...)`` returns ``Generator(Philox(SeedSequence(seed, spawn_key=(purpose, round, call,
    client))))`` (Salmon et al., Parallel random numbers: as easy as 1, 2, 3, 2011).
    """

    seed: int

    def generator(self, purpose: Purpose, round: int = 0, call: int = 0, client: int = 0) -> np.random.Generator:
        """The stream at this address; the same numbers at every call."""
        sequence = np.random.SeedSequence(self.seed, spawn_key=(int(purpose), round, call, client))
        return np.random.Generator(np.random.Philox(sequence))
