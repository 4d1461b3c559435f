"""Tasks of meta-learning: a support set to adapt to, and a query set to judge the adapted model by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcfed.data.images import Images
from hpcfed.errors import DataError

AMPLITUDES = (0.1, 5.0)
PHASES = (0.0, np.pi)
INPUTS = (-1.0, 1.0)
FREQUENCY = 5.0
"""The sinusoids of C. Finn et al. (2017), who draw all uniformly from these ranges, with inputs from -5 to 5: here they
are in units of 5, for networks start better from inputs of size 1."""

Samples = tuple[NDArray[np.float32], NDArray[Any]]


@dataclass(frozen=True, eq=False)
class Task:
    """Inputs and targets, twice."""

    support: Samples
    query: Samples


@dataclass(frozen=True)
class Sinusoid:
    """``x -> amplitude sin(5 x - phase)``."""

    amplitude: float
    phase: float

    @classmethod
    def random(cls, rng: np.random.Generator) -> Sinusoid:
        return cls(float(rng.uniform(*AMPLITUDES)), float(rng.uniform(*PHASES)))

    def __call__(self, x: NDArray[Any]) -> NDArray[np.float32]:
        return (self.amplitude * np.sin(FREQUENCY * x - self.phase)).astype(np.float32)

    def samples(self, count: int, rng: np.random.Generator) -> Samples:
        """Points on it: inputs and targets, (count, 1)."""
        x = rng.uniform(*INPUTS, size=(count, 1)).astype(np.float32)
        return x, self(x)

    def task(self, support: int, query: int, rng: np.random.Generator) -> Task:
        return Task(self.samples(support, rng), self.samples(query, rng))


def few_shot(images: Images, ways: int, support: int, query: int, rng: np.random.Generator) -> Task:
    """Tell some classes apart: ``ways`` random ones in random order, with so many images of each in either set.

    Raises
    ------
    DataError
        Fewer than ``ways`` classes have ``support + query`` images.
    """
    classes, sizes = np.unique(images.labels, return_counts=True)
    rich = classes[sizes >= support + query]
    if len(rich) < ways:
        raise DataError(
            f"{len(rich)} classes have {support} + {query} images for --support and --query, --ways asks for {ways}: "
            "use smaller numbers"
        )
    chosen = rng.choice(rich, size=ways, replace=False)
    rows = np.stack(
        [rng.choice(np.flatnonzero(images.labels == label), size=support + query, replace=False) for label in chosen]
    )
    targets = np.arange(ways)

    def part(columns: slice) -> Samples:
        some = rows[:, columns]
        return images.inputs(some.ravel()), targets.repeat(some.shape[1])

    return Task(part(slice(support)), part(slice(support, None)))
