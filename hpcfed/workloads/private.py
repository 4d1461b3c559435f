"""Convex learning on private records, with public ones at hand: means, ridge, lasso, softmax regression."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np
from annotated_types import Ge, Gt, Le, Lt
from numpy.typing import NDArray

from hpcfed import memory
from hpcfed.capabilities import Records
from hpcfed.data.splits import DealingOptions
from hpcfed.errors import ConfigError
from hpcfed.federation import Federation
from hpcfed.operators.penalties import L1, L2, Ball, Nothing, Penalty
from hpcfed.options import option
from hpcfed.streams import Purpose

if TYPE_CHECKING:
    from hpcfed.data.private_sets import RecordSets
    from hpcfed.data.tables import Table
    from hpcfed.privacy.engine import NoisySteps
    from hpcfed.workloads.private_losses import Loss
    from hpcfed.workloads.private_reference import Reference

logger = logging.getLogger(__name__)

Vector = NDArray[np.float64]

# What a task has where the user does not say: data, penalty, and the penalty's weight.
TASKS = {
    "mean": ("made", "ball", 0.0),
    "ridge": ("made", "l2", 0.1),
    "lasso": ("made", "l1", 0.002),
    "softmax": ("digits", "l2", 0.001),
}


@dataclass(frozen=True)
class Private(DealingOptions):
    r"""Learn from private records, with public records that resemble them, by steps that see one record at a time.

    Minimizes ``G(x) = 1/N sum_i f(x; d_i) + psi(x)`` over all N private records, wherever they lie. (Methods that let
    psi weigh as much as a pass over the largest client's records have this target where all hold equally many.)

    =======  ============================================  ===================  ===================
    task     f                                             L for ``|a| <= R``   psi by default
    =======  ============================================  ===================  ===================
    mean     ``1/2 |x - d|^2``                             1                    the ball of radius 10
    ridge    ``(<a, x> - y)^2``                            2 R^2                ``0.1/2 |x|^2``
    lasso    ``log(1 + exp(-y <a, x>))``, y = -1 or 1      R^2/4                ``0.002 |x|_1``
    softmax  ``log sum_k exp(<x_k, a>) - <x_c, a>``        R^2/2                ``0.001/2 |x|^2``
    =======  ============================================  ===================  ===================

    L bounds the curvature of f for whatever record there might be. To this end features are standardized by the
    *public* records, and then those of each record are scaled down to the norm R where they exceed it; of the task mean
    nothing is scaled. Nothing done to a record depends on private records. Clipped steps on the first three losses do
    not expand distances, so that hidden public steps amplify privacy; on the last they may, and do not.

    All clients know all public records.
    """

    explanation: ClassVar[str] = (
        "Learn from private records with the help of public ones, under record-level differential privacy.\n\n"
        "Minimizes the mean loss of the private records of all clients + psi(x). Tasks: mean (1/2 |x - d|^2 in a "
        "ball), ridge ((<a,x> - y)^2), lasso (logistic loss, l1 norm), softmax (softmax regression; its steps may "
        "expand distances, so that nothing amplifies privacy). All clients know all public records. The default data "
        "are made; --data takes diabetes, breast-cancer, digits (scikit-learn's), CSV, LIBSVM and .npz files. "
        "Features are standardized by the public records alone and bounded by --bound."
    )
    offers: ClassVar[tuple[type, ...]] = (Records,)
    defaults: ClassVar[Mapping[str, Any]] = {
        "algorithm": "interleaved",
        "compressor": "qsgd",
        "rounds": 50,
        "device": "cpu",
        "clip": 10.0,
    }
    pictures: ClassVar[tuple[str, ...]] = ("convergence", "holdings")
    compiled: ClassVar[tuple[str, ...]] = ("hpcfed.privacy.engine_kernels",)

    clients: Annotated[int, Ge(1)] = option(4, "number of clients")
    task: Literal["mean", "ridge", "lasso", "softmax"] = option("mean", "the loss, with its penalty")
    data: str | None = option(
        None,
        "made, diabetes, breast-cancer, digits, or a file: .csv with a line of names, .npz of images, LIBSVM text "
        "(.bz2 .gz .xz too)  [default: made; softmax: digits]",
        metavar="NAME|FILE",
    )
    target: str | None = option(None, "column of a .csv that is to be predicted", metavar="COLUMN")
    public: str | None = option(
        None, "public records, in a file like that of --data  [default: --public-fraction of the data]", metavar="FILE"
    )
    public_fraction: Annotated[float, Gt(0), Lt(1)] = option(0.25, "part of the data that is public")
    corrupt: Annotated[float, Ge(0), Le(1)] = option(0.0, "part of the public records that get wrong targets")
    records: Annotated[int, Ge(2)] = option(4000, "private records of made data; at most so many images of --task mean")
    public_records: Annotated[int, Ge(2)] = option(1000, "the same for public records")
    dimension: Annotated[int, Ge(1)] = option(20, "features of made records")
    shift: float = option(0.5, "how far made public records differ from private ones: in each entry of mean or model")
    digits: tuple[int, int] = option(
        (6, 9),
        "--task mean with images: class of the private ones, and of the public ones, which are turned by 180 degrees",
        metavar="PRIVATE,PUBLIC",
    )
    test_fraction: Annotated[float, Gt(0), Lt(1)] = option(0.2, "part held out for the test, except by --task mean")
    bound: Annotated[float, Gt(0)] = option(1.0, "R, to which the norm of each record's features is scaled down")
    standardize: bool = option(
        True, "shift and scale features (and the targets of ridge) by means and deviations of the public records"
    )
    penalty: Literal["none", "l1", "l2", "ball"] | None = option(
        None, "psi: weight |x|_1, weight/2 |x|^2, or |x| <= radius  [default: the task's]"
    )
    penalty_weight: Annotated[float, Ge(0)] | None = option(None, "weight of psi  [default: the task's]")
    radius: Annotated[float, Gt(0)] = option(10.0, "of the ball")

    def __post_init__(self) -> None:
        from hpcfed.data.private_sets import EMBEDDED

        for name in ("data", "public"):
            value = getattr(self, name)
            if value is not None and value not in ("made", *EMBEDDED):
                object.__setattr__(self, name, os.path.abspath(value))

    @property
    def source(self) -> str:
        """The data, by name or file."""
        return self.data or TASKS[self.task][0]

    def psi(self) -> Penalty:
        """The penalty."""
        _, kind, weight = TASKS[self.task]
        weight = weight if self.penalty_weight is None else self.penalty_weight
        match self.penalty or kind:
            case "l1":
                return L1(weight)
            case "l2":
                return L2(weight)
            case "ball":
                return Ball(self.radius)
            case _:
                return Nothing()

    def loss(self, classes: int) -> Loss:
        """The loss; ``classes`` is the number of them that softmax tells apart."""
        from hpcfed.workloads import private_losses as losses

        match self.task:
            case "mean":
                return losses.Mean()
            case "ridge":
                return losses.LeastSquares()
            case "lasso":
                return losses.Logistic()
            case _:
                return losses.Softmax(classes)

    def build(self, fed: Federation) -> PrivateProblem:
        from hpcfed.data import partitions

        self._refuse_contradictions()
        if self.source == "made":
            made = {"private records": self.records, "public records": self.public_records}
            needs = {name: 16 * self.dimension * count for name, count in made.items()}  # as made, and as taken
            memory.require(
                fed.communicator, fed.device, needs, "ask for fewer --records, --public-records or --dimension"
            )
        sets: RecordSets = fed.once(lambda: self._read(fed))
        for note in sets.notes:
            logger.info("%s", note)
        loss, psi = self.loss(len(sets.classes)), self.psi()
        start = np.zeros(sets.private.features.shape[1] * (len(sets.classes) if self.task == "softmax" else 1))
        reference, public_only = fed.once(lambda: _references(loss, psi, sets, start))
        labels = sets.private.targets if len(sets.classes) else np.zeros(len(sets.private))
        dealt = self.deal(labels, fed.num_clients, fed.streams.generator(Purpose.SPLIT))
        sizes = [len(rows) for rows in dealt]
        if len(sets.classes):
            logger.info("what each client holds:\n%s", partitions.describe(dealt, labels))
        logger.info("private records of a client: %d to %d; public ones: %d", min(sizes), max(sizes), len(sets.public))

        def client(number: int, rng: np.random.Generator) -> PrivateClient:
            return PrivateClient(
                measured=loss,
                smoothness=loss.smoothness(self.bound),
                private=sets.private.take(dealt[number]),
                public=sets.public,
                test=sets.test.take(slice(number, None, fed.num_clients)),
                regularizer=psi,
                count=fed.ledger.count,
            )

        if len(sets.classes):
            holdings = partitions.contents(dealt, labels), sets.classes
        else:
            holdings = np.array([(size, len(sets.public)) for size in sizes]), np.array([b"private", b"public"])
        return PrivateProblem(
            fed.build(client), psi, start, len(sets.private), holdings, reference, public_only, bool(len(sets.classes))
        )

    def _refuse_contradictions(self) -> None:
        """Options that say what cannot be done."""
        wrong = ""
        if self.task in ("mean", "ridge") and self.partition in ("dirichlet", "shards"):
            wrong = f"--partition {self.partition} deals classes, and --task {self.task} has none: use iid or quantity"
        elif self.task == "mean" and self.corrupt:
            wrong = f"--corrupt {self.corrupt:g}: points have no targets that could be wrong: use --shift"
        elif self.source.lower().endswith(".csv") and self.task != "mean" and self.target is None:
            wrong = f"--data {self.data} needs --target, the column that is to be predicted"
        elif self.public is not None and self.source == "made":
            wrong = f"--public {self.public} goes with --data: made records bring public ones along"
        if wrong:
            raise ConfigError(wrong).on_all_ranks()

    def _read(self, fed: Federation) -> RecordSets:
        from hpcfed.data import private_sets as data

        rng = fed.streams.generator(Purpose.SPLIT, call=1)
        target = None if self.task == "mean" else self.target
        pictures = self.source == "digits" or self.source.lower().endswith(".npz")
        if self.source == "made":
            private, public = data.made(self.task, self.records, self.public_records, self.dimension, self.shift, rng)
        elif self.task == "mean" and pictures and self.public is None:
            private, public = data.turned_digits(self.source, self.digits, self.records, self.public_records)
        else:
            private, names = data.read(self.source, target)
            if self.public is not None:
                public, public_names = data.read(self.public, target, private)
                if public_names != names:
                    raise ConfigError(f"--public {self.public}: its columns are not those of --data {self.data}")
            else:
                private, public = data.split(private, self.public_fraction, "--public-fraction", rng)
        if self.task == "mean":
            return data.RecordSets(private, public, private.take(slice(0)), np.empty(0))
        private, test = data.split(private, self.test_fraction, "--test-fraction", rng)
        sets = data.RecordSets(private, public, test, np.empty(0))
        if self.task != "ridge":
            sets = data.with_classes(sets, self.task, self.source)
        if self.corrupt:
            sets = data.corrupted(sets, self.corrupt, rng)
        if self.task == "lasso":
            sets = data.with_signs(sets)
        return data.in_bounds(sets, self.bound, standardize=self.standardize)


@dataclass(frozen=True)
class PrivateClient:
    """One client: private records of its own, public ones that all know, a share of those of the test."""

    measured: Loss
    smoothness: float
    private: Table
    public: Table
    test: Table
    regularizer: Penalty
    count: Callable[..., None]

    @property
    def loss(self) -> str:
        """The loss's name."""
        return self.measured.name

    @property
    def num_private(self) -> int:
        return len(self.private)

    @property
    def num_public(self) -> int:
        return len(self.public)

    def noisy_pass(
        self,
        x: Vector,
        part: Literal["private", "public"],
        order: NDArray[np.int64],
        steps: NoisySteps,
        rng: np.random.Generator,
    ) -> Vector:
        """The iterate after steps on the records ``order`` of a part (`hpcfed.privacy.engine.run`)."""
        from hpcfed.privacy import engine

        table = self.private if part == "private" else self.public
        targets = None if self.loss == "mean" else table.targets
        self.count(gradients=len(steps.bounds(len(order))) - 1, samples=len(order))
        return engine.run(self.loss, table.features, targets, x, order, steps, rng)

    def value(self, x: Vector) -> float:
        """The mean loss of the client's private records."""
        return float(self.measured.values(x, self.private).mean())

    def measure(self, rng: np.random.Generator, x: Vector) -> Vector:
        """Sum of the private records' losses; sum of the losses, hits and number of the own share of the test."""
        from hpcfed.workloads.private_losses import hits

        losses, judged = self.measured.values(x, self.private), self.measured.values(x, self.test)
        return np.array([losses.sum(), judged.sum(), hits(self.measured, x, self.test) or 0, len(judged)], float)


@dataclass(frozen=True)
class PrivateProblem:
    """The data in place."""

    fed: Federation
    psi: Penalty
    first: Vector
    records: int
    holdings: tuple[NDArray[np.int64], NDArray[Any]]
    reference: Reference | None
    public_only: Reference | None
    classifies: bool

    def start(self) -> Vector:
        return self.first.copy()

    def metrics(self, solution: Vector, fed: Federation) -> dict[str, float]:
        """Objective G over all private records; ``excess_risk``, G minus its minimum; loss and accuracy on the test.

        ``public_only_risk`` is the excess risk of the public records' own minimizer, the same in every record. All of
        these but the last look at private records and are no part of any privacy budget.
        """
        private, loss, hits, count = fed.total(fed.map(PrivateClient.measure, solution)).tolist()
        metrics = {"objective": private / self.records + self.psi.value(solution)}
        if self.reference is not None:
            metrics["excess_risk"] = metrics["objective"] - self.reference.objective
            if self.public_only is not None:
                metrics["public_only_risk"] = self.public_only.objective - self.reference.objective
        if count:
            metrics["test_loss"] = loss / count
            if self.classifies:
                metrics["test_accuracy"] = hits / count
        return metrics

    def results(self, solution: Vector) -> Mapping[str, tuple[Any, Mapping[str, Any]]]:
        datasets: dict[str, tuple[Any, Mapping[str, Any]]] = {
            "x": (solution, {"meaning": "the model; of softmax a row for each class, one after another"}),
            "holdings": (self.holdings[0], {"classes": self.holdings[1]}),
        }
        for name, found in (("reference", self.reference), ("public_only", self.public_only)):
            if found is not None:
                vouch = {"objective": found.objective, "kkt_residual": found.kkt_residual}
                datasets[name] = (found.x, vouch)
        return datasets


def _references(loss: Loss, psi: Penalty, sets: RecordSets, start: Vector) -> tuple[Reference | None, Reference | None]:
    """The minimizer over all private records; that over the public ones, with its objective over the private ones."""
    from hpcfed.workloads import private_reference as solver

    best = solver.minimize(loss, psi, sets.private, start)
    public = solver.minimize(loss, psi, sets.public, start)
    if public is not None:
        public = replace(public, objective=solver.objective(loss, psi, sets.private, public.x))
    if best is not None:
        logger.info("minimum G* = %.10g, to a KKT residual of %.1g", best.objective, best.kkt_residual)
        if public is not None:
            logger.info("excess risk of the public records' minimizer: %.6g", public.objective - best.objective)
    return best, public
