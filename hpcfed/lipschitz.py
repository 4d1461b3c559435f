"""The Lipschitz constant of a federated gradient, by power iteration, and step sizes that are given by it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hpcfed import devices
from hpcfed.capabilities import Array, BoundedCurvature
from hpcfed.errors import ConfigError
from hpcfed.federation import Federation
from hpcfed.streams import Purpose


def lipschitz_constant(
    fed: Federation,
    like: Array,
    *,
    each: bool = False,
    metric: Callable[[Array], Array] | None = None,
    tolerance: float = 1e-3,
    most_steps: int = 50,
) -> float:
    """An estimate of ``L``, the largest eigenvalue of the clients' mean curvature ``H = (1/N) sum_i H_i``.

    Power iteration ``d <- H d / |H d|`` from a seeded random start, one exchange a step, until ``|H d|`` changes by
    less than ``tolerance``, relatively. The start is positive, which is near the leading eigenvector of operators with
    nonnegative entries, such as projections. Its messages are not counted as the method's.

    Parameters
    ----------
    like : an array of the model's shape, type and device.
    each : return the largest constant of a single client instead, ``max_i rho_max(H_i)``: what bounds the step when
        few clients take part in a round. Exchanges nothing until the end.
    metric : P; then the constants are those of ``P H`` and ``P H_i``.

    Returns
    -------
    float
        ``|H d|`` for the last unit vector d, which approaches L from below.
    """

    def iterate(product: Callable[[Array], Array]) -> float:
        measured = product if metric is None else lambda d: metric(product(d))
        return largest_eigenvalue(measured, fed, like, tolerance, most_steps)

    with fed.ledger.uncounted():
        if each:
            return float(fed.largest(fed.map(lambda client, rng: iterate(client.curvature))))
        return iterate(lambda d: fed.mean(fed.map(lambda client, rng: client.curvature(d))))


def largest_eigenvalue(
    product: Callable[[Array], Array], fed: Federation, like: Array, tolerance: float = 1e-3, most_steps: int = 50
) -> float:
    """The largest eigenvalue of a map with nonnegative ones, from below, by the iteration of `lipschitz_constant`."""
    values = fed.streams.generator(Purpose.START).random(tuple(like.shape), dtype=np.float32)
    direction = devices.from_host(values.astype(devices.host_type(like)), devices.backend(like), fed.device)
    direction /= norm(direction)
    length = 0.0
    for _ in range(most_steps):
        image = product(direction)
        previous, length = length, norm(image)
        if length == 0.0 or abs(length - previous) <= tolerance * length:
            break
        direction = image / length
    return length


def check_step(text: str) -> tuple[float, bool]:
    """A ``step`` option as a factor and whether it is to be divided by L: ``0.1``, ``1.9/L`` or ``auto`` = ``1/L``.

    Raises
    ------
    ConfigError
        If it is none of these or not positive.
    """
    number, slash, over = ("1/L" if text == "auto" else text).partition("/")
    try:
        factor = float(number)
    except ValueError:
        factor = 0.0
    if not 0 < factor < float("inf") or (slash and over != "L"):
        raise ConfigError(f"--step {text}: give a positive number, one over L such as 1.9/L, or auto")
    return factor, bool(slash)


def step_size(text: str, fed: Federation, like: Array, *, each: bool = False) -> float:
    """The step size that a ``step`` option stands for; the other parameters are those of `lipschitz_constant`."""
    factor, relative = check_step(text)
    if not relative:
        return factor
    if not isinstance(fed.any_client, BoundedCurvature):
        raise ConfigError(
            f"--step {text}: L is unknown where curvature has no bound: give --step a number, or --tune step"
        ).on_all_ranks()
    constant = lipschitz_constant(fed, like, each=each)
    if constant == 0.0:
        raise ConfigError(f"--step {text}: L is 0, the gradient is constant: give --step a number").on_all_ranks()
    return factor / constant


def norm(x: Array) -> float:
    """The Euclidean norm, accumulated in float64."""
    flat = x.reshape(-1)
    if isinstance(flat, np.ndarray):
        return float(np.sqrt(np.einsum("i,i->", flat, flat, dtype=np.float64)))
    return float((flat.double() ** 2).sum().sqrt())
