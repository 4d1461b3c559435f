"""The methods that MFCGD is compared with, against closed forms and against their steps written out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from composition_problems import (
    Composition,
    adapted_clients,
    federation,
    global_solution,
    local_solution,
    random_affine,
    solve,
)

from hpcfed import config
from hpcfed.algorithms.adamfcgd import AdaMfcgd
from hpcfed.algorithms.comfedl import ComFedL
from hpcfed.algorithms.fednest_comp import FedNestComp
from hpcfed.algorithms.localmoml import LocalMoml
from hpcfed.algorithms.localscgd import LocalScgd
from hpcfed.algorithms.localscgdm import LocalScgdm
from hpcfed.algorithms.mfcgd import Mfcgd
from hpcfed.algorithms.per_fedavg import PerFedAvg
from hpcfed.compressors.qsgd import Qsgd
from hpcfed.errors import ConfigError

CLIENTS = random_affine(5)
START = np.zeros(4)
ONE: dict[str, Any] = {"local_steps": 1, "rate": 0.15}
LOCAL = [ComFedL, PerFedAvg, LocalMoml, LocalScgd, LocalScgdm, FedNestComp]
STATELESS = [ComFedL, PerFedAvg, LocalMoml, FedNestComp]


def distance(method: Any, target: np.ndarray, rounds: int = 300) -> float:
    return float(np.linalg.norm(solve(method, CLIENTS, rounds, START).x - target))


# -- which problem is solved ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", LOCAL)
def test_unequal_clients_are_exact_with_one_local_step(method):
    assert distance(method(**ONE), local_solution(CLIENTS), 600) < 1e-10


@pytest.mark.parametrize("method", [*LOCAL[:-1], Mfcgd])
def test_unequal_clients_drift_by_the_step_with_many_local_steps(method):
    options = {"rate_delay": 1e15} if method is Mfcgd else {}
    target = local_solution(CLIENTS)
    twice, once = (distance(method(rate=rate, **options), target, int(5 / rate)) for rate in (0.02, 0.01))
    assert twice > 1e-3
    assert once == pytest.approx(twice / 2, rel=0.15)


@pytest.mark.parametrize(
    ("inner_rounds", "inner_iterations", "value_step"), [(1, 1, 1.0), (1, 2, 0.4), (3, 1, 0.5), (2, 3, 0.2)]
)
def test_fednest_solves_the_problem_of_its_scope(inner_rounds, inner_iterations, value_step):
    """Local steps do not drift: they only multiply the rate."""
    for scope, target in (("local", local_solution(CLIENTS)), ("global", global_solution(CLIENTS))):
        method = FedNestComp(
            scope=scope,
            local_steps=4,
            rate=0.06,
            inner_rounds=inner_rounds,
            inner_iterations=inner_iterations,
            value_step=value_step,
        )
        assert distance(method, target, 400) < 1e-10
    assert np.linalg.norm(global_solution(CLIENTS) - local_solution(CLIENTS)) > 0.3


def test_fednests_inner_value_follows_the_mean_of_the_maps():
    """From the last y it keeps ``(1 - b)`` to the power of all inner steps; the first is the mean itself."""
    method = FedNestComp(scope="global", local_steps=1, rate=0.1, inner_rounds=2, inner_iterations=3, value_step=0.2)
    first, second = (solve(method, CLIENTS, rounds, START) for rounds in (1, 2))

    def mean(x):
        return np.mean([each.g(x) for each in CLIENTS], axis=0)

    np.testing.assert_allclose(first.y, mean(START), atol=1e-13)
    np.testing.assert_allclose(second.y, mean(first.x) + 0.8**6 * (first.y - mean(first.x)), atol=1e-13)


@pytest.mark.parametrize("method", [LocalScgd, LocalScgdm])
def test_averaging_the_inner_values_solves_neither_problem(method):
    found = solve(method(average_u=True, **ONE), CLIENTS, 500, START).x
    assert np.linalg.norm(found - local_solution(CLIENTS)) > 0.1
    assert np.linalg.norm(found - global_solution(CLIENTS)) > 0.1
    again = solve(method(average_u=True, **ONE), CLIENTS, 550, START).x
    np.testing.assert_allclose(again, found, atol=1e-10)


# -- meta-learning ----------------------------------------------------------------------------------------------------


def test_three_points_of_meta_learning_are_told_apart():
    clients = adapted_clients()

    def weighted(weight):
        weights = [weight(each.H, np.eye(2) - each.a * each.H) for each in clients]
        return np.linalg.solve(sum(weights), sum(w @ each.c for w, each in zip(weights, clients, strict=True)))

    exact = weighted(lambda H, keep: keep @ H @ keep)
    first_order = weighted(lambda H, keep: H @ keep)
    plain = weighted(lambda H, keep: H)
    for one, other in ((exact, first_order), (exact, plain), (first_order, plain)):
        assert np.linalg.norm(one - other) > 0.05
    options = {"local_steps": 1, "rate": 0.5}
    for method in (ComFedL(**options), PerFedAvg(**options), LocalMoml(**options), Mfcgd(rate_delay=1e15, **options)):
        np.testing.assert_allclose(solve(method, clients, 250, np.ones(2)).x, exact, atol=1e-10)
    for method in (PerFedAvg(hessian="first_order", **options), LocalMoml(hessian="first_order", **options)):
        found = solve(method, clients, 250, np.ones(2)).x
        np.testing.assert_allclose(found, first_order, atol=1e-10)


@pytest.mark.parametrize("method", [PerFedAvg, LocalMoml])
def test_the_first_order_form_is_for_adapted_models(method):
    with pytest.raises(ConfigError, match="maps 4 numbers to 5: use --hessian exact"):
        method(hessian="first_order").init(federation(CLIENTS), START)


@pytest.mark.parametrize("method", [PerFedAvg, LocalMoml])
def test_the_first_order_form_asks_for_no_products(method):
    clients = adapted_clients()
    solve(method(hessian="first_order"), clients, 1, np.ones(2))
    assert "inner_pullback" not in clients[0].calls
    assert clients[0].calls["outer_gradient"] == 5


# -- the steps, written out -------------------------------------------------------------------------------------------


def noisy() -> list[Composition]:
    return random_affine(3, p=2, seed=2, noise=0.5, numbered=True)


def written_out(step: Any, begin: Any, rounds: int, tau: int) -> np.ndarray:
    """Rounds of ``x, memory = step(client, x, memory)``; x, and m if there is one, are averaged, u is not."""
    clients = noisy()
    x, memories = START, [begin(client, START) for client in clients]
    for number in range(rounds):
        if begin is moml_begin and number:
            memories = [begin(client, x) for client in clients]
        ends = []
        for place, client in enumerate(clients):
            own = x
            for _ in range(tau):
                own, memories[place] = step(client, own, memories[place])
            ends.append(own)
        x = np.mean(ends, axis=0)
        if step is scgdm_step:
            m = np.mean([memory["m"] for memory in memories], axis=0)
            memories = [{"u": memory["u"], "m": m} for memory in memories]
    return x


def drawn(client: Composition) -> tuple[Any, Any]:
    return client.draw_inner(None, 3), client.draw_outer(None, 2)


def comfedl_step(client, x, memory):
    zeta, xi = drawn(client)
    y, J = client.inner(x, zeta), client.inner_jacobian(x, zeta)
    return x - 0.05 * J.T @ client.outer_gradient(y, xi), memory


def moml_begin(client, x):
    return client.inner(x, client.draw_inner(None, 6))


def moml_step(client, x, u):
    zeta, xi = drawn(client)
    u = 0.6 * u + 0.4 * client.inner(x, zeta)
    return x - 0.05 * client.inner_jacobian(x, zeta).T @ client.outer_gradient(u, xi), u


def scgd_begin(client, x):
    return client.inner(x, client.draw_inner(None, 12))


def scgd_step(client, x, u):
    zeta, xi = drawn(client)
    u = 0.7 * u + 0.3 * client.inner(x, zeta)
    return x - 0.05 * client.inner_jacobian(x, zeta).T @ client.outer_gradient(u, xi), u


def scgdm_begin(client, x):
    return {"u": scgd_begin(client, x), "m": 0 * x}


def scgdm_step(client, x, memory):
    zeta, xi = drawn(client)
    u = 0.7 * memory["u"] + 0.3 * client.inner(x, zeta)
    m = 0.8 * memory["m"] + 0.2 * client.inner_jacobian(x, zeta).T @ client.outer_gradient(u, xi)
    return x - 0.05 * m, {"u": u, "m": m}


@pytest.mark.parametrize(
    ("method", "step", "begin"),
    [
        (ComFedL(), comfedl_step, lambda client, x: None),
        (PerFedAvg(), comfedl_step, lambda client, x: None),
        (LocalMoml(memory_weight=0.4), moml_step, moml_begin),
        (LocalScgd(), scgd_step, scgd_begin),
        (LocalScgdm(), scgdm_step, scgdm_begin),
    ],
    ids=lambda each: type(each).__name__,
)
def test_it_is_the_method_as_written_for_one_process(method, step, begin):
    options = {"inner_batch": 3, "batch": 2, "local_steps": 4, "rate": 0.05}
    found = solve(type(method)(**{**vars(method), **options}), noisy(), 5, START).x
    np.testing.assert_allclose(found, written_out(step, begin, 5, 4), atol=1e-13)


def test_a_step_decays():
    """Of one client, by ``1 + k / k0``: k counts rounds from 0."""
    client = random_affine(1)
    x = START
    for k in range(4):
        x = x - 0.15 / (1 + k / 3) * client[0].gradient(x)
    np.testing.assert_allclose(solve(ComFedL(step_decay=3, **ONE), client, 4, START).x, x, atol=1e-14)


# -- the bias of inner batches ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Losses(Composition):
    """20000 copies of one problem, a coordinate each: ``exp(x^2 / (2 lam))``, its inner loss with normal noise."""

    lam: float = 0.5

    @property
    def shape(self) -> tuple[int, int]:
        return 20000, 20000

    def draw_inner(self, rng: np.random.Generator, batch: int) -> Any:
        return self.noise / np.sqrt(batch) * rng.standard_normal(20000)

    def draw_outer(self, rng: np.random.Generator, batch: int) -> None:
        return None

    def inner(self, x: np.ndarray, sample: Any) -> np.ndarray:
        return x**2 / 2 + sample

    def inner_pullback(self, x: np.ndarray, sample: Any) -> Any:
        return self.inner(x, sample), lambda v: v * x

    def df(self, y: np.ndarray) -> np.ndarray:
        return np.exp(y / self.lam) / self.lam


X = np.ones(20000)
SLOPE = X * np.exp(X**2 / 2 / 0.5) / 0.5


def factor(slope: np.ndarray) -> tuple[float, float]:
    """By how much a slope exceeds the true one in the mean, and the standard error."""
    ratio = slope / SLOPE
    return float(ratio.mean()), float(ratio.std(ddof=1) / np.sqrt(ratio.size))


@pytest.mark.parametrize(("batch", "expected"), [(1, 2.054), (16, 1.046)])
def test_comfedl_is_biased_by_its_inner_batch(batch, expected):
    """``exp(s^2 / (2 lam^2 batch))``, s = 0.6."""
    state = solve(ComFedL(local_steps=1, rate=1e-3, batch=batch), [Losses(noise=0.6)], 1, X)
    found, error = factor((X - state.x) / 1e-3)
    assert found == pytest.approx(expected, abs=5 * error)
    assert error < 0.05


def test_mfcgds_bias_shrinks_with_alpha():
    """At rest h is a moving average, of variance ``s^2 alpha / (2 - alpha)``, s = 0.6."""
    for alpha in (0.5, 0.05):
        scale = {"c1": alpha, "c2": 1.0, "c3": 1.0, "rate": 1.0, "step_factor": 1e-15, "rate_delay": 1e15}
        method = Mfcgd(local_steps=1, batch=1, jacobian="beta1", **scale)
        found, error = factor(solve(method, [Losses(noise=0.6)], 150, X).estimates[0].w)
        assert found == pytest.approx(np.exp(0.36 * alpha / (2 - alpha) / 2 / 0.5**2), abs=5 * error)
    assert found < 1.03


def test_a_moving_average_is_not_corrected_for_motion():
    """Local-SCGD's u lags behind ``g(x)``, MFCGD's h does not, on exact maps."""
    scgd = solve(LocalScgd(**ONE), CLIENTS, 5, START)
    mfcgd = solve(Mfcgd(rate_delay=1e15, **ONE), CLIENTS, 5, START)
    for number, client in enumerate(CLIENTS):
        assert np.linalg.norm(scgd.u[number] - client.g(scgd.x)) > 0.05
        np.testing.assert_allclose(mfcgd.estimates[number].h, client.g(mfcgd.x), atol=1e-13)


# -- messages and who sends them --------------------------------------------------------------------------------------

D, P = 4, 5


@pytest.mark.parametrize(
    ("method", "up", "down"),
    [
        (Mfcgd(), 2 * D, D),
        (Mfcgd(jacobian="product"), 2 * D, D),
        (Mfcgd(old_point="average"), 2 * D, 2 * D),
        (AdaMfcgd(), 2 * D, 2 * D),
        (AdaMfcgd(matrix="norm"), 2 * D, 2 * D),
        (ComFedL(), D, D),
        (PerFedAvg(), D, D),
        (LocalMoml(), D, D),
        (LocalScgd(), D, D),
        (LocalScgd(average_u=True), D + P, D + P),
        (LocalScgdm(), 2 * D, 2 * D),
        (LocalScgdm(average_u=True), 2 * D + P, 2 * D + P),
        (FedNestComp(), 2 * D, 2 * D),
        (FedNestComp(scope="global", inner_rounds=3), 2 * D + 7 * P, 2 * D + 7 * P),
    ],
    ids=lambda each: type(each).__name__ if not isinstance(each, int) else str(each),
)
def test_a_round_sends_what_the_papers_count(method, up, down):
    """Reals of a client up; of the server's broadcast down."""
    fed = federation(CLIENTS)
    state = method.init(fed.at(0), START)
    first = dict(fed.ledger.traffic)
    method.round(state, fed.at(1))
    sent = {name: (fed.ledger.traffic[name] - first[name]) / 32 for name in ("paper_bits_up", "paper_bits_down")}
    assert sent == {"paper_bits_up": up * len(CLIENTS), "paper_bits_down": down}
    before = D if isinstance(method, AdaMfcgd) else 0
    assert first["paper_bits_up"] / 32 == before * len(CLIENTS)


def test_of_a_rounded_mean_the_broadcast_part_counts():
    """In the first round both send the same messages, and the server of one broadcasts half of their mean."""
    bits = []
    for old_point in ("own", "average"):
        method, fed = Mfcgd(old_point=old_point), federation(CLIENTS, compressor=Qsgd(5, quantize_down=5))
        method.round(method.init(fed.at(0), START), fed.at(1))
        bits.append(fed.ledger.traffic["paper_bits_down"])
    assert 0 < bits[0] == pytest.approx(bits[1] / 2, abs=1)


@pytest.mark.parametrize("method", STATELESS)
def test_some_clients_may_take_part(method):
    """Only they send; equal clients give what all of them would."""
    equal = [CLIENTS[0]] * 5
    fed = federation(equal)
    some, everyone = method(participants=2), method()
    state = some.init(fed.at(0), START)
    found = some.round(state, fed.at(1))
    sent = fed.ledger.traffic["paper_bits_up"]
    np.testing.assert_allclose(found.x, everyone.round(state, fed.at(1)).x, atol=1e-14)
    assert fed.ledger.traffic["paper_bits_up"] == sent * (1 + 5 / 2)
    fed = federation(CLIENTS)
    assert np.linalg.norm(some.round(state, fed.at(1)).x - everyone.round(state, fed.at(1)).x) > 1e-3


@pytest.mark.parametrize("name", ["localscgd", "localscgdm"])
def test_clients_that_track_their_maps_all_take_part(name):
    with pytest.raises(ConfigError, match=f"--participants 3: the clients of {name} keep estimates"):
        config.assemble({"workload": "composition_problems:AffineQuadratics", "algorithm": name, "participants": 3})


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        (ComFedL, {"inner_pullback": 5, "products": 5, "outer_gradient": 5}),
        (LocalMoml, {"inner": 1, "inner_pullback": 5, "products": 5, "outer_gradient": 5}),
        (LocalScgd, {"inner": 1, "inner_pullback": 5, "products": 5, "outer_gradient": 5}),
        (LocalScgdm, {"inner": 1, "inner_pullback": 5, "products": 5, "outer_gradient": 5}),
        (FedNestComp, {"inner": 1, "inner_pullback": 1, "products": 1, "outer_gradient": 1}),
    ],
)
def test_a_round_asks_no_more_than_it_must(method, expected):
    clients = random_affine(2, noise=0.1)
    solve(method(batch=3), clients, 1, START)
    assert clients[0].calls == expected
