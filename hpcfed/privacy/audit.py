"""An audit that can show a private mechanism to be less private than it claims. It never shows that it is private.

One record, the canary, pulls with ten times the clipping bound along one axis or against it, and nothing else happens:
public gradients are zero, there is no penalty. In this game the accountant's claim is attained exactly, so that an
implementation with less noise, without clipping, or with noise in the wrong places loses more than it claims. Two tests
of the noise itself complete it: they see what the game is blind to.

The mechanism is any `Mechanism`: `hpcfed.privacy.audited.Compiled` is what runs do, `Simulated` the same with faults to
plant.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

from hpcfed.errors import ConfigError
from hpcfed.privacy.accountant import Epoch
from hpcfed.privacy.calibration import epsilon_of_rho, gaussian_epsilon, mu_of_rho, noise_of_epsilon
from hpcfed.privacy.certify import Certificate

Numbers = NDArray[np.float64]
Fault = Literal[
    "half-noise", "less-noise", "tenth-less-noise", "no-clipping", "step-squared", "silent-public-steps", "reused-noise"
]
FAULTS: tuple[str, ...] = get_args(Fault)

# Joint confidence of the game's two error rates, and confidence of each test of the noise.
CONFIDENCE = 0.999
NOISE_CONFIDENCE = 0.9999
# At most so many steps are looked at by the tests of the noise.
MOVES = 4_000_000
# The canary's gradient in units of the clipping bound: clipping is put to the test, too.
PULL = 10.0


class Mechanism(Protocol):
    """What is audited: a number of epochs, each of one private step and then ``public_steps`` public ones.

    Attributes
    ----------
    epochs, public_steps : how many.
    clip, noise, step : bound of the gradient, sigma and eta, as claimed.
    """

    @property
    def epochs(self) -> int: ...

    @property
    def public_steps(self) -> int: ...

    @property
    def clip(self) -> float: ...

    @property
    def noise(self) -> float: ...

    @property
    def step(self) -> float: ...

    def ends(self, pull: float, runs: int, rng: np.random.Generator) -> Numbers:
        """Where independent runs from 0 end along one axis, of shape ``(runs,)``.

        The private gradient is ``pull`` along the axis before clipping, public gradients are zero, psi is 0.
        """

    def moves(self, runs: int, rng: np.random.Generator) -> Numbers:
        """How every step moves the iterate along the axis if all gradients are zero: ``(runs, epochs, steps)``."""


@dataclass(frozen=True)
class Simulated:
    """The noisy clipped steps themselves, for many runs at a time, along the one axis on which something happens.

    Attributes
    ----------
    fault : what is done wrong: ``half-noise`` (the factor 2 of replaced records is missing), ``less-noise`` (by the
        root of 2), ``tenth-less-noise``, ``no-clipping``, ``step-squared`` (noise is multiplied by eta twice),
        ``silent-public-steps`` (without noise, but accounted as if it were there), ``reused-noise`` (the steps of an
        epoch share it). None does all as it should be.
    """

    epochs: int
    public_steps: int
    clip: float
    noise: float
    step: float = 0.1
    fault: str | None = None

    def __post_init__(self) -> None:
        if self.fault is not None and self.fault not in FAULTS:
            raise ConfigError(f"fault {self.fault!r} is unknown: use one of {', '.join(FAULTS)}")

    def ends(self, pull: float, runs: int, rng: np.random.Generator) -> Numbers:
        size = abs(pull)
        clipped = pull * min(1.0, self.clip / size) if size and self.fault != "no-clipping" else pull
        moved = np.zeros(runs)
        for _ in range(self.epochs):
            moved += np.sum(self._noise(runs, rng), axis=1)
        return moved - self.epochs * self.step * clipped

    def moves(self, runs: int, rng: np.random.Generator) -> Numbers:
        return np.stack([self._noise(runs, rng) for _ in range(self.epochs)], axis=1)

    def _noise(self, runs: int, rng: np.random.Generator) -> Numbers:
        """What the noise of one epoch's steps moves: ``(runs, steps)``."""
        steps = 1 + self.public_steps
        scale = {"half-noise": 0.5, "less-noise": 0.5**0.5, "tenth-less-noise": 0.9, "step-squared": self.step}
        deviation = self.step * self.noise * scale.get(self.fault or "", 1.0)
        if self.fault == "reused-noise":
            return np.repeat(-deviation * rng.standard_normal((runs, 1)), steps, axis=1)
        moves: Numbers = -deviation * rng.standard_normal((runs, steps))
        if self.fault == "silent-public-steps":
            moves[:, 1:] = 0
        return moves


@dataclass(frozen=True)
class Audit:
    """What an audit found.

    Attributes
    ----------
    mu_claimed, epsilon_claimed : from the accountant.
    mu_found, epsilon_found : lower bounds from the game, at joint confidence `CONFIDENCE`; a negative ``mu_found``
        says that the game was not won.
    noise_scale : variance of what an epoch's noise moves, over the claimed one; with the interval that holds it with
        probability `NOISE_CONFIDENCE` if the claim is true.
    noise_freshness : the same for differences of steps of one epoch; None where an epoch has one step.
    """

    mu_claimed: float
    epsilon_claimed: float
    mu_found: float
    epsilon_found: float
    noise_scale: tuple[float, float, float]
    noise_freshness: tuple[float, float, float] | None

    @property
    def game_lost(self) -> bool:
        """Whether the game shows that the mechanism is less private than claimed."""
        return self.mu_found > self.mu_claimed or self.epsilon_found > self.epsilon_claimed

    @property
    def contradictions(self) -> list[str]:
        """What speaks against the claim; empty if nothing does, which is no proof of privacy."""
        found = []
        if self.game_lost:
            found.append(f"the membership game: mu is at least {self.mu_found:.4g}, claimed {self.mu_claimed:.4g}")
        for name, test in (("scale", self.noise_scale), ("freshness", self.noise_freshness)):
            if test is not None and not test[1] <= test[0] <= test[2]:
                found.append(
                    f"the noise's {name}: variance {test[0]:.4g} of the claimed, not {test[1]:.4g} to {test[2]:.4g}"
                )
        return found

    def facts(self) -> dict[str, Any]:
        """The audit as a table that JSON can hold."""
        return {
            "mu_claimed": self.mu_claimed,
            "mu_found": self.mu_found,
            "epsilon_claimed": self.epsilon_claimed,
            "epsilon_found": self.epsilon_found,
            "noise_scale": list(self.noise_scale),
            "noise_freshness": None if self.noise_freshness is None else list(self.noise_freshness),
            "contradictions": self.contradictions,
        }


def calibrated(
    epsilon: float, delta: float, epochs: int, public_steps: int = 0, *, clip: float = 1.0, fault: str | None = None
) -> Simulated:
    """A simulated mechanism with the noise that the accountant gives it for a budget."""
    noise = noise_of_epsilon(epsilon, delta, clip, epochs, amplification=1 / (1 + public_steps))
    return Simulated(epochs, public_steps, clip, noise, fault=fault)


def audit(mechanism: Mechanism, delta: float, runs: int, rng: np.random.Generator) -> Audit:
    """Play the membership game ``runs`` times in each of two worlds, and test the noise.

    The canary pulls one way in world 1, the other in world 0. A threshold on where runs end is chosen on the first
    half; on the second, Clopper and Pearson's upper bounds of the two error rates give ``mu >= z(1 - fpr) - z(fnr)``
    with z the normal quantile, signed: guessing in vain gives a negative number, never its absolute value.

    Parameters
    ----------
    mechanism : what is audited.
    delta : at which epsilons are compared.
    runs : for each world, at least 4.
    rng : draws everything.
    """
    if runs < 4:
        raise ConfigError(f"an audit of {runs} runs finds nothing: choose 4000 or more")
    claim = Epoch(
        private_steps=1,
        public_steps=mechanism.public_steps,
        clip=mechanism.clip,
        noise=mechanism.noise,
        public_noise=mechanism.noise if mechanism.public_steps else 0.0,
        certificate=Certificate(True, "gradients of the game are constant"),
    )
    rho = mechanism.epochs * claim.cost().rho
    pull = PULL * mechanism.clip
    inside, outside = (-mechanism.ends(sign * pull, runs, rng) for sign in (1.0, -1.0))
    mu = _lower_mu(inside, outside)
    steps = mechanism.epochs * (1 + mechanism.public_steps)
    moves = mechanism.moves(max(1, min(runs, MOVES // steps)), rng)
    return Audit(
        mu_claimed=mu_of_rho(rho),
        epsilon_claimed=epsilon_of_rho(rho, delta),
        mu_found=mu,
        epsilon_found=gaussian_epsilon(mu, delta) if mu > 0 else 0.0,
        noise_scale=_scale(moves, mechanism.step * mechanism.noise),
        noise_freshness=_freshness(moves, mechanism.step * mechanism.noise),
    )


def _lower_mu(inside: Numbers, outside: Numbers) -> float:
    """A lower bound of mu from scores that are larger in world 1: threshold from one half, bound from the other."""
    half = len(inside) // 2
    candidates = np.quantile(np.concatenate([inside[:half], outside[:half]]), np.linspace(0.02, 0.98, 97))
    best = int(np.argmax(_bounds(inside[:half], outside[:half], candidates)))
    return float(_bounds(inside[half:], outside[half:], candidates[best : best + 1])[0])


def _bounds(inside: Numbers, outside: Numbers, thresholds: Numbers) -> Numbers:
    """The lower bound of mu that each threshold gives."""
    from scipy.special import ndtri

    false_positives = len(outside) - np.searchsorted(np.sort(outside), thresholds)
    false_negatives = np.searchsorted(np.sort(inside), thresholds)
    return np.asarray(
        -ndtri(_clopper_pearson(false_positives, len(outside))) - ndtri(_clopper_pearson(false_negatives, len(inside)))
    )


def _clopper_pearson(wrong: NDArray[np.int64], trials: int) -> Numbers:
    """Upper bounds of error rates; both of a game hold with probability `CONFIDENCE`."""
    from scipy.special import betaincinv

    at_most = np.minimum(wrong, trials - 1)
    bound = betaincinv(at_most + 1.0, (trials - at_most).astype(float), 1 - (1 - CONFIDENCE) / 2)
    return np.where(wrong == trials, 1.0, bound)


def _scale(moves: Numbers, deviation: float) -> tuple[float, float, float]:
    """Variance of an epoch's whole movement over that of n independent steps."""
    return _chi_square(moves.sum(axis=2) / (deviation * moves.shape[2] ** 0.5))


def _freshness(moves: Numbers, deviation: float) -> tuple[float, float, float] | None:
    """Variance of differences of steps, in pairs that share none, over that of independent ones."""
    pairs = moves.shape[2] // 2
    if not pairs:
        return None
    differences = moves[:, :, 0 : 2 * pairs : 2] - moves[:, :, 1 : 2 * pairs : 2]
    return _chi_square(differences / (deviation * 2**0.5))


def _chi_square(normal: Numbers) -> tuple[float, float, float]:
    """Mean square of what should be standard normal, and the interval that it should be in."""
    from scipy.stats import chi2

    tail = (1 - NOISE_CONFIDENCE) / 2
    count = normal.size
    low, high = (float(chi2.ppf(share, count)) / count for share in (tail, 1 - tail))
    return float(np.mean(np.square(normal))), low, high
