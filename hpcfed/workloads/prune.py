"""Pruning: which weights of a network to keep, found by validation while the network is trained."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import array_api_compat
import numpy as np
from annotated_types import Ge, Gt, Lt
from numpy.typing import NDArray

from hpcfed.capabilities import Array, Bilevel
from hpcfed.data.splits import SplitOptions
from hpcfed.devices import to_host
from hpcfed.errors import ConfigError, DataError
from hpcfed.federation import Federation
from hpcfed.lipschitz import norm
from hpcfed.options import option
from hpcfed.streams import Purpose

logger = logging.getLogger(__name__)

DIGITS = "digits"
"""In the place of a file: scikit-learn's digits."""

RULES = {
    "sigmoid": "weights count by the sigmoid of their scores over the temperature while the network is trained; for "
    "the test all but those with the largest scores are 0",
    "straight-through": "weights with the largest scores count fully and the others not at all, in the test as in "
    "training; derivatives pass as if the mask were the scores",
}


@dataclass(frozen=True)
class Prune(SplitOptions):
    r"""Find which weights of a network to keep, by the loss on validation images.

    Each weight of a convolution or of the last layer has a score, an entry of x; a mask m(x) multiplies the weights.
    Lower level: the parameters y minimize the mean loss of the training images with the network ``m(x) y`` plus
    ``ridge/2 |y|^2``. Upper level: x minimizes the mean loss of the validation images. In the test, the weights with
    the largest scores of the whole network are kept, a part ``1 - sparsity`` of them, and the others are 0.

    Masks are binary, which no gradient method can have; how they are relaxed is a choice (``--mask``, logged):

    ================  ==================================================================================================
    sigmoid           ``m = 1 / (1 + exp(-x / temperature))``, which is differentiable. Kept weights keep their m in the
                      test
    straight-through  ``m = 1`` for the largest scores and 0 for the others, its derivative taken for 1 (Y. Bengio et
                      al. 2013): what methods get is then no gradient of the loss
    ================  ==================================================================================================

    Scores start as ``|y| / sigma - c``: the magnitudes of the network's first weights by their layer's standard
    deviation, with c such that those to be kept are positive. The clients' means are the two objectives whatever the
    partition.
    """

    explanation: ClassVar[str] = (
        "Find which weights of a network to keep, by the loss on validation images.\n\n"
        "Lower level: the network's parameters y minimize the mean training loss with masked weights. Upper level: "
        "the scores x that make the mask minimize the mean validation loss. The test keeps the weights with the "
        "largest scores. --data takes .npz files of images, such as CIFAR-10's."
    )
    offers: ClassVar[tuple[type, ...]] = (Bilevel,)
    defaults: ClassVar[Mapping[str, Any]] = {
        "algorithm": "fedds",
        "compressor": "qsgd",
        "rounds": 100,
        "record_every": 10,
        "batch": 10,
        "start_batch": 100,
        "local_steps": 4,
        "common_step": 0.1,
        "smoothing": 0.1,
    }
    pictures: ClassVar[tuple[str, ...]] = ("convergence", "holdings", "sparsity")
    compiled: ClassVar[tuple[str, ...]] = ()

    clients: Annotated[int, Ge(1)] = option(8, "number of clients N")
    data: tuple[str, ...] | None = option(
        None, "images, .npz with x (n, rows, columns[, channels]) and y; or digits: scikit-learn's", metavar="FILE,FILE"
    )
    test: str | None = option(None, "test images, .npz  [default: those of --data, or --test-fraction]", metavar="FILE")
    partition: Literal["iid", "dirichlet", "shards", "quantity"] = option(
        "dirichlet", "how samples are dealt to clients"
    )
    model: Literal["resnet20", "small"] = option("resnet20", "network; small: a residual one of two blocks")
    sparsity: Annotated[float, Gt(0), Lt(1)] = option(0.8, "part of the weights that is pruned")
    mask: Literal["sigmoid", "straight-through"] = option("sigmoid", "how scores become a mask in training")
    temperature: Annotated[float, Gt(0)] = option(0.3, "of --mask sigmoid; small: a sharper mask, flatter for most")
    ridge: Annotated[float, Ge(0)] = option(1e-4, "weight of |y|^2 / 2 in the lower level")
    recorded_images: Annotated[int, Ge(1)] | None = option(
        None, "images of each client in a recorded training or validation loss  [default: all]"
    )

    def __post_init__(self) -> None:
        if self.data is not None:
            full = tuple(name if name == DIGITS else os.path.abspath(name) for name in self.data)
            object.__setattr__(self, "data", full)
        if self.test is not None:
            object.__setattr__(self, "test", os.path.abspath(self.test))

    def build(self, fed: Federation) -> PruneProblem:
        from hpcfed.models import require_torch

        require_torch("prune")
        if not self.data:
            raise ConfigError(
                "prune needs images: give --data FILE[,FILE], .npz with uint8 x (n, 32, 32, 3) and y, made from "
                "CIFAR-10 (https://www.cs.toronto.edu/~kriz/cifar.html); or try --data digits"
            ).on_all_ranks()
        from hpcfed.data import partitions
        from hpcfed.models import resnet
        from hpcfed.models.empirical import EmpiricalLoss

        images, test = fed.once(self._read)
        split = self.split(images.labels, fed, test=test is None)
        held_out = images.take(split.test) if test is None else test
        classes = 1 + int(max(images.labels.max(), held_out.labels.max()))
        plain = getattr(resnet, self.model)(images.shape[0], classes)
        rule = self.mask
        model = resnet.MaskedModel.over(plain, rule, self.temperature, 1 - self.sparsity, fed.device)
        logger.info("%d of %d weights are kept; --mask %s: %s", model.kept, model.upper_size, rule, RULES[rule])

        def loss(of: Any, rows: Any, model: Any = model) -> Any:
            return EmpiricalLoss.over(model, 2 * of.inputs(rows) - 1, of.labels[rows], fed.device)

        def client(number: int, rng: np.random.Generator) -> PruneClient:
            train, validation = (
                Level(loss(images, parts[number]), fed.num_clients * len(parts[number]) / sum(map(len, parts)))
                for parts in (split.train, split.validation)
            )
            judged = loss(held_out, slice(number, None, fed.num_clients), plain)
            return PruneClient(
                model, train, validation, judged, self.ridge, fed.ledger.count, model.upper_size, model.lower_size
            )

        holdings = partitions.contents(split.dealt, images.labels)
        return PruneProblem(self, fed.build(client), model, holdings, np.unique(images.labels))

    def _read(self) -> tuple[Any, Any]:
        """Images to deal out, and those for the test, if they are given."""
        from hpcfed.data import images

        found, tests = [], []
        for name in self.data or ():
            train, test = (images.embedded(), None) if name == DIGITS else images.read_images(Path(name))
            found.append(train)
            tests += [] if test is None else [test]
        if self.test is not None:
            own, further = images.read_images(Path(self.test))
            tests = [own if further is None else further]
        kinds = {f"{each.pixels.dtype} {each.shape}" for each in (*found, *tests)}
        if len(kinds) > 1:
            raise DataError(f"--data, --test: images are {' and '.join(sorted(kinds))}: give files of one set")
        return _together(found), _together(tests) if tests else None


@dataclass(frozen=True)
class Level:
    """The mean loss of a client's samples, and its factor in the client's objective, N times its share of all."""

    loss: Any
    factor: float


@dataclass(frozen=True)
class PruneClient:
    """One client: ``f_i`` is its validation loss, ``g_i`` its training loss and the ridge.

    Counted are, for each gradient (of both parts, at one point) or product, the samples that it takes.
    """

    model: Any
    train: Level
    validation: Level
    test: Any
    ridge: float
    count: Callable[..., None]
    upper_size: int
    lower_size: int

    def draw_upper(self, rng: np.random.Generator, batch: int | None) -> Any:
        return self.validation.loss.draw(rng, batch)

    def draw_lower(self, rng: np.random.Generator, batch: int | None) -> Any:
        return self.train.loss.draw(rng, batch)

    def upper_value(self, x: Array, y: Array) -> float:
        return self._value(self.validation, x, y, None)

    def lower_value(self, x: Array, y: Array) -> float:
        return self._value(self.train, x, y, None) + self.ridge / 2 * norm(y) ** 2

    def upper_gradients(self, x: Array, y: Array, sample: Any) -> tuple[Array, Array]:
        return self._gradients(self.validation, x, y, sample)

    def lower_gradients(self, x: Array, y: Array, sample: Any) -> tuple[Array, Array]:
        in_x, in_y = self._gradients(self.train, x, y, sample)
        in_y += self.ridge * y
        return in_x, in_y

    def lower_hessian_product(self, x: Array, y: Array, sample: Any, v: Array) -> Array:
        return self._products(x, y, sample, v)[1] + self.ridge * v

    def lower_cross_product(self, x: Array, y: Array, sample: Any, v: Array) -> Array:
        return self._products(x, y, sample, v)[0]

    def _value(self, level: Level, x: Array, y: Array, sample: Any) -> float:
        self.count(samples=level.loss.count(sample))
        return level.factor * float(level.loss.value(_join(x, y), sample)[0])

    def _gradients(self, level: Level, x: Array, y: Array, sample: Any) -> tuple[Array, Array]:
        self.count(samples=level.loss.count(sample), gradients=1)
        gradient = level.loss.value_and_gradient(_join(x, y), sample)[1]
        gradient *= level.factor
        return gradient[: self.upper_size], gradient[self.upper_size :]

    def _products(self, x: Array, y: Array, sample: Any, v: Array) -> tuple[Array, Array]:
        """``(D_xy, D_yy)`` of the training loss times v: a row of its Hessian in (x, y) along (0, v)."""
        self.count(samples=self.train.loss.count(sample), hessian_products=1)
        product = self.train.loss.gradient_and_products(_join(x, y), sample)[1](_join(0 * x, v))
        product *= self.train.factor
        return product[: self.upper_size], product[self.upper_size :]

    def measure(self, rng: np.random.Generator, x: Array, y: Array, images: int | None) -> NDArray[np.float64]:
        """Own values of f and g; of the pruned network, loss, hits and number of the own share of the test images."""
        upper = self._value(self.validation, x, y, self.validation.loss.draw(rng, images))
        lower = self._value(self.train, x, y, self.train.loss.draw(rng, images))
        judged = self.test.judge(self.model.pruned(x, y))
        return np.array([upper, lower, *judged, len(self.test)])


@dataclass(frozen=True)
class PruneProblem:
    """The images in place."""

    workload: Prune
    fed: Federation
    model: Any
    holdings: NDArray[np.int64]
    classes: NDArray[np.int64]

    def start(self) -> Array:
        return self.fed.device.put(self.model.initial(self.fed.streams.generator(Purpose.START)))

    def metrics(self, solution: Array, fed: Federation) -> dict[str, float]:
        """Upper loss (the objective) and lower loss at (x, y); loss and accuracy of the pruned network on test images.

        The losses have the training mask, and ``--recorded-images`` of each client, drawn anew each time, if it is
        given. Gradient norms of the penalty form are not recorded: they need a minimizer of the lower level.
        """
        x, y = self.model.parts(solution)
        numbers = fed.map(PruneClient.measure, x, y, self.workload.recorded_images)
        upper, lower, loss, hits, count = fed.total(numbers).tolist()
        return {
            "objective": upper / fed.num_present,
            "lower_loss": lower / fed.num_present + self.workload.ridge / 2 * norm(y) ** 2,
            "test_loss": loss / count,
            "test_accuracy": hits / count,
        }

    def results(self, solution: Array) -> Mapping[str, tuple[Any, Mapping[str, Any]]]:
        x, y = (to_host(part) for part in self.model.parts(solution))
        names, kept = self.model.kept_by_layer(x)
        return {
            "point": (solution, {"meaning": "x, then y"}),
            "x": (x, {"meaning": "scores of the weights, in the order of the layers"}),
            "y": (y, {"meaning": "parameters of the network, in the order of its layers"}),
            "layers": (kept, {"columns": "weights that are kept and weights of each layer", "names": names}),
            "holdings": (self.holdings, {"classes": self.classes}),
        }


def _join(x: Array, y: Array) -> Array:
    return array_api_compat.array_namespace(x).concat([x, y])


def _together(sets: list[Any]) -> Any:
    from hpcfed.data.images import Images

    return Images(np.concatenate([each.pixels for each in sets]), np.concatenate([each.labels for each in sets]))
