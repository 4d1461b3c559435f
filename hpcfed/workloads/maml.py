"""Meta-learning: a model that adapts to a client's task by one gradient step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import array_api_compat
import numpy as np
from annotated_types import Ge, Gt
from numpy.typing import NDArray

from hpcfed import devices
from hpcfed.capabilities import Array, Compositional, Smooth
from hpcfed.errors import ConfigError
from hpcfed.federation import Federation
from hpcfed.lipschitz import norm
from hpcfed.options import option
from hpcfed.streams import Purpose
from hpcfed.workloads.torch_clients import LossClient, NetworkWorkload, Size

MOST_DENSE = 3000
"""The largest d for which a Jacobian is made as a matrix, of d^2 numbers."""

SHOWN = 3
"""Held-out sinusoids whose curves are kept for a picture."""


@dataclass(frozen=True)
class Maml(NetworkWorkload):
    r"""Find a model that one gradient step adapts to a client's task.

    Minimizes ``(1/N) sum_m l_m(x - a grad l_m(x; S_m); Q_m)`` (C. Finn et al. 2017, model-agnostic meta-learning), S_m
    the support set and Q_m the query set of client m's task and a the inner step: the inner map is ``g_m(x) = x - a
    grad l_m(x; S_m)``, with p = d and the Jacobian ``I - a Hess l_m(x; S_m)``, and the outer one ``f_m = l_m(.; Q_m)``.
    A client with J tasks has the J adapted models one after the other in its inner vector, p = J d, and the mean of
    the tasks' losses as outer map; one sample has a batch of each task.
    """

    explanation: ClassVar[str] = (
        "Find a model that one gradient step adapts to a client's task.\n\n"
        "Minimizes the clients' mean loss l_m(x - a grad l_m(x)) of models that have adapted to few samples (a: "
        "--inner-step); it is judged by tasks that no client has. A task is a sinusoid to learn from a few points, "
        "or, with --data (Omniglot, MNIST or CIFAR as .npz), a few classes of images to tell apart."
    )
    offers: ClassVar[tuple[type, ...]] = (Smooth, Compositional)
    defaults: ClassVar[Mapping[str, Any]] = {
        "algorithm": "mfcgd",
        "compressor": "qsgd",
        "rounds": 150,
        "record_every": 10,
        "batch": 5,
        "rate": 0.1,
        "jacobian": "product",
        "device": "cpu",
    }
    pictures: ClassVar[tuple[str, ...]] = ("convergence", "adaptation")
    compiled: ClassVar[tuple[str, ...]] = ()

    tasks_per_client: Size = option(1, "tasks of each client")
    support: Size = option(10, "samples that a task is adapted to (images: of each class)")
    query: Size = option(10, "samples that an adapted model is judged by (images: of each class)")
    ways: Annotated[int, Ge(2)] = option(5, "classes of a task of images")
    inner_step: Annotated[float, Gt(0)] = option(0.05, "step a of the adaptation")
    held_out: Size = option(100, "tasks that no client has, for the test")

    def build(self, fed: Federation) -> MamlProblem:
        from hpcfed.models import require_torch

        require_torch("maml")
        from hpcfed.data.tasks import Task
        from hpcfed.models.empirical import EmpiricalLoss

        pools = fed.once(self._read)
        shape, outputs = ((1,), 1) if pools is None else (pools[0].shape, self.ways)
        model = self.network(shape, outputs)

        def adapted(task: Task) -> Adaptation:
            support, query = (EmpiricalLoss.over(model, *part, fed.device) for part in (task.support, task.query))
            return Adaptation(support, query, self.inner_step)

        def held_out(number: int) -> Adaptation:
            stream = fed.streams.generator(Purpose.SPLIT, client=number)
            return adapted(self._task(pools and pools[1], stream))

        def client(number: int, rng: np.random.Generator) -> MamlClient:
            tasks = [self._task(pools and pools[0], rng) for _ in range(self.tasks_per_client)]
            inputs, targets = (
                np.concatenate(parts)
                for parts in zip(*(part for t in tasks for part in (t.support, t.query)), strict=True)
            )
            return MamlClient(
                loss=EmpiricalLoss.over(model, inputs, targets, fed.device),
                count=fed.ledger.count,
                tasks=tuple(map(adapted, tasks)),
                inner_size=model.size * len(tasks),
                test=tuple(map(held_out, range(number, self.held_out, fed.num_clients))),
            )

        return MamlProblem(self, fed.build(client), model, held_out if fed.writes else None, images=pools is not None)

    def _read(self) -> tuple[Any, Any] | None:
        """Images for the clients' tasks and for those held out; None for sinusoids."""
        if self.data is None:
            return None
        from hpcfed.data.images import read_images

        train, test = read_images(Path(self.data))
        if test is None:  # every fifth image of the file, whatever its class
            rows = np.arange(len(train))
            train, test = train.take(rows[rows % 5 > 0]), train.take(rows[rows % 5 == 0])
        return train, test

    def _task(self, images: Any, rng: np.random.Generator) -> Any:
        from hpcfed.data import tasks

        if images is None:
            return tasks.Sinusoid.random(rng).task(self.support, self.query, rng)
        return tasks.few_shot(images, self.ways, self.support, self.query, rng)


@dataclass(frozen=True)
class Adaptation:
    """A task: its loss over the support set and over the query set, and the step from one to the other."""

    support: Any
    query: Any
    step: float

    def adapt(self, x: Array, sample: Any = None) -> Array:
        """``x - a grad l(x; S)``."""
        return x - self.step * self.support.value_and_gradient(x, sample)[1]


@dataclass(frozen=True)
class MamlClient(LossClient):
    """One client's tasks; ``loss`` is that over all their samples, as if they were one."""

    tasks: tuple[Adaptation, ...]
    inner_size: int
    test: tuple[Adaptation, ...]

    def draw_inner(self, rng: np.random.Generator, batch: int | None) -> Any:
        return None if batch is None else [task.support.draw(rng, batch) for task in self.tasks]

    def draw_outer(self, rng: np.random.Generator, batch: int | None) -> Any:
        return None if batch is None else [task.query.draw(rng, batch) for task in self.tasks]

    def inner(self, x: Array, sample: Any) -> Array:
        samples = self._each(sample)
        self._count_steps(samples)
        return _concat([task.adapt(x, own) for task, own in zip(self.tasks, samples, strict=True)])

    def inner_pullback(self, x: Array, sample: Any) -> tuple[Array, Callable[[Array], Array]]:
        samples = self._each(sample)
        self._count_steps(samples)
        gradients, products = zip(
            *(task.support.gradient_and_products(x, own) for task, own in zip(self.tasks, samples, strict=True)),
            strict=True,
        )

        def pull(v: Array) -> Array:
            self.count(jacobian_products=1, hessian_products=len(self.tasks))
            parts = zip(self.tasks, products, self._split(v), strict=True)
            pulled = [part - task.step * product(part) for task, product, part in parts]
            return sum(pulled[1:], pulled[0])

        steps = zip(self.tasks, gradients, strict=True)
        return _concat([x - task.step * gradient for task, gradient in steps]), pull

    def inner_jacobian(self, x: Array, sample: Any) -> Array:
        """``I - a Hess l_m(x; S_m)``, one below the other for several tasks.

        Raises
        ------
        ConfigError
            If d exceeds `MOST_DENSE`.
        """
        if len(x) > MOST_DENSE:
            raise ConfigError(
                f"a Jacobian of {len(x):,} x {len(x):,} numbers is too large: use --jacobian product or a smaller model"
            ).on_all_ranks()
        samples = self._each(sample)
        self.count(samples=self._size(samples), jacobian_products=self.inner_size, hessian_products=self.inner_size)
        blocks = []
        for task, own in zip(self.tasks, samples, strict=True):
            block = -task.step * task.support.hessian(x, own)
            block.reshape(-1)[:: len(x) + 1] += 1
            blocks.append(block)
        return _concat(blocks)

    def outer_value(self, y: Array) -> float:
        self.count(samples=sum(len(task.query) for task in self.tasks))
        losses = [float(task.query.value(own)[0]) for task, own in zip(self.tasks, self._split(y), strict=True)]
        return sum(losses) / len(losses)

    def outer_gradient(self, y: Array, sample: Any) -> Array:
        return self._outer(y, sample)[1]

    def _outer(self, y: Array, sample: Any) -> tuple[float, Array]:
        """``f_m(y; sample)`` and its gradient."""
        losses, gradients = [], []
        for task, own, part in zip(self.tasks, self._each(sample), self._split(y), strict=True):
            self.count(samples=task.query.count(own), gradients=1)
            loss, gradient = task.query.value_and_gradient(part, own)
            losses.append(float(loss[0]))
            gradients.append(gradient)
        return sum(losses) / len(losses), _concat(gradients) / len(losses)

    def measure(self, rng: np.random.Generator, x: Array) -> tuple[NDArray[np.float64], Array]:
        """Own objective; over held-out tasks, before and after adaptation, the sums of losses and of hits, and how many
        query samples they have. And ``grad (f o g)(x)``.
        """
        y, pull = self.inner_pullback(x, None)
        value, outer = self._outer(y, None)
        numbers = np.zeros(6)
        for task in self.test:
            numbers[1:] += (*task.query.judge(x), *task.query.judge(task.adapt(x)), len(task.query))
        numbers[0] = value
        return numbers, pull(outer)

    def _each(self, sample: Any) -> list[Any]:
        """The sample of each task."""
        return [None] * len(self.tasks) if sample is None else sample

    def _split(self, y: Array) -> list[Array]:
        """The adapted models."""
        size = self.inner_size // len(self.tasks)
        return [y[first : first + size] for first in range(0, self.inner_size, size)]

    def _size(self, samples: list[Any]) -> int:
        return sum(task.support.count(own) for task, own in zip(self.tasks, samples, strict=True))

    def _count_steps(self, samples: list[Any]) -> None:
        self.count(samples=self._size(samples), gradients=len(self.tasks))


@dataclass(frozen=True)
class MamlProblem:
    """The tasks in place. ``held_out`` makes a held-out task by its number, on the rank that writes the result."""

    workload: Maml
    fed: Federation
    model: Any
    held_out: Callable[[int], Adaptation] | None
    images: bool

    def start(self) -> Array:
        return self.fed.device.put(self.model.initial(self.fed.streams.generator(Purpose.START)))

    def metrics(self, solution: Array, fed: Federation) -> dict[str, float]:
        """The objective and the norm of its gradient; loss and accuracy on held-out tasks before and after the step."""
        numbers, gradients = fed.map(MamlClient.measure, solution).unzip(2)
        value, before, hits_before, after, hits_after, count = fed.total(numbers).tolist()
        metrics = {
            "objective": value / fed.num_present,
            "gradient_norm": norm(fed.mean(gradients)),
            "loss_before": before / count,
            "loss_after": after / count,
        }
        if self.images:
            metrics |= {"accuracy_before": hits_before / count, "accuracy_after": hits_after / count}
        return metrics

    def results(self, solution: Array) -> Mapping[str, tuple[Any, Mapping[str, Any]]]:
        assert self.held_out is not None, "called on the rank that writes"
        tasks = [self.held_out(number) for number in range(self.workload.held_out)]
        judged = np.array([[each.query.judge(x) for x in (solution, each.adapt(solution))] for each in tasks])
        judged /= [[[len(each.query)]] for each in tasks]
        columns = {"columns": "a held-out task before and after the step of adaptation"}
        results = {
            "x": (solution, {"meaning": "parameters of the network, in the order of its layers"}),
            "held_out_losses": (judged[:, :, 0], columns),
        }
        if self.images:
            return results | {"held_out_accuracies": (judged[:, :, 1], columns)}
        return results | self._curves(solution, tasks[:SHOWN])

    def _curves(self, solution: Array, tasks: list[Adaptation]) -> dict[str, tuple[Any, Mapping[str, Any]]]:
        """What a picture of a few held-out sinusoids needs."""
        from hpcfed.data.tasks import INPUTS, Sinusoid

        x = np.linspace(*INPUTS, 201, dtype=np.float32)[:, None]
        streams = self.fed.streams
        curves = []
        for number, task in enumerate(tasks):
            truth = Sinusoid.random(streams.generator(Purpose.SPLIT, client=number))
            models = (solution, task.adapt(solution))
            curves.append([truth(x), *(devices.to_host(task.query.predict(m, self.fed.device.put(x))) for m in models)])
        points = np.array(
            [[devices.to_host(each) for each in (task.support.inputs, task.support.targets)] for task in tasks]
        )
        return {
            "curves": (
                np.array(curves)[..., 0],
                {"axes": "held-out task; truth, before and after the step; x", "x": x[:, 0]},
            ),
            "support": (points[..., 0], {"axes": "held-out task; x and y; sample"}),
        }


def _concat(parts: list[Array]) -> Array:
    """One after the other; a single one is itself."""
    return parts[0] if len(parts) == 1 else array_api_compat.array_namespace(parts[0]).concat(parts)
