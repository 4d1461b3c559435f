"""What every algorithm, workload and compressor of the registry must keep. A new one is tested by its registry line.

A new workload needs one more line, in ``SMALL``: the options that make it small enough for a test.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import math
import tomllib

import numpy as np
import pytest
from test_communicator import on_ranks

from hpcfed import config, registry
from hpcfed.capabilities import (
    Bilevel,
    BoundedCurvature,
    Compositional,
    LinearComposite,
    Proximal,
    Records,
    Regularizer,
    Smooth,
    explain_missing,
)
from hpcfed.federation import Federation, PerClient
from hpcfed.run.checkpoint import Checkpoint, load, save
from hpcfed.streams import Streams

SMALL = {
    "ct": {"shape": (16, 16, 4), "views": 34, "detector": 24, "clients": 3},
    "logreg": {"clients": 3},
    "robust": {"clients": 3, "model": "linear"},
    "maml": {"clients": 3, "hidden": (5,)},
    "hyperopt": {"clients": 3, "hidden": 3},
    "prune": {"clients": 2, "data": ("digits",), "model": "small"},
    "private": {"clients": 3, "records": 30, "public_records": 20, "dimension": 4},
    "toy:Quadratics": {"size": 30, "mu": 0.1},
    "bilevel_problems:Quadratics": {"clients": 3},
    "composition_problems:AffineQuadratics": {"clients": 3},
}
ALGORITHMS = [*registry.ALGORITHMS, "toy:Momentum", "toy:Descent"]
WORKLOADS = [
    *registry.WORKLOADS,
    "toy:Quadratics",
    "bilevel_problems:Quadratics",
    "composition_problems:AffineQuadratics",
]
COMPRESSORS = [*registry.COMPRESSORS]
PARTS = [
    *(("algorithm", name) for name in ALGORITHMS),
    *(("workload", name) for name in WORKLOADS),
    *(("compressor", name) for name in COMPRESSORS),
]


def fits(algorithm, workload):
    needs, offers = registry.load("algorithm", algorithm).needs, registry.load("workload", workload).offers
    return explain_missing(algorithm, needs, workload, offers) is None


# Networks are slow for a test: their workloads meet their default method here, and the others through small problems.
SLOW = ("robust", "maml", "prune")
PAIRS = [
    (algorithm, workload)
    for algorithm in ALGORITHMS
    for workload in WORKLOADS
    if fits(algorithm, workload)
    and (workload not in SLOW or algorithm == registry.load("workload", workload).defaults["algorithm"])
]
OFFERING = {
    capability: [name for name in WORKLOADS if capability in registry.load("workload", name).offers]
    for capability in (Smooth, BoundedCurvature, Compositional, Bilevel, LinearComposite, Proximal)
}


def skip_what_cannot_differ(algorithm, compressor, levels):
    """The messages of bilevel methods and of those on records are never rounded."""
    exact = {Bilevel, Records}.intersection(registry.load("algorithm", algorithm).needs)
    if exact and (levels or compressor != COMPRESSORS[0]):
        pytest.skip("no message of this method may be rounded")


def made(algorithm, workload):
    """The method, with what it asks of its user, and a step where the workload cannot tell one."""
    method = registry.load("algorithm", algorithm)()
    options = {field.name for field in dataclasses.fields(method)}
    asked = {"clip": 1.0, "epochs": 2}
    method = dataclasses.replace(method, **{name: asked[name] for name in options & asked.keys()})
    if "step" in options and BoundedCurvature not in registry.load("workload", workload).offers:
        return dataclasses.replace(method, step="0.01")
    return method


@functools.cache
def problem(name):
    """The small problem, its clients in this process."""
    workload = registry.load("workload", name)(**SMALL[name])
    return workload.build(Federation(workload.clients, Streams(1)))


def arrays(value):
    """All arrays and numbers in a state, in order."""
    if dataclasses.is_dataclass(value):
        return [part for field in dataclasses.fields(value) for part in arrays(getattr(value, field.name))]
    if isinstance(value, PerClient):
        return [part for own in value.values() for part in arrays(own)]
    table = [] if value is None else [np.asarray(value)]
    return [part[name] for part in table for name in part.dtype.names] if table and table[0].dtype.names else table


def bits(state):
    return [(part.dtype, part.shape, part.tobytes()) for part in arrays(state)]


def direction(seed, like):
    return np.random.default_rng(seed).standard_normal(like.shape).astype(like.dtype)


def inner(a, b):
    return float(np.sum(np.asarray(a, float) * np.asarray(b, float)))


@pytest.mark.parametrize(("section", "name"), PARTS)
class TestEveryPart:
    def test_it_is_a_frozen_dataclass_that_explains_itself(self, section, name):
        part = registry.load(section, name)
        assert dataclasses.is_dataclass(part)
        assert part.__dataclass_params__.frozen
        assert part.__doc__
        assert not part.__doc__.startswith(f"{part.__name__}("), "the docstring that dataclass makes up"

    def test_every_field_is_an_option_with_help(self, section, name):
        for field in dataclasses.fields(registry.load(section, name)):
            assert field.metadata.get("help", "").strip(), field.name
            assert field.default is not dataclasses.MISSING, field.name

    def test_defaults_are_values_that_a_user_may_give(self, section, name):
        part = registry.load(section, name)
        for field in dataclasses.fields(part):
            if field.default is not None:
                found = config.coerce(part, field.name, field.default, field.name)
                assert (found, type(found)) == (field.default, type(field.default)), field.name

    def test_no_option_takes_a_name_that_means_something_else(self, section, name):
        names = {field.name for field in dataclasses.fields(registry.load(section, name))}
        assert names.isdisjoint({"name", "help", "version", "file_name", *config.SECTIONS})
        assert section == "workload" or names.isdisjoint({f.name for f in dataclasses.fields(config.RunOptions)})


@pytest.mark.parametrize("compressor", COMPRESSORS)
@pytest.mark.parametrize(("algorithm", "workload"), PAIRS)
class TestEveryCombination:
    def test_its_configuration_is_complete_and_its_names_are_unambiguous(self, algorithm, workload, compressor):
        names = {"workload": workload, "algorithm": algorithm, "compressor": compressor}
        owners = [config.RunOptions, *(registry.load(section, name) for section, name in names.items())]
        fields = [field.name for owner in owners for field in dataclasses.fields(owner)]
        assert len(fields) == len(set(fields)), fields
        run = config.assemble(names)
        assert config.assemble({}, tomllib.loads(run.to_toml()), "config.toml") == run

    @pytest.mark.parametrize("levels", [0, 5])
    def test_two_rounds(self, algorithm, workload, compressor, levels, tmp_path):
        """Pure, repeatable, finite, of one shape; and a checkpoint in between changes nothing."""
        skip_what_cannot_differ(algorithm, compressor, levels)
        place = problem(workload)
        compress = registry.load("compressor", compressor)(quantize=levels) if levels else None
        fed = dataclasses.replace(place.fed, compressor=compress)
        method = made(algorithm, workload)
        start = place.start()
        before = start.copy()

        first = method.init(fed.at(0), start)
        second = method.round(first, fed.at(1))
        kept = bits(second)
        third = method.round(second, fed.at(2))
        assert bits(second) == kept, "a round changed the state it was given"
        np.testing.assert_array_equal(start, before)
        assert bits(method.round(second, fed.at(2))) == bits(third), "the same round gave other bits"
        assert bits(method.init(fed.at(0), before)) == bits(first)

        for state in (first, second, third):
            assert isinstance(state, method.state_type)
            solution = method.solution(state)
            assert (solution.shape, solution.dtype) == (start.shape, start.dtype)
            assert all(np.isfinite(part).all() for part in arrays(state))
            assert all(np.asarray(array).size for array in method.outputs(state).values())
            assert math.isfinite(place.metrics(solution, fed.at(2))["objective"])

        save(tmp_path, Checkpoint(1, second, {}, {}), fed)
        loaded = load(tmp_path / "round-00000001", method.state_type, fed).state
        assert bits(loaded) == kept
        assert bits(method.round(loaded, fed.at(2))) == bits(third)

    def test_ranks_change_no_bit(self, algorithm, workload, compressor):
        skip_what_cannot_differ(algorithm, compressor, 0)

        def two_rounds(comm):
            options = registry.load("workload", workload)(**SMALL[workload])
            compress = registry.load("compressor", compressor)(quantize=3)
            built = options.build(Federation(options.clients, Streams(1), comm, compress))
            method = made(algorithm, workload)
            state = method.init(built.fed.at(0), built.start())
            for number in (1, 2):
                state = method.round(state, built.fed.at(number))
            solution = method.solution(state)
            return solution.tobytes(), built.metrics(solution, built.fed.at(2))

        ranks = min(3, SMALL[workload]["clients"]) if "clients" in SMALL[workload] else 3
        alone = two_rounds(Federation(1).communicator)
        assert on_ranks(ranks, two_rounds) == [alone] * ranks


def test_an_option_means_the_same_in_every_registered_algorithm():
    """One command line has the options of all algorithms that fit its workload."""
    said = {}
    for name in registry.ALGORITHMS:
        part = registry.load("algorithm", name)
        for field in dataclasses.fields(part):
            meaning = (config.hints(part)[field.name], field.default, field.metadata)
            assert said.setdefault(field.name, meaning) == meaning, (name, field.name)


@pytest.mark.parametrize("name", ALGORITHMS)
class TestAlgorithms:
    def test_what_it_declares(self, name):
        method = registry.load("algorithm", name)
        assert isinstance(method.needs, tuple)
        assert all(getattr(need, "_is_protocol", False) for need in method.needs)
        assert dataclasses.is_dataclass(method.state_type)
        assert method.state_type.__dataclass_params__.frozen

    def test_it_runs_somewhere(self, name):
        assert any(fits(name, workload) for workload in WORKLOADS)


@pytest.mark.parametrize("name", WORKLOADS)
class TestWorkloads:
    def test_its_clients_can_what_it_offers(self, name):
        place, offers = problem(name), registry.load("workload", name).offers
        assert len(place.fed.clients) == place.fed.num_clients
        for client in place.fed.clients.values():
            for offer in offers:
                assert isinstance(client, offer), offer

    def test_its_defaults_are_options_of_a_run_that_is_possible(self, name):
        workload = registry.load("workload", name)
        assert fits(workload.defaults["algorithm"], name)
        run = config.assemble({"workload": name})
        preset = getattr(workload, "presets", {}).get(run.algorithm.name, {})
        for key, value in (workload.defaults | preset).items():
            if key in ("algorithm", "compressor"):
                assert getattr(run, key).name == value
            else:
                owners = (run.run, *(getattr(run, section).options for section in config.SECTIONS))
                assert [getattr(owner, key) for owner in owners if hasattr(owner, key)] == [value], key

    def test_its_presets_are_options_of_a_run_with_the_method(self, name):
        workload = registry.load("workload", name)
        for method, preset in getattr(workload, "presets", {}).items():
            run = config.assemble({"workload": name, "algorithm": method})
            for key, value in (workload.defaults | preset).items():
                owners = (run.run, *(getattr(run, section).options for section in config.SECTIONS))
                found = [getattr(owner, key) for owner in owners if hasattr(owner, key)]
                assert found == [value] or key in ("algorithm", "compressor"), key

    def test_its_pictures_and_compiled_modules_are_there(self, name):
        from hpcfed import plots

        workload = registry.load("workload", name)
        for picture in workload.pictures:
            assert callable(getattr(plots, picture))
        for module in workload.compiled:
            importlib.import_module(module)

    def test_what_is_measured_and_kept(self, name):
        place = problem(name)
        start = place.start()
        np.testing.assert_array_equal(place.start(), start)
        before = start.copy()
        numbers = place.metrics(start, place.fed.at(1))
        assert math.isfinite(numbers["objective"])
        assert all(isinstance(number, float) for number in numbers.values())
        assert place.metrics(start, place.fed.at(1)) == numbers
        results = place.results(start)
        np.testing.assert_array_equal(start, before)
        assert any(np.array_equal(array, start) for array, _ in results.values())
        for array, attributes in results.values():
            assert np.asarray(array).size
            assert all(isinstance(key, str) for key in attributes)


def points(name):
    """A random point of the magnitude of the start, and the first client and the last."""
    place = problem(name)
    like = place.start()
    x = like + np.abs(like).mean() * direction(1, like)
    clients = list(place.fed.clients.values())
    return x.astype(like.dtype) + like.dtype.type(0.1), (clients[0], clients[-1])


def unit(d):
    """The direction, of length 1; zero stays zero."""
    length = math.sqrt(inner(d, d))
    return d / d.dtype.type(length) if length else d


def difference(function, z, d, part=1e-2):
    """A central difference along d; its length h is a part of that of z, its error that of third derivatives, h^2."""
    h = part * math.sqrt(inner(z, z))
    up, down = (function(z + z.dtype.type(sign * h) * d) for sign in (1, -1))
    return (up - down) / (2 * h)


def in_the_mean(draw, exact):
    """200 draws of a number are another in the mean, up to five standard errors and to rounding: the standard error."""
    draws = [draw(np.random.default_rng(seed)) for seed in range(200)]
    error = np.std(draws, ddof=1) / math.sqrt(len(draws))
    assert np.mean(draws) == pytest.approx(exact, rel=1e-5, abs=5 * error)
    return error


@pytest.mark.parametrize("name", OFFERING[Smooth])
class TestSmooth:
    def test_the_gradient_is_the_slope_of_the_value(self, name):
        x, clients = points(name)
        for client in clients:
            gradient = client.gradient(x)
            assert (gradient.shape, gradient.dtype) == (x.shape, x.dtype)
            length = math.sqrt(inner(gradient, gradient))
            for d in (unit(gradient), unit(direction(2, x))):
                assert difference(client.value, x, d) == pytest.approx(inner(gradient, d), abs=1e-3 * length)

    def test_a_batch_gives_the_gradient_in_the_mean(self, name):
        x, clients = points(name)
        d = direction(5, x)
        for client in clients:

            def along(rng, client=client):
                return inner(client.gradient(x, rng, 1), d)

            assert in_the_mean(along, inner(client.gradient(x), d)) > 0

    def test_a_stream_fixes_the_batch(self, name):
        x, (client, _) = points(name)
        drawn = [client.gradient(x, np.random.default_rng(seed), 1).tobytes() for seed in (1, 1, 2)]
        assert drawn[0] == drawn[1] != drawn[2]

    def test_the_gradient_is_the_callers_and_the_point_stays(self, name):
        x, (client, _) = points(name)
        before, value = x.copy(), client.value(x)
        gradient = client.gradient(x)
        kept = gradient.copy()
        gradient[:] = 0
        np.testing.assert_array_equal(client.gradient(x), kept)
        np.testing.assert_array_equal(x, before)
        assert client.value(x) == value


@pytest.mark.parametrize("name", OFFERING[BoundedCurvature])
class TestBoundedCurvature:
    def test_the_curvature_is_symmetric_and_bounds_the_value_from_above(self, name):
        x, clients = points(name)
        for client in clients:
            u, v = direction(3, x), direction(4, x)
            hu, hv = client.curvature(u), client.curvature(v)
            scale = math.sqrt(inner(hu, hu) * inner(v, v))
            assert inner(hu, v) == pytest.approx(inner(u, hv), abs=1e-4 * scale)
            for d in (u, v, np.abs(u)):
                step = (0.3 * d).astype(x.dtype)
                bound = client.value(x) + inner(client.gradient(x), step) + inner(client.curvature(step), step) / 2
                assert client.value(x + step) <= bound + 1e-4 * (abs(bound) + client.value(x))


@pytest.mark.parametrize("name", OFFERING[LinearComposite])
class TestLinearComposite:
    def pieces(self, name):
        place = problem(name)
        x = direction(1, place.start())
        regularizer = next(iter(place.fed.clients.values())).regularizer
        return regularizer, x, direction(2, regularizer.apply(x))

    def test_it_is_a_regularizer(self, name):
        assert isinstance(self.pieces(name)[0], Regularizer)

    def test_the_adjoint_is_the_adjoint(self, name):
        g, x, v = self.pieces(name)
        scale = math.sqrt(inner(x, x) * inner(v, v))
        assert inner(g.apply(x), v) == pytest.approx(inner(x, g.adjoint(v)), abs=1e-5 * scale)

    def test_the_norm_is_below_its_bound_and_not_far(self, name):
        """Power iteration approaches it from below."""
        g, x, _ = self.pieces(name)
        for _ in range(200):
            x = x / np.sqrt(inner(x, x)).astype(x.dtype)
            x = g.adjoint(g.apply(x))
        assert g.norm_bound / 2 < math.sqrt(inner(x, x)) <= g.norm_bound * (1 + 1e-5)

    def test_the_dual_prox_is_a_projection(self, name):
        """The conjugate of a norm is the indicator of a set: its prox projects, onto the same set for every scale."""
        g, _, v = self.pieces(name)
        v = 10 * max(1.0, np.abs(g.dual_prox(1e6 * v)).max()) * v
        projected = g.dual_prox(v.copy())
        assert not np.array_equal(projected, v)
        np.testing.assert_allclose(g.dual_prox(projected.copy()), projected, rtol=1e-5, atol=1e-6)
        for seed in (3, 4):
            other = g.dual_prox(direction(seed, v) * np.abs(v).max())
            assert inner(v - projected, other - projected) <= 1e-4 * inner(v, v)

    def test_the_value_is_the_largest_product_with_the_dual_set(self, name):
        """``g(Bx) = sup_v <Bx, v>`` over the set that the dual prox projects on; far along Bx it is attained."""
        g, x, v = self.pieces(name)
        bx, value = g.apply(x), g.value(x)
        assert value > 0
        assert inner(bx, g.dual_prox(1e6 * v)) < value
        assert inner(bx, g.dual_prox((1e8 * bx).astype(bx.dtype))) == pytest.approx(value, rel=1e-4)
        assert g.value(2 * x) == pytest.approx(2 * value, rel=1e-5)

    def test_the_step_is_its_formula(self, name):
        g, x, v = self.pieces(name)
        gradient, gamma, lam = direction(5, x), x.dtype.type(0.3), x.dtype.type(0.9 / g.norm_bound)
        v = g.dual_prox(v)
        inputs = (x.copy(), v.copy())
        change, dual = g.step(x, v, gradient.copy(), float(gamma), float(lam))
        np.testing.assert_array_equal(x, inputs[0])
        np.testing.assert_array_equal(v, inputs[1])
        y = x - gamma * gradient - gamma * g.adjoint(v)
        expected = g.dual_prox(lam / gamma * g.apply(y) + v)
        np.testing.assert_allclose(dual, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())
        new = x - gamma * gradient - gamma * g.adjoint(expected)
        np.testing.assert_allclose(x + change, new, rtol=1e-4, atol=1e-5 * np.abs(new).max())


@pytest.mark.parametrize("name", OFFERING[Proximal])
class TestProximal:
    @pytest.mark.parametrize("dtype", [np.float32, np.float64])
    def test_the_map_minimizes_what_it_should(self, name, dtype):
        """No point near ``prox(x)``, nor x itself, has a lower ``weight psi(z) + |z - x|^2 / 2``; weight 0 keeps x."""
        place = problem(name)
        psi = place.fed.any_client.regularizer
        x = direction(1, np.empty(place.start().shape, dtype))
        before = x.copy()
        assert psi.value(x) > 0
        for weight in (0.0, 0.01, 1.0):
            z = psi.prox(x, weight)
            np.testing.assert_array_equal(x, before)
            assert (z.shape, z.dtype) == (x.shape, x.dtype)
            lowest = weight * psi.value(z) + inner(z - x, z - x) / 2
            nearby = [z + (h * direction(seed, z)).astype(dtype) for seed in range(2, 6) for h in (1e-2, 1e-1)]
            for other in (x, *nearby):
                assert lowest <= (weight * psi.value(other) + inner(other - x, other - x) / 2) * (1 + 1e-6)
        np.testing.assert_array_equal(psi.prox(x, 0.0), x)


def counted(fed, work):
    """What the run's ledger counts of a piece of work, which counts nothing while it is a measurement."""
    before = dict(fed.ledger.work)
    with fed.ledger.uncounted():
        work()
    assert fed.ledger.work == before
    work()
    return {name: amount - before[name] for name, amount in fed.ledger.work.items() if amount > before[name]}


@pytest.mark.parametrize("place", [0, 1], ids=["first", "last"])
@pytest.mark.parametrize("name", OFFERING[Compositional])
class TestCompositional:
    def pieces(self, name, place):
        x, clients = points(name)
        return x, clients[place]

    @pytest.mark.parametrize("batch", [None, 2])
    def test_jacobian_and_pullback_are_the_slope_of_the_inner_map(self, name, place, batch):
        x, client = self.pieces(name, place)
        sample = client.draw_inner(np.random.default_rng(1), batch)
        y, pullback = client.inner_pullback(x, sample)
        jacobian = client.inner_jacobian(x, sample)
        assert (y.shape, y.dtype) == ((client.inner_size,), x.dtype)
        assert (jacobian.shape, jacobian.dtype) == ((client.inner_size, x.size), x.dtype)
        np.testing.assert_allclose(client.inner(x, sample), y, rtol=1e-5, atol=1e-6)
        v = direction(2, y)
        pulled = pullback(v)
        assert (pulled.shape, pulled.dtype) == (x.shape, x.dtype)
        length = math.sqrt(inner(pulled, pulled))
        np.testing.assert_allclose(pulled, v @ jacobian, rtol=1e-4, atol=1e-5 * length)
        for d in (unit(pulled), unit(direction(3, x))):
            slope = difference(lambda z: client.inner(z, sample), x, d)
            assert inner(v, slope) == pytest.approx(inner(pulled, d), abs=1e-3 * length)

    def test_the_outer_gradient_is_the_slope_of_the_outer_value(self, name, place):
        x, client = self.pieces(name, place)
        y = client.inner(x, None)
        gradient = client.outer_gradient(y, None)
        assert (gradient.shape, gradient.dtype) == (y.shape, y.dtype)
        length = math.sqrt(inner(gradient, gradient))
        for d in (unit(gradient), unit(direction(3, y))):
            assert difference(client.outer_value, y, d) == pytest.approx(inner(gradient, d), abs=1e-3 * length)

    def test_samples_give_both_maps_in_the_mean(self, name, place):
        x, client = self.pieces(name, place)
        y, pullback = client.inner_pullback(x, None)
        v, d = direction(2, y), direction(3, x)

        def value(rng):
            return inner(v, client.inner(x, client.draw_inner(rng, 1)))

        def pulled(rng):
            return inner(d, client.inner_pullback(x, client.draw_inner(rng, 1))[1](v))

        def gradient(rng):
            return inner(v, client.outer_gradient(y, client.draw_outer(rng, 1)))

        assert in_the_mean(value, inner(v, y)) > 0
        assert in_the_mean(pulled, inner(d, pullback(v))) > 0
        in_the_mean(gradient, inner(v, client.outer_gradient(y, None)))  # an outer map may have no samples

    def test_a_stream_fixes_a_sample_which_stays_as_it_is(self, name, place):
        x, client = self.pieces(name, place)
        before, other = x.copy(), x + direction(3, x)
        assert client.draw_inner(np.random.default_rng(1), None) is None
        assert client.draw_outer(np.random.default_rng(1), None) is None
        found = []
        for seed in (1, 1, 2):
            zeta, xi = (draw(np.random.default_rng(seed), 1) for draw in (client.draw_inner, client.draw_outer))
            y, pullback = client.inner_pullback(x, zeta)
            kept = y.copy()
            client.inner_pullback(other, zeta)[1](client.outer_gradient(kept, xi))
            np.testing.assert_array_equal(client.inner_pullback(x, zeta)[0], kept)
            found.append((kept.tobytes(), pullback(client.outer_gradient(kept, xi)).tobytes()))
        assert found[0] == found[1] != found[2]
        np.testing.assert_array_equal(x, before)

    def test_evaluations_are_counted(self, name, place):
        fed, (x, client) = problem(name).fed, self.pieces(name, place)
        zeta, xi = (draw(np.random.default_rng(1), 1) for draw in (client.draw_inner, client.draw_outer))
        for sample in (None, zeta):
            maps = (client.inner, client.inner_pullback, client.inner_jacobian)
            samples = {counted(fed, functools.partial(each, x, sample))["samples"] for each in maps}
            assert len(samples) == 1
        y, pullback = client.inner_pullback(x, zeta)
        assert counted(fed, lambda: pullback(y))["jacobian_products"] == 1
        assert counted(fed, lambda: client.outer_gradient(y, xi))["gradients"] == 1


# Networks with kinks, whose second derivatives no difference shows; they are tested in double precision on their own.
KINKED = ("prune",)


@pytest.mark.parametrize("place", [0, 1], ids=["first", "last"])
@pytest.mark.parametrize("name", OFFERING[Bilevel])
class TestBilevel:
    def pieces(self, name, place):
        """A random x, a random y and a client."""
        point, clients = points(name)
        x, y = np.split(point, [clients[place].upper_size])
        assert y.size == clients[place].lower_size
        return x, y, clients[place]

    @pytest.mark.parametrize("level", ["upper", "lower"])
    def test_gradients_are_the_slopes_of_the_value(self, name, place, level):
        x, y, client = self.pieces(name, place)
        value = getattr(client, f"{level}_value")
        in_x, in_y = getattr(client, f"{level}_gradients")(x, y, None)
        assert (in_x.shape, in_x.dtype, in_y.shape, in_y.dtype) == (x.shape, x.dtype, y.shape, y.dtype)
        length = math.sqrt(inner(in_x, in_x) + inner(in_y, in_y))
        for d in (unit(direction(2, x)), unit(in_x)):
            slope = difference(lambda z: value(z, y), x, d, 1e-3)
            assert slope == pytest.approx(inner(in_x, d), abs=1e-3 * length)
        for d in (unit(direction(3, y)), unit(in_y)):
            slope = difference(lambda z: value(x, z), y, d, 1e-3)
            assert slope == pytest.approx(inner(in_y, d), abs=1e-3 * length)

    @pytest.mark.parametrize("batch", [None, 2])
    def test_products_are_the_slopes_of_the_lower_gradient(self, name, place, batch):
        x, y, client = self.pieces(name, place)
        sample = client.draw_lower(np.random.default_rng(1), batch)
        v, w, d = unit(direction(2, y)), unit(direction(3, y)), unit(direction(4, x))
        product, other = (client.lower_hessian_product(x, y, sample, each) for each in (v, w))
        cross = client.lower_cross_product(x, y, sample, v)
        assert (product.shape, product.dtype, cross.shape, cross.dtype) == (y.shape, y.dtype, x.shape, x.dtype)
        length = math.sqrt(inner(product, product))
        assert inner(product, w) == pytest.approx(inner(v, other), abs=1e-5 * length)
        if name not in KINKED:
            slope = difference(lambda z: client.lower_gradients(x, z, sample)[1], y, v, 1e-3)
            np.testing.assert_allclose(slope, product, atol=1e-3 * length)
            slope = difference(lambda z: client.lower_gradients(z, y, sample)[1], x, d, 1e-3)
            assert inner(slope, v) == pytest.approx(inner(cross, d), abs=1e-3 * math.sqrt(inner(cross, cross)))

    @pytest.mark.parametrize("level", ["upper", "lower"])
    def test_samples_give_the_gradients_in_the_mean(self, name, place, level):
        x, y, client = self.pieces(name, place)
        draw, gradients = getattr(client, f"draw_{level}"), getattr(client, f"{level}_gradients")

        def along(sample):
            in_x, in_y = gradients(x, y, sample)
            return inner(in_x, direction(2, x)) + inner(in_y, direction(3, y))

        assert in_the_mean(lambda rng: along(draw(rng, 1)), along(None)) > 0

    @pytest.mark.parametrize("level", ["upper", "lower"])
    def test_a_stream_fixes_a_sample_which_stays_as_it_is(self, name, place, level):
        x, y, client = self.pieces(name, place)
        before = x.copy(), y.copy()
        draw, gradients = getattr(client, f"draw_{level}"), getattr(client, f"{level}_gradients")
        assert draw(np.random.default_rng(1), None) is None
        found = []
        for seed in (1, 1, 2):
            sample = draw(np.random.default_rng(seed), 1)
            found.append(gradients(x, y, sample)[1].tobytes())
            gradients(2 * x, -y, sample)
            assert gradients(x, y, sample)[1].tobytes() == found[-1]
        assert found[0] == found[1] != found[2]
        np.testing.assert_array_equal(x, before[0])
        np.testing.assert_array_equal(y, before[1])

    def test_evaluations_are_counted(self, name, place):
        fed, (x, y, client) = problem(name).fed, self.pieces(name, place)
        upper, lower = (draw(np.random.default_rng(1), 1) for draw in (client.draw_upper, client.draw_lower))
        for gradients, sample in ((client.upper_gradients, upper), (client.lower_gradients, lower)):
            assert counted(fed, functools.partial(gradients, x, y, sample))["gradients"] == 1
        for product in (client.lower_hessian_product, client.lower_cross_product):
            assert counted(fed, functools.partial(product, x, y, lower, y))["hessian_products"] == 1


@pytest.mark.parametrize("name", COMPRESSORS)
class TestCompressors:
    def mean(self, name, value, levels=2, round=1, clients=1):
        fed = Federation(clients, compressor=registry.load("compressor", name)(quantize=levels)).at(round)
        return fed.mean(PerClient(dict.fromkeys(range(clients), value)), lossy=True)

    def test_it_is_off_by_default(self, name):
        compressor = registry.load("compressor", name)
        assert compressor().quantize == 0
        assert compressor.kind in ("ordered", "integer")
        for module in compressor.compiled:
            importlib.import_module(module)

    @pytest.mark.parametrize("dtype", [np.float32, np.float64])
    @pytest.mark.parametrize("shape", [(), (5,), (4, 3, 2), (3, 4, 3, 2)])
    def test_zero_stays_zero(self, name, dtype, shape):
        found = self.mean(name, np.zeros(shape, dtype), clients=3)
        np.testing.assert_array_equal(found, 0)
        assert np.shape(found) == shape
        assert shape == () or found.dtype == dtype

    def test_a_stream_fixes_the_message(self, name):
        value = direction(1, np.empty(40))
        found = [self.mean(name, value, round=number).tobytes() for number in (1, 1, 2)]
        assert found[0] == found[1] != found[2]

    def test_it_is_right_in_the_mean(self, name):
        """400 messages: six standard errors of each element, or ten roundings that are rare and were not seen."""
        value = np.random.default_rng(1).uniform(0.3, 1, 40) * np.sign(direction(2, np.empty(40)))
        found = np.array([self.mean(name, value, round=number) for number in range(400)])
        error = found.std(axis=0, ddof=1) / math.sqrt(len(found))
        assert error.max() > 0
        rare = 10 * np.abs(found).max() / len(found)
        assert (np.abs(found.mean(axis=0) - value) <= np.maximum(6 * error, rare)).all()

    def test_more_levels_err_less(self, name):
        value = direction(1, np.empty(300))
        errors = [np.linalg.norm(self.mean(name, value, levels) - value) for levels in (1, 10, 1000)]
        assert errors[0] > 3 * errors[1] > 9 * errors[2]


def test_everything_registered_has_a_module_of_its_own():
    tables = (registry.ALGORITHMS, registry.WORKLOADS, registry.COMPRESSORS)
    for section, table in zip(("algorithm", "workload", "compressor"), tables, strict=True):
        for name, target in table.items():
            assert inspect.getmodule(registry.load(section, name)).__name__ == target.partition(":")[0]
            assert name.islower()
