"""Bilevel problems whose solutions are known, small enough to read at a glance.

``hpcfed bilevel_problems:Quadratics --algorithm fedds`` runs one from this folder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import islice
from typing import Any, ClassVar

import numpy as np

from hpcfed.capabilities import Bilevel
from hpcfed.federation import Federation, PerClient
from hpcfed.ledger import Ledger
from hpcfed.options import option
from hpcfed.streams import Streams


@dataclass(frozen=True)
class QuadraticClient:
    """``g = 1/2 y^T H y + x^T C y + d^T y``, ``f = 1/2 |y - b|^2 + 1/2 x^T R x + e^T x``.

    A sample of either adds a random linear function, and one of g changes H and C a little, all by ``noise``.
    """

    H: np.ndarray
    C: np.ndarray
    d: np.ndarray
    b: np.ndarray
    R: np.ndarray
    e: np.ndarray
    noise: float = 0.0
    count: Callable[..., None] = field(default=Ledger().count)

    @property
    def upper_size(self) -> int:
        return len(self.e)

    @property
    def lower_size(self) -> int:
        return len(self.d)

    def _draw(self, rng: np.random.Generator, batch: int | None) -> np.ndarray | None:
        size = 1 + self.upper_size + self.lower_size
        return None if batch is None else self.noise / np.sqrt(batch) * rng.standard_normal(size)

    draw_upper = draw_lower = _draw

    def _noise(self, sample: Any) -> list[np.ndarray]:
        if sample is None:
            return [np.float64(0), np.zeros(self.upper_size), np.zeros(self.lower_size)]
        return np.split(sample, [1, 1 + self.upper_size])

    def upper_value(self, x: np.ndarray, y: np.ndarray) -> float:
        return float(np.sum((y - self.b) ** 2) / 2 + x @ self.R @ x / 2 + self.e @ x)

    def lower_value(self, x: np.ndarray, y: np.ndarray) -> float:
        return float(y @ self.H @ y / 2 + x @ self.C @ y + self.d @ y)

    def upper_gradients(self, x: np.ndarray, y: np.ndarray, sample: Any) -> tuple[np.ndarray, np.ndarray]:
        self.count(gradients=1)
        _, in_x, in_y = self._noise(sample)
        return self.R @ x + self.e + in_x, y - self.b + in_y

    def lower_gradients(self, x: np.ndarray, y: np.ndarray, sample: Any) -> tuple[np.ndarray, np.ndarray]:
        self.count(gradients=1)
        scale, in_x, in_y = self._noise(sample)
        return (1 + scale) * (self.C @ y) + in_x, (1 + scale) * (self.H @ y + self.C.T @ x) + self.d + in_y

    def lower_hessian_product(self, x: np.ndarray, y: np.ndarray, sample: Any, v: np.ndarray) -> np.ndarray:
        self.count(hessian_products=1)
        return (1 + self._noise(sample)[0]) * (self.H @ v)

    def lower_cross_product(self, x: np.ndarray, y: np.ndarray, sample: Any, v: np.ndarray) -> np.ndarray:
        self.count(hessian_products=1)
        return (1 + self._noise(sample)[0]) * (self.C @ v)


def quadratic_clients(
    number: int, *, identical: bool = False, noise: float = 0.0, upper: int = 3, lower: int = 4, seed: int = 0
) -> list[QuadraticClient]:
    """Clients whose Hessians have eigenvalues between 1/2 and 2 (H) and between 1 and 2 (R)."""
    rng = np.random.default_rng(seed)
    clients = [
        QuadraticClient(
            H=spectrum(rng, lower, 0.5, 2),
            C=0.7 * rng.standard_normal((upper, lower)),
            d=rng.standard_normal(lower),
            b=rng.standard_normal(lower),
            R=spectrum(rng, upper, 1, 2),
            e=rng.standard_normal(upper),
            noise=noise,
        )
        for _ in range(number)
    ]
    return [clients[0]] * number if identical else clients


def spectrum(rng: np.random.Generator, size: int, low: float, high: float) -> np.ndarray:
    """A random symmetric matrix with eigenvalues spread over [low, high]."""
    vectors = np.linalg.qr(rng.standard_normal((size, size)))[0]
    return vectors * np.linspace(low, high, size) @ vectors.T


def mean_of(clients: Sequence[QuadraticClient]) -> QuadraticClient:
    """The client whose functions are the means of all."""
    return QuadraticClient(*(np.mean([getattr(c, name) for c in clients], axis=0) for name in "HCdbRe"))


def lower_solution(clients: Sequence[QuadraticClient], x: np.ndarray) -> np.ndarray:
    """``y*(x)`` of the mean lower level."""
    q = mean_of(clients)
    return -np.linalg.solve(q.H, q.C.T @ x + q.d)


def hypergradient(clients: Sequence[QuadraticClient], x: np.ndarray) -> np.ndarray:
    """``R x + e - C H^-1 (y*(x) - b)``."""
    q = mean_of(clients)
    return q.R @ x + q.e - q.C @ np.linalg.solve(q.H, lower_solution(clients, x) - q.b)


def with_inverse(clients: Sequence[QuadraticClient], P: np.ndarray) -> np.ndarray:
    """Where ``R x + e - C P (y*(x) - b)`` is zero: x* for ``P = H^-1``."""
    q = mean_of(clients)
    inner = np.linalg.solve(q.H, np.column_stack([q.C.T, q.d]))
    return -np.linalg.solve(q.R + q.C @ P @ inner[:, :-1], q.e + q.C @ P @ (inner[:, -1] + q.b))


def bilevel_solution(clients: Sequence[QuadraticClient]) -> np.ndarray:
    """x*, then y*(x*)."""
    x = with_inverse(clients, np.linalg.inv(mean_of(clients).H))
    return np.concatenate([x, lower_solution(clients, x)])


def penalized_solution(clients: Sequence[QuadraticClient], rho: float) -> np.ndarray:
    """x_rho, then ``y_rho = (rho I + H)^-1 (rho b - C^T x_rho - d)``."""
    q = mean_of(clients)
    inverse = np.linalg.inv(rho * np.eye(len(q.d)) + q.H)
    x = with_inverse(clients, inverse)
    return np.concatenate([x, inverse @ (rho * q.b - q.C.T @ x - q.d)])


def truncated_solution(clients: Sequence[QuadraticClient], eta: float, terms: int) -> np.ndarray:
    """x_N, then y*(x_N): the limit with ``P = eta sum_{n <= N} (I - eta H)^n`` in the place of the inverse Hessian."""
    H = mean_of(clients).H
    P = eta * sum(np.linalg.matrix_power(np.eye(len(H)) - eta * H, n) for n in range(terms + 1))
    x = with_inverse(clients, P)
    return np.concatenate([x, lower_solution(clients, x)])


def locally_inverted_solution(clients: Sequence[QuadraticClient]) -> np.ndarray:
    """x and y*(x) where ``R x + e - mean C_i H_i^-1 (y*(x) - b_i)`` is zero: each client inverts its own Hessian."""
    q = mean_of(clients)
    kernels = [c.C @ np.linalg.inv(c.H) for c in clients]
    kernel = np.mean(kernels, axis=0)
    shift = np.mean([k @ c.b for k, c in zip(kernels, clients, strict=True)], axis=0)
    inner = np.linalg.solve(q.H, np.column_stack([q.C.T, q.d]))
    x = -np.linalg.solve(q.R + kernel @ inner[:, :-1], q.e + kernel @ inner[:, -1] + shift)
    return np.concatenate([x, lower_solution(clients, x)])


@dataclass(frozen=True)
class RidgeClient:
    """``g = 1/2 |A y - b|^2 + e^x/2 |y|^2``, ``f = 1/2 |A_v y - b_v|^2``: what weight has the ridge to have?"""

    A: np.ndarray
    b: np.ndarray
    A_v: np.ndarray
    b_v: np.ndarray
    upper_size: int = 1

    @property
    def lower_size(self) -> int:
        return self.A.shape[1]

    def draw_upper(self, rng: np.random.Generator, batch: int | None) -> None:
        return None

    draw_lower = draw_upper

    def upper_value(self, x: np.ndarray, y: np.ndarray) -> float:
        return float(np.sum((self.A_v @ y - self.b_v) ** 2) / 2)

    def lower_value(self, x: np.ndarray, y: np.ndarray) -> float:
        return float(np.sum((self.A @ y - self.b) ** 2) / 2 + np.exp(x[0]) * (y @ y) / 2)

    def upper_gradients(self, x: np.ndarray, y: np.ndarray, sample: Any) -> tuple[np.ndarray, np.ndarray]:
        return 0 * x, self.A_v.T @ (self.A_v @ y - self.b_v)

    def lower_gradients(self, x: np.ndarray, y: np.ndarray, sample: Any) -> tuple[np.ndarray, np.ndarray]:
        return np.exp(x) * (y @ y) / 2, self.A.T @ (self.A @ y - self.b) + np.exp(x[0]) * y

    def lower_hessian_product(self, x: np.ndarray, y: np.ndarray, sample: Any, v: np.ndarray) -> np.ndarray:
        return self.A.T @ (self.A @ v) + np.exp(x[0]) * v

    def lower_cross_product(self, x: np.ndarray, y: np.ndarray, sample: Any, v: np.ndarray) -> np.ndarray:
        return np.exp(x) * (y @ v)


def ridge_clients(number: int, size: int = 3, seed: int = 0) -> list[RidgeClient]:
    """Few noisy samples each, so that some ridge is best."""
    rng = np.random.default_rng(seed)
    truth = rng.standard_normal(size)
    clients = []
    for _ in range(number):
        A, A_v = rng.standard_normal((2, 4, size)) / 2
        noises = rng.standard_normal((2, 4))
        clients.append(RidgeClient(A, A @ truth + noises[0], A_v, A_v @ truth + 0.1 * noises[1]))
    return clients


def slope_at(function: Callable[[float], float], x: float, h: float = 1e-4) -> float:
    """The derivative, by a central difference."""
    return (function(x + h) - function(x - h)) / (2 * h)


def ridge_objective(clients: Sequence[RidgeClient], x: float) -> float:
    """``mean f_i(y*(x))``, the normal equations solved."""
    y = _ridge(clients, x, 0.0)
    return float(np.mean([c.upper_value(np.array([x]), y) for c in clients]))


def penalized_ridge_objective(clients: Sequence[RidgeClient], x: float, rho: float) -> float:
    """``min_y mean (f_i(y) + g_i(x, y) / rho) - min_z mean g_i(x, z) / rho``, the normal equations solved."""
    weight, y, z = np.array([x]), _ridge(clients, x, rho), _ridge(clients, x, 0.0)
    excess = [c.lower_value(weight, y) - c.lower_value(weight, z) for c in clients]
    return float(np.mean([c.upper_value(weight, y) for c in clients]) + np.mean(excess) / rho)


def _ridge(clients: Sequence[RidgeClient], x: float, rho: float) -> np.ndarray:
    """The minimizer of ``mean (g_i(x, .) + rho f_i)``."""
    matrix = np.mean([c.A.T @ c.A + rho * c.A_v.T @ c.A_v for c in clients], axis=0)
    target = np.mean([c.A.T @ c.b + rho * c.A_v.T @ c.b_v for c in clients], axis=0)
    return np.linalg.solve(matrix + np.exp(x) * np.eye(len(matrix)), target)


@dataclass(frozen=True)
class RankDeficientClient:
    """``g = 1/2 |A y - B x|^2`` with many minimizers in y, ``f = 1/2 |y - b|^2 + 1/2 |x - c|^2``."""

    A: np.ndarray
    B: np.ndarray
    b: np.ndarray
    c: np.ndarray

    @property
    def upper_size(self) -> int:
        return len(self.c)

    @property
    def lower_size(self) -> int:
        return len(self.b)

    def draw_upper(self, rng: np.random.Generator, batch: int | None) -> None:
        return None

    draw_lower = draw_upper

    def upper_value(self, x: np.ndarray, y: np.ndarray) -> float:
        return float(np.sum((y - self.b) ** 2) / 2 + np.sum((x - self.c) ** 2) / 2)

    def lower_value(self, x: np.ndarray, y: np.ndarray) -> float:
        return float(np.sum((self.A @ y - self.B @ x) ** 2) / 2)

    def upper_gradients(self, x: np.ndarray, y: np.ndarray, sample: Any) -> tuple[np.ndarray, np.ndarray]:
        return x - self.c, y - self.b

    def lower_gradients(self, x: np.ndarray, y: np.ndarray, sample: Any) -> tuple[np.ndarray, np.ndarray]:
        residual = self.A @ y - self.B @ x
        return -self.B.T @ residual, self.A.T @ residual

    def lower_hessian_product(self, x: np.ndarray, y: np.ndarray, sample: Any, v: np.ndarray) -> np.ndarray:
        return self.A.T @ (self.A @ v)

    def lower_cross_product(self, x: np.ndarray, y: np.ndarray, sample: Any, v: np.ndarray) -> np.ndarray:
        return -self.B.T @ (self.A @ v)


def rank_deficient_clients(number: int, seed: int = 0) -> list[RankDeficientClient]:
    """Two upper variables, four lower ones of which two combinations matter."""
    rng = np.random.default_rng(seed)
    seen = rng.standard_normal((2, 4)) / 2
    return [
        RankDeficientClient(
            A=rng.standard_normal((3, 2)) @ seen,
            B=rng.standard_normal((3, 2)) / 2,
            b=rng.standard_normal(4),
            c=rng.standard_normal(2),
        )
        for _ in range(number)
    ]


def federation(clients: Sequence[Any], **options: Any) -> Federation:
    return Federation(len(clients), Streams(0), **options).build(lambda client, rng: clients[client])


def solve(method: Any, fed: Federation, rounds: int, start: np.ndarray) -> Any:
    """The state after these rounds."""
    state = method.init(fed.at(0), start)
    for number in range(1, rounds + 1):
        state = method.round(state, fed.at(number))
    return state


def limit(method: Any, clients: Sequence[Any]) -> tuple[Any, float]:
    """The state that exact rounds lead to on quadratics, and the factor by which a round comes nearer.

    Without noise a round is an affine map of the state: this is its fixed point, and its spectral radius. Above 1, the
    method diverges.
    """
    fed = federation(clients)
    state = method.init(fed.at(0), np.zeros(clients[0].upper_size + clients[0].lower_size))

    def flatten(state: Any) -> np.ndarray:
        values = [getattr(state, each.name) for each in fields(state)]
        pieces = [list(value.values()) if isinstance(value, PerClient) else [value] for value in values]
        return np.concatenate([part for some in pieces for part in some if isinstance(part, np.ndarray)])

    def unflatten(vector: np.ndarray) -> Any:
        parts = iter(vector)

        def fill(like: Any) -> Any:
            if isinstance(like, PerClient):
                return PerClient({client: fill(own) for client, own in like.items()})
            return np.array(list(islice(parts, like.size))) if isinstance(like, np.ndarray) else like

        return replace(state, **{each.name: fill(getattr(state, each.name)) for each in fields(state)})

    def after(vector: np.ndarray) -> np.ndarray:
        return flatten(method.round(unflatten(vector), fed.at(1)))

    unit = np.eye(len(flatten(state)))
    shift = after(0 * unit[0])
    matrix = np.column_stack([after(column) - shift for column in unit])
    fixed = np.linalg.solve(unit - matrix, shift)
    return unflatten(fixed), float(np.abs(np.linalg.eigvals(matrix)).max())


def floats_a_round(method: Any, clients: Sequence[Any], rounds: int = 1) -> float:
    """Reals that a client sends in a round."""
    fed = federation(clients)
    state = method.init(fed.at(0), np.zeros(clients[0].upper_size + clients[0].lower_size))
    before = fed.ledger.traffic["paper_bits_up"]
    for number in range(1, rounds + 1):
        state = method.round(state, fed.at(number))
    return (fed.ledger.traffic["paper_bits_up"] - before) / 32 / len(clients) / rounds


@dataclass(frozen=True)
class Quadratics:
    """Minimize the mean of quadratics at the minimizer of the mean of others."""

    offers: ClassVar[tuple[type, ...]] = (Bilevel,)
    defaults: ClassVar[Mapping[str, Any]] = {
        "algorithm": "fedds",
        "compressor": "qsgd",
        "rounds": 20,
        "device": "cpu",
    }
    pictures: ClassVar[tuple[str, ...]] = ()
    compiled: ClassVar[tuple[str, ...]] = ()

    clients: int = option(4, "number of clients")
    noise: float = option(0.1, "standard deviation of a sample's noise")

    def build(self, fed: Federation) -> Problem:
        everyone = quadratic_clients(self.clients, noise=self.noise)

        def client(number: int, rng: np.random.Generator) -> QuadraticClient:
            own = everyone[number]
            return QuadraticClient(own.H, own.C, own.d, own.b, own.R, own.e, own.noise, fed.ledger.count)

        return Problem(fed.build(client))


class Problem:
    """The quadratics in place."""

    def __init__(self, fed: Federation) -> None:
        self.fed = fed

    def start(self) -> np.ndarray:
        return np.zeros(self.fed.any_client.upper_size + self.fed.any_client.lower_size)

    def metrics(self, solution: np.ndarray, fed: Federation) -> dict[str, float]:
        x, y = np.split(solution, [fed.any_client.upper_size])
        values = fed.map(lambda client, rng: np.array([client.upper_value(x, y), client.lower_value(x, y)]))
        upper, lower = fed.mean(values).tolist()
        return {"objective": upper, "lower": lower}

    def results(self, solution: np.ndarray) -> dict[str, Any]:
        return {"point": (solution, {})}
