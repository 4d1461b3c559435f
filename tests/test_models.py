"""Networks as functions of one vector, and losses over samples, against finite differences and torch's own ways."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from hpcfed.errors import ConfigError
from hpcfed.models.empirical import CHUNK, EmpiricalLoss
from hpcfed.models.flat import FlatModel
from hpcfed.models.nets import network

SHAPES = {"linear": (1, 5, 4), "mlp": (1, 5, 4), "cnn": (1, 16, 17), "cnn7": (2, 7, 7), "conv4": (1, 16, 16)}
# Entries of weights and biases, counted by hand for MNIST (cnn, conv4) and CIFAR-10 (cnn7).
PUBLISHED = {
    "cnn": ((1, 28, 28), 6 * 26 + 16 * (6 * 25 + 1) + 120 * 257 + 10 * 121),
    "cnn7": (
        (3, 32, 32),
        96 * 28 + 96 * (96 * 9 + 1) + 196 * 97 + 10 * 197 + 1000 * 1961 + 1000 * 1001 + 10 * 1001,
    ),
    "conv4": ((1, 28, 28), 64 * 10 + 3 * 64 * (64 * 9 + 1) + 4 * 128 + 10 * 65),
}


def loss(name, samples=6, activation="tanh", classes=3, dtype=np.float64):
    """A loss in float64 and a point for it."""
    rng = np.random.default_rng(0)
    model = network(name, SHAPES[name], classes, (7,), activation)
    inputs = rng.standard_normal((samples, *SHAPES[name])).astype(dtype)
    point = model.initial(rng).astype(dtype)
    return EmpiricalLoss.over(model, inputs, rng.integers(classes, size=samples)), point + 0.01


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_published_networks_have_the_published_sizes(name):
    shape, size = PUBLISHED[name]
    assert network(name, shape, 10).size == size


@pytest.mark.parametrize("name", SHAPES)
def test_derivatives_are_those_of_differences(name):
    """Of the value and of the gradient, along random directions; networks with pools have kinks, but none this near."""
    if name == "cnn7":
        pytest.skip("3 million parameters: as cnn, only larger")
    own, x = loss(name)
    rng = np.random.default_rng(1)
    value, gradient = own.value_and_gradient(x)
    again, product = own.gradient_and_products(x)
    np.testing.assert_allclose(again, gradient, rtol=1e-8, atol=1e-14)
    assert value == own.value(x)
    h = 1e-6
    for _ in range(3):
        d = rng.standard_normal(x.shape)
        slope = (own.value(x + h * d)[0] - own.value(x - h * d)[0]) / (2 * h)
        assert gradient @ d == pytest.approx(slope, rel=1e-6, abs=1e-7)
        change = (own.value_and_gradient(x + h * d)[1] - own.value_and_gradient(x - h * d)[1]) / (2 * h)
        np.testing.assert_allclose(product(d), change, atol=1e-6 * np.linalg.norm(change))


def test_the_hessian_is_its_products():
    own, x = loss("mlp")
    dense = own.hessian(x, rows=13)
    _, product = own.gradient_and_products(x)
    np.testing.assert_allclose(dense, np.stack([product(e) for e in np.eye(len(x))]), atol=1e-12)
    np.testing.assert_allclose(dense, dense.T, atol=1e-12)


def test_the_flat_form_is_the_module():
    """The same numbers put into a module in the usual way give the same outputs."""
    module = nn.Sequential(nn.Conv2d(2, 8, 3), nn.GroupNorm(4, 8), nn.ELU(), nn.Flatten(), nn.Linear(72, 3))
    vector = torch.cat([parameter.detach().reshape(-1) for parameter in module.parameters()])
    inputs = torch.randn(4, 2, 5, 5)
    torch.testing.assert_close(FlatModel.of(module).apply(vector, inputs), module(inputs), rtol=0, atol=0)


def test_softmax_regression_has_the_gradient_of_the_textbook():
    own, x = loss("linear", samples=9)
    inputs, labels = own.inputs.numpy().reshape(9, -1), own.targets.numpy()
    weights, bias = x[:60].reshape(3, 20), x[60:]
    scores = inputs @ weights.T + bias
    shares = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    assert own.value(x)[0] == pytest.approx(-np.log(shares[np.arange(9), labels]).mean(), rel=1e-12)
    errors = (shares - np.eye(3)[labels]) / 9
    expected = np.concatenate([(errors.T @ inputs).ravel(), errors.sum(axis=0)])
    np.testing.assert_allclose(own.value_and_gradient(x)[1], expected, atol=1e-14)
    summed, hits = own.judge(x)
    assert summed == pytest.approx(9 * own.value(x)[0])
    assert hits == (scores.argmax(axis=1) == labels).sum()


def test_squared_error_is_that_of_least_squares():
    rng = np.random.default_rng(2)
    inputs, targets = rng.standard_normal((8, 3)), rng.standard_normal((8, 2))
    own = EmpiricalLoss.over(network("linear", (3,), 2), inputs, targets)
    x = rng.standard_normal(8)
    residual = inputs @ x[:6].reshape(2, 3).T + x[6:] - targets
    assert own.value(x)[0] == pytest.approx((residual**2).mean(), rel=1e-12)
    assert own.judge(x) == (pytest.approx(8 * (residual**2).mean()), 0)


def test_more_samples_than_go_at_once_give_their_mean():
    own, x = loss("mlp", samples=2 * CHUNK + 7)
    whole = (own.inputs, own.targets)
    for all_at_once, in_parts in zip(own.value_and_gradient(x, whole), own.value_and_gradient(x), strict=True):
        np.testing.assert_allclose(in_parts, all_at_once, rtol=1e-10, atol=1e-13)
    assert own.value(x) == pytest.approx(own.value(x, whole), rel=1e-12)
    assert own.judge(x)[0] == pytest.approx(len(own) * own.value(x)[0])
    v = np.random.default_rng(3).standard_normal(x.shape)
    np.testing.assert_allclose(
        own.gradient_and_products(x)[1](v), own.gradient_and_products(x, whole)[1](v), rtol=1e-8, atol=1e-12
    )


def test_a_start_has_the_variances_that_keep_signals_alive():
    """2 / fan-in before a rectifier, 1 / fan-in elsewhere; 5 standard errors of a variance."""
    model = network("mlp", (300,), 200, (400, 500), "relu")
    start = model.initial(np.random.default_rng(0))
    assert start.dtype == np.float32
    parts = np.split(start, np.cumsum(model.sizes)[:-1])
    for part, (fan_in, gain) in zip(parts[::2], ((300, 2), (400, 2), (500, 1)), strict=True):
        assert part.var() == pytest.approx(gain / fan_in, rel=5 * np.sqrt(2 / part.size))
        assert part.mean() == pytest.approx(0, abs=5 * np.sqrt(gain / fan_in / part.size))
    assert not np.concatenate(parts[1::2]).any()
    blocks = network("conv4", (1, 16, 16), 5)
    parts = np.split(blocks.initial(np.random.default_rng(0)), np.cumsum(blocks.sizes)[:-1])
    values = dict(zip(blocks.shapes, parts, strict=True))
    assert (values["1.weight"] == 1).all()
    assert not values["1.bias"].any()


def test_the_stream_alone_fixes_the_start():
    before = torch.get_rng_state()
    starts = []
    for torch_seed, seed in ((1, 5), (2, 5), (1, 6)):
        torch.manual_seed(torch_seed)
        kept = torch.get_rng_state()
        starts.append(network("cnn", (1, 28, 28), 10).initial(np.random.default_rng(seed)).tobytes())
        assert torch.equal(torch.get_rng_state(), kept), "torch's own generator was used"
    assert starts[0] == starts[1] != starts[2]
    torch.set_rng_state(before)


def test_points_are_not_copied_and_results_are_the_callers():
    own, x = loss("mlp")
    frozen = x.copy()
    gradient = own.value_and_gradient(x)[1]
    kept = gradient.copy()
    gradient[:] = 0
    np.testing.assert_array_equal(own.value_and_gradient(x)[1], kept)
    np.testing.assert_array_equal(x, frozen)
    tensor = torch.from_numpy(x)
    assert isinstance(own.value_and_gradient(tensor)[1], torch.Tensor)
    np.testing.assert_array_equal(own.value_and_gradient(tensor)[1].numpy(), kept)
    assert not tensor.requires_grad


def test_what_cannot_be_a_function_of_its_parameters_is_refused():
    with pytest.raises(ValueError, match="GroupNorm"):
        FlatModel.of(nn.BatchNorm1d(3))


def test_images_that_are_too_small_are_refused():
    with pytest.raises(ConfigError, match=r"--model cnn: inputs of shape 1 x 8 x 8"):
        network("cnn", (1, 8, 8), 10)
    with pytest.raises(ConfigError, match="--model cnn"):
        network("cnn", (1,), 10)
