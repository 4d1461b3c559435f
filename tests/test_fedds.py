"""FedDS-BVRFO and FedSVRBGD-FO against closed forms: the penalized solution, and what averaging does to it."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields, replace

import numpy as np
import pytest
from bilevel_problems import (
    QuadraticClient,
    bilevel_solution,
    federation,
    floats_a_round,
    hypergradient,
    limit,
    lower_solution,
    mean_of,
    penalized_ridge_objective,
    penalized_solution,
    quadratic_clients,
    rank_deficient_clients,
    ridge_clients,
    ridge_objective,
    slope_at,
    solve,
)

from hpcfed import registry
from hpcfed.algorithms import bilevel
from hpcfed.algorithms.fedds import FedDs
from hpcfed.algorithms.fedsvrbgd import FedSvrbgd
from hpcfed.capabilities import Bilevel
from hpcfed.federation import PerClient

CLIENTS = quadratic_clients(4)
START = np.zeros(7)
RHO = 0.1
FAST = {"alpha_p": 1.0, "alpha_q": 1.0, "alpha_r": 1.0}


def distance(a, b):
    return float(np.linalg.norm(a - b))


# -- the problems that the methods are tested on ----------------------------------------------------------------------


@pytest.mark.parametrize("make", [quadratic_clients, ridge_clients, rank_deficient_clients])
def test_the_problems_derivatives_are_slopes_of_their_values(make):
    """Central differences, of values and of gradients."""
    client, h = make(2)[1], 1e-5
    assert isinstance(client, Bilevel)
    rng = np.random.default_rng(1)
    (x, a), (y, v) = (rng.standard_normal((2, size)) for size in (client.upper_size, client.lower_size))
    for value, gradients in (
        (client.upper_value, client.upper_gradients),
        (client.lower_value, client.lower_gradients),
    ):
        in_x, in_y = gradients(x, y, None)
        assert (value(x + h * a, y) - value(x - h * a, y)) / (2 * h) == pytest.approx(in_x @ a, abs=1e-8)
        assert (value(x, y + h * v) - value(x, y - h * v)) / (2 * h) == pytest.approx(in_y @ v, abs=1e-8)
    up, down = client.lower_gradients(x, y + h * v, None), client.lower_gradients(x, y - h * v, None)
    np.testing.assert_allclose((up[0] - down[0]) / (2 * h), client.lower_cross_product(x, y, None, v), atol=1e-8)
    np.testing.assert_allclose((up[1] - down[1]) / (2 * h), client.lower_hessian_product(x, y, None, v), atol=1e-8)


def test_the_closed_forms_of_the_bilevel_problem():
    rng, h = np.random.default_rng(1), 1e-4
    x, a = rng.standard_normal((2, 3))
    values = [mean_of(CLIENTS).upper_value(each, lower_solution(CLIENTS, each)) for each in (x + h * a, x - h * a)]
    assert (values[0] - values[1]) / (2 * h) == pytest.approx(hypergradient(CLIENTS, x) @ a, abs=1e-8)
    np.testing.assert_allclose(hypergradient(CLIENTS, bilevel_solution(CLIENTS)[:3]), 0, atol=1e-12)


def test_the_closed_form_of_the_penalty_form():
    """All partial derivatives of ``f(x, y) + (g(x, y) - g(x, z)) / rho`` vanish."""
    solution, q = penalized_solution(CLIENTS, RHO), mean_of(CLIENTS)
    x, y = solution[:3], solution[3:]
    slope = bilevel.derivatives(q, bilevel.Samples(None, None, None), x, y, lower_solution(CLIENTS, x))
    np.testing.assert_allclose(RHO * slope.u1 + slope.u2 - slope.u3, 0, atol=1e-12)
    np.testing.assert_allclose(RHO * slope.v1 + slope.v2, 0, atol=1e-12)
    np.testing.assert_allclose(slope.w, 0, atol=1e-12)


def test_the_penalized_solution_is_off_in_proportion_to_rho():
    exact = bilevel_solution(CLIENTS)
    errors = [distance(penalized_solution(CLIENTS, rho)[:3], exact[:3]) for rho in (1e-3, 1e-4)]
    assert errors[0] / errors[1] == pytest.approx(10, rel=0.01)


# -- one local step: exact --------------------------------------------------------------------------------------------

EXACT = [
    FedDs(penalty=RHO, local_steps=1, common_step=0.3, **FAST),
    FedDs(penalty=RHO, local_steps=1, common_step=0.3, sync="combined", **FAST),
    FedSvrbgd(penalty=RHO, local_steps=1, common_step=0.3),
]


@pytest.mark.parametrize("method", EXACT)
def test_one_local_step_solves_the_penalty_form(method):
    expected = penalized_solution(CLIENTS, RHO)
    found = solve(method, federation(CLIENTS), 850, START).point
    assert distance(found, expected) < 1e-10
    assert distance(found, bilevel_solution(CLIENTS)) > 0.05


@pytest.mark.parametrize("method", EXACT[::2])
def test_what_it_finds_is_off_in_proportion_to_rho(method):
    exact = bilevel_solution(CLIENTS)
    errors = [distance(limit(replace(method, penalty=rho), CLIENTS)[0].point, exact) for rho in (1e-2, 1e-3)]
    assert errors[0] / errors[1] == pytest.approx(10, rel=0.05)


@pytest.mark.parametrize("smoothing", [0.0, 0.5, 2.0])
@pytest.mark.parametrize("smoothing_z", [None, 1.0])
def test_smoothing_does_not_move_the_solution(smoothing, smoothing_z):
    """And the points that follow arrive: p = x, q = y and r = z."""
    options = {"smoothing": smoothing, "smoothing_z": smoothing_z, **FAST}
    state, factor = limit(FedDs(penalty=RHO, local_steps=1, common_step=0.2, **options), CLIENTS)
    assert factor < 1
    expected = penalized_solution(CLIENTS, RHO)
    np.testing.assert_allclose(state.point, expected, atol=1e-11)
    z = lower_solution(CLIENTS, expected[:3])
    np.testing.assert_allclose(state.rest, np.concatenate([z, expected, z]), atol=1e-11)


def test_smoothing_by_points_that_hardly_follow_delays():
    """As the theory's alpha_p, alpha_q and alpha_r would."""
    factors = [
        limit(FedDs(penalty=RHO, local_steps=1, common_step=0.2, alpha_p=a, alpha_q=a, alpha_r=a), CLIENTS)[1]
        for a in (1e-5, 0.1, 1.0)
    ]
    assert 1 - factors[0] < 1e-5 < 1e-3 < 1 - factors[1] < 1 - factors[2]


def test_a_badly_conditioned_lower_level():
    H = np.array([[0.01]])
    one = np.ones((1, 1))
    clients = [QuadraticClient(H * k, 0.01 * one, 0.01 * one[0], one[0] * k, one, one[0]) for k in (0.5, 1.5)]
    for method in EXACT:
        state, factor = limit(replace(method, penalty=1e-3), clients)
        assert factor < 1
        np.testing.assert_allclose(state.point, penalized_solution(clients, 1e-3), atol=1e-9)


def test_many_lower_solutions():
    """``g(x, .)`` is not strongly convex. ``min_z g`` is still defined: z gives the projection on the range of A."""
    clients = rank_deficient_clients(2)
    A, B = (np.vstack([getattr(c, name) for c in clients]) / np.sqrt(2) for name in "AB")
    b, c = (np.mean([getattr(client, name) for client in clients], axis=0) for name in "bc")
    assert np.linalg.matrix_rank(A) < A.shape[1]
    residual = np.hstack([-A @ np.linalg.pinv(A) @ B, A])
    expected = np.linalg.solve(np.eye(6) + residual.T @ residual / RHO, np.concatenate([c, b]))
    for method in (EXACT[0], EXACT[2]):
        found = solve(method, federation(clients), 1000, np.zeros(6)).point
        assert distance(found, expected) < 1e-5


def test_the_weight_of_a_ridge():
    """f does not depend on x: x learns from the difference of two gradients of g alone."""
    clients, rho = ridge_clients(2), 0.05
    method = FedDs(penalty=rho, local_steps=1, common_step=0.5, alpha_x=0.4 / rho, smoothing=0.0)
    x = solve(method, federation(clients), 600, np.zeros(4)).point[0]
    at_start, found = (slope_at(lambda each: penalized_ridge_objective(clients, each, rho), at) for at in (0.0, x))
    assert abs(at_start) > 0.01
    assert abs(found) < 1e-5
    assert 1e-4 < abs(slope_at(lambda each: ridge_objective(clients, each), x)) < abs(at_start) / 3


# -- several local steps, and what is averaged ------------------------------------------------------------------------


def test_averaging_combined_estimates_fails_where_clients_differ():
    """The published rule averages ``u = rho u1 + u2 - u3``, v and w; the next u is made of the client's own u1, u2, u3.

    Between two averages the clients' own y and z drift apart, each as its own estimates say. ``u2 - u3 = C_i (y_i -
    z_i)`` is then of the size of the drift, not of rho; x follows it at rate 1 while the signal is of size rho, so the
    error grows as rho falls, and at steps that components bear the iteration even diverges. Averaged components drift
    only as any local method does.
    """
    common = {"penalty": 0.03, "local_steps": 4, "smoothing": 0.0}
    expected = penalized_solution(CLIENTS, 0.03)
    for step, most, least in ((0.02, 0.02, 0.2), (0.05, 0.05, 1.0)):
        components, factor = limit(FedDs(common_step=step, **common), CLIENTS)
        assert factor < 1
        assert distance(components.point, expected) < most
        combined, factor = limit(FedDs(common_step=step, sync="combined", **common), CLIENTS)
        assert distance(combined.point, expected) > least
    assert factor > 1, "the last one diverges"


def test_the_error_of_averaging_combined_estimates_grows_as_the_penalty_does():
    errors = []
    for rho in (0.1, 0.03):
        method = FedDs(penalty=rho, local_steps=4, common_step=0.02, smoothing=0.0, sync="combined")
        errors.append(distance(limit(method, CLIENTS)[0].point, penalized_solution(CLIENTS, rho)))
    assert errors[1] > 3 * errors[0]


@pytest.mark.parametrize("smoothing", [0.0, 1.0])
def test_local_steps_of_different_clients_are_off_in_proportion_to_the_step(smoothing):
    expected = penalized_solution(CLIENTS, RHO)
    errors = []
    for step in (2e-2, 2e-3):
        method = FedDs(penalty=RHO, local_steps=4, common_step=step, smoothing=smoothing, **FAST)
        errors.append(distance(limit(method, CLIENTS)[0].point, expected))
    assert 0 < errors[0] < 0.02
    assert errors[0] / errors[1] == pytest.approx(10, rel=0.05)


@pytest.mark.parametrize("kind", [FedDs, FedSvrbgd])
def test_for_equal_clients_neither_local_steps_nor_what_is_averaged_matters(kind):
    """Which is why it cannot be seen on data that are dealt out at random."""
    clients = quadratic_clients(4, identical=True)
    points = [
        solve(kind(penalty=RHO, local_steps=tau, sync=sync), federation(clients), 12 // tau, START).point
        for tau in (1, 3, 4)
        for sync in ("components", "combined")
    ]
    assert distance(points[0], START) > 0.1
    for point in points[1:]:
        np.testing.assert_allclose(point, points[0], rtol=0, atol=1e-14)


def test_without_smoothing_it_is_fedsvrbgd():
    """Whose steps are rho times as long, as its directions are 1/rho as long; on noise as well."""
    clients = quadratic_clients(4, noise=0.3)
    shared = {"penalty": RHO, "local_steps": 3, "batch": 2, "common_step": 0.1, "storm_weight": 0.3}
    for sync in ("components", "combined"):
        smooth = FedDs(alpha_x=0.5, alpha_y=1.0, alpha_z=0.8, smoothing=0.0, sync=sync, **shared)
        scaled = FedSvrbgd(alpha_x=0.5 * RHO, alpha_y=RHO, alpha_z=0.8 * RHO, sync=sync, **shared)
        ours, theirs = (solve(method, federation(clients), 20, START) for method in (smooth, scaled))
        np.testing.assert_allclose(ours.point, theirs.point, atol=1e-12)
        np.testing.assert_allclose(ours.rest[:4], theirs.rest, atol=1e-12)
    default, scaled = FedDs(smoothing=0.0), FedSvrbgd()
    ours, theirs = (solve(method, federation(clients), 20, START).point for method in (default, scaled))
    np.testing.assert_allclose(ours, theirs, atol=1e-12)


# -- samples ----------------------------------------------------------------------------------------------------------


class Noting(QuadraticClient):
    """Notes the sample and the point of each gradient."""

    def upper_gradients(self, x, y, sample):
        self.asked.append(("upper", sample.tobytes()))
        return super().upper_gradients(x, y, sample)

    def lower_gradients(self, x, y, sample):
        self.asked.append(("lower", sample.tobytes()))
        return super().lower_gradients(x, y, sample)


@pytest.mark.parametrize("kind", [FedDs, FedSvrbgd])
def test_a_step_takes_six_joint_gradients_of_two_samples(kind):
    """f at two points, g at y and at z at two points, with one sample of each."""
    client = Noting(*(getattr(CLIENTS[0], name) for name in "HCdbRe"), noise=0.3)
    object.__setattr__(client, "asked", [])
    fed, method = federation([client]), kind(local_steps=5, batch=2)
    state = (
        method.init(fed.at(0), START) if method.start_batch else replace(method, start_batch=2).init(fed.at(0), START)
    )
    client.asked.clear()
    method.round(state, fed.at(1))
    counts = Counter(client.asked)
    assert sorted((level, times) for (level, _), times in counts.items()) == [("lower", 4)] * 5 + [("upper", 2)] * 5


def test_one_sample_cancels_in_the_difference_of_gradients_and_two_do_not():
    client, rng = quadratic_clients(1, noise=1.0)[0], np.random.default_rng(0)
    x, y = rng.standard_normal(3), rng.standard_normal(4)
    for shared in (True, False):
        slope = bilevel.derivatives(client, bilevel.draw(client, rng, 1, shared=shared), x, y, y)
        assert (distance(slope.u2, slope.u3) == 0) == shared


def test_storm_keeps_an_exact_estimate_exact_and_forgets_what_it_should():
    rng = np.random.default_rng(0)
    old, new, error = rng.standard_normal((3, 5))
    np.testing.assert_allclose(bilevel.storm(old, new, old, 0.3), new)
    np.testing.assert_allclose(bilevel.storm(old + error, new, old, 0.3), new + 0.7 * error)
    np.testing.assert_array_equal(bilevel.storm(error, new, old, 1.0), new)


def test_estimates_of_a_small_weight_are_less_noisy():
    """From the solution, with small steps: what remains is the noise, which a small theta averages."""
    clients = quadratic_clients(2, noise=0.5)
    fed, solution = federation(clients), penalized_solution(clients, RHO)
    spreads = []
    for weight in (1.0, 0.05):
        method = FedSvrbgd(penalty=RHO, local_steps=1, batch=1, common_step=0.02, storm_weight=weight)
        state, found = method.init(fed.at(0), solution), []
        for number in range(1, 300):
            state = method.round(state, fed.at(number))
            found.append(state.estimates)
        spreads.append(np.std(found[100:], axis=0).sum())
    assert spreads[1] < spreads[0] / 2


# -- messages and state -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "sync", "upper", "lower"),
    [
        (FedDs, "components", 5, 7),
        (FedDs, "combined", 3, 6),
        (FedSvrbgd, "components", 4, 5),
        (FedSvrbgd, "combined", 2, 4),
    ],
)
def test_the_reals_that_a_synchronization_sends(kind, sync, upper, lower):
    clients = quadratic_clients(3, upper=11, lower=101)
    assert floats_a_round(kind(sync=sync), clients, rounds=2) == upper * 11 + lower * 101


def test_only_averaged_components_leave_the_clients_without_a_state():
    for sync, kept in (("components", 0), ("combined", 4)):
        state = solve(FedDs(sync=sync), federation(CLIENTS), 1, START)
        assert isinstance(state.own, PerClient)
        assert len(state.own) == kept


def test_no_client_may_sit_out_a_round_of_a_method_that_keeps_estimates():
    """Estimates that every round corrects would be of another point."""
    for name in ("fedds", "fedsvrbgd", "f2bsa", "localbsgvrm", "fedbioacc"):
        assert "participants" not in {each.name for each in fields(registry.load("algorithm", name))}
