"""Who holds which samples: partitions of a data set over clients, and what came of them.

A partition depends on the labels and the random stream alone, so every rank that computes it gets the same. It is made
as one owner for each sample, so no sample is lost or dealt twice; and each scheme sees to it that no client is empty,
without drawing again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hpcfed.errors import ConfigError

SCHEMES = ("iid", "dirichlet", "shards", "quantity")
"""The schemes of `deal`."""

MOST_LINES = 20
MOST_COLUMNS = 10
"""The most clients and classes that `describe` lists one by one."""

Indices = NDArray[np.int64]


def deal(
    scheme: str,
    labels: ArrayLike,
    num_clients: int,
    rng: np.random.Generator,
    alpha: float = 0.5,
    shards: int = 2,
) -> list[Indices]:
    """Deal samples out to clients.

    ==========  ========================================================================================================
    scheme      who holds what, of n samples and N clients
    ==========  ========================================================================================================
    iid         a random permutation in N parts; sizes differ by one at most
    dirichlet   each class is dealt by shares of its own from Dirichlet(alpha, ..., alpha) over the clients; clients
                left without a sample get one each from the client that has most
    shards      samples sorted by label (equal ones shuffled) in N * ``shards`` runs, ``shards`` random ones a client
    quantity    labels as they come; sizes are 1 + (n - N) p with p from Dirichlet(alpha, ..., alpha)
    ==========  ========================================================================================================

    Small alpha makes clients unlike one another, large alpha alike.

    Parameters
    ----------
    scheme
        One of `SCHEMES`.
    labels
        The class of each sample, (n,). The iid and quantity schemes use their number only.
    num_clients
        N, at most n.
    rng
        The stream; the same state gives the same partition.
    alpha
        Concentration of the Dirichlet distribution, positive.
    shards
        Runs of samples a client.

    Returns
    -------
    list of N ndarrays, int64
        The indices of each client's samples, increasing; none is empty, and each index is in one of them.

    Raises
    ------
    ConfigError
        The scheme is unknown, alpha is not positive, or there are too few samples for so many clients or shards.

    References
    ----------
    B. McMahan et al. (2017), Communication-efficient learning of deep networks from decentralized data (shards).
    M. Yurochkin et al. (2019), Bayesian nonparametric federated learning of neural networks (dirichlet, by class).
    Q. Li et al. (2022), Federated learning on non-IID data silos: an experimental study (quantity).
    """
    labels = np.asarray(labels)
    if scheme not in SCHEMES:
        raise ConfigError(f"partition {scheme!r} is unknown: use one of {', '.join(SCHEMES)}")
    if num_clients < 1:
        raise ConfigError(f"{num_clients} clients cannot hold samples: use 1 or more")
    if labels.size < num_clients:
        raise ConfigError(f"{labels.size} samples are too few for {num_clients} clients: use fewer clients")
    if scheme in ("dirichlet", "quantity") and not 1e-6 <= alpha <= 1e9:
        raise ConfigError(f"alpha {alpha:g} of the {scheme} partition is out of range: use 1e-6 to 1e9, such as 0.5")
    if scheme == "shards" and not 1 <= shards <= labels.size // num_clients:
        raise ConfigError(
            f"{shards} shards for each of {num_clients} clients cannot be cut from {labels.size} samples: "
            f"use 1 to {labels.size // num_clients}"
        )
    match scheme:
        case "iid":
            owners = _iid(labels.size, num_clients, rng)
        case "dirichlet":
            owners = _dirichlet(labels, num_clients, rng, alpha)
        case "shards":
            owners = _shards(labels, num_clients, rng, shards)
        case _:
            owners = _quantity(labels.size, num_clients, rng, alpha)
    sizes = np.bincount(owners, minlength=num_clients)
    # a stable sort keeps the samples of a client in order
    return np.split(np.argsort(owners, kind="stable"), np.cumsum(sizes)[:-1])


def contents(parts: Sequence[Indices], labels: ArrayLike) -> Indices:
    """How many samples of each class a client holds: (clients, classes), classes as ``np.unique(labels)`` has them."""
    classes, column = np.unique(np.asarray(labels), return_inverse=True)
    return np.array([np.bincount(column[part], minlength=classes.size) for part in parts], dtype=np.int64)


def skew(counts: Indices) -> NDArray[np.float64]:
    r"""How far the classes of each client are from those of all: :math:`\frac12 \sum_c |p_{ic} - p_c|`, in [0, 1).

    Parameters
    ----------
    counts
        (clients, classes), as from `contents`; no client empty.

    Returns
    -------
    ndarray, float64, (clients,)
        Total variation distances; 0 where a client's shares :math:`p_{ic}` are the overall shares :math:`p_c`.
    """
    shares = counts / counts.sum(axis=1, keepdims=True)
    distances: NDArray[np.float64] = np.abs(shares - counts.sum(axis=0) / counts.sum()).sum(axis=1) / 2
    return distances


def describe(parts: Sequence[Indices], labels: ArrayLike) -> str:
    """A table of what clients hold: a line each, or, of many clients, the spread and the clients at its ends."""
    classes = np.unique(np.asarray(labels))
    counts = contents(parts, labels)
    sizes, skews = counts.sum(axis=1), skew(counts)
    if classes.size <= MOST_COLUMNS:
        head = ["samples", *(f"label {_name(label)}" for label in classes)]
        columns = np.column_stack([sizes, counts])
    else:
        head = ["samples", "classes", "of main class"]
        columns = np.column_stack([sizes, np.count_nonzero(counts, axis=1), counts.max(axis=1)])
    if len(parts) <= MOST_LINES:
        rows = {f"client {client}": columns[client] for client in range(len(parts))}
    else:
        ends = {
            "smallest": sizes.argmin(),
            "largest": sizes.argmax(),
            "most like all": skews.argmin(),
            "least like all": skews.argmax(),
        }
        rows = {"minimum": columns.min(axis=0), "median": np.median(columns, axis=0), "maximum": columns.max(axis=0)}
        rows |= {f"client {client}, {end}": columns[client] for end, client in ends.items()}
    cells = [["", *head], *([name, *(f"{value:,.12g}" for value in values)] for name, values in rows.items())]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join([f"{name:{widths[0]}}", *map(str.rjust, values, widths[1:])]) for name, *values in cells]
    clients = "1 client" if len(parts) == 1 else f"{len(parts):,} clients"
    return "\n".join(
        [
            f"{sizes.sum():,} samples of {classes.size:,} classes, {clients}",
            *lines,
            f"skew {skews.mean():.3f}: how far a client's classes are from those of all, on average (0 alike, 1 apart)",
        ]
    )


def _name(label: Any) -> str:
    return f"{label:g}" if isinstance(label, (int, float, np.number)) else str(label)


def _iid(num_samples: int, num_clients: int, rng: np.random.Generator) -> Indices:
    owners = np.empty(num_samples, np.int64)
    owners[rng.permutation(num_samples)] = np.arange(num_samples) * num_clients // num_samples
    return owners


def _quantity(num_samples: int, num_clients: int, rng: np.random.Generator, alpha: float) -> Indices:
    sizes = 1 + _portions(num_samples - num_clients, rng.dirichlet(np.full(num_clients, alpha)))
    owners = np.empty(num_samples, np.int64)
    owners[rng.permutation(num_samples)] = np.repeat(np.arange(num_clients), sizes)
    return owners


def _shards(labels: NDArray[Any], num_clients: int, rng: np.random.Generator, shards: int) -> Indices:
    shuffled = rng.permutation(labels.size)
    by_label = shuffled[np.argsort(labels[shuffled], kind="stable")]
    num_shards = num_clients * shards
    holders = rng.permutation(np.repeat(np.arange(num_clients), shards))
    owners = np.empty(labels.size, np.int64)
    owners[by_label] = holders[np.arange(labels.size) * num_shards // labels.size]
    return owners


def _dirichlet(labels: NDArray[Any], num_clients: int, rng: np.random.Generator, alpha: float) -> Indices:
    owners = np.empty(labels.size, np.int64)
    for label in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == label))
        shares = rng.dirichlet(np.full(num_clients, alpha))
        owners[members] = np.repeat(np.arange(num_clients), _portions(members.size, shares))
    sizes = np.bincount(owners, minlength=num_clients)
    for client in np.flatnonzero(sizes == 0):
        donor = sizes.argmax()  # has two or more, as there are no fewer samples than clients
        owners[rng.choice(np.flatnonzero(owners == donor))] = client
        sizes[donor] -= 1
        sizes[client] = 1
    return owners


def _portions(total: int, shares: NDArray[np.float64]) -> Indices:
    """Whole numbers with this total, within one of ``total * shares``."""
    ends = np.rint(total * np.cumsum(shares)).astype(np.int64)
    ends[-1] = total
    return np.diff(ends, prepend=0)
