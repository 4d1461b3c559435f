"""Compositions with known solutions: clients in NumPy, and a workload of affine maps in quadratics.

``hpcfed composition_problems:AffineQuadratics --algorithm mfcgd`` runs it from this folder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from hpcfed.capabilities import Compositional
from hpcfed.federation import Federation
from hpcfed.ledger import Ledger
from hpcfed.options import option
from hpcfed.streams import Streams

Array = np.ndarray


@dataclass(frozen=True)
class Composition:
    """``f(g(x))`` by exact maps, with noise that a sample holds fixed: of the value, the Jacobian, the outer gradient.

    ``calls`` counts evaluations; ``sizes`` notes the samples drawn. ``noise`` is the deviation of a single sample.
    ``numbered`` makes the k-th sample the same whatever the stream, so that two methods can be given the same ones.
    """

    ledger: Ledger = field(default_factory=Ledger)
    noise: float = 0.0
    numbered: bool = False
    calls: dict[str, int] = field(default_factory=dict)
    sizes: list[int | None] = field(default_factory=list)

    @property
    def shape(self) -> tuple[int, int]:
        raise NotImplementedError

    def g(self, x: Array) -> Array:
        raise NotImplementedError

    def slope(self, x: Array) -> Array:
        raise NotImplementedError

    def f(self, y: Array) -> float:
        raise NotImplementedError

    def df(self, y: Array) -> Array:
        raise NotImplementedError

    @property
    def inner_size(self) -> int:
        return self.shape[0]

    def draw_inner(self, rng: np.random.Generator, batch: int | None) -> Any:
        self.sizes.append(batch)
        if batch is None:
            return None
        if self.numbered:
            rng = np.random.default_rng(len(self.sizes))
        p, d = self.shape
        return self.noise / np.sqrt(batch) * rng.standard_normal((p, d + 1)), batch

    def draw_outer(self, rng: np.random.Generator, batch: int | None) -> Any:
        self.sizes.append(batch)
        if batch is None:
            return None
        if self.numbered:
            rng = np.random.default_rng(len(self.sizes))
        return self.noise / np.sqrt(batch) * rng.standard_normal(self.shape[0]), batch

    def inner(self, x: Array, sample: Any) -> Array:
        self._count("inner", sample, gradients=0)
        return self._value(x, sample)

    def inner_pullback(self, x: Array, sample: Any) -> tuple[Array, Callable[[Array], Array]]:
        self._count("inner_pullback", sample, gradients=0)
        matrix = self._matrix(x, sample)

        def pull(v: Array) -> Array:
            self.calls["products"] = self.calls.get("products", 0) + 1
            self.ledger.count(jacobian_products=1)
            return v @ matrix

        return self._value(x, sample), pull

    def inner_jacobian(self, x: Array, sample: Any) -> Array:
        self._count("inner_jacobian", sample, gradients=self.shape[0])
        return self._matrix(x, sample)

    def outer_value(self, y: Array) -> float:
        return self.f(y)

    def outer_gradient(self, y: Array, sample: Any) -> Array:
        self._count("outer_gradient", sample, gradients=1)
        return self.df(y) if sample is None else (self.df(y) + sample[0]).astype(y.dtype)

    def gradient(self, x: Array) -> Array:
        """Of ``f(g(x))``, exact."""
        return self.slope(x).T @ self.df(self.g(x))

    def _value(self, x: Array, sample: Any) -> Array:
        value = self.g(x)
        return value if sample is None else (value + sample[0][:, :-1] @ x + sample[0][:, -1]).astype(x.dtype)

    def _matrix(self, x: Array, sample: Any) -> Array:
        matrix = self.slope(x)
        return matrix if sample is None else (matrix + sample[0][:, :-1]).astype(x.dtype)

    def _count(self, name: str, sample: Any, gradients: int) -> None:
        self.calls[name] = self.calls.get(name, 0) + 1
        self.ledger.count(samples=1 if sample is None else sample[1], gradients=gradients)


@dataclass(frozen=True)
class Affine(Composition):
    """``g(x) = A x + b``, ``f(y) = (y - c)^T D (y - c) / 2``."""

    A: Array = field(default_factory=lambda: np.eye(2))
    b: Array = field(default_factory=lambda: np.zeros(2))
    c: Array = field(default_factory=lambda: np.zeros(2))
    D: Array = field(default_factory=lambda: np.eye(2))

    @property
    def shape(self) -> tuple[int, int]:
        return self.A.shape

    def g(self, x: Array) -> Array:
        return self.A @ x + self.b

    def slope(self, x: Array) -> Array:
        return self.A

    def f(self, y: Array) -> float:
        return float((y - self.c) @ self.D @ (y - self.c) / 2)

    def df(self, y: Array) -> Array:
        return self.D @ (y - self.c)


@dataclass(frozen=True)
class Adapted(Composition):
    """``l(x - a grad l(x))`` with ``l(x) = (x - c)^T H (x - c) / 2``."""

    H: Array = field(default_factory=lambda: np.eye(2))
    c: Array = field(default_factory=lambda: np.zeros(2))
    a: float = 0.3

    @property
    def shape(self) -> tuple[int, int]:
        return self.H.shape

    def g(self, x: Array) -> Array:
        return x - self.a * self.df(x)

    def slope(self, x: Array) -> Array:
        return np.eye(len(x)) - self.a * self.H

    def f(self, y: Array) -> float:
        return float((y - self.c) @ self.H @ (y - self.c) / 2)

    def df(self, y: Array) -> Array:
        return self.H @ (y - self.c)


@dataclass(frozen=True)
class Robust(Composition):
    """``exp((l(x) - shift) / lam)`` with ``l(x) = |x - a|^2 / 2``; noise is of the loss alone."""

    a: Array = field(default_factory=lambda: np.zeros(1))
    lam: float = 1.0
    shift: float = 0.0

    @property
    def shape(self) -> tuple[int, int]:
        return 1, len(self.a)

    def draw_inner(self, rng: np.random.Generator, batch: int | None) -> Any:
        if batch is None:
            return None
        noise = np.zeros((1, len(self.a) + 1))
        noise[0, -1] = self.noise / np.sqrt(batch) * rng.standard_normal()
        return noise, batch

    def draw_outer(self, rng: np.random.Generator, batch: int | None) -> None:
        return None

    def g(self, x: Array) -> Array:
        return np.array([np.sum((x - self.a) ** 2) / 2])

    def slope(self, x: Array) -> Array:
        return (x - self.a)[None]

    def f(self, y: Array) -> float:
        return float(np.exp((y[0] - self.shift) / self.lam))

    def df(self, y: Array) -> Array:
        return np.exp((y - self.shift) / self.lam) / self.lam


def random_affine(number: int, p: int = 5, d: int = 4, seed: int = 0, **options: Any) -> list[Affine]:
    """Unequal clients; for p >= d their problems, with inner maps of their own or the mean, are well conditioned."""
    rng = np.random.default_rng(seed)
    return [_random_affine(rng, p, d, **options) for _ in range(number)]


def _random_affine(rng: np.random.Generator, p: int, d: int, **options: Any) -> Affine:
    root = rng.standard_normal((p, p)) / np.sqrt(p)
    return Affine(
        A=np.eye(p, d) + rng.standard_normal((p, d)) / 3,
        b=rng.standard_normal(p),
        c=rng.standard_normal(p),
        D=root @ root.T / 2 + np.eye(p) / 2,
        **options,
    )


def local_solution(clients: Sequence[Affine]) -> Array:
    """Of ``min mean f_m(g_m(x))``."""
    return np.linalg.solve(
        sum(each.A.T @ each.D @ each.A for each in clients),
        sum(each.A.T @ each.D @ (each.c - each.b) for each in clients),
    )


def global_solution(clients: Sequence[Affine]) -> Array:
    """Of ``min mean f_m(mean g_m(x))``."""
    A, b, D = (np.mean([getattr(each, name) for each in clients], axis=0) for name in ("A", "b", "D"))
    return np.linalg.solve(A.T @ D @ A, A.T @ (np.mean([each.D @ each.c for each in clients], axis=0) - D @ b))


def adapted_clients(number: int = 4, seed: int = 3) -> list[Adapted]:
    """Unequal quadratics in the plane, with Hessians between 0.3 and 2."""
    rng = np.random.default_rng(seed)
    turns = [np.linalg.qr(rng.standard_normal((2, 2)))[0] for _ in range(number)]
    return [Adapted(H=q @ np.diag(rng.uniform(0.3, 2, 2)) @ q.T, c=rng.standard_normal(2)) for q in turns]


def federation(clients: Sequence[Any], seed: int = 0, **options: Any) -> Federation:
    """These clients in one process."""
    return Federation(len(clients), Streams(seed), **options).build(lambda number, rng: clients[number])


def solve(method: Any, clients: Sequence[Any], rounds: int, start: Array, seed: int = 0) -> Any:
    """The state after so many rounds."""
    fed = federation(clients, seed)
    state = method.init(fed.at(0), start)
    for number in range(1, rounds + 1):
        state = method.round(state, fed.at(number))
    return state


@dataclass(frozen=True)
class AffineQuadratics:
    """Minimize the mean of ``f_m(g_m(x))``, g_m affine and f_m quadratic, each client with its own of both."""

    offers: ClassVar[tuple[type, ...]] = (Compositional,)
    defaults: ClassVar[Mapping[str, Any]] = {
        "algorithm": "mfcgd",
        "compressor": "qsgd",
        "rounds": 50,
        "device": "cpu",
    }
    pictures: ClassVar[tuple[str, ...]] = ()
    compiled: ClassVar[tuple[str, ...]] = ()

    clients: int = option(5, "number of clients")
    size: int = option(4, "dimension d of x")
    inner_size: int = option(5, "dimension p of the inner maps' values")
    noise: float = option(0.1, "deviation of a sample of each map")

    def build(self, fed: Federation) -> Problem:
        def client(number: int, rng: np.random.Generator) -> Affine:
            return _random_affine(rng, self.inner_size, self.size, ledger=fed.ledger, noise=self.noise)

        return Problem(fed.build(client), self.size)


class Problem:
    """The affine maps and quadratics in place."""

    def __init__(self, fed: Federation, size: int) -> None:
        self.fed, self.size = fed, size

    def start(self) -> Array:
        return np.zeros(self.size)

    def metrics(self, solution: Array, fed: Federation) -> dict[str, float]:
        values = fed.map(lambda client, rng: client.f(client.g(solution)))
        slope = fed.mean(fed.map(lambda client, rng: client.gradient(solution)))
        return {"objective": fed.mean(values), "gradient": float(np.linalg.norm(slope))}

    def results(self, solution: Array) -> dict[str, Any]:
        return {"x": (solution, {})}
