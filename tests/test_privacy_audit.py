"""The audit: what is right passes, and what is wrong is found, unless it is known to be out of reach."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import beta

from hpcfed.errors import ConfigError
from hpcfed.privacy.audit import FAULTS, Simulated, _clopper_pearson, audit, calibrated

DELTA = 1e-5


def play(seed, *, epsilon=2.0, public_steps=0, fault=None, runs=4000, epochs=20):
    mechanism = calibrated(epsilon, DELTA, epochs, public_steps, fault=fault)
    return audit(mechanism, DELTA, runs, np.random.default_rng(seed))


@pytest.mark.parametrize("public_steps", [0, 15])
def test_what_is_right_passes(public_steps):
    found = [play(seed, public_steps=public_steps) for seed in range(8)]
    assert [each.contradictions for each in found] == [[]] * 8
    # Nor is it passed for want of power.
    assert np.mean([each.mu_found for each in found]) > 0.1


@pytest.mark.parametrize("public_steps", [0, 15])
@pytest.mark.parametrize("fault", ["half-noise", "no-clipping", "step-squared"])
def test_the_game_finds_gross_faults(fault, public_steps):
    lost = [play(seed, public_steps=public_steps, fault=fault, runs=6000).game_lost for seed in range(3)]
    assert lost == [True] * 3


def test_the_game_finds_silent_public_steps_that_were_accounted_for():
    assert all(play(seed, public_steps=15, fault="silent-public-steps").game_lost for seed in range(3))


def test_the_game_finds_a_missing_root_of_two_in_more_runs():
    assert play(0, fault="less-noise", runs=30_000).game_lost


@pytest.mark.parametrize("fault", ["tenth-less-noise", "reused-noise"])
def test_what_the_game_is_blind_to_the_tests_of_the_noise_find(fault):
    found = play(0, public_steps=15, fault=fault)
    assert not found.game_lost
    assert found.contradictions


@pytest.mark.parametrize("fault", FAULTS)
def test_the_whole_audit_finds_every_fault(fault):
    assert play(1, public_steps=15, fault=fault, runs=8000).contradictions


def test_reused_noise_never_differs():
    scale, freshness = (
        getattr(play(2, public_steps=15, fault="reused-noise"), name) for name in ("noise_scale", "noise_freshness")
    )
    assert scale[0] == pytest.approx(16, rel=0.05)
    assert freshness[0] == 0
    assert play(2, public_steps=0).noise_freshness is None


def test_the_claim_is_what_the_game_truly_loses():
    """Ends are Gaussian with means ``K eta clip`` apart from 0 and variance ``K (m + 1) (eta sigma)^2``."""
    mechanism = calibrated(2.0, DELTA, 20, 15)
    rng = np.random.default_rng(3)
    ends = [mechanism.ends(sign * 10.0, 40_000, rng) for sign in (1, -1)]
    truth = (ends[1].mean() - ends[0].mean()) / ends[0].std()
    claimed = audit(mechanism, DELTA, 100, rng).mu_claimed
    assert claimed == pytest.approx(2 * np.sqrt(20) / (mechanism.noise * 4), rel=1e-12)
    assert truth == pytest.approx(claimed, abs=5 * np.sqrt(2 / 40_000))


def test_the_bounds_of_error_rates_are_clopper_and_pearsons():
    wrong = np.array([0, 1, 17, 99, 100])
    exact = np.append(beta.ppf(0.9995, wrong[:-1] + 1, 100 - wrong[:-1]), 1.0)
    np.testing.assert_allclose(_clopper_pearson(wrong, 100), exact, rtol=1e-9)


def test_a_game_without_a_difference_is_never_won():
    """Both worlds alike: the bound of mu is negative, not its absolute value."""

    class Silent(Simulated):
        def ends(self, pull, runs, rng):
            return rng.standard_normal(runs)

    found = [audit(Silent(5, 0, 1.0, 1.0), DELTA, 2000, np.random.default_rng(seed)) for seed in range(10)]
    assert max(each.mu_found for each in found) < 0
    assert {each.epsilon_found for each in found} == {0.0}


def test_the_same_seed_finds_the_same():
    assert play(4, public_steps=3).facts() == play(4, public_steps=3).facts()


def test_a_larger_budget_gives_the_game_more_power():
    shares = [found.mu_found / found.mu_claimed for found in (play(5, epsilon=epsilon) for epsilon in (2.0, 8.0))]
    assert shares[0] < 0.8 < shares[1]


def test_refusals():
    with pytest.raises(ConfigError, match="unknown"):
        calibrated(2.0, DELTA, 20, fault="nothing")
    with pytest.raises(ConfigError, match="4000"):
        play(0, runs=3)
