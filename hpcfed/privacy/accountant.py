"""What an epoch of noisy steps costs a private record, in zero-concentrated differential privacy.

Neighbouring data sets differ in one record of one client, which is replaced; their sizes are public. A release is
rho-zCDP if its Renyi divergence of every order ``alpha`` is at most ``rho alpha`` (Bun and Steinke 2016). An epoch
takes steps

    ``x <- M_t(x) - eta_t N(0, sigma_t^2 I)``,  ``M_t(x) = x - eta_t g_t(x)``

of which the private ones see b records each, and no record occurs in two of them. Where the epoch's inner iterates stay
hidden and the maps ``M_t`` do not expand, the noise of later steps hides the record, too: privacy amplification by
iteration (Feldman, Mironov, Talwar, Thakurta 2018, Theorem 22).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hpcfed.errors import ConfigError
from hpcfed.privacy.certify import Certificate

ADJACENCY = "replace one record"


def epoch_rho(
    private: ArrayLike,
    clip: float,
    noise: ArrayLike,
    step: ArrayLike = 1.0,
    *,
    batch: int = 1,
    lipschitz: ArrayLike | None = None,
) -> float:
    """``rho`` of an epoch's last iterate, or of all its iterates.

    A record in step j moves the iterate by ``s_j = 2 eta_j clip / b`` at most. What reaches the end can be spread over
    the noise of steps ``t >= j`` at will; the best spread (by Cauchy and Schwarz) leaves

        ``rho_j = s_j^2 / (2 sum_{t >= j} w_t^2 eta_t^2 sigma_t^2)``,  ``w_t = prod_{j < i <= t} 1 / c_i``

    with ``c_i`` a Lipschitz constant of ``M_i``; the epoch costs the largest ``rho_j`` of a private step. With
    ``c_i = 1`` and equal steps this is ``2 clip^2 / (b^2 sigma^2 (n - j + 1))``.

    Parameters
    ----------
    private : for each of the n steps in order, whether it sees private records.
    clip : bound of the norm of each record's gradient.
    noise : ``sigma_t``, one number or one for each step, in units of the gradient.
    step : ``eta_t``, one number or one for each step. Equal steps cancel.
    batch : b, the fixed number that a private step's sum of gradients is divided by, also where a batch is short.
    lipschitz : ``c_t``, one number or one for each step, valid for whatever records the client might hold. None if
        they are unknown or the epoch's iterates are seen: then each step stands alone.

    Returns
    -------
    float
        0 without private steps; infinite if some private step is not hidden by any noise.
    """
    sees = np.asarray(private, bool)
    if not sees.any():
        return 0.0
    count = len(sees)
    eta, sigma = (np.broadcast_to(np.asarray(each, float), count) for each in (step, noise))
    moves = (eta * sigma) ** 2
    unit = float(moves.max())
    if unit == 0:
        return float("inf")
    # In units of the largest: sums of equal numbers are exact.
    hidden_by = moves / unit
    if lipschitz is not None:
        hidden_by = _accumulated(hidden_by, np.broadcast_to(np.asarray(lipschitz, float), count))
    with np.errstate(divide="ignore"):
        return float(np.max((2 * clip / batch * eta[sees]) ** 2 / (2 * unit * hidden_by[sees])))


def _accumulated(moves: NDArray[np.float64], factors: NDArray[np.float64]) -> NDArray[np.float64]:
    """``D_j = moves_j + D_{j+1} / c_{j+1}^2``: the noise from step j on, as it counts for a record in step j."""
    if not (factors > 0).all():
        raise ValueError("Lipschitz constants of steps must be positive")
    if (factors == 1).all():
        return np.cumsum(moves[::-1])[::-1]
    sums = moves.copy()
    for place in range(len(sums) - 2, -1, -1):
        sums[place] += sums[place + 1] / factors[place + 1] ** 2
    return sums


@dataclass(frozen=True)
class Cost:
    """What an epoch costs.

    Attributes
    ----------
    rho : its zCDP.
    unamplified : what it would cost if all its iterates were released.
    reason : why ``rho`` is less than ``unamplified``, or why it is not.
    """

    rho: float
    unamplified: float
    reason: str

    @property
    def amplification(self) -> float:
        """The share ``a <= 1`` of the unamplified cost."""
        return self.rho / self.unamplified if self.unamplified else 1.0


@dataclass(frozen=True)
class Epoch:
    """One client's epoch: private steps first, then public ones, all of one size, each record in one step at most.

    Attributes
    ----------
    private_steps, public_steps : how many steps see private and public records.
    clip : bound of the norm of every private record's gradient; None if gradients are not clipped.
    noise, public_noise : standard deviation of the noise in the private and in the public steps, in units of the
        gradient.
    batch : the fixed divisor of a private step's sum of gradients.
    hidden : nothing of the epoch but its last iterate leaves the client.
    certificate : whether no step expands distances, by `hpcfed.privacy.certify.certify_contractive`.

    Raises
    ------
    ConfigError
        If private steps lack a clipping bound or noise, or a count makes no sense.
    """

    private_steps: int
    public_steps: int = 0
    clip: float | None = None
    noise: float = 0.0
    public_noise: float = 0.0
    batch: int = 1
    hidden: bool = True
    certificate: Certificate = Certificate(False, "no certificate that steps do not expand distances was asked for")

    def __post_init__(self) -> None:
        for name in ("private_steps", "public_steps"):
            if getattr(self, name) < 0:
                raise ConfigError(f"an epoch with {name} = {getattr(self, name)}: counts start at 0")
        if self.batch < 1:
            raise ConfigError(f"batch = {self.batch}: a private step needs at least one record")
        if not 0 <= self.public_noise < np.inf:
            raise ConfigError(f"noise {self.public_noise} in public steps: choose a number from 0 on")
        if self.private_steps:
            check_clip(self.clip)
            check_noise(self.noise)

    def cost(self) -> Cost:
        """What the epoch costs each private record, amplified only if every condition of that holds."""
        if not self.private_steps:
            return Cost(0.0, 0.0, "the epoch sees public records only")
        assert self.clip is not None
        steps = self.private_steps + self.public_steps
        private = np.arange(steps) < self.private_steps
        noise = np.where(private, self.noise, self.public_noise)
        unamplified = epoch_rho(private, self.clip, noise, batch=self.batch)
        broken = self._broken_condition()
        if broken:
            return Cost(unamplified, unamplified, broken)
        rho = epoch_rho(private, self.clip, noise, batch=self.batch, lipschitz=1.0)
        return Cost(rho, unamplified, f"amplified by {self.public_steps} hidden noisy steps after the private ones")

    def _broken_condition(self) -> str:
        """What amplification by iteration lacks, in a line; empty if nothing."""
        if not self.public_steps:
            return "no amplification: no public step follows the private ones"
        if not self.public_noise:
            return "no amplification: the public steps carry no noise"
        if not self.hidden:
            return "no amplification: iterates inside the epoch are released"
        if not self.certificate:
            return f"no amplification: {self.certificate.reason}"
        return ""


def check_clip(clip: float | None) -> None:
    """Refuse private gradients without a bound.

    Raises
    ------
    ConfigError
        If ``clip`` is None or no positive number.
    """
    if clip is None:
        raise ConfigError("clip is missing: without a bound of each record's gradient nothing is private; give --clip")
    if not 0 < clip < np.inf:
        raise ConfigError(f"clip = {clip}: the bound of a gradient's norm must be a positive number")


def check_noise(noise: float) -> None:
    """Refuse private steps without noise.

    Raises
    ------
    ConfigError
        If ``noise`` is no positive number.
    """
    if not 0 < noise < np.inf:
        raise ConfigError(f"sigma = {noise:g} with private records hides nothing: choose a positive number")
