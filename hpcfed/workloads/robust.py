"""Distributionally robust learning: the clients that fare worst count most."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import array_api_compat
import numpy as np
from annotated_types import Gt, Lt
from numpy.typing import NDArray

from hpcfed.capabilities import Array, Compositional, Smooth
from hpcfed.errors import ConfigError, DataError
from hpcfed.federation import Federation, PerClient
from hpcfed.lipschitz import norm
from hpcfed.options import option
from hpcfed.streams import Purpose
from hpcfed.workloads.torch_clients import LossClient, NetworkWorkload, Size

logger = logging.getLogger(__name__)

# The client that has most samples under --split imbalanced has so many at most: the size of the published experiment.
MOST_OF_MAJORITY = 5000


@dataclass(frozen=True)
class Robust(NetworkWorkload):
    r"""Train a classifier that does well at every client, not only on average.

    Minimizes ``F(x) = (1/N) sum_m exp((l_m(x) - c) / lambda)``, l_m the mean cross-entropy over client m's samples: the
    inner map is ``g_m = l_m`` (p = 1), the outer one ``f(y) = exp((y - c) / lambda)``, without samples. Its minimizers
    are those of ``lambda log (1/N) sum_m exp(l_m / lambda)``, which is the largest of ``sum_m p_m l_m - lambda KL(p,
    uniform)`` over weights p of the clients. Small lambda looks at the worst client, large lambda at the mean.

    The shift c is one number for all clients: it multiplies F and its gradient by ``exp(-c / lambda)``, and keeps them
    near 1 at the start, where exp of a large loss would overflow. Step sizes that were tuned without a shift belong to
    ``--shift 0``.
    """

    explanation: ClassVar[str] = (
        "Train a classifier that does well at every client, not only on average.\n\n"
        "Minimizes the clients' mean of exp(l_m / lambda), l_m the loss over client m's samples, so that those with "
        "the largest loss weigh most (--temperature is lambda; l_m is shifted by a constant). Estimates of l_m from "
        "few samples give a biased gradient of this composition, which the methods for compositions correct. The "
        "default data are scikit-learn's digits, one client holding most of them; --data takes MNIST or CIFAR as .npz."
    )
    offers: ClassVar[tuple[type, ...]] = (Smooth, Compositional)
    defaults: ClassVar[Mapping[str, Any]] = {
        "algorithm": "mfcgd",
        "compressor": "qsgd",
        "rounds": 200,
        "record_every": 5,
        "batch": 20,
        "rate": 0.5,
        "device": "cpu",
    }
    pictures: ClassVar[tuple[str, ...]] = ("convergence", "losses", "holdings")
    compiled: ClassVar[tuple[str, ...]] = ()

    temperature: Annotated[float, Gt(0)] = option(0.5, "lambda: small looks at the worst client, large at the mean")
    shift: float | None = option(
        None, "c in exp((l - c) / lambda), a constant factor of F  [default: the largest loss of a client at the start]"
    )
    split: Literal["imbalanced", "dirichlet", "iid"] = option(
        "imbalanced", "imbalanced: client 0 has most samples; dirichlet: classes by random shares; iid"
    )
    minority: Size = option(20, "samples of each other client under --split imbalanced")
    concentration: Annotated[float, Gt(0)] = option(0.5, "of --split dirichlet; small: clients with few classes")
    test_fraction: Annotated[float, Gt(0), Lt(1)] = option(0.2, "part held out where the data have no test images")

    def build(self, fed: Federation) -> RobustProblem:
        from hpcfed.models import require_torch

        require_torch("robust")
        from hpcfed.data import partitions
        from hpcfed.models.empirical import EmpiricalLoss

        train, test = fed.once(lambda: self._read(fed))
        dealt = self._deal(train.labels, fed)
        logger.info("what each client holds:\n%s", partitions.describe(dealt, train.labels))
        model = self.network(train.shape, int(train.labels.max()) + 1)

        def loss(images: Any, rows: Any) -> Any:
            return EmpiricalLoss.over(model, images.inputs(rows), images.labels[rows], fed.device)

        def client(number: int, rng: np.random.Generator) -> RobustClient:
            judged = slice(number, None, fed.num_clients)
            return RobustClient(
                loss(train, dealt[number]), fed.ledger.count, self.temperature, self.shift or 0.0, loss(test, judged)
            )

        built = fed.build(client)
        losses = (lambda number: loss(train, dealt[number])) if fed.writes else None
        holdings = partitions.contents(dealt, train.labels)
        problem = RobustProblem(self, built, model, losses, holdings, np.unique(train.labels))
        return problem if self.shift is not None else problem.shifted()

    def _read(self, fed: Federation) -> tuple[Any, Any]:
        """Training and test images."""
        from hpcfed.data import images

        train, test = (images.embedded(), None) if self.data is None else images.read_images(Path(self.data))
        if test is None:
            order = fed.streams.generator(Purpose.SPLIT, call=1).permutation(len(train))
            count = round(self.test_fraction * len(train))
            if not 0 < count < len(train) - fed.num_clients + 1:
                raise DataError(
                    f"--test-fraction {self.test_fraction}: {len(train)} images leave none for the test, or for one of "
                    f"{fed.num_clients} clients"
                )
            train, test = train.take(np.sort(order[count:])), train.take(np.sort(order[:count]))
        strange = np.setdiff1d(test.labels, train.labels)
        if strange.size:
            raise DataError(f"{self.data}: test images have label {strange[0]}, training images have not: not one task")
        return train, test

    def _deal(self, labels: NDArray[np.int64], fed: Federation) -> list[NDArray[np.int64]]:
        from hpcfed.data import partitions

        rng = fed.streams.generator(Purpose.SPLIT)
        if self.split != "imbalanced":
            return partitions.deal(self.split, labels, fed.num_clients, rng, alpha=self.concentration)
        others = (fed.num_clients - 1) * self.minority
        majority = min(len(labels) - others, MOST_OF_MAJORITY)
        if majority < self.minority:
            raise ConfigError(
                f"--minority {self.minority}: of {len(labels)} images {fed.num_clients - 1} others leave "
                f"{max(majority, 0)} for client 0: choose less"
            ).on_all_ranks()
        order = rng.permutation(len(labels))
        ends = majority + np.arange(fed.num_clients) * self.minority
        return [np.sort(part) for part in np.split(order[: ends[-1]], ends[:-1])]


@dataclass(frozen=True)
class RobustClient(LossClient):
    """One client: its loss is the inner map (p = 1), the outer map is ``f(y) = exp((y - shift) / temperature)``."""

    temperature: float
    shift: float
    test: Any
    inner_size: ClassVar[int] = 1

    def draw_inner(self, rng: np.random.Generator, batch: int | None) -> Any:
        return self.loss.draw(rng, batch)

    def draw_outer(self, rng: np.random.Generator, batch: int | None) -> None:
        """The outer map has no samples."""

    def inner(self, x: Array, sample: Any) -> Array:
        self.count(samples=self.loss.count(sample))
        return self.loss.value(x, sample)

    def inner_pullback(self, x: Array, sample: Any) -> tuple[Array, Callable[[Array], Array]]:
        self.count(samples=self.loss.count(sample))
        value, gradient = self.loss.value_and_gradient(x, sample)

        def pull(v: Array) -> Array:
            self.count(jacobian_products=1)
            return v[0] * gradient

        return value, pull

    def inner_jacobian(self, x: Array, sample: Any) -> Array:
        self.count(samples=self.loss.count(sample), jacobian_products=1)
        return self.loss.value_and_gradient(x, sample)[1].reshape(1, -1)

    def outer_value(self, y: Array) -> float:
        return float(self._exp(y)[0])

    def outer_gradient(self, y: Array, sample: Any) -> Array:
        self.count(gradients=1)
        return self._exp(y) / self.temperature

    def _exp(self, y: Array) -> Array:
        return array_api_compat.array_namespace(y).exp((y - self.shift) / self.temperature)

    def measure(self, rng: np.random.Generator, x: Array) -> tuple[tuple[float, ...], Array]:
        """Own loss, and loss, hits and number of the own share of the test images; ``grad (f o l_m)(x)``."""
        value, pull = self.inner_pullback(x, None)
        loss, hits = self.test.judge(x)
        return (float(value[0]), loss, hits, len(self.test)), pull(self.outer_gradient(value, None))


@dataclass(frozen=True)
class RobustProblem:
    """The data in place. ``losses`` gives every client's loss by its number, on the rank that writes the result."""

    workload: Robust
    fed: Federation
    model: Any
    losses: Callable[[int], Any] | None
    holdings: NDArray[np.int64]
    classes: NDArray[np.int64]

    def shifted(self) -> RobustProblem:
        """The problem with the shift that all clients agree on: the largest of their losses at the start."""
        start, beside = self.start(), self.fed.beside(0)
        with self.fed.ledger.uncounted():
            shift = beside.largest(beside.map(lambda client, rng: client.value(start)))
        clients = PerClient({number: replace(client, shift=shift) for number, client in self.fed.clients.items()})
        return replace(self, workload=replace(self.workload, shift=shift), fed=replace(self.fed, clients=clients))

    def start(self) -> Array:
        return self.fed.device.put(self.model.initial(self.fed.streams.generator(Purpose.START)))

    def metrics(self, solution: Array, fed: Federation) -> dict[str, float]:
        """F and the norm of its gradient; the clients' losses, also as the KL-robust one; test loss and accuracy.

        ``robust_loss`` is ``lambda log (1/N) sum_m exp(l_m / lambda)``, in the units of the losses and without a shift.
        """
        numbers, gradients = fed.map(RobustClient.measure, solution).unzip(2)
        losses, test_losses, hits, counts = np.array(fed.collect(numbers), np.float64).T
        temperature, shift = self.workload.temperature, self.workload.shift or 0.0
        robust = temperature * (np.logaddexp.reduce(losses / temperature) - np.log(len(losses)))
        return {
            "objective": float(np.exp((losses - shift) / temperature).mean()),
            "robust_loss": float(robust),
            "loss_mean": float(losses.mean()),
            "loss_worst": float(losses.max()),
            "loss_spread": float(np.ptp(losses)),
            "gradient_norm": norm(fed.mean(gradients)),
            "test_loss": float(test_losses.sum() / counts.sum()),
            "test_accuracy": float(hits.sum() / counts.sum()),
        }

    def results(self, solution: Array) -> Mapping[str, tuple[Any, Mapping[str, Any]]]:
        assert self.losses is not None, "called on the rank that writes"
        before_and_after = np.array(
            [
                [float(loss.value(x)[0]) for x in (self.start(), solution)]
                for loss in map(self.losses, range(self.fed.num_clients))
            ]
        )
        return {
            "x": (solution, {"meaning": "parameters of the network, in the order of its layers"}),
            "losses": (before_and_after, {"columns": "a client's loss at the start and at the solution"}),
            "holdings": (self.holdings, {"classes": self.classes}),
        }
