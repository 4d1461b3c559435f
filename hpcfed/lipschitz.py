"""The Lipschitz constant of a federated gradient, by power iteration."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hpcfed import devices
from hpcfed.capabilities import Array
from hpcfed.federation import Federation
from hpcfed.streams import Purpose


def lipschitz_constant(
    fed: Federation, like: Array, *, each: bool = False, tolerance: float = 1e-3, most_steps: int = 50
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

    Returns
    -------
    float
        ``|H d|`` for the last unit vector d, which approaches L from below.
    """
    values = fed.streams.generator(Purpose.START).random(tuple(like.shape), dtype=np.float32)
    start = devices.from_host(values.astype(devices.host_type(like)), devices.backend(like), fed.device)
    start /= norm(start)

    def iterate(product: Callable[[Array], Array]) -> float:
        direction, length = start, 0.0
        for _ in range(most_steps):
            image = product(direction)
            previous, length = length, norm(image)
            if length == 0.0 or abs(length - previous) <= tolerance * length:
                break
            direction = image / length
        return length

    with fed.ledger.uncounted():
        if each:
            return float(fed.largest(fed.map(lambda client, rng: iterate(client.curvature))))
        return iterate(lambda d: fed.mean(fed.map(lambda client, rng: client.curvature(d))))


def norm(x: Array) -> float:
    """The Euclidean norm, accumulated in float64."""
    flat = x.reshape(-1)
    if isinstance(flat, np.ndarray):
        return float(np.sqrt(np.einsum("i,i->", flat, flat, dtype=np.float64)))
    return float((flat.double() ** 2).sum().sqrt())
