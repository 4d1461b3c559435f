"""Hyperparameter optimization: weights of a ridge, found by validation while a model is trained."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from annotated_types import Ge, Gt
from numpy.typing import NDArray

from hpcfed.capabilities import Bilevel
from hpcfed.data.splits import SplitOptions
from hpcfed.errors import ConfigError
from hpcfed.federation import Federation
from hpcfed.lipschitz import norm
from hpcfed.options import option
from hpcfed.streams import Purpose

logger = logging.getLogger(__name__)

Vector = NDArray[np.float64]


@dataclass(frozen=True)
class Hyperopt(SplitOptions):
    r"""Find the weights of a ridge, one for each column of a model's matrices, by the loss on validation samples.

    Lower level: the model's parameters y minimize the mean loss of the training samples plus ``R(x, y) = sum_i
    1/columns_i sum_q exp(x_iq) 1/rows_i sum_p (Y_i)_pq^2`` over its matrices Y_i. Upper level: x minimizes the mean
    loss of the validation samples, on which it acts through y alone.

    ``--lower mlp``: ``w^T tanh(W^T a)`` with the logistic loss, W of (features, hidden) and w of (hidden, 1), so that x
    has hidden + 1 entries; not convex in y. ``--lower logistic``: softmax regression with Y of (classes, features), so
    that x has an entry for each feature; strongly convex in y.

    With n training samples, ``T_i`` of them client i's, it has ``g_i = N/n sum_{j in T_i} loss_j + R``, and likewise
    ``f_i`` with the validation samples: the clients' means are the two objectives whatever the partition.
    """

    explanation: ClassVar[str] = (
        "Find the weights of a ridge by the loss on validation samples.\n\n"
        "Lower level: a model's parameters y minimize the mean training loss + R(x, y), where R weights the squares of "
        "each column q of y's matrices by exp(x_q). Upper level: x minimizes the mean validation loss. --lower mlp is "
        "a network with two layers, logistic is softmax regression, convex in y. The default data are scikit-learn's "
        "breast cancer set; --data takes LIBSVM files."
    )
    offers: ClassVar[tuple[type, ...]] = (Bilevel,)
    defaults: ClassVar[Mapping[str, Any]] = {
        "algorithm": "fedds",
        "compressor": "qsgd",
        "rounds": 200,
        "record_every": 5,
        "device": "cpu",
        "batch": 10,
        "local_steps": 4,
        "common_step": 0.1,
        # The ridge changes little in x, so x takes far longer steps than y, and p follows it at once.
        "alpha_x": 100.0,
        "alpha_y": 1.0,
        "alpha_z": 1.0,
        "alpha_p": 10.0,
        "smoothing": 0.1,
    }
    pictures: ClassVar[tuple[str, ...]] = ("convergence", "holdings")
    compiled: ClassVar[tuple[str, ...]] = ()

    clients: Annotated[int, Ge(1)] = option(8, "number of clients N")
    data: str | None = option(None, "LIBSVM text (.bz2 .gz .xz too)  [default: breast cancer]", metavar="FILE")
    lower: Literal["mlp", "logistic"] = option("mlp", "mlp: a network with two layers; logistic: softmax regression")
    hidden: Annotated[int, Ge(1)] = option(20, "hidden units of --lower mlp")
    first_exponent: float = option(1.0, "all entries of x at the start; 1 is a strong ridge, -5 hardly one")
    hypergradient: bool = option(
        False,
        "record the norms of the true hypergradient and of the penalized gradient, by Newton's method on the lower "
        "level: slow, and for at most 1000 parameters",
    )
    recorded_penalty: Annotated[float, Gt(0)] = option(0.02, "rho of the penalized gradient that is recorded")

    def __post_init__(self) -> None:
        if self.data is not None:
            object.__setattr__(self, "data", os.path.abspath(self.data))

    def build(self, fed: Federation) -> HyperoptProblem:
        from hpcfed.data import partitions
        from hpcfed.workloads.hyperopt_hypergradient import MOST_EXACT
        from hpcfed.workloads.hyperopt_models import ColumnRidge, Softmax, TwoLayer

        features, labels, notes = fed.once(self._read)
        for note in notes:
            logger.info("%s", note)
        columns = features.shape[1]
        model = TwoLayer(columns, self.hidden) if self.lower == "mlp" else Softmax(columns)
        ridge = ColumnRidge(model.shapes)
        parameters = sum(rows * columns for rows, columns in model.shapes)
        if self.hypergradient and parameters > MOST_EXACT:
            raise ConfigError(
                f"--hypergradient: the lower level has {parameters:,} parameters, more than {MOST_EXACT:,}: leave it "
                "out, or reduce --hidden"
            ).on_all_ranks()
        split = self.split(labels, fed)
        targets = model.targets(labels)

        def samples(rows: Any, weight: float) -> Samples:
            return Samples(features[rows], targets[rows], weight)

        def client(number: int, rng: np.random.Generator) -> HyperoptClient:
            train, validation = (
                samples(parts[number], fed.num_clients / sum(map(len, parts)))
                for parts in (split.train, split.validation)
            )
            test = samples(split.test[number :: fed.num_clients], 1.0)
            return HyperoptClient(
                model, ridge, train, validation, test, fed.ledger.count, upper_size=ridge.size, lower_size=parameters
            )

        holdings = partitions.contents(split.dealt, labels)
        return HyperoptProblem(self, fed.build(client), model, holdings, np.unique(labels))

    def _read(self) -> tuple[Any, Vector, tuple[str, ...]]:
        from hpcfed.data import libsvm

        data = libsvm.embedded() if self.data is None else libsvm.read_libsvm(Path(self.data))
        return data.features, data.labels, data.notes


@dataclass(frozen=True)
class Samples:
    """Some samples, and the weight of each one's loss in a client's objective. Features are CSR rows or dense."""

    features: Any
    targets: NDArray[Any]
    weight: float

    def __len__(self) -> int:
        return len(self.targets)

    def draw(self, rng: np.random.Generator, batch: int | None) -> Samples | None:
        """``batch`` of them without replacement, dense, that weigh as much as all; None if there are no more."""
        if batch is None or batch >= len(self):
            return None
        rows = rng.choice(len(self), size=batch, replace=False)
        return Samples(_dense(self.features, rows), self.targets[rows], self.weight * len(self) / batch)


@dataclass(frozen=True)
class HyperoptClient:
    """One client: ``f_i`` is its validation loss, ``g_i`` its training loss and the ridge.

    Counted are, for each gradient (of both parts, at one point) or product, the samples that it takes.
    """

    model: Any
    ridge: Any
    train: Samples
    validation: Samples
    test: Samples
    count: Callable[..., None]
    upper_size: int
    lower_size: int

    def draw_upper(self, rng: np.random.Generator, batch: int | None) -> Samples | None:
        return self.validation.draw(rng, batch)

    def draw_lower(self, rng: np.random.Generator, batch: int | None) -> Samples | None:
        return self.train.draw(rng, batch)

    def upper_value(self, x: Vector, y: Vector) -> float:
        return self._loss(y, self.validation)

    def lower_value(self, x: Vector, y: Vector) -> float:
        return self._loss(y, self.train) + float(self.ridge.value(x, y))

    def upper_gradients(self, x: Vector, y: Vector, sample: Samples | None) -> tuple[Vector, Vector]:
        return np.zeros_like(x), self._gradient(y, sample or self.validation)

    def lower_gradients(self, x: Vector, y: Vector, sample: Samples | None) -> tuple[Vector, Vector]:
        in_x, in_y = self.ridge.gradients(x, y)
        in_y += self._gradient(y, sample or self.train)
        return in_x, in_y

    def lower_hessian_product(self, x: Vector, y: Vector, sample: Samples | None, v: Vector) -> Vector:
        part = sample or self.train
        self.count(samples=len(part), hessian_products=1)
        product: Vector = self.model.hessian_product(y, v, part.features, part.targets, part.weight)
        product += self.ridge.hessian_product(x, v)
        return product

    def lower_cross_product(self, x: Vector, y: Vector, sample: Samples | None, v: Vector) -> Vector:
        """Of the ridge alone: the training loss does not depend on x."""
        self.count(hessian_products=1)
        product: Vector = self.ridge.cross_product(x, y, v)
        return product

    def _loss(self, y: Vector, part: Samples) -> float:
        self.count(samples=len(part))
        return part.weight * float(self.model.judge(y, part.features, part.targets)[0])

    def _gradient(self, y: Vector, part: Samples) -> Vector:
        self.count(samples=len(part), gradients=1)
        gradient: Vector = self.model.gradient(y, part.features, part.targets, part.weight)
        return gradient

    def measure(self, rng: np.random.Generator, x: Vector, y: Vector) -> tuple[Vector, Vector]:
        """Own values of f and g, and loss, hits and number of the own share of the test samples; ``D_y g_i``."""
        judged = self.model.judge(y, self.test.features, self.test.targets)
        numbers = [self.upper_value(x, y), self.lower_value(x, y), *judged, len(self.test)]
        return np.array(numbers), self.lower_gradients(x, y, None)[1]


@dataclass(frozen=True)
class HyperoptProblem:
    """The data in place."""

    workload: Hyperopt
    fed: Federation
    model: Any
    holdings: NDArray[np.int64]
    classes: Vector

    def start(self) -> Vector:
        client = self.fed.any_client
        y = self.model.initial(self.fed.streams.generator(Purpose.START))
        return np.concatenate([np.full(client.upper_size, self.workload.first_exponent), y])

    def metrics(self, solution: Vector, fed: Federation) -> dict[str, float]:
        """Upper loss (the objective) and lower loss at (x, y), ``|D_y g|``, and loss and accuracy on the test samples.

        With ``--hypergradient``, from a minimizer z of the lower level near y: ``hypergradient_norm`` at (x, z), and
        ``penalized_gradient_norm``, the norm of the gradient in (x, y, z) of ``f(x, y) + (g(x, y) - g(x, z)) / rho``,
        in which z is not a method's own but that minimizer. Both are missing where no strict minimizer was found.
        """
        x, y = self._parts(solution)
        numbers, slopes = fed.map(HyperoptClient.measure, x, y).unzip(2)
        upper, lower, loss, hits, count = fed.total(numbers).tolist()
        metrics = {
            "objective": upper / fed.num_present,
            "lower_loss": lower / fed.num_present,
            "lower_gradient_norm": norm(fed.mean(slopes)),
            "test_loss": loss / count,
            "test_accuracy": hits / count,
        }
        return metrics | (self._exact(x, y, fed) if self.workload.hypergradient else {})

    def _exact(self, x: Vector, y: Vector, fed: Federation) -> dict[str, float]:
        from hpcfed.workloads import hyperopt_hypergradient as exact

        z = exact.lower_minimizer(fed, x, y)
        if z is None:
            return {}
        penalized = exact.penalized_gradient(fed, x, y, z, self.workload.recorded_penalty)
        return {
            "hypergradient_norm": norm(exact.hypergradient(fed, x, z)),
            "penalized_gradient_norm": norm(penalized),
        }

    def results(self, solution: Vector) -> Mapping[str, tuple[Any, Mapping[str, Any]]]:
        x, y = self._parts(solution)
        return {
            "point": (solution, {"meaning": "x, then y"}),
            "x": (x, {"meaning": "logarithms of the ridge's weights, a column of the model's matrices each"}),
            "y": (y, {"meaning": "the model's matrices, row by row", "shapes": np.array(self.model.shapes)}),
            "holdings": (self.holdings, {"classes": self.classes}),
        }

    def _parts(self, solution: Vector) -> tuple[Vector, Vector]:
        size = self.fed.any_client.upper_size
        return solution[:size], solution[size:]


def _dense(features: Any, rows: NDArray[np.int64]) -> Vector:
    """Some rows of a CSR array, dense: ten times as fast as SciPy's way for so few."""
    counts = features.indptr[rows + 1] - features.indptr[rows]
    places = np.repeat(np.arange(len(rows)), counts)
    entries = np.arange(counts.sum()) + np.repeat(features.indptr[rows] - (np.cumsum(counts) - counts), counts)
    dense = np.zeros((len(rows), features.shape[1]))
    dense[places, features.indices[entries]] = features.data[entries]
    return dense
