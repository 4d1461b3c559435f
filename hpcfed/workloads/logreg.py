"""Graph-guided logistic regression on LIBSVM data, the samples split over the clients."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np
from annotated_types import Ge, Gt, Lt
from numpy.typing import NDArray

from hpcfed.capabilities import BoundedCurvature, LinearComposite, Proximal, Smooth
from hpcfed.data.splits import DealingOptions
from hpcfed.errors import DataError
from hpcfed.federation import Federation
from hpcfed.options import option
from hpcfed.streams import Purpose

if TYPE_CHECKING:
    from hpcfed.workloads.logreg_reference import Reference

logger = logging.getLogger(__name__)

Vector = NDArray[np.float64]


@dataclass(frozen=True)
class LogReg(DealingOptions):
    """Classify with a sparse linear model whose weights agree along a graph of the features.

    Minimizes ``1/n sum_j log(1 + exp(-b_j s_j^T x)) + mu1/2 |x|^2 + mu2 |B x|_1``, ``B = [G; I]`` (problem (24) of Zhu,
    Liang, Zhang: Federated primal dual fixed point algorithm, the ridge outside the logarithm). Client i with the
    samples ``S_i`` has ``f_i(x) = N/n sum_{j in S_i} log(1 + exp(-b_j s_j^T x)) + mu1/2 |x|^2``, so that the clients'
    mean is the objective whatever the partition.
    """

    explanation: ClassVar[str] = (
        "Classify with a sparse linear model whose weights agree along a graph of the features.\n\n"
        "Minimizes the mean logistic loss + mu1/2 |x|^2 + mu2 |Bx|_1, B = [G; I], with a row e_i - sign e_j of G for "
        "each pair of features that the graphical lasso finds related; --B identity leaves the graph out. The default "
        "data are scikit-learn's breast cancer set; --data takes LIBSVM files."
    )
    offers: ClassVar[tuple[type, ...]] = (Smooth, BoundedCurvature, LinearComposite, Proximal)
    defaults: ClassVar[Mapping[str, Any]] = {"algorithm": "fpdfp", "compressor": "qsgd", "rounds": 300, "device": "cpu"}
    pictures: ClassVar[tuple[str, ...]] = ("convergence", "holdings")
    compiled: ClassVar[tuple[str, ...]] = ()

    clients: Annotated[int, Ge(1)] = option(10, "number of clients N")
    data: str | None = option(
        None, "training file, LIBSVM text (.bz2 .gz .xz too)  [default: breast cancer]", metavar="FILE"
    )
    test: str | None = option(None, "test file  [default: --test-fraction of the training file]", metavar="FILE")
    test_fraction: Annotated[float, Gt(0), Lt(1)] = option(0.2, "part of the samples held out where there is no --test")
    features: Annotated[int, Ge(1)] | None = option(None, "number of features  [default: the largest index]")
    mu1: Annotated[float, Ge(0)] = option(1e-5, "weight of the ridge")
    mu2: Annotated[float, Ge(0)] = option(1e-5, "weight of |Bx|_1")
    B: Literal["graph", "identity"] = option("graph", "graph: B = [G; I]; identity: the plain l1 norm")
    graph: str | None = option(None, "take the graph from the result.h5 of an earlier run", metavar="FILE.h5")
    graph_penalty: Annotated[float, Gt(0)] = option(
        0.2, "weight of the l1 norm in the graphical lasso; larger: fewer edges"
    )
    reference: bool = option(
        False, "find the minimum F* first (or take it from the cache) and record the relative error (F - F*)/F*"
    )

    def __post_init__(self) -> None:
        for name in ("data", "test", "graph"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, os.path.abspath(getattr(self, name)))

    def build(self, fed: Federation) -> LogRegProblem:
        train, test, notes = fed.once(lambda: self._read(fed))
        edges = fed.once(lambda: self._edges(train[0]))
        for note in notes:
            logger.info("%s", note)
        from hpcfed.data import partitions
        from hpcfed.operators.feature_graph import graph_matrix
        from hpcfed.operators.sparse_l1 import SparseL1

        num_features = train[0].shape[1]
        matrix = graph_matrix(edges, num_features)  # without edges: the identity
        regularizer = SparseL1(self.mu2, None if self.B == "identity" else matrix)
        reference = None
        if self.reference:
            from hpcfed.workloads import logreg_reference

            objective = logreg_reference.Objective(train[0], train[1], matrix, self.mu1, self.mu2)
            reference = fed.once(lambda: logreg_reference.cached(objective))
        stream = fed.streams.generator(Purpose.SPLIT)
        dealt = self.deal(train[1], fed.num_clients, stream)
        logger.info("what each client holds:\n%s", partitions.describe(dealt, train[1]))
        total = len(train[1])

        def client(number: int, rng: np.random.Generator) -> LogRegClient:
            own, judged = dealt[number], slice(number, None, fed.num_clients)
            return LogRegClient(
                features=train[0][own],
                labels=train[1][own],
                scale=fed.num_clients / total,
                mu1=self.mu1,
                regularizer=regularizer,
                count=fed.ledger.count,
                test_features=test[0][judged],
                test_labels=test[1][judged],
            )

        holdings = partitions.contents(dealt, train[1])
        classes = np.unique(train[1])
        return LogRegProblem(fed.build(client), regularizer, num_features, edges, holdings, classes, reference)

    def _read(self, fed: Federation) -> tuple[Any, Any, tuple[str, ...]]:
        """Training and test samples as (features, labels), and what the reader assumed."""
        from hpcfed.data import libsvm

        data = libsvm.embedded() if self.data is None else libsvm.read_libsvm(Path(self.data), self.features)
        features, labels, notes = data.features, data.labels, data.notes
        if self.test is not None:
            held = libsvm.read_libsvm(Path(self.test), features.shape[1])
            return (features, labels), (held.features, held.labels), (*notes, *held.notes)
        order = fed.streams.generator(Purpose.SPLIT, call=1).permutation(len(labels))
        count = round(self.test_fraction * len(labels))
        if not 0 < count < len(labels) - fed.num_clients + 1:
            raise DataError(
                f"--test-fraction {self.test_fraction}: {len(labels)} samples leave none for the test, or for one of "
                f"{fed.num_clients} clients"
            )
        held_out, kept = np.sort(order[:count]), np.sort(order[count:])
        return (features[kept], labels[kept]), (features[held_out], labels[held_out]), notes

    def _edges(self, features: Any) -> NDArray[np.int64]:
        from hpcfed.operators import feature_graph

        if self.B == "identity":
            return np.empty((0, 3), np.int64)
        if self.graph is not None:
            return feature_graph.read_edges(Path(self.graph), features.shape[1])
        return feature_graph.build_edges(features, self.graph_penalty)


@dataclass(frozen=True)
class LogRegClient:
    """One client's samples; ``scale`` = N/n. Features are sparse rows, labels -1 or +1."""

    features: Any
    labels: Vector
    scale: float
    mu1: float
    regularizer: Any
    count: Callable[..., None]
    test_features: Any
    test_labels: Vector

    @cached_property
    def transposed(self) -> Any:
        """The features by columns: of few samples, to make them takes longer than to use them."""
        return self.features.T

    def value(self, x: Vector) -> float:
        loss = np.logaddexp(0, -self.labels * (self.features @ x)).sum()
        return float(self.scale * loss + self.mu1 / 2 * (x @ x))

    def gradient(self, x: Vector, rng: np.random.Generator | None = None, batch: int | None = None) -> Vector:
        features, transposed, labels, scale = self.features, self.transposed, self.labels, self.scale
        if batch is not None and batch < len(labels):
            if rng is None:
                raise ValueError("a gradient from a batch of samples needs a stream")
            chosen = rng.choice(len(labels), size=batch, replace=False)
            features, labels, scale = features[chosen], labels[chosen], scale * len(labels) / batch
            transposed = features.T
        self.count(gradients=1, samples=len(labels))
        margins = labels * (features @ x)
        slopes = -scale * labels * _sigmoid(-margins)
        gradient: Vector = transposed @ slopes + self.mu1 * x
        return gradient

    def curvature(self, direction: Vector) -> Vector:
        """The Hessian's bound: the logistic loss curves by at most 1/4."""
        bound: Vector = self.scale / 4 * (self.transposed @ (self.features @ direction)) + self.mu1 * direction
        return bound

    def subgradient(self, x: Vector) -> Vector:
        """Of the regularizer."""
        return self.regularizer.subgradient(x)  # type: ignore[no-any-return]

    def measure(self, rng: np.random.Generator, x: Vector) -> Vector:
        """This client's value, and loss, hits and number of its share of the test samples; a score of 0 means -1."""
        scores = self.test_features @ x
        hits = (scores > 0) == (self.test_labels > 0)
        losses = np.logaddexp(0, -self.test_labels * scores)
        return np.array([self.value(x), losses.sum(), hits.sum(), len(hits)])


@dataclass(frozen=True)
class LogRegProblem:
    """The data in place: where to start, what to measure, what to keep."""

    fed: Federation
    regularizer: Any
    num_features: int
    edges: NDArray[np.int64]
    holdings: NDArray[np.int64]
    classes: Vector
    reference: Reference | None

    def start(self) -> Vector:
        return np.zeros(self.num_features)

    def metrics(self, solution: Vector, fed: Federation) -> dict[str, float]:
        """Objective on the training samples and its relative error; mean loss and accuracy on the test samples."""
        value, loss, hits, count = fed.total(fed.map(LogRegClient.measure, solution)).tolist()
        objective = value / fed.num_present + self.regularizer.value(solution)
        best = None if self.reference is None else self.reference.objective
        return {
            "objective": objective,
            **({} if best is None else {"relative_error": (objective - best) / best}),
            "test_loss": loss / count,
            "test_accuracy": hits / count,
        }

    def results(self, solution: Vector) -> Mapping[str, tuple[Any, Mapping[str, Any]]]:
        datasets: dict[str, tuple[Any, Mapping[str, Any]]] = {
            "x": (solution, {"meaning": "weights of the features"}),
            "graph": (self.edges, {"columns": "i, j, sign: a row e_i - sign e_j of G"}),
            "holdings": (self.holdings, {"classes": self.classes}),
        }
        if self.reference is not None:
            best = self.reference
            vouch = {"objective": best.objective, "kkt_residual": best.kkt_residual, "gap": best.gap}
            datasets["reference"] = (best.x, {"meaning": "the minimizer", **vouch})
        return datasets


def _sigmoid(t: Vector) -> Vector:
    """``1 / (1 + exp(-t))`` without overflow."""
    return np.exp(-np.logaddexp(0, -t))
