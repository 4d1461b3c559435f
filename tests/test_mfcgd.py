"""MFCGD and AdaMFCGD against closed forms, and against Algorithm 1 written out for one process."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from composition_problems import (
    Adapted,
    Affine,
    Composition,
    Robust,
    federation,
    global_solution,
    local_solution,
    random_affine,
    solve,
)

from hpcfed import config
from hpcfed.algorithms.adamfcgd import AdaMfcgd
from hpcfed.algorithms.mfcgd import Mfcgd
from hpcfed.errors import ConfigError
from hpcfed.federation import PerClient

CLIENTS = random_affine(5)
START = np.zeros(4)
CONSTANT: dict[str, Any] = {"rate": 0.3, "rate_delay": 1e15}
MODES = ["exact", "product", "beta1", "replay"]


def error(method: Mfcgd, rounds: int, clients: list[Any] = CLIENTS) -> float:
    return float(np.linalg.norm(solve(method, clients, rounds, START).x - local_solution(clients)))


@pytest.mark.parametrize("mode", MODES)
def test_unequal_clients_are_exact_with_one_local_step(mode):
    assert error(Mfcgd(local_steps=1, jacobian=mode, **CONSTANT), 200) < 1e-10


@pytest.mark.parametrize("matrix", ["adam", "norm"])
@pytest.mark.parametrize("first", ["allreduce", "identity"])
def test_the_adaptive_method_is_exact_too(matrix, first):
    """As the slopes vanish the matrix falls to rho, so the steps end as ``rate / rho`` long."""
    method = AdaMfcgd(local_steps=1, matrix=matrix, first_matrix=first, rate=0.02, rate_delay=1e15, matrix_floor=0.1)
    assert error(method, 400) < 1e-10


def test_equal_clients_are_exact_with_any_number_of_local_steps():
    assert error(Mfcgd(local_steps=4, **CONSTANT), 150, CLIENTS[:1] * 2) < 1e-10


def test_the_inner_maps_are_the_clients_own():
    """The problem with the mean of the maps inside has its solution elsewhere; averaging estimates finds neither."""
    one, other = local_solution(CLIENTS), global_solution(CLIENTS)
    assert np.linalg.norm(one - other) > 0.3
    np.testing.assert_allclose(solve(Mfcgd(local_steps=1, **CONSTANT), CLIENTS, 200, START).x, one, atol=1e-10)
    found = solve(Mfcgd(local_steps=1, average_estimators=True, **CONSTANT), CLIENTS, 200, START).x
    assert min(np.linalg.norm(found - each) for each in (one, other)) > 0.1


def test_the_inner_maps_in_one_dimension():
    """``g = x - a``, ``f = D y^2 / 2``: at ``sum D a / sum D``, not at ``mean a``."""
    a, D = np.array([1.0, 2, 6]), np.array([3.0, 1, 1])
    clients = [Affine(A=np.eye(1), b=-a[i : i + 1], c=np.zeros(1), D=D[i : i + 1, None]) for i in range(3)]
    assert solve(Mfcgd(local_steps=1, **CONSTANT), clients, 300, np.zeros(1)).x[0] == pytest.approx(11 / 5, abs=1e-12)


def test_unequal_clients_drift_by_the_step_with_many_local_steps():
    large, twice, once = (
        error(Mfcgd(local_steps=5, rate=rate, rate_delay=1e15), int(5 / rate)) for rate in (0.1, 0.02, 0.01)
    )
    assert large > 2 * twice > 0.01
    assert once == pytest.approx(twice / 2, rel=0.1)


def test_a_decreasing_step_removes_the_drift():
    """After 300 rounds of 5 steps a step is ``(126/1625)^(1/3) = 0.43`` of the first."""
    assert error(Mfcgd(rate=0.1), 300) < 0.5 * error(Mfcgd(rate=0.1, rate_delay=1e15), 300)


def test_correcting_from_the_average_is_worse():
    """The clients' estimates are of their own points, and so are wrong at the average by the drift."""
    own, average = (
        error(Mfcgd(local_steps=5, rate=0.2, rate_delay=100, old_point=point), 300) for point in ("own", "average")
    )
    assert average > 1.5 * own
    exact, same = (error(Mfcgd(local_steps=1, old_point=point, **CONSTANT), 200) for point in ("own", "average"))
    assert max(exact, same) < 1e-10


def test_averaging_estimates_leaves_an_error_of_its_own():
    for steps in (1, 5):
        method = Mfcgd(local_steps=steps, rate=0.1 / steps, rate_delay=1e15, average_estimators=True)
        assert error(method, 150) > 3 * error(replace(method, average_estimators=False), 150)


# -- Algorithm 1, in the paper's order ------------------------------------------------------------------------------


def algorithm_1(clients: list[Composition], method: Mfcgd, steps: int, start: np.ndarray) -> np.ndarray:
    """t = 1 .. steps for one process, with the matrices of AdaMFCGD where the method is that."""
    q, everyone = method.local_steps, range(len(clients))
    n = max(2, q**3) if method.rate_delay is None else method.rate_delay
    k = method.rate * (n + 1) ** (1 / 3)
    weights = [0.5 / method.rate**2 if c is None else c for c in (method.c1, method.c2, method.c3)]
    adaptive = isinstance(method, AdaMfcgd)

    def project(value, radius):
        return value if radius is None else value * min(1.0, radius / np.linalg.norm(value))

    def refresh(a, wbar):
        new = wbar**2 if method.matrix == "adam" else np.linalg.norm(wbar)
        a = method.matrix_memory * a + (1 - method.matrix_memory) * new
        return a, (np.sqrt(a) if method.matrix == "adam" else a) + method.matrix_floor

    def sampled(m, size):
        return clients[m].draw_inner(None, size), clients[m].draw_outer(None, size)

    x = [start.copy() for _ in everyone]
    h, u, v = [None] * len(clients), [None] * len(clients), [None] * len(clients)
    for m in everyone:
        zeta, xi = sampled(m, q * method.batch)
        h[m], u[m] = clients[m].inner(x[m], zeta), clients[m].inner_jacobian(x[m], zeta)
        v[m] = clients[m].outer_gradient(h[m], xi)
    w = [u[m].T @ v[m] for m in everyone]
    a, A = 0.0, 1.0
    if adaptive and method.first_matrix == "allreduce":
        a, A = refresh(a, np.mean(w, axis=0))
    for t in range(1, steps + 1):
        eta = k / (n + t) ** (1 / 3)
        if t % q == 0:
            wbar, xbar = np.mean(w, axis=0), np.mean(x, axis=0)
            if adaptive:
                a, A = refresh(a, wbar)
            new = [xbar - method.step_factor * eta * wbar / A for _ in everyone]
        else:
            new = [x[m] - method.step_factor * eta * w[m] / A for m in everyone]
        alpha, beta, varrho = (min(1.0, c * eta**2) for c in weights)
        for m in everyone:
            client = clients[m]
            zeta, xi = sampled(m, method.batch)
            h_old = h[m]
            h[m] = client.inner(new[m], zeta) + (1 - alpha) * (h_old - client.inner(x[m], zeta))
            moved = client.inner_jacobian(new[m], zeta) + (1 - beta) * (u[m] - client.inner_jacobian(x[m], zeta))
            u[m] = project(moved, method.clip_jacobian)
            moved = client.outer_gradient(h[m], xi) + (1 - varrho) * (v[m] - client.outer_gradient(h_old, xi))
            v[m] = project(moved, method.clip_outer)
            w[m] = u[m].T @ v[m]
        x = new
    return x[0]


@pytest.mark.parametrize(
    "method",
    [
        Mfcgd(rate=0.1, batch=2),
        Mfcgd(rate=0.1, batch=2, local_steps=1, rate_delay=20.0),
        Mfcgd(rate=0.1, batch=2, local_steps=3, c1=30.0, c2=70.0, c3=200.0, step_factor=0.5),
        Mfcgd(rate=0.1, batch=2, local_steps=3, clip_outer=0.5, clip_jacobian=1.0),
        AdaMfcgd(rate=0.02, batch=2, local_steps=3),
        AdaMfcgd(rate=0.02, batch=2, local_steps=3, first_matrix="identity", matrix_memory=0.7, matrix_floor=0.3),
        AdaMfcgd(rate=0.02, batch=2, local_steps=3, matrix="norm"),
        AdaMfcgd(rate=0.02, batch=2, local_steps=3, matrix="norm", first_matrix="identity"),
    ],
)
@pytest.mark.parametrize("p", [1, 3])
def test_it_is_algorithm_1(method, p):
    def clients():
        return random_affine(3, p=p, seed=2, noise=0.5, numbered=True)

    found = solve(method, clients(), 4, START).x
    np.testing.assert_allclose(found, algorithm_1(clients(), method, 4 * method.local_steps, START), atol=1e-12)


# -- estimates --------------------------------------------------------------------------------------------------------

ROBUST = [Robust(a=np.array([0.3 * i, -0.2 * i, 1.0]), lam=0.8) for i in range(4)]


def test_all_ways_with_jacobians_agree_on_exact_maps():
    """Jacobians that change: of losses. Two rounds of 3 steps fit into a window of 7."""
    start = np.array([0.5, 0.7, -0.1])
    found = [solve(Mfcgd(local_steps=3, rate=0.1, jacobian=mode, window=7), ROBUST, 2, start).x for mode in MODES]
    for other in found[1:]:
        np.testing.assert_allclose(other, found[0], atol=1e-13)


@pytest.mark.parametrize("length", [1, 3, 50])
def test_a_replayed_jacobian_is_the_recursion_over_the_window(length):
    """From the samples that the seeds draw again: one pass over them in the order of time gives u."""
    weight = 0.3
    method = Mfcgd(
        local_steps=1, batch=2, rate=0.1, rate_delay=1e15, jacobian="replay", window=length, c2=weight / 0.1**2
    )
    clients = random_affine(2, noise=1.0)
    state = solve(method, clients, 8, START)
    for number, own in state.estimates.items():
        window = own.window
        assert len(window.seeds) == min(length, 9)
        u, last = None, None
        for x, seed, size in zip(window.points, window.seeds, window.sizes, strict=True):
            sample = clients[number].draw_inner(np.random.default_rng(int(seed)), int(size))
            fresh = clients[number].inner_jacobian(x, sample)
            if u is not None:
                fresh = fresh + (1 - weight) * (u - clients[number].inner_jacobian(last, sample))
            u, last = fresh, x
        np.testing.assert_allclose(own.w, own.v @ u, atol=1e-12)


def test_fresh_samples_alone_forget_the_past():
    """alpha = beta = varrho = 1: the next estimates do not depend on the last, but for the step that w takes."""
    method = Mfcgd(local_steps=1, batch=2, rate=0.1, c1=1e9, c2=1e9, c3=1e9)
    fed = federation(random_affine(3, noise=0.5))
    state = method.init(fed.at(0), START)
    spoilt = {i: replace(own, h=own.h + 1, u=own.u + 2, v=own.v - 3) for i, own in state.estimates.items()}
    spoilt_state = replace(state, estimates=PerClient(spoilt))
    one, other = (method.round(each, fed.at(1)).estimates for each in (state, spoilt_state))
    for number in one:
        for name in ("h", "u", "v", "w"):
            np.testing.assert_array_equal(getattr(one[number], name), getattr(other[number], name))


def test_no_fresh_samples_carry_errors_along():
    """alpha = beta = 0 and exact maps: what h and u are wrong by at first they stay wrong by; without error, exact."""
    method = Mfcgd(local_steps=3, rate=0.1, c1=0.0, c2=0.0, c3=0.0)
    fed = federation(ROBUST)
    state = method.init(fed.at(0), np.array([0.5, 0.7, -0.1]))
    for shift in (0.0, 0.01):
        moved = PerClient({i: replace(own, h=own.h + shift, u=own.u - shift) for i, own in state.estimates.items()})
        now = replace(state, estimates=moved)
        for number in (1, 2, 3):
            now = method.round(now, fed.at(number))
        assert np.linalg.norm(now.x - state.x) > 0.05
        for number, own in now.estimates.items():
            np.testing.assert_allclose(own.h, ROBUST[number].g(now.x) + shift, atol=1e-13)
            np.testing.assert_allclose(own.u, ROBUST[number].slope(now.x) - shift, atol=1e-13)
            if shift == 0:
                np.testing.assert_allclose(own.v, ROBUST[number].df(own.h), atol=1e-12)


def test_norms_are_clipped():
    options: dict[str, Any] = {"rate": 0.1, "clip_outer": 0.3, "clip_jacobian": 0.6}
    for mode in MODES:
        state = solve(Mfcgd(jacobian=mode, **options), CLIENTS, 2, START)
        free = solve(Mfcgd(jacobian=mode, rate=0.1), CLIENTS, 2, START)
        for number, own in state.estimates.items():
            assert np.linalg.norm(own.v) <= 0.3 * (1 + 1e-12)
            assert np.linalg.norm(own.w) <= 0.18 * (1 + 1e-12) < np.linalg.norm(free.estimates[number].w)
            if mode == "exact":
                assert np.linalg.norm(own.u) == pytest.approx(0.6)


# -- robust losses ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lam", "digits", "found"),
    [(100, 4, 0.3337), (1, 5, 0.36417), (0.5, 5, 0.38584), (0.1, 5, 0.45054), (0.05, 5, 0.47112)],
)
def test_robust_losses_in_one_dimension(lam, digits, found):
    """At ``sum p a``, p proportional to ``exp(l(x) / lam)``: between the mean 1/3 and the middle 1/2 of 0, 0, 1."""
    clients = [Robust(a=np.array([a]), lam=lam, shift=0.1) for a in (0.0, 0.0, 1.0)]
    method = Mfcgd(local_steps=1, rate=0.7 / (1 / lam + 0.3 / lam**2), rate_delay=1e15)
    x = solve(method, clients, 500, np.array([0.4])).x[0]
    losses = np.array([each.g(np.array([x]))[0] for each in clients])
    p = np.exp(losses / lam) / np.exp(losses / lam).sum()
    assert x == pytest.approx(p[2], abs=1e-8)
    assert round(x, digits) == found


@pytest.mark.parametrize("lam", [10, 1, 0.2])
def test_two_robust_losses_meet_in_the_middle(lam):
    clients = [Robust(a=np.array([a]), lam=lam, shift=0.5) for a in (-1.0, 1.0)]
    method = Mfcgd(local_steps=1, rate=0.5 / (1 / lam + 1 / lam**2), rate_delay=1e15)
    assert solve(method, clients, 400, np.array([0.3])).x[0] == pytest.approx(0, abs=1e-10)


def test_the_first_step_is_along_the_gradient_of_the_robust_objective():
    """``lam log mean exp(l/lam)``, by central differences, and whatever the shift common to all clients."""
    lam, x = 0.4, np.array([0.5, 0.7, -0.1])

    def objective(x):
        return lam * np.log(np.mean([np.exp(each.g(x)[0] / lam) for each in ROBUST]))

    gradient = np.array([objective(x + 1e-5 * e) - objective(x - 1e-5 * e) for e in np.eye(3)]) / 2e-5
    for shift in (0.0, 5.0):
        clients = [replace(each, lam=lam, shift=shift) for each in ROBUST]
        step = x - solve(Mfcgd(local_steps=1), clients, 1, x).x
        np.testing.assert_allclose(step / np.linalg.norm(step), gradient / np.linalg.norm(gradient), atol=1e-8)


# -- cost, messages, limits -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "p", "expected"),
    [
        ("exact", 3, {"inner": 2, "inner_jacobian": 2, "outer_gradient": 2}),
        ("exact", 1, {"inner_pullback": 2, "products": 2, "outer_gradient": 2}),
        ("product", 3, {"inner_pullback": 2, "products": 2, "outer_gradient": 2}),
        ("beta1", 3, {"inner": 1, "inner_pullback": 1, "products": 1, "outer_gradient": 2}),
        ("replay", 3, {"inner_pullback": 5, "products": 5, "outer_gradient": 2}),
    ],
)
def test_a_step_asks_no_more_than_it_must(mode, p, expected):
    clients = random_affine(2, p=p, noise=0.1)
    fed = federation(clients)
    method = Mfcgd(local_steps=4, batch=3, inner_batch=2, jacobian=mode, window=3)
    state = method.init(fed.at(0), START)
    assert clients[0].sizes == [8, 12]
    state = method.round(state, fed.at(1))
    before = Counter(clients[0].calls)
    clients[0].sizes.clear()
    method.round(state, fed.at(2))
    after = Counter(clients[0].calls)
    assert after - before == Counter({name: 4 * times for name, times in expected.items()})
    if mode != "replay":
        assert clients[0].sizes == [2, 3] * 4


def test_the_first_estimates_may_be_of_a_larger_sample():
    clients = random_affine(2, noise=0.1)
    Mfcgd(batch=3, first_batch=100).init(federation(clients).at(0), START)
    assert clients[0].sizes == [100, 100]


def test_the_first_step_has_the_rate_and_later_ones_fall():
    method = Mfcgd(rate=0.3, local_steps=2)
    assert method.eta(1) == 0.3
    assert method.eta(100) == pytest.approx(0.3 * (9 / 108) ** (1 / 3))
    assert Mfcgd(rate=0.3, rate_delay=7.0).eta(57) == pytest.approx(0.15)


@pytest.mark.parametrize("mode", MODES)
def test_a_run_says_what_it_is(mode, caplog):
    with caplog.at_level(logging.INFO):
        Mfcgd(jacobian=mode).init(federation(CLIENTS), START)
        AdaMfcgd(jacobian=mode).init(federation(CLIENTS), START)
    said = [record.getMessage() for record in caplog.records]
    assert [f"--jacobian {mode}" in line for line in said] == [True, True]
    assert ["MFCGD as published" in line for line in said] == [mode == "exact"] * 2


@pytest.mark.parametrize(("size", "mode"), [(1000, "exact"), (1001, "product")])
def test_large_jacobians_are_not_formed_unless_asked_for(size, mode):
    client = Adapted(H=np.eye(size), c=np.ones(size))
    state = Mfcgd().init(federation([client]).at(0), np.zeros(size))
    assert (state.estimates[0].u is not None) == (mode == "exact")
    np.testing.assert_allclose(state.estimates[0].w, client.gradient(np.zeros(size)), atol=1e-13)


@pytest.mark.parametrize("name", ["mfcgd", "adamfcgd"])
def test_clients_that_keep_estimates_all_take_part(name):
    with pytest.raises(ConfigError, match=f"--participants 3: the clients of {name} keep estimates"):
        config.assemble({"workload": "composition_problems:AffineQuadratics", "algorithm": name, "participants": 3})


@pytest.mark.parametrize("options", [{"average_estimators": True}, {"old_point": "average"}])
def test_replaying_does_not_go_with_averages(options):
    with pytest.raises(ConfigError, match="--jacobian replay"):
        Mfcgd(jacobian="replay", **options)


def test_a_jacobian_that_is_too_large_is_refused():
    size = 12000
    large = Adapted(H=np.broadcast_to(1.0, (size, size)), c=np.zeros(size))
    with pytest.raises(ConfigError, match=r"12000 x 12000 numbers a client: use product, beta1 or replay"):
        Mfcgd(jacobian="exact").init(federation([large]), np.zeros(size))
