"""The bilevel methods that FedDS-BVRFO is compared with, each against the closed form of where it ends."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from bilevel_problems import (
    bilevel_solution,
    federation,
    floats_a_round,
    hypergradient,
    limit,
    locally_inverted_solution,
    lower_solution,
    mean_of,
    penalized_solution,
    quadratic_clients,
    ridge_clients,
    ridge_objective,
    slope_at,
    solve,
    truncated_solution,
)
from test_communicator import on_ranks

from hpcfed.algorithms.f2bsa import F2bsa
from hpcfed.algorithms.f2sa import F2sa
from hpcfed.algorithms.fedbioacc import FedBioAcc
from hpcfed.algorithms.fedmbo import FedMbo
from hpcfed.algorithms.fednest import FedNest
from hpcfed.algorithms.localbsgvrm import LocalBsgvrm
from hpcfed.algorithms.memfbo import MemFbo
from hpcfed.errors import ConfigError
from hpcfed.federation import Federation
from hpcfed.streams import Streams

CLIENTS = quadratic_clients(4)
EQUAL = quadratic_clients(4, identical=True)
START = np.zeros(7)
RHO = 0.1

PENALIZED = {
    "f2sa": F2sa(penalty=RHO, schedule="constant", upper_step=0.03, lower_step=0.5),
    "f2bsa": F2bsa(penalty=RHO, upper_step=0.03, lower_step=0.5),
    "f2bsa, variance reduced": F2bsa(penalty=RHO, upper_step=0.03, lower_step=0.5, variance_reduced=True),
    "memfbo": MemFbo(penalty=RHO, upper_step=0.03, lower_step=0.5),
}
NEST = FedNest(local_steps=1, upper_local_steps=1, upper_step=0.2, lower_step=0.5, neumann_step=0.5)
BIO = FedBioAcc(local_steps=1, upper_step=0.2, lower_step=0.5, auxiliary_step=0.5)
LOCAL = LocalBsgvrm(local_steps=1, upper_step=0.2, lower_step=0.5, neumann_step=0.65, neumann_terms=80)


def distance(a, b):
    return float(np.linalg.norm(a - b))


# -- the penalty form -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PENALIZED)
def test_one_local_step_solves_the_penalty_form_not_the_bilevel_problem(name):
    state, factor = limit(replace(PENALIZED[name], local_steps=1), CLIENTS)
    assert factor < 1
    assert distance(state.point, penalized_solution(CLIENTS, RHO)) < 1e-10
    assert distance(state.point, bilevel_solution(CLIENTS)) > 0.05


@pytest.mark.parametrize("name", PENALIZED)
def test_what_rounds_find_is_that_limit(name):
    found = solve(replace(PENALIZED[name], local_steps=1), federation(CLIENTS), 500, START).point
    assert distance(found, penalized_solution(CLIENTS, RHO)) < 1e-7


@pytest.mark.parametrize("name", PENALIZED)
def test_it_is_off_in_proportion_to_rho(name):
    exact, errors = bilevel_solution(CLIENTS), []
    for rho in (1e-2, 1e-3):
        state, _ = limit(replace(PENALIZED[name], local_steps=1, penalty=rho, upper_step=0.3 * rho), CLIENTS)
        errors.append(distance(state.point, exact))
    assert errors[0] / errors[1] == pytest.approx(10, rel=0.05)


@pytest.mark.parametrize("inner", [1, 5, 10])
def test_inner_steps_do_not_move_the_solution_of_equal_clients(inner):
    for name in ("f2sa", "f2bsa"):
        state, factor = limit(
            replace(PENALIZED[name], inner=inner, local_steps=3, lower_step=0.3, upper_step=0.01), EQUAL
        )
        assert factor < 1
        assert distance(state.point, penalized_solution(EQUAL, RHO)) < 1e-10


def test_a_single_inner_step_has_no_proximal_term():
    """y moves by b s along the gradient whatever m is; with more steps m matters on the way."""
    for inner, same in ((1, True), (3, False)):
        points = [
            solve(F2bsa(moreau=m, inner=inner, relaxation=0.5), federation(CLIENTS), 3, START).point for m in (0.5, 2.0)
        ]
        assert np.allclose(points[0], points[1], rtol=0, atol=1e-14) == same
    assert not np.array_equal(points[0], START)


def test_recursive_estimates_are_a_single_loop():
    with pytest.raises(ConfigError, match=r"--inner 5 with --variance-reduced"):
        F2bsa(inner=5, variance_reduced=True)


@pytest.mark.parametrize(("schedule", "known"), [("theory", 101 ** (1 / 7)), ("benchmark", 7.0), ("constant", 1.0)])
def test_the_multiplier_of_f2sa(schedule, known):
    """lam_k for k = 100 and lam_0 = 1: the seventh root; about ``1 + 0.1 (7/6) k^(6/7)``; and 1."""
    method = F2sa(penalty=1.0, schedule=schedule, local_steps=50)
    state = solve(method, federation(EQUAL[:1]), 2, START)
    assert state.count == 100
    assert state.multiplier == pytest.approx(known, rel=0.01)


def test_a_growing_multiplier_leads_beyond_the_penalized_solution():
    method = F2sa(penalty=0.5, upper_step=0.5, lower_step=0.5, local_steps=1)
    state = solve(method, federation(CLIENTS), 1000, START)
    assert distance(state.point, penalized_solution(CLIENTS, 1 / state.multiplier)) < 0.02
    off = distance(penalized_solution(CLIENTS, 0.5), bilevel_solution(CLIENTS))
    assert distance(state.point, bilevel_solution(CLIENTS)) < off / 2


def test_the_servers_rates_do_not_move_the_solution_and_scale_the_first_change():
    base = replace(PENALIZED["memfbo"], local_steps=1)
    scaled = replace(base, upper_server_step=0.5, lower_server_step=1.5)
    assert distance(limit(scaled, CLIENTS)[0].point, penalized_solution(CLIENTS, RHO)) < 1e-10
    once, other = (solve(method, federation(CLIENTS), 1, START) for method in (base, scaled))
    np.testing.assert_allclose(other.point, np.concatenate([0.5 * once.point[:3], 1.5 * once.point[3:]]))
    np.testing.assert_allclose(other.z, 1.5 * once.z)


def test_one_sample_for_y_and_z_makes_x_less_noisy():
    """Two samples put ``sqrt(2)/rho`` times the noise of one gradient into x."""
    clients = quadratic_clients(1, noise=1.0)
    start = penalized_solution(clients, 0.01)
    for method in (F2sa(penalty=0.01, schedule="constant"), MemFbo(penalty=0.01)):
        spread = []
        for shared in (True, False):
            once = replace(method, shared_sample=shared, batch=1, local_steps=1, upper_step=1e-6)
            moves = []
            for number in range(1, 100):
                fed = federation(clients)
                moves.append(once.round(once.init(fed.at(0), start), fed.at(number)).point[:3] - start[:3])
            spread.append(np.std(moves))
        assert spread[1] > 5 * spread[0]


# -- second order -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("terms", [0, 3, 10, 40])
@pytest.mark.parametrize("svrg", [True, False])
def test_fednest_ends_where_its_truncated_series_leads(terms, svrg):
    state, factor = limit(replace(NEST, neumann_terms=terms, svrg=svrg), CLIENTS)
    assert factor < 1
    assert distance(state.point, truncated_solution(CLIENTS, 0.5, terms)) < 1e-12
    assert (distance(state.point, bilevel_solution(CLIENTS)) < 1e-6) == (terms == 40)


def test_corrected_local_steps_are_exact_and_others_drift():
    """Quadratics: the correction makes y a fixed point of every client's steps, where the mean gradient is zero."""
    expected = truncated_solution(CLIENTS, 0.5, 10)
    common = {"neumann_terms": 10, "local_steps": 3, "upper_local_steps": 3, "lower_rounds": 2, "upper_step": 0.05}
    exact, _ = limit(replace(NEST, **common), CLIENTS)
    assert distance(exact.point, expected) < 1e-11
    drifting, _ = limit(replace(NEST, svrg=False, **common), CLIENTS)
    assert distance(drifting.point, expected) > 0.02


def test_a_long_series_is_the_hypergradient_and_that_the_slope_of_the_ridges_objective():
    """x moves by ``-upper_step`` times the derivative that finite differences of exact ridge solutions find."""
    clients = ridge_clients(3)
    method = replace(NEST, lower_rounds=400, neumann_terms=400, lower_step=0.3, neumann_step=0.3, upper_step=1e-3)
    for x in (-1.0, 0.5):
        point = np.array([x, 0, 0, 0])
        moved = solve(method, federation(clients), 1, point).point
        slope = slope_at(lambda each: ridge_objective(clients, each), x)
        assert abs(slope) > 1e-3
        assert (x - moved[0]) / 1e-3 == pytest.approx(slope, abs=1e-7)


@pytest.mark.parametrize("chain", ["permutation", "uniform"])
@pytest.mark.parametrize("series", ["sampled", "full"])
def test_relayed_products_give_the_series_of_the_mean_hessian_in_the_mean(chain, series):
    """400 estimates at one point: five standard errors, around ``eta sum_{n < N} (I - eta H)^n`` of the mean H."""
    fed, q, terms = federation(CLIENTS), mean_of(CLIENTS), 4
    rng = np.random.default_rng(3)
    x, y = rng.standard_normal(3), rng.standard_normal(4)
    P = 0.5 * sum(np.linalg.matrix_power(np.eye(4) - 0.5 * q.H, n) for n in range(terms))
    exact = q.R @ x + q.e - q.C @ P @ (y - q.b)
    method = FedMbo(chain=chain, series=series, neumann_terms=terms, neumann_step=0.5)
    found = []
    for number in range(1, 401):
        there = fed.at(number)
        found.append(there.mean(method.hypergradients(there, x, y)))
    error = np.std(found, axis=0, ddof=1) / np.sqrt(len(found))
    assert (error > 0).all()
    assert (np.abs(np.mean(found, axis=0) - exact) < 5 * error).all()


def test_the_whole_series_varies_less_than_a_random_term_and_is_exact_for_equal_clients():
    spreads = []
    for series in ("sampled", "full"):
        fed, method = federation(CLIENTS), FedMbo(series=series, neumann_terms=4, neumann_step=0.5)
        found = []
        for number in range(1, 100):
            there = fed.at(number)
            found.append(there.mean(method.hypergradients(there, START[:3], START[3:])))
        spreads.append(np.std(found, axis=0).sum())
    assert spreads[1] < spreads[0] / 2
    nest = FedMbo(**{**_options(NEST), "neumann_terms": 11}, series="full")
    state, factor = limit(nest, EQUAL)
    assert factor < 1
    assert distance(state.point, truncated_solution(EQUAL, 0.5, 10)) < 1e-12


def _options(method):
    return {name: value for name, value in vars(method).items() if name != "svrg"}


def test_the_relay_changes_no_bit_with_ranks():
    for chain in ("permutation", "uniform"):
        method = FedMbo(chain=chain, neumann_terms=4, participants=3, batch=2)
        clients = quadratic_clients(5, noise=0.3)

        def run(comm, clients=clients, method=method):
            fed = Federation(5, Streams(0), comm).build(lambda client, rng: clients[client])
            return solve(method, fed, 3, START).point.tobytes()

        alone = run(Federation(1).communicator)
        assert on_ranks(2, run) == [alone] * 2
        assert on_ranks(3, run) == [alone] * 3


def test_localbsgvrm_is_biased_by_its_local_inverses():
    """It ends where each client's own inverse leads, far from the solution; for equal clients there is no bias."""
    state, factor = limit(LOCAL, CLIENTS)
    assert factor < 1
    assert distance(state.point, locally_inverted_solution(CLIENTS)) < 1e-11
    assert distance(state.point, bilevel_solution(CLIENTS)) > 0.1
    assert distance(limit(LOCAL, EQUAL)[0].point, bilevel_solution(EQUAL)) < 1e-11


def test_fedbioacc_solves_the_bilevel_problem_and_its_auxiliary_one():
    state, factor = limit(BIO, CLIENTS)
    assert factor < 1
    exact, q = bilevel_solution(CLIENTS), mean_of(CLIENTS)
    assert distance(state.point, exact) < 1e-12
    np.testing.assert_allclose(BIO.outputs(state)["auxiliary"], np.linalg.solve(q.H, exact[3:] - q.b), atol=1e-12)


def test_a_radius_that_is_large_enough_changes_nothing_and_a_small_one_bounds_the_auxiliary_variable():
    fed = federation(CLIENTS)
    free, wide, tight = (solve(replace(BIO, radius=radius), fed, 60, START) for radius in (None, 100.0, 0.1))
    np.testing.assert_array_equal(free.point, wide.point)
    assert np.linalg.norm(free.auxiliary) > 0.5
    assert np.linalg.norm(tight.auxiliary) <= 0.1 + 1e-12


def test_falling_steps_of_fedbioacc():
    """While x hardly moves, y takes gradient steps of these lengths towards y*(x)."""
    client = EQUAL[0]
    method = FedBioAcc(local_steps=2, upper_step=1e-12, lower_step=0.3, third_root_decay=5.0)
    y = solve(method, federation([client]), 3, START).point[3:]
    exact, expected = lower_solution([client], START[:3]), START[3:]
    for t in range(6):
        expected = expected - 0.3 * (1 + t / 5) ** (-1 / 3) * client.H @ (expected - exact)
    np.testing.assert_allclose(y, expected, atol=1e-9)


# -- several local steps ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [PENALIZED["f2sa"], PENALIZED["memfbo"], BIO, LOCAL])
def test_for_equal_clients_local_steps_do_not_matter(method):
    points = [solve(replace(method, local_steps=tau), federation(EQUAL), 12 // tau, START).point for tau in (1, 3, 4)]
    assert distance(points[0], START) > 0.1
    for point in points[1:]:
        np.testing.assert_allclose(point, points[0], rtol=0, atol=1e-13)


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        *((PENALIZED[name], penalized_solution(CLIENTS, RHO)) for name in PENALIZED),
        (BIO, bilevel_solution(CLIENTS)),
        (LOCAL, locally_inverted_solution(CLIENTS)),
    ],
)
def test_local_steps_of_different_clients_are_off_in_proportion_to_the_steps(method, expected):
    errors = []
    for factor in (0.02, 0.002):
        names = [name for name in ("upper_step", "lower_step", "auxiliary_step") if hasattr(method, name)]
        steps = {name: factor * getattr(method, name) for name in names}
        errors.append(distance(limit(replace(method, local_steps=4, **steps), CLIENTS)[0].point, expected))
    assert 0 < errors[0] < 0.1
    assert errors[0] / errors[1] == pytest.approx(10, rel=0.1)


@pytest.mark.parametrize("method", [NEST, FedMbo(), PENALIZED["f2sa"], PENALIZED["memfbo"]])
def test_some_clients_of_methods_without_client_state(method):
    """Equal ones: who takes part does not matter. Others: it does."""
    for clients, same in ((EQUAL, True), (CLIENTS, False)):
        fed = federation(clients)
        everyone = solve(replace(method, participants=4), fed, 3, START).point
        some = solve(replace(method, participants=2), fed, 3, START).point
        assert fed.ledger.participants == 2
        if not isinstance(method, FedMbo) or not same:
            assert np.allclose(everyone, some, rtol=0, atol=1e-13) == same


def test_noise_averages_out():
    """From the solution, small steps on single samples stay near it."""
    clients = quadratic_clients(4, noise=0.3)
    start = bilevel_solution(clients)
    for method in (replace(BIO, upper_step=0.02), replace(NEST, neumann_terms=20, upper_step=0.02)):
        found = solve(replace(method, batch=1, lower_step=0.02, local_steps=1), federation(clients), 60, start).point
        assert 0 < distance(found, start) < 0.2
    assert hypergradient(clients, start[:3]) == pytest.approx(0, abs=1e-12)


# -- messages ---------------------------------------------------------------------------------------------------------

DX, DY = 11, 101


@pytest.mark.parametrize(
    ("method", "upper", "lower"),
    [
        (F2sa(inner=2), 1, 2),
        (F2bsa(inner=5), 1, 2),
        (F2bsa(variance_reduced=True), 4, 5),
        (MemFbo(), 1, 2),
        (FedNest(lower_rounds=3, neumann_terms=4), 2, 2 * 3 + 1 + 4),
        (FedNest(lower_rounds=3, neumann_terms=4, svrg=False), 2, 3 + 1 + 4),
        (FedMbo(lower_rounds=3, neumann_terms=4, series="full"), 2, 3 + 4),
        (FedMbo(lower_rounds=3, neumann_terms=1), 2, 3 + 1),
        (LocalBsgvrm(), 2, 2),
        (FedBioAcc(), 2, 4),
    ],
)
def test_the_reals_that_a_round_sends(method, upper, lower):
    clients = quadratic_clients(3, upper=DX, lower=DY)
    assert floats_a_round(method, clients, rounds=2) == upper * DX + lower * DY


def test_a_relay_of_random_length_sends_as_much_in_the_mean():
    """``1 + J`` vectors with J uniform in 0 .. 4: mean 3, standard error of 200 rounds 0.1."""
    sent = (floats_a_round(FedMbo(neumann_terms=5), quadratic_clients(2), rounds=200) - 2 * 3) / 4 - 1
    assert sent == pytest.approx(3, abs=0.4)


@pytest.mark.parametrize(
    ("method", "gradients", "products"),
    [
        (F2sa(inner=2, local_steps=3), 3 * (3 * 2 + 3), 0),
        (F2bsa(inner=5, local_steps=3), 3 * (3 * 5 + 3), 0),
        (F2bsa(variance_reduced=True, local_steps=3), 3 * 6, 0),
        (MemFbo(local_steps=3), 3 * 3, 0),
        (FedNest(lower_rounds=2, local_steps=1, upper_local_steps=1, neumann_terms=4), 2 + 1, 4 + 1),
        (FedMbo(lower_rounds=2, local_steps=3, upper_local_steps=1, neumann_terms=4, series="full"), 2 * 3 + 5, 3 + 1),
        (LocalBsgvrm(local_steps=3, neumann_terms=4), 3 * (2 + 2), 3 * 2 * (4 + 1)),
        (FedBioAcc(local_steps=3), 3 * (2 + 2), 3 * (2 + 2)),
    ],
)
def test_the_oracles_that_a_round_asks(method, gradients, products):
    """Of joint gradients, and of products with second derivatives, a client in a round."""
    fed = federation(CLIENTS)
    counted = federation([replace(client, count=fed.ledger.count) for client in CLIENTS])
    state = method.init(counted.at(0), START)
    before = dict(fed.ledger.work)
    method.round(state, counted.at(1))
    work = {name: (fed.ledger.work[name] - before[name]) / 4 for name in before}
    assert (work["gradients"], work["hessian_products"]) == (gradients, products)
