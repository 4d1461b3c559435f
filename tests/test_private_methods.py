"""Private shuffled gradient methods: known fixed points, rates and variances; what they see, and where noise is."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from record_problems import PRIVATE, Holder, Ridge, federation, go, points, silent

from hpcfed.algorithms.dp_sgd import DpSgd
from hpcfed.algorithms.dp_shuffle import DpShuffle
from hpcfed.algorithms.interleaved import Interleaved
from hpcfed.algorithms.plain import Plain
from hpcfed.algorithms.priv_pub import PrivPub
from hpcfed.algorithms.pub_priv import PubPriv
from hpcfed.algorithms.public_only import PublicOnly
from hpcfed.privacy import bounds, engine
from hpcfed.privacy.engine import NoisySteps
from hpcfed.streams import Purpose

# -- steps, orders, averages, the proximal step -----------------------------------------------------------------------


@pytest.mark.parametrize("records", [2, 6, 20])
def test_incremental_gradients_end_at_their_fixed_point(records):
    """Records +1, ..., -1: ``x = -(1 - q^{n/2}) / (1 + q^{n/2})`` after each epoch, ``q = 1 - eta``."""
    half = records // 2
    fed = federation(Holder(np.repeat([[1.0], [-1.0]], half, axis=0), points(1, 1)))
    x = go(Plain(order="ig", eta="0.3"), fed, np.zeros(1), 200).x
    q = 0.7**half
    np.testing.assert_allclose(x, -(1 - q) / (1 + q), atol=1e-10)


def test_the_rate_of_incremental_gradients_is_minus_two_thirds():
    """``eta = c K^{-1/3}``: the gap falls like ``K^{-2/3}``. K epochs are one pass of the engine."""
    records, epochs = np.repeat([[1.0], [-1.0]], 5, axis=0), np.array([300, 1000, 3000, 10_000, 30_000, 100_000])
    gaps = []
    for count in epochs:
        steps = NoisySteps(0.1 * count ** (-1 / 3), None, 0.0)
        order = np.tile(np.arange(10), count)
        x = engine.run("mean", records, None, np.ones(1), order, steps, np.random.default_rng(0))
        gaps.append(float(x[0] ** 2) / 2)
    slope = np.polyfit(np.log(epochs), np.log(gaps), 1)[0]
    assert slope == pytest.approx(-2 / 3, abs=0.01)


def test_better_orders_are_closer_and_all_within_the_bound():
    """Mean estimation of sorted +1, -1 with ``eta n L = 0.2``: the optimum is 0, the variance 1."""
    records, epochs, gaps = np.repeat([[1.0], [-1.0]], 10, axis=0), 25, []
    for order in ("ig", "so", "rr"):
        feds = [federation(Holder(records, points(1, 1)), seed=seed) for seed in range(60)]
        ends = [go(Plain(order=order, eta="0.01"), fed, np.zeros(1), epochs).x[0] for fed in feds]
        gaps.append(np.mean(np.square(ends)) / 2)
    assert gaps[0] > 5 * gaps[1] > 25 * gaps[2]
    assert gaps[0] < bounds.last_iterate_bound(0.0, 0.01, 20, epochs, 1.0, 1.0)


def test_orders():
    """rr: a new permutation in each round, so: the same one, ig: none; each client has its own."""
    fed = federation(*[Holder(points(40), points(2)) for _ in range(2)])
    for order in ("rr", "so", "ig"):
        drawn = [dict(Plain(order=order).orders(fed.at(number))) for number in (1, 2)]
        for each in drawn:
            for own in each.values():
                np.testing.assert_array_equal(np.sort(own), np.arange(40))
        same_round_to_round = np.array_equal(drawn[0][0], drawn[1][0])
        same_for_all = np.array_equal(drawn[0][0], drawn[0][1])
        assert (same_round_to_round, same_for_all) == {
            "rr": (False, False),
            "so": (True, False),
            "ig": (True, True),
        }[order]


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("method", [Plain, DpShuffle, PrivPub, PubPriv, Interleaved, PublicOnly, DpSgd])
def test_the_penalty_weighs_as_much_as_an_epoch(method, batch):
    """``n eta / b`` once an epoch, n its private and public records together, of the client that has most of them."""
    psi = Ridge(0.1)
    fed = federation(*[Holder(points(count), points(20), regularizer=psi) for count in (8, 20)])
    budget = {"sigma": 1.0, "epochs": 2} if method in PRIVATE else {}
    state = go(method(clip=1.0, eta="0.01", record_batch=batch, **budget), fed, np.zeros(3), 2)
    np.testing.assert_allclose(psi.weights, 2 * [20 * 0.01 / batch], rtol=1e-12)
    assert np.isfinite(state.x).all()


def test_the_mean_comes_before_the_penalty():
    clients = [Holder(points(6, seed=seed), points(2), regularizer=Ridge(2.0)) for seed in (1, 2)]
    found = go(Plain(order="ig", eta="0.1"), federation(*clients), np.zeros(3), 1).x
    alone = [
        go(Plain(order="ig", eta="0.1"), federation(Holder(each.private, each.public)), np.zeros(3), 1).x
        for each in clients
    ]
    np.testing.assert_allclose(found, np.mean(alone, axis=0) / (1 + 2.0 * 6 * 0.1), rtol=1e-12)


def test_one_client_is_the_method_on_one_machine():
    """Bit by bit what the engine does with the client's streams."""
    client = Holder(points(12), points(5))
    fed, method = federation(client), DpShuffle(clip=1.0, sigma=2.0, eta="0.05", epochs=3)
    state = method.init(fed.at(0), np.zeros(3))
    for number in (1, 2, 3):
        before, state = state, method.round(state, fed.at(number))
        streams = [fed.streams.generator(Purpose.CLIENT, number, call, 0) for call in (1, 2)]  # orders, then noise
        order = streams[0].permutation(12)
        expected = engine.run("mean", client.private, None, before.x, order, NoisySteps(0.05, 1.0, 2.0), streams[1])
        assert state.x.tobytes() == expected.tobytes()


def test_equal_clients_are_one():
    client = Holder(points(12), points(5))
    many, alone = (
        go(Plain(order="ig", eta="0.05"), federation(*[client] * count), np.zeros(3), 4).x for count in (4, 1)
    )
    assert many.tobytes() == alone.tobytes()


# -- noise ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clients", [1, 4])
def test_the_stationary_variance_is_that_of_the_noise(clients):
    """All records at the optimum: the mean excess ``d/2 eta^2 sigma^2 (1 - q^{2nK})/(1 - q^2)``, over M; d = 20,000."""
    eta, sigma, epochs, size = 0.05, 3.0, 6, 20_000
    fed = federation(*[Holder(np.zeros((5, size)), points(1, size)) for _ in range(clients)])
    x = go(DpShuffle(clip=1e9, sigma=sigma, eta=str(eta), epochs=epochs), fed, np.zeros(size), epochs).x
    q = 1 - eta
    exact = size / 2 * (eta * sigma) ** 2 * (1 - q ** (2 * 5 * epochs)) / (1 - q**2) / clients
    assert float(x @ x) / 2 == pytest.approx(exact, rel=0.03)


@pytest.mark.parametrize(
    ("method", "steps"),
    [
        (DpShuffle(), [16, 16, 16, 16]),
        (PrivPub(), [16, 16, 16, 0]),
        (PubPriv(), [0, 16, 16, 16]),
        (Interleaved(), [16, 16, 16, 16]),
        (DpSgd(), [16, 16, 16, 16]),
    ],
)
def test_which_steps_carry_noise(method, steps):
    """An epoch of s noisy steps moves by ``eta sigma sqrt(s)`` a coordinate; interleaved's public ones count."""
    method = dataclasses.replace(method, clip=1.0, sigma=3.0, eta="0.5", epochs=4)
    fed, state = federation(silent(16, 16)), None
    for number, noisy in enumerate(steps, start=1):
        before = np.zeros(20_000) if state is None else state.x
        state = go(method, fed, before, 1, state, number)
        variance = np.var(state.x - before) / (0.5 * 3.0) ** 2
        assert variance == pytest.approx(noisy, rel=0.04)


@pytest.mark.parametrize("rng", ["seeded", "secure"])
def test_noise_of_clients_rounds_and_methods_is_apart(rng):
    fed = federation(silent(4), silent(4))
    ends = []
    for method in (DpShuffle, DpSgd) if rng == "secure" else (DpShuffle,):
        private = method(clip=1.0, sigma=1.0, eta="1", epochs=2, rng=rng)
        state = private.init(fed.at(0), np.zeros(20_000))
        ends += [end for number in (1, 2) for end in private.epochs_of(state, fed.at(number)).values()]
    correlations = np.corrcoef(ends) - np.eye(len(ends))
    assert np.abs(correlations).max() < 4.5 / 20_000**0.5


def test_seeded_noise_repeats_and_secure_noise_does_not():
    for rng, same in (("seeded", True), ("secure", False)):
        method = DpShuffle(clip=1.0, sigma=1.0, epochs=1, rng=rng)
        a, b = (go(method, federation(Holder(points(9), points(2))), np.zeros(3), 1).x for _ in range(2))
        assert np.array_equal(a, b) == same


# -- what the epochs see ----------------------------------------------------------------------------------------------


def seen(method, private=8, public=8, rounds=4):
    client = Holder(points(private), points(public))
    go(dataclasses.replace(method, clip=1.0, eta="0.01", order="ig"), federation(client), np.zeros(3), rounds)
    return [(part, order.tolist()) for part, order, _ in client.passes]


def test_what_each_method_sees():
    budget = {"sigma": 1.0, "epochs": 4}
    everything = list(range(8))
    assert seen(Plain()) == 4 * [("private", everything)]
    assert seen(PublicOnly(), public=5) == 4 * [("public", list(range(5)))]
    assert seen(DpShuffle(**budget)) == 4 * [("private", everything)]
    assert seen(PrivPub(**budget)) == 3 * [("private", everything)] + [("public", everything)]
    assert seen(PubPriv(**budget)) == [("public", everything)] + 3 * [("private", everything)]
    assert seen(PrivPub(switch=1, **budget))[1:] == 3 * [("public", everything)]
    assert seen(Interleaved(**budget)) == 4 * [("private", everything[:6]), ("public", [0, 1])]
    assert seen(Interleaved(private_fraction=0.25, **budget), public=4, rounds=1)[1] == ("public", [0, 1, 2, 3, 0, 1])


def test_public_epochs_have_a_step_size_of_their_own():
    client = Holder(points(8), points(8))
    method = PubPriv(clip=1.0, sigma=1.0, epochs=4, eta="0.001", public_eta="0.5/L")
    go(method, federation(client), np.zeros(3), 2)
    assert [(part, steps.eta, steps.noise) for part, _, steps in client.passes] == [
        ("public", 0.5, 0.0),
        ("private", 0.001, 1.0),
    ]


def test_poisson_samples():
    """Each record has probability b/n in each step: 400 of 4000, 25 epochs of 10 steps; four standard errors."""
    client = Holder(points(4000, 1), points(1, 1))
    method = DpSgd(clip=1.0, sigma=1.0, eta="1e-6", epochs=25, record_batch=400)
    go(method, federation(client), np.zeros(1), 25)
    counts = np.bincount(np.concatenate([order for _, order, _ in client.passes]), minlength=4000)
    sizes = np.concatenate([np.diff(steps.ends, prepend=0) for *_, steps in client.passes])
    assert len(sizes) == 250
    assert sizes.mean() == pytest.approx(400, abs=4 * (400 * 0.9 / 250) ** 0.5)
    assert np.var(sizes) == pytest.approx(400 * 0.9, rel=0.4)
    assert counts.mean() == pytest.approx(25, abs=4 * (25 * 0.9 / 4000) ** 0.5)
    assert np.var(counts) == pytest.approx(250 * 0.1 * 0.9, rel=0.1)
    for _, order, steps in client.passes:
        assert all(len(set(part)) == len(part) for part in np.split(order, steps.ends[:-1]))
