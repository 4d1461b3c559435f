"""`hpcfed robust`: the composition against closed forms and differences, what is counted, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from matplotlib.image import imread
from test_communicator import on_ranks

from hpcfed.data.images import embedded, read_images
from hpcfed.errors import ConfigError, DataError
from hpcfed.federation import Federation
from hpcfed.models.empirical import EmpiricalLoss
from hpcfed.streams import Streams
from hpcfed.workloads.robust import Robust


def build(**options):
    workload = Robust(**{"clients": 4, "model": "linear", "minority": 30, **options})
    return workload.build(Federation(workload.clients, Streams(3)))


def doubled(problem):
    """The problem's clients in float64."""
    return [
        replace(
            client,
            loss=EmpiricalLoss(client.loss.model, client.loss.inputs.double(), client.loss.targets),
        )
        for client in problem.fed.clients.values()
    ]


def point(problem, seed=0):
    return 0.1 * np.random.default_rng(seed).standard_normal(problem.model.size)


@pytest.mark.parametrize("temperature", [0.2, 3.0])
def test_the_gradient_is_that_of_the_kl_robust_loss_up_to_a_factor(temperature):
    """``grad lambda log mean exp(l_m / lambda)`` by differences: F has its minimizers, at every shift."""
    problem = build(temperature=temperature, shift=0.7)
    clients, x = doubled(problem), point(problem)
    slope = 0.0
    for client in clients:
        y, pull = client.inner_pullback(x, None)
        slope = slope + pull(client.outer_gradient(y, None)) / len(clients)

    def robust(x):
        losses = np.array([client.value(x) for client in clients])
        return temperature * np.log(np.mean(np.exp(losses / temperature)))

    factor = np.mean([client.outer_value(client.inner(x, None)) for client in clients]) / temperature
    rng, h = np.random.default_rng(1), 1e-5
    for _ in range(5):
        d = rng.standard_normal(x.shape)
        difference = (robust(x + h * d) - robust(x - h * d)) / (2 * h)
        assert slope @ d == pytest.approx(factor * difference, rel=1e-7)


def test_metrics_are_what_they_are_called():
    problem = build(temperature=0.4, shift=1.0)
    x = point(problem).astype(np.float32)
    found = problem.metrics(x, problem.fed)
    losses = np.array([client.value(x) for client in problem.fed.clients.values()])
    assert found["objective"] == pytest.approx(np.exp((losses - 1) / 0.4).mean(), rel=1e-6)
    assert found["robust_loss"] == pytest.approx(0.4 * np.log(np.exp(losses / 0.4).mean()), rel=1e-6)
    assert (found["loss_worst"], found["loss_spread"]) == pytest.approx((losses.max(), losses.max() - losses.min()))
    slopes = [
        client.gradient(x) * np.exp((value - 1) / 0.4) / 0.4
        for client, value in zip(problem.fed.clients.values(), losses, strict=True)
    ]
    assert found["gradient_norm"] == pytest.approx(np.linalg.norm(np.mean(slopes, axis=0)), rel=1e-4)
    test = [(client.test.inputs.numpy(), client.test.targets.numpy()) for client in problem.fed.clients.values()]
    inputs, labels = (np.concatenate(parts) for parts in zip(*test, strict=True))
    scores = inputs.reshape(len(labels), -1) @ x[:640].reshape(10, 64).T + x[640:]
    assert len(labels) == round(0.2 * 1797)
    assert found["test_accuracy"] == pytest.approx((scores.argmax(axis=1) == labels).mean())


def test_small_temperature_looks_at_the_worst_client_and_large_at_the_mean():
    x = point(build(), 5).astype(np.float32)
    for temperature, name in ((1e-3, "loss_worst"), (1e3, "loss_mean")):
        problem = build(temperature=temperature, shift=5.0)
        found = problem.metrics(x, problem.fed)
        assert found["robust_loss"] == pytest.approx(found[name], abs=5e-3)


def test_the_shift_is_the_largest_loss_at_the_start_and_all_have_it():
    problem = build(split="dirichlet")
    assert not any(problem.fed.ledger.work.values()), "the search is no part of the method"
    start = problem.start()
    losses = [client.value(start) for client in problem.fed.clients.values()]
    assert problem.workload.shift == max(losses)
    assert {client.shift for client in problem.fed.clients.values()} == {max(losses)}
    assert 0 < problem.metrics(start, problem.fed)["objective"] <= 1


def test_the_split_is_imbalanced():
    problem = build(clients=5, minority=20)
    assert problem.holdings.sum(axis=1).tolist() == [1797 - 359 - 80, 20, 20, 20, 20]
    digits = embedded()
    assert (len(digits), digits.shape, digits.inputs().max()) == (1797, (1, 8, 8), 1.0)


def test_one_sample_at_two_points():
    """A sample is fixed when it is drawn: both points see the same images."""
    problem = build()
    client, x = doubled(problem)[0], point(problem)
    sample = client.draw_inner(np.random.default_rng(4), 7)
    inputs, labels = sample[0].numpy().reshape(7, -1), sample[1].numpy()
    for at in (x, 2 * x, x):
        scores = inputs @ at[:640].reshape(10, 64).T + at[640:]
        expected = (np.log(np.exp(scores).sum(axis=1)) - scores[np.arange(7), labels]).mean()
        assert client.inner(at, sample)[0] == pytest.approx(expected, rel=1e-10)
        value, pull = client.inner_pullback(at, sample)
        assert value[0] == pytest.approx(expected, rel=1e-10)
        np.testing.assert_allclose(pull(np.array([3.0])), 3 * client.inner_jacobian(at, sample)[0], rtol=1e-12)
    again = client.draw_inner(np.random.default_rng(4), 7)
    np.testing.assert_array_equal(again[0], sample[0])


def test_counts_are_those_of_a_hand():
    problem = build()
    client, x = problem.fed.clients[1], problem.start()
    rng = np.random.default_rng(0)
    sample = client.draw_inner(rng, 8)
    y, pull = client.inner_pullback(x, sample)  # 8 samples
    for _ in range(3):
        pull(y)  # 3 products
    client.inner(x, None)  # 30 samples
    client.inner_jacobian(x, sample)  # 8 samples, 1 product
    client.outer_gradient(y, client.draw_outer(rng, 8))  # 1 gradient
    client.outer_value(y)
    client.gradient(x, rng, 5)  # 5 samples, 1 gradient
    client.value(x)  # 30 samples
    expected = {"samples": 8 + 30 + 8 + 5 + 30, "gradients": 2, "jacobian_products": 4, "hessian_products": 0}
    assert problem.fed.ledger.work == expected
    with problem.fed.ledger.uncounted():
        problem.metrics(x, problem.fed)
    assert problem.fed.ledger.work == expected


def test_a_batch_of_one_has_the_bias_of_the_samples():
    """``E f(l(x; one image)) = mean_j f(l_j(x))``, more than ``f(l(x))`` (Jensen): what the methods here correct."""
    problem = build(temperature=1.0, clients=1)
    client, x = problem.fed.clients[0], point(problem).astype(np.float32)
    inputs, labels = client.loss.inputs.numpy().reshape(-1, 64), client.loss.targets.numpy()
    scores = inputs @ x[:640].reshape(10, 64).T + x[640:]
    losses = np.log(np.exp(scores).sum(axis=1)) - scores[np.arange(len(labels)), labels]
    expected, exact = np.exp(losses - client.shift).mean(), np.exp(losses.mean() - client.shift)
    assert client.outer_value(client.inner(x, None)) == pytest.approx(exact, rel=1e-5)
    rng = np.random.default_rng(0)
    values = np.array([client.outer_value(client.inner(x, client.draw_inner(rng, 1))) for _ in range(2000)])
    error = values.std(ddof=1) / np.sqrt(len(values))
    assert values.mean() == pytest.approx(expected, abs=5 * error)
    assert values.mean() > exact + 3 * error


def test_results_show_every_client_before_and_after():
    problem = build()
    x = point(problem).astype(np.float32)
    losses = problem.results(x)["losses"][0]
    clients = problem.fed.clients.values()
    np.testing.assert_allclose(losses, [[client.value(problem.start()), client.value(x)] for client in clients])


def save(path, **arrays):
    np.savez(path, **arrays)
    return str(path)


def images(count=60, **changes):
    rng = np.random.default_rng(0)
    arrays = {"x": rng.integers(256, size=(count, 6, 6), dtype=np.uint8), "y": np.arange(count) % 3}
    return {**arrays, **changes}


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"pixels": np.zeros(3)}, "holds pixels; save images as x_train"),
        ({"x": np.zeros((3, 4, 4))}, "holds x; save images"),
        (images(x=np.full((60, 6, 6), np.nan)), "not finite"),
        (images(y=np.arange(59)), r"y has shape \(59,\) for 60 images"),
        (images(y=np.full(60, 0.5)), "no whole numbers"),
        (images(y=np.full(60, -1)), "no whole numbers"),
        (images(x=np.zeros((60, 36))), r"x is float64 \(60, 36\)"),
        ({f"{a}_train": images()[a] for a in "xy"} | {"x_test": images(9)["x"], "y_test": np.full(9, 7)}, "label 7"),
    ],
)  # fmt: skip
def test_bad_files_are_refused_in_one_line(arrays, words, tmp_path):
    with pytest.raises(DataError, match=words) as refusal:
        build(data=save(tmp_path / "bad.npz", **arrays))
    assert "\n" not in str(refusal.value)
    assert "bad.npz" in str(refusal.value)


def test_what_is_no_archive_is_refused(tmp_path):
    (tmp_path / "text.npz").write_text("no archive")
    np.savez(tmp_path / "object.npz", x=np.array([None]), y=np.zeros(1))
    for name in ("nowhere.npz", "text.npz", "object.npz"):
        with pytest.raises(DataError, match=name) as refusal:
            read_images(tmp_path / name)
        assert "\n" not in str(refusal.value)


def test_too_little_data_is_refused(tmp_path):
    few = save(tmp_path / "few.npz", **images(12))
    for options in ({"data": few, "minority": 30}, {"data": few, "clients": 11}):
        with pytest.raises((ConfigError, DataError), match=r"--minority 30|12 images"):
            build(**options)


def test_files_are_read_as_they_are_meant(tmp_path):
    arrays = images()
    problem = build(data=save(tmp_path / "grey.npz", **arrays), minority=5)
    assert problem.model.size == 3 * 37
    colours = np.random.default_rng(0).integers(256, size=(60, 6, 5, 3), dtype=np.uint8)
    train, test = read_images(save(tmp_path / "colour.npz", x=colours, y=arrays["y"][:, None]))
    assert test is None
    assert train.shape == (3, 6, 5)
    np.testing.assert_allclose(train.inputs([2])[0, 1], colours[2, :, :, 1] / 255, rtol=1e-6)


def test_mnist_is_the_published_one(shared_data):
    train, test = read_images(shared_data / "mnist" / "mnist.npz")
    assert (len(train), len(test), train.shape) == (60000, 10000, (1, 28, 28))
    assert np.bincount(train.labels).tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    problem = build(data=str(shared_data / "mnist" / "mnist.npz"), clients=10, minority=20, model="cnn")
    assert problem.holdings.sum(axis=1).tolist() == [5000] + [20] * 9


def test_ranks_change_no_bit_of_what_is_measured():
    def measured(comm):
        workload = Robust(clients=4, hidden=(8,), split="dirichlet")
        problem = workload.build(Federation(4, Streams(3), comm))
        start = problem.start()
        return start.tobytes(), problem.metrics(start, problem.fed.at(1))

    alone = measured(Federation(1).communicator)
    for ranks in (2, 3):
        assert on_ranks(ranks, measured) == [alone] * ranks


def test_a_run_ends_with_its_picture(hpcfed, tmp_path):
    options = ["--rounds", "2", "--record-every", "2", "--clients", "4", "--hidden", "8", "--quantize", "20"]
    finished = hpcfed("robust", *options, "--out", str(tmp_path / "run"))
    assert finished.status == 0, finished.err
    assert f"picture {tmp_path / 'run' / 'losses.png'}" in finished.out
    picture = imread(tmp_path / "run/losses.png")
    assert picture.std() > 0.05
