"""Isotropic TV against closed forms, optimality conditions and plain formulas."""

from __future__ import annotations

import numpy as np
import pytest

from hpcfed.errors import ConfigError, DataError
from hpcfed.operators import total_variation
from hpcfed.operators.total_variation import TotalVariation

SHAPES = [(5, 6, 7), (1, 9, 4), (8, 1, 3), (6, 5, 1), (1, 1, 6), (1, 1, 1), (2, 2, 2)]


@pytest.fixture
def rng():
    return np.random.default_rng(11)


def noise(rng, *shape):
    return rng.standard_normal(shape, dtype=np.float32)


def inner(a, b):
    return float(np.vdot(a.astype(np.float64), b.astype(np.float64)))


def denoise(data, weight, nonnegative=False, rounds=3000):
    """Minimize ``1/2 ||x - data||^2 + weight TV(x)``: the step with the data term's own gradient."""
    regularizer = TotalVariation(data.shape, weight, nonnegative)
    x, v = data.copy(), regularizer.apply(np.zeros_like(data))
    for _ in range(rounds):
        change, v = regularizer.step(x, v, x - data, 1.0, 1 / max(regularizer.norm_bound, 4))
        x = x + change
    return x, v


@pytest.mark.parametrize("shape", SHAPES)
def test_differences(rng, shape):
    x = noise(rng, *shape)
    found = TotalVariation(shape, 1).apply(x)
    expected = [np.diff(x, axis=axis, append=np.take(x, [-1], axis=axis)) for axis in range(3)]
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("shape", SHAPES)
def test_adjoint_is_the_transpose(rng, shape):
    regularizer = TotalVariation(shape, 1)
    x, v = noise(rng, *shape), noise(rng, 3, *shape)
    scale = np.linalg.norm(x) * np.linalg.norm(v)
    assert abs(inner(regularizer.apply(x), v) - inner(x, regularizer.adjoint(v))) <= 1e-6 * scale


@pytest.mark.parametrize("shape", [(24, 24, 24), (40, 40, 1), (1, 1, 60)])
def test_norm_bound_is_a_close_upper_bound(rng, shape):
    regularizer = TotalVariation(shape, 1)
    x, largest = noise(rng, *shape), 0.0
    for _ in range(400):
        x = regularizer.adjoint(regularizer.apply(x / np.linalg.norm(x)))
        largest = float(np.linalg.norm(x))
    assert 0.9 * regularizer.norm_bound < largest < regularizer.norm_bound


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("weight", [0.0, 0.7])
def test_dual_prox_is_the_nearest_point_of_the_ball(rng, shape, weight):
    v = noise(rng, 3, *shape)
    v[:, 0, 0, 0] = 0
    found = TotalVariation(shape, weight).dual_prox(v)
    length = np.linalg.norm(v, axis=0)
    expected = np.where(length > weight, v * (weight / np.maximum(length, 1e-30)), v)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("nonnegative", [False, True])
@pytest.mark.parametrize("weight", [0.0, 0.4])
def test_step_is_the_composition(rng, shape, nonnegative, weight):
    regularizer, gamma, lam = TotalVariation(shape, weight, nonnegative), 0.7, 1 / 13
    x, v, gradient = noise(rng, *shape), noise(rng, 3, *shape), noise(rng, *shape)

    def constrain(y):
        return np.maximum(y, 0) if nonnegative else y

    y = constrain(x - gamma * gradient - gamma * regularizer.adjoint(v))
    expected_dual = regularizer.dual_prox((lam / gamma) * regularizer.apply(y) + v)
    expected = constrain(x - gamma * gradient - gamma * regularizer.adjoint(expected_dual)) - x
    kept = x.copy(), v.copy()
    difference, dual = regularizer.step(x, v, gradient, gamma, lam)
    np.testing.assert_allclose(difference, expected, atol=1e-5)
    np.testing.assert_allclose(dual, expected_dual, atol=1e-5)
    np.testing.assert_array_equal(x, kept[0])
    np.testing.assert_array_equal(v, kept[1])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("weight", [0.0, 0.4])
def test_the_dual_step_is_the_composition(rng, shape, weight):
    regularizer, lam = TotalVariation(shape, weight), 0.3
    x, v = noise(rng, *shape), noise(rng, 3, *shape)
    expected = regularizer.dual_prox(v + np.float32(lam) * regularizer.apply(x))
    np.testing.assert_allclose(regularizer.dual_step(v, x, lam), expected, atol=1e-6)


@pytest.mark.parametrize("shape", SHAPES)
def test_rows_on_their_own_have_the_same_bits(rng, shape):
    torch = pytest.importorskip("torch")
    regularizer = TotalVariation(shape, 0.4)
    x, v = noise(rng, *shape), noise(rng, 3, *shape)
    image, moved = regularizer.adjoint(v), regularizer.dual_step(v, x, 0.3)
    for first in range(shape[0]):
        rows = slice(first, min(first + 2, shape[0]))
        np.testing.assert_array_equal(regularizer.adjoint(v, rows=rows), image[rows])
        np.testing.assert_array_equal(regularizer.dual_step(v, x, 0.3, rows), moved[:, rows])
        tensors = torch.from_numpy(v), torch.from_numpy(x)
        np.testing.assert_allclose(regularizer.adjoint(tensors[0], rows=rows), image[rows], atol=2e-6)
        np.testing.assert_allclose(regularizer.dual_step(*tensors, 0.3, rows), moved[:, rows], atol=1e-6)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("nonnegative", [False, True])
def test_the_array_api_functions_agree_with_the_compiled_loops(rng, shape, nonnegative):
    regularizer = TotalVariation(shape, 0.4, nonnegative)
    x, v, gradient = noise(rng, *shape), noise(rng, 3, *shape), noise(rng, *shape)
    np.testing.assert_array_equal(total_variation.differences(x), regularizer.apply(x))
    np.testing.assert_allclose(total_variation.differences_adjoint(v), regularizer.adjoint(v), atol=2e-6)
    np.testing.assert_allclose(total_variation.project(v, 0.4), regularizer.dual_prox(v), atol=1e-6)
    for first, last in ((0, shape[0]), (shape[0] // 2, shape[0]), (0, shape[0] // 2)):
        expected = regularizer.value(x, first, last)
        assert 0.4 * total_variation.total_length(x, first, last) == pytest.approx(expected, rel=1e-6)
    for found, expected in zip(
        regularizer._array_step(x, v, gradient, 0.7, 1 / 13), regularizer.step(x, v, gradient, 0.7, 1 / 13), strict=True
    ):
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_value(rng, shape):
    x, regularizer = noise(rng, *shape), TotalVariation(shape, 0.3)
    whole = 0.3 * np.linalg.norm(regularizer.apply(x).astype(np.float64), axis=0).sum()
    assert regularizer.value(x) == pytest.approx(whole, rel=1e-6)
    rows = [regularizer.value(x, i, i + 1) for i in range(shape[0])]
    assert sum(rows) == pytest.approx(whole, rel=1e-6)
    alone = x.copy()
    alone[: shape[0] // 2] = np.nan
    assert regularizer.value(alone, shape[0] // 2) == pytest.approx(sum(rows[shape[0] // 2 :]), rel=1e-6)


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("weight", [0.6, 5.0])
def test_denoised_step_has_the_closed_form(axis, weight):
    """A step of height h between n1 and n2 planes: its levels move by mu/n1 and mu/n2, or meet at the mean."""
    low, high, first, second = -1.0, 1.5, 3, 5
    shape = [2, 2, 2]
    shape[axis] = first + second
    data = np.full(shape, low, dtype=np.float32)
    np.moveaxis(data, axis, 0)[first:] = high
    x, v = denoise(data, weight)
    if weight * (1 / first + 1 / second) < high - low:
        expected = np.where(data < 0, low + weight / first, high - weight / second)
    else:
        expected = np.full(shape, (first * low + second * high) / (first + second))
    np.testing.assert_allclose(x, expected, atol=1e-4)
    # The dual between the two plateaus is on the ball where they differ, and what the mean needs where they meet.
    edge = np.moveaxis(v[axis], axis, 0)[first - 1]
    np.testing.assert_allclose(edge, min(weight, (high - low) * first * second / (first + second)), atol=1e-4)


@pytest.mark.parametrize("shape", [(12, 10, 1), (6, 7, 8)])
@pytest.mark.parametrize("nonnegative", [False, True])
def test_denoising_closes_the_duality_gap(rng, shape, nonnegative):
    """The dual problem maximizes ``1/2||b||^2 - 1/2||P(b - B^T v)||^2`` over the v whose 3-vectors have length <= mu.

    Both values are computed in double precision from the plain definition, so that a wrong norm (a sum of absolute
    values, say), a wrong boundary or a wrong constraint leaves a gap.
    """
    weight, data = 0.5, noise(rng, *shape) + np.float32(0.3)
    x, v = denoise(data, weight, nonnegative)
    x, v, data = (array.astype(np.float64) for array in (x, v, data))
    length = np.linalg.norm(v, axis=0)
    assert length.max() <= weight * (1 + 1e-6)
    gradient = np.array([np.diff(x, axis=axis, append=np.take(x, [-1], axis=axis)) for axis in range(3)])
    primal = 0.5 * ((x - data) ** 2).sum() + weight * np.linalg.norm(gradient, axis=0).sum()
    transpose = np.zeros(shape)
    for axis in range(3):
        component = np.moveaxis(v[axis], axis, 0)[:-1]
        np.moveaxis(transpose, axis, 0)[1:] += component
        np.moveaxis(transpose, axis, 0)[:-1] -= component
    best = data - transpose
    if nonnegative:
        best = np.maximum(best, 0)
        assert x.min() >= 0
        assert (x == 0).any()
    dual = 0.5 * (data**2).sum() - 0.5 * (best**2).sum()
    assert abs(primal - dual) < 2e-4 * primal
    np.testing.assert_allclose(x, best, atol=2e-3)


def test_says_what_is_wrong(rng):
    with pytest.raises(ConfigError, match="weight"):
        TotalVariation((4, 4, 4), -1)
    with pytest.raises(ConfigError, match="shape"):
        TotalVariation((4, 0, 4), 1)
    regularizer = TotalVariation((4, 5, 6), 1)
    x = noise(rng, 4, 5, 6)
    with pytest.raises(DataError, match="rows 2 to 9"):
        regularizer.value(x, 2, 9)
    with pytest.raises(DataError, match="volume"):
        regularizer.apply(x.astype(np.float64))
    with pytest.raises(DataError, match="gradient"):
        regularizer.step(x, regularizer.apply(x), x[:, :, ::-1], 1.0, 0.1)
    x[1, 2, 3] = np.nan
    assert np.isnan(regularizer.value(x))
    assert np.isnan(regularizer.step(x, regularizer.apply(x * 0), x * 0, 1.0, 0.1)[0]).any()


@pytest.mark.parametrize("nonnegative", [False, True])
def test_the_set_of_volumes_inside_is_projected_on(rng, nonnegative):
    """Of each voxel on its own: cleared outside, clipped at zero inside."""
    inside = np.array([[True, False, True], [False, True, True]])
    regularizer, x = TotalVariation((2, 3, 4), 1, nonnegative, inside), noise(rng, 2, 3, 4)
    found = regularizer.project(x)
    np.testing.assert_array_equal(found[~inside], 0)
    np.testing.assert_array_equal(found[inside], x[inside].clip(0) if nonnegative else x[inside])
    torch = pytest.importorskip("torch")
    np.testing.assert_array_equal(regularizer.project(torch.from_numpy(x)).numpy(), found)


@pytest.mark.parametrize("nonnegative", [False, True])
def test_a_step_with_a_mask_is_that_of_the_definition(rng, nonnegative):
    shape, gamma, lam = (5, 6, 4), 0.3, 0.07
    inside = rng.random(shape[:2]) < 0.6
    regularizer = TotalVariation(shape, 0.2, nonnegative, inside)
    x, gradient = noise(rng, *shape), noise(rng, *shape)
    v = regularizer.dual_prox(noise(rng, 3, *shape))
    change, dual = regularizer.step(x, v, gradient, gamma, lam)
    allowed = np.broadcast_to(inside[:, :, None], shape)

    def nearest(y):
        return np.where(allowed, y.clip(0) if nonnegative else y, 0)

    predicted = nearest(x - gamma * (gradient + regularizer.adjoint(v)))
    field = (lam / gamma) * regularizer.apply(predicted.astype(np.float32)) + v
    expected = field / np.maximum(np.linalg.norm(field, axis=0) / 0.2, 1)
    np.testing.assert_allclose(dual, expected, atol=1e-6)
    moved = nearest(x - gamma * (gradient + regularizer.adjoint(expected.astype(np.float32))))
    np.testing.assert_allclose(x + change, moved, atol=1e-6)
    np.testing.assert_array_equal((x + change)[~allowed], 0)


@pytest.mark.parametrize("inside", [np.ones((5, 4), bool), np.ones((4, 5))])
def test_a_mask_of_another_shape_or_type_is_refused(inside):
    with pytest.raises(DataError, match="inside"):
        TotalVariation((4, 5, 6), 1, inside=inside)
