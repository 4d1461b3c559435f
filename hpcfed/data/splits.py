"""Samples for problems of two levels: those of the test, and each client's own for training and for validation."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from annotated_types import Ge, Gt, Lt
from numpy.typing import NDArray

from hpcfed.errors import DataError
from hpcfed.federation import Federation
from hpcfed.options import option
from hpcfed.streams import Purpose

logger = logging.getLogger(__name__)

Indices = NDArray[np.int64]
Fraction = Annotated[float, Gt(0), Lt(1)]


@dataclass(frozen=True)
class DealingOptions:
    """Options of a workload that deals samples to clients."""

    partition: Literal["iid", "dirichlet", "shards", "quantity"] = option("iid", "how samples are dealt to clients")
    alpha: Annotated[float, Gt(0)] = option(0.5, "concentration of --partition dirichlet and quantity; small: uneven")
    shards: Annotated[int, Ge(1)] = option(2, "shards of sorted labels for each client of --partition shards")

    def deal(self, labels: NDArray[Any], num_clients: int, rng: np.random.Generator) -> list[Indices]:
        """The rows of each client (`hpcfed.data.partitions.deal`)."""
        from hpcfed.data import partitions

        return partitions.deal(self.partition, labels, num_clients, rng, alpha=self.alpha, shards=self.shards)


@dataclass(frozen=True, eq=False)
class Split:
    """Rows of a data set, each in one part.

    Attributes
    ----------
    test : rows held out, increasing.
    train, validation : rows of each client, increasing; none is empty.
    """

    test: Indices
    train: tuple[Indices, ...]
    validation: tuple[Indices, ...]

    @property
    def dealt(self) -> list[Indices]:
        """All that each client holds."""
        return [np.sort(np.concatenate(parts)) for parts in zip(self.train, self.validation, strict=True)]


@dataclass(frozen=True)
class SplitOptions(DealingOptions):
    """Options of a workload that holds samples out and deals the rest; a client validates with a part of its own."""

    test_fraction: Fraction = option(0.1, "part of the samples that is held out for the test")
    validation_fraction: Fraction = option(
        0.3, "part of each client's samples that the upper level sees, not the lower"
    )

    def split(self, labels: NDArray[Any], fed: Federation, *, test: bool = True) -> Split:
        """Who trains, validates and tests with which of the samples with these labels, the same on every rank.

        Parameters
        ----------
        labels
            (n,).
        test
            Whether to hold samples out; a data set may have its own for the test.

        Raises
        ------
        DataError
            There are no samples for the test, or for the training or the validation of a client.
        ConfigError
            Clients, alpha or shards do not fit the number of samples.
        """
        from hpcfed.data import partitions

        rng = fed.streams.generator(Purpose.SPLIT)
        order = rng.permutation(len(labels))
        held_out = round(self.test_fraction * len(labels)) if test else 0
        if test and not 0 < held_out < len(labels):
            raise DataError(
                f"--test-fraction {self.test_fraction} of {len(labels)} samples is {held_out}: none for the test, or "
                "none for the clients"
            )
        rest = np.sort(order[held_out:])
        parts = self.deal(labels[rest], fed.num_clients, rng)
        train, validation = [], []
        for client, part in enumerate(parts):
            if len(part) < 2:
                raise DataError(
                    f"client {client} has 1 sample, for training or for validation: deal more evenly "
                    "(--alpha, --partition), or give fewer --clients"
                )
            own = rest[rng.permutation(part)]
            count = min(max(1, round(self.validation_fraction * len(own))), len(own) - 1)
            validation.append(np.sort(own[:count]))
            train.append(np.sort(own[count:]))
        split = Split(np.sort(order[:held_out]), tuple(train), tuple(validation))
        logger.info("what each client holds:\n%s", partitions.describe(split.dealt, labels))
        return split
