"""`hpcfed maml`: adaptation against differences and closed forms, what is counted, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from matplotlib.image import imread
from test_communicator import on_ranks

from hpcfed.data import tasks
from hpcfed.data.images import Images, read_images
from hpcfed.errors import ConfigError, DataError
from hpcfed.federation import Federation
from hpcfed.models.empirical import EmpiricalLoss
from hpcfed.streams import Streams
from hpcfed.workloads.maml import Maml


def build(**options):
    workload = Maml(**{"clients": 3, "hidden": (6,), "inner_step": 0.1, "held_out": 7, **options})
    return workload.build(Federation(workload.clients, Streams(3)))


def doubled(client):
    """A client in float64."""

    def own(loss):
        targets = loss.targets.double() if loss.targets.is_floating_point() else loss.targets
        return EmpiricalLoss(loss.model, loss.inputs.double(), targets)

    sets = tuple(replace(task, support=own(task.support), query=own(task.query)) for task in client.tasks)
    return replace(client, loss=own(client.loss), tasks=sets)


def omniglot(folder, evaluation=4, **changes):
    """Twelve characters of twenty drawings of their own, noisy, in the layout of the published set."""
    rng = np.random.default_rng(0)
    shapes = rng.random((12, 1, 105, 105)) < 0.1
    drawn = shapes ^ (rng.random((12, 20, 105, 105)) < 0.01)
    arrays = {
        "packed": np.packbits(drawn.reshape(240, -1), axis=1),
        "y": np.arange(12).repeat(20),
        "class_is_evaluation": np.arange(12) >= 12 - evaluation,
    }
    np.savez(folder / "omniglot.npz", **(arrays | changes))
    return str(folder / "omniglot.npz"), drawn


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("batch", [None, 4])
def test_the_pullback_is_that_of_differences_and_of_the_dense_jacobian(count, batch):
    client = doubled(build(tasks_per_client=count).fed.clients[1])
    rng = np.random.default_rng(0)
    x = rng.standard_normal(client.inner_size // count)
    sample = client.draw_inner(rng, batch)
    y, pull = client.inner_pullback(x, sample)
    assert y.shape == (client.inner_size,)
    np.testing.assert_allclose(client.inner(x, sample), y, rtol=1e-12)
    dense = client.inner_jacobian(x, sample)
    assert dense.shape == (client.inner_size, len(x))
    h = 1e-6
    for _ in range(3):
        v, d = rng.standard_normal(y.shape), rng.standard_normal(x.shape)
        slope = (client.inner(x + h * d, sample) - client.inner(x - h * d, sample)) / (2 * h)
        np.testing.assert_allclose(dense @ d, slope, atol=1e-7 * np.linalg.norm(slope))
        np.testing.assert_allclose(pull(v), v @ dense, rtol=1e-9, atol=1e-12)
        assert pull(v) @ d == pytest.approx(v @ slope, rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("count", [1, 3])
def test_the_outer_gradient_and_the_whole_are_those_of_differences(count):
    client = doubled(build(tasks_per_client=count).fed.clients[0])
    rng, h = np.random.default_rng(1), 1e-6
    x = rng.standard_normal(client.inner_size // count)
    y, pull = client.inner_pullback(x, None)
    outer = client.outer_gradient(y, None)
    d = rng.standard_normal(y.shape)
    slope = (client.outer_value(y + h * d) - client.outer_value(y - h * d)) / (2 * h)
    assert outer @ d == pytest.approx(slope, rel=1e-6)
    d = rng.standard_normal(x.shape)
    up, down = (client.outer_value(client.inner(x + s * h * d, None)) for s in (1, -1))
    assert pull(outer) @ d == pytest.approx((up - down) / (2 * h), rel=1e-6)


def test_a_linear_model_adapts_as_in_the_textbook():
    """Least squares: ``g(x) = x - a H x + a b`` with H and b from the support set, and the query set judges it."""
    client = doubled(build(model="linear").fed.clients[2])
    (task,) = client.tasks

    def rows(loss):
        inputs = loss.inputs.numpy()
        return np.column_stack([inputs, np.ones(len(inputs))]), loss.targets.numpy()[:, 0]

    (A, b), (C, c) = rows(task.support), rows(task.query)
    x = np.array([0.7, -0.3])
    adapted = x - 0.1 * 2 * A.T @ (A @ x - b) / len(b)
    np.testing.assert_allclose(client.inner(x, None), adapted, rtol=1e-12)
    np.testing.assert_allclose(client.inner_jacobian(x, None), np.eye(2) - 0.2 * A.T @ A / len(b), rtol=1e-12)
    assert client.outer_value(adapted) == pytest.approx(((C @ adapted - c) ** 2).mean(), rel=1e-12)
    everything = np.concatenate([(A @ x - b) ** 2, (C @ x - c) ** 2])
    assert client.value(x) == pytest.approx(everything.mean(), rel=1e-12)


@pytest.mark.parametrize("count", [1, 2])
def test_counts_are_those_of_a_hand(count):
    problem = build(tasks_per_client=count)
    client, x = problem.fed.clients[0], problem.start()
    rng = np.random.default_rng(0)
    sample = client.draw_inner(rng, 4)
    y, pull = client.inner_pullback(x, sample)  # 4 samples and 1 gradient a task
    pull(y), pull(y)  # 2 products, with 2 Hessian products a task
    client.inner(x, None)  # 10 samples and 1 gradient a task
    client.inner_jacobian(x, sample)  # 4 samples a task; a product for each of p rows
    client.outer_gradient(y, client.draw_outer(rng, 5))  # 5 samples and 1 gradient a task
    client.outer_value(y)  # 10 samples a task
    client.gradient(x, rng, 6)  # 6 samples, 1 gradient
    p = client.inner_size
    assert p == count * len(x)
    assert problem.fed.ledger.work == {
        "samples": count * (4 + 10 + 4 + 5 + 10) + 6,
        "gradients": count * 3 + 1,
        "jacobian_products": 2 + p,
        "hessian_products": 2 * count + p,
    }


def test_one_sample_at_two_points_is_one_map():
    """The Jacobian of a quadratic is the same everywhere: two points tell whether the sample was."""
    client = doubled(build(model="linear").fed.clients[0])
    sample, other = (client.draw_inner(np.random.default_rng(seed), 4) for seed in (1, 2))
    here, there = np.array([0.5, 1.0]), np.array([-2.0, 0.3])
    np.testing.assert_allclose(client.inner_jacobian(here, sample), client.inner_jacobian(there, sample), rtol=1e-12)
    change = client.inner(there, sample) - client.inner(here, sample)
    np.testing.assert_allclose(client.inner_jacobian(here, sample) @ (there - here), change, rtol=1e-10)
    assert not np.allclose(client.inner_jacobian(here, other), client.inner_jacobian(here, sample))


def test_metrics_are_those_of_the_held_out_tasks():
    """Seven tasks, dealt to three clients to be judged, adapted here by hand."""
    problem = build()
    x = problem.start()
    found = problem.metrics(x, problem.fed)
    before, after = [], []
    for number in range(7):
        task = problem.held_out(number)
        y = x - np.float32(0.1) * task.support.value_and_gradient(x)[1]
        before.append(task.query.value(x)[0])
        after.append(task.query.value(y)[0])
    assert found["loss_before"] == pytest.approx(np.mean(before), rel=1e-5)
    assert found["loss_after"] == pytest.approx(np.mean(after), rel=1e-5)
    values = [client.outer_value(client.inner(x, None)) for client in problem.fed.clients.values()]
    assert found["objective"] == pytest.approx(np.mean(values), rel=1e-6)
    np.testing.assert_allclose(problem.results(x)["held_out_losses"][0].T, [before, after], rtol=1e-5)


def test_sinusoids_are_drawn_from_their_ranges_and_tasks_lie_on_them():
    rng = np.random.default_rng(0)
    curves = [tasks.Sinusoid.random(rng) for _ in range(500)]
    amplitudes, phases = np.array([(curve.amplitude, curve.phase) for curve in curves]).T
    assert (amplitudes.min() >= 0.1, amplitudes.max() <= 5, phases.min() >= 0, phases.max() <= np.pi) == (True,) * 4
    assert amplitudes.mean() == pytest.approx(2.55, abs=5 * 4.9 / np.sqrt(12 * 500))
    assert phases.mean() == pytest.approx(np.pi / 2, abs=5 * np.pi / np.sqrt(12 * 500))
    x, y = curves[0].task(8, 3, rng).support
    np.testing.assert_allclose(y, amplitudes[0] * np.sin(5 * x - phases[0]), rtol=1e-4, atol=1e-5)


def test_tasks_of_images_have_new_labels_and_no_image_twice():
    pixels = np.arange(60, dtype=np.float32).reshape(60, 1, 1, 1)
    images = Images(pixels, np.arange(60) % 6)
    task = tasks.few_shot(images, 3, 4, 6, np.random.default_rng(1))
    (support, new), (query, newer) = task.support, task.query
    assert (len(support), len(query)) == (12, 18)
    assert new.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    names = {}
    for value, label in zip([*support.ravel(), *query.ravel()], [*new, *newer], strict=True):
        assert names.setdefault(int(value) % 6, label) == label
    assert sorted(names.values()) == [0, 1, 2]
    assert len({*support.ravel(), *query.ravel()}) == 30
    with pytest.raises(DataError, match="6 classes have 4 \\+ 6 images"):
        tasks.few_shot(images, 7, 4, 6, np.random.default_rng(1))


def test_omniglot_is_unpacked_and_shrunk_by_means_over_areas(tmp_path):
    path, drawn = omniglot(tmp_path)
    background, evaluation = read_images(path)
    assert (len(background), len(evaluation), background.shape) == (160, 80, (1, 28, 28))
    assert set(evaluation.labels) == {8, 9, 10, 11}
    fine = drawn[0, 3].repeat(4, 0).repeat(4, 1).reshape(28, 15, 28, 15).mean(axis=(1, 3))
    np.testing.assert_allclose(background.inputs([3])[0, 0], fine, atol=0.51 / 255)
    problem = build(data=path, ways=3, hidden=(4,), held_out=3)
    found = problem.metrics(problem.start(), problem.fed)
    assert 0 <= found["accuracy_before"] <= 1
    assert problem.results(problem.start())["held_out_accuracies"][0].shape == (3, 2)


def test_a_few_steps_of_learning_adapt_to_new_characters(tmp_path):
    """Gradient descent on the objective: one step then adapts to held-out tasks."""
    path, _ = omniglot(tmp_path)
    problem = build(data=path, ways=2, model="linear", inner_step=0.5, support=5)
    x = problem.start()
    for _ in range(10):
        pulls = [client.inner_pullback(x, None) for client in problem.fed.clients.values()]
        slopes = [
            pull(client.outer_gradient(y, None))
            for client, (y, pull) in zip(problem.fed.clients.values(), pulls, strict=True)
        ]
        x = x - np.float32(0.5) * np.mean(slopes, axis=0)
    assert problem.metrics(x, problem.fed)["accuracy_after"] > 0.8


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"packed": np.zeros((240, 10), np.uint8)}, r"packed is uint8 \(240, 10\)"),
        ({"y": np.arange(3)}, r"y has shape \(3,\) for 240 images"),
        ({"class_is_evaluation": np.zeros(3)}, "class_is_evaluation has 3 classes"),
        ({"class_is_evaluation": np.zeros(12)}, "marks all classes or none"),
        ({"y": np.arange(240)}, "0 classes have 10"),
    ],
)
def test_bad_files_are_refused_in_one_line(changes, words, tmp_path):
    if len(changes.get("y", ())) == 240:
        changes = {**changes, "class_is_evaluation": np.arange(240) % 2}
    with pytest.raises(DataError, match=words) as refusal:
        build(data=omniglot(tmp_path, **changes)[0])
    assert "\n" not in str(refusal.value)


def test_a_jacobian_that_is_too_large_is_refused():
    problem = build(hidden=(60, 60))
    with pytest.raises(ConfigError, match="--jacobian product"):
        problem.fed.clients[0].inner_jacobian(problem.start(), None)


def test_omniglot_has_the_published_classes(shared_data):
    background, evaluation = read_images(shared_data / "omniglot" / "omniglot_105.npz")
    assert [len(np.unique(part.labels)) for part in (background, evaluation)] == [964, 659]
    assert len(background) + len(evaluation) == 32460
    assert 0.05 < background.inputs(slice(100)).mean() < 0.12  # ink


def test_ranks_change_no_bit_of_what_is_measured():
    def measured(comm):
        workload = Maml(clients=4, hidden=(8,), held_out=9)
        problem = workload.build(Federation(4, Streams(3), comm))
        start = problem.start()
        return start.tobytes(), problem.metrics(start, problem.fed.at(1))

    alone = measured(Federation(1).communicator)
    for ranks in (2, 3):
        assert on_ranks(ranks, measured) == [alone] * ranks


def test_a_run_ends_with_its_picture(hpcfed, tmp_path):
    options = [
        "--rounds",
        "2",
        "--record-every",
        "2",
        "--clients",
        "4",
        "--hidden",
        "8",
        "--held-out",
        "9",
        "--quantize",
        "20",
    ]
    finished = hpcfed("maml", *options, "--out", str(tmp_path / "run"))
    assert finished.status == 0, finished.err
    assert f"picture {tmp_path / 'run' / 'adaptation.png'}" in finished.out
    picture = imread(tmp_path / "run/adaptation.png")
    assert picture.std() > 0.05
