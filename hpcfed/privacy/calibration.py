"""Between a privacy budget ``(epsilon, delta)``, zero-concentrated privacy ``rho`` and noise ``sigma``.

T private epochs of one client, each a share ``a`` of the unamplified cost, add up to

    ``rho = 2 (clip/b)^2 T a / sigma^2``

in `hpcfed.privacy.accountant`'s terms. Minimizing the conversion ``epsilon = rho alpha + log(1/delta)/(alpha - 1)``
over all orders gives, with ``c = log(1/delta)``,

    ``epsilon = rho + 2 sqrt(rho c)``,  ``alpha = 1 + sqrt(c/rho)``,
    ``sigma = (clip/b) sqrt(2 T a) / (sqrt(epsilon + c) - sqrt(c))``

so noise is calibrated without any search.
"""

from __future__ import annotations

import math

from hpcfed.errors import ConfigError
from hpcfed.privacy.accountant import check_clip, check_noise

# Noise is rounded up by this share, so that no sum of rounded numbers can pass the budget that it was made for.
MARGIN = 1e-12


def check_delta(delta: float) -> None:
    """Refuse a ``delta`` that is no probability below 1.

    Raises
    ------
    ConfigError
        Unless ``0 < delta < 1``.
    """
    if not 0 < delta < 1:
        remedy = "everything is (epsilon, 1)-private" if delta >= 1 else "Gaussian noise needs some"
        raise ConfigError(f"delta = {delta:g}: {remedy}; choose a number well below 1 over the number of records")


def check_epsilon(epsilon: float) -> None:
    """Refuse an ``epsilon`` that is no positive number.

    Raises
    ------
    ConfigError
        Unless ``0 < epsilon < infinity``.
    """
    if not 0 < epsilon < math.inf:
        raise ConfigError(f"epsilon = {epsilon:g} is no privacy budget: choose a positive number, such as 1")


def rho_of_noise(
    noise: float, clip: float | None, epochs: float, *, amplification: float = 1.0, batch: int = 1
) -> float:
    """``rho`` of T epochs with this noise."""
    check_clip(clip)
    check_noise(noise)
    assert clip is not None
    return 2 * (clip / batch / noise) ** 2 * epochs * amplification


def noise_of_rho(rho: float, clip: float | None, epochs: float, *, amplification: float = 1.0, batch: int = 1) -> float:
    """The least ``sigma`` with which T epochs cost ``rho``, rounded up by `MARGIN`."""
    check_clip(clip)
    assert clip is not None
    return clip / batch * math.sqrt(2 * epochs * amplification / rho) * (1 + MARGIN)


def noise_of_epsilon(
    epsilon: float,
    delta: float,
    clip: float | None,
    epochs: float,
    *,
    amplification: float = 1.0,
    batch: int = 1,
) -> float:
    """The ``sigma`` with which T epochs are ``(epsilon, delta)``-private by the closed form.

    Parameters
    ----------
    clip : bound of the norm of each record's gradient.
    epochs : T, the private ones.
    amplification : a, the share of the unamplified cost that an epoch has.
    batch : b, the fixed divisor of a private step's sum of gradients.

    Raises
    ------
    ConfigError
        If the budget is none, or the clipping bound is missing.
    """
    rho = rho_of_epsilon(epsilon, delta)
    return noise_of_rho(rho, clip, epochs, amplification=amplification, batch=batch)


def rho_of_epsilon(epsilon: float, delta: float) -> float:
    """``(sqrt(epsilon + c) - sqrt(c))^2``, the largest ``rho`` that the closed form allows."""
    check_epsilon(epsilon)
    check_delta(delta)
    c = -math.log(delta)
    return (epsilon / (math.sqrt(epsilon + c) + math.sqrt(c))) ** 2


def epsilon_of_rho(rho: float, delta: float) -> float:
    """``rho + 2 sqrt(rho c)``, the closed form. Every rho-zCDP release is ``(epsilon, delta)``-private."""
    check_delta(delta)
    return rho + 2 * math.sqrt(-rho * math.log(delta))


def best_order(rho: float, delta: float) -> float:
    """``1 + sqrt(c/rho)``, the order that attains the closed form."""
    check_delta(delta)
    return 1 + math.sqrt(-math.log(delta) / rho) if rho else math.inf


def improved_epsilon_of_rho(rho: float, delta: float) -> float:
    """A smaller epsilon for the same rho (Canonne, Kamath, Steinke 2020, Proposition 12; Balle et al. 2020).

    ``min_{alpha > 1} rho alpha + log((alpha - 1)/alpha) - (log delta + log alpha)/(alpha - 1)``; every order gives a
    valid epsilon, so a minimum that is only nearly found errs on the safe side.
    """
    from scipy.optimize import minimize_scalar

    check_delta(delta)
    if rho == 0:
        return 0.0

    def epsilon(log_excess: float) -> float:
        excess = math.exp(log_excess)  # alpha - 1
        log_order = math.log1p(excess)
        return rho * (1 + excess) + log_excess - log_order - (math.log(delta) + log_order) / excess

    middle = math.log(best_order(rho, delta) - 1)
    found = minimize_scalar(epsilon, bounds=(middle - 5, middle + 5), method="bounded", options={"xatol": 1e-10})
    return max(0.0, min(float(found.fun), epsilon_of_rho(rho, delta)))


def mu_of_rho(rho: float) -> float:
    """``sqrt(2 rho)``: unamplified epochs are together one Gaussian mechanism, whose ``mu`` this is.

    For amplified epochs the same ``mu`` follows from shifted interpolation (Bok, Su, Altschuler 2024), whose theorem
    was not checked (UNVERIFIED): nothing here uses it for them unless asked.
    """
    return math.sqrt(2 * rho)


def gaussian_delta(mu: float, epsilon: float) -> float:
    """``Phi(mu/2 - epsilon/mu) - e^epsilon Phi(-mu/2 - epsilon/mu)``: exact for a Gaussian mechanism.

    ``mu`` is the sensitivity over the standard deviation (Balle, Wang: Improving the Gaussian mechanism, 2018).
    """
    from scipy.special import log_ndtr

    if mu == 0:
        return 0.0
    above = float(log_ndtr(mu / 2 - epsilon / mu))
    below = float(epsilon + log_ndtr(-mu / 2 - epsilon / mu))
    return math.exp(above) * -math.expm1(min(0.0, below - above))


def gaussian_epsilon(mu: float, delta: float) -> float:
    """The least epsilon with ``gaussian_delta(mu, epsilon) <= delta``."""
    from scipy.optimize import brentq

    check_delta(delta)
    if gaussian_delta(mu, 0.0) <= delta:
        return 0.0
    most = epsilon_of_rho(mu**2 / 2, delta)
    return float(brentq(lambda epsilon: gaussian_delta(mu, epsilon) - delta, 0.0, most, xtol=1e-14, rtol=1e-13))


def gaussian_mu(epsilon: float, delta: float) -> float:
    """The largest ``mu`` with ``gaussian_delta(mu, epsilon) <= delta``."""
    from scipy.optimize import brentq

    least = mu_of_rho(rho_of_epsilon(epsilon, delta))
    most = 2 * least
    while gaussian_delta(most, epsilon) < delta:
        most *= 2
    return float(brentq(lambda mu: gaussian_delta(mu, epsilon) - delta, least, most, xtol=1e-14, rtol=1e-13))
