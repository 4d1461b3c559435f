"""What steps on Poisson samples cost: the accounting of DP-SGD, by the package dp-accounting.

A step sees each of n records with probability ``q = b/n``, whatever the others; who was seen is secret. Neighbouring
data sets differ in one record that is added or removed, which is dp-accounting's default for such samples.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from hpcfed.errors import ConfigError
from hpcfed.privacy.calibration import check_delta, check_epsilon

ADJACENCY = "add or remove one record"


def epsilon(rate: float, multiplier: float, steps: int, delta: float) -> float:
    """The epsilon of so many steps, by Renyi differential privacy.

    Parameters
    ----------
    rate : q.
    multiplier : standard deviation of the noise of a sum of gradients, over the clipping bound: ``sigma b / C``.
    """
    check_delta(delta)
    dp_accounting = _package()
    if not steps:
        return 0.0
    accountant = dp_accounting.rdp.RdpAccountant()
    accountant.compose(_event(dp_accounting, rate, multiplier, steps))
    return float(accountant.get_epsilon(delta))


@cache
def multiplier(rate: float, steps: int, budget: float, delta: float) -> float:
    """The least noise multiplier, to 1e-6, with which so many steps are ``(budget, delta)``-private.

    Raises
    ------
    ConfigError
        If the budget is none, no noise is enough, or dp-accounting is not installed.
    """
    check_epsilon(budget)
    check_delta(delta)
    dp_accounting = _package()
    try:
        found: float = dp_accounting.calibrate_dp_mechanism(
            dp_accounting.rdp.RdpAccountant,
            lambda noise: _event(dp_accounting, rate, noise, steps),
            budget,
            delta,
            dp_accounting.LowerEndpointAndGuess(0.0, 1.0),
        )
    except (ValueError, RuntimeError) as error:
        raise ConfigError(f"--epsilon {budget:g}: dp-accounting finds no noise for it: give a larger one") from error
    return found


def _event(dp_accounting: Any, rate: float, noise: float, steps: int) -> Any:
    step = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise))
    return dp_accounting.SelfComposedDpEvent(step, steps)


def _package() -> Any:
    try:
        import dp_accounting
        import dp_accounting.rdp
    except ImportError as error:
        raise ConfigError(
            "dp-sgd needs dp-accounting, which is not installed: pip install 'hpcfed[privacy]'"
        ) from error
    return dp_accounting
