"""`hpcfed prune`: masks, networks and derivatives in double precision against finite differences."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from hpcfed.errors import ConfigError, DataError
from hpcfed.federation import Federation
from hpcfed.streams import Streams
from hpcfed.workloads.prune import Prune

torch = pytest.importorskip("torch")

from hpcfed.devices import Device  # noqa: E402
from hpcfed.models.resnet import MaskedModel, resnet20, small  # noqa: E402


def build(**options):
    workload = Prune(**{"clients": 3, "data": ("digits",), "model": "small", "partition": "iid", **options})
    return workload.build(Federation(workload.clients, Streams(3)))


@pytest.fixture(scope="module")
def double():
    """A client with few images in double precision, and a point at which nothing is small."""
    problem = build()
    client = problem.fed.any_client

    def few(level):
        loss = level.loss
        part = dataclasses.replace(loss, inputs=loss.inputs[:30].double(), targets=loss.targets[:30])
        return dataclasses.replace(level, loss=part)

    client = dataclasses.replace(client, train=few(client.train), validation=few(client.validation), ridge=0.1)
    rng = np.random.default_rng(0)
    start = problem.start().astype(float)
    x, y = problem.model.parts(start + 0.05 * rng.normal(size=start.size))
    return client, 0.3 * x, y


def slope(value, x, y, dx, dy, h=1e-6):
    """A central difference."""
    return (value(x + h * dx, y + h * dy) - value(x - h * dx, y - h * dy)) / (2 * h)


class TestNetworks:
    def test_resnet20_has_the_published_size(self):
        """0.27 million parameters (He et al. 2015, table 6), 19 convolutions and one affine map."""
        model = resnet20(3, 10)
        assert round(model.size / 1e6, 2) == 0.27
        assert sum(len(shape) == 4 for shape in model.shapes.values()) == 19
        assert sum(len(shape) == 2 for shape in model.shapes.values()) == 1

    @pytest.mark.parametrize("network", [resnet20, small])
    def test_outputs_are_of_one_image_each(self, network):
        """Group normalization: what an image gives does not depend on the others of its batch."""
        model = network(3, 10)
        y = torch.from_numpy(model.initial(np.random.default_rng(0)))
        images = torch.from_numpy(np.random.default_rng(1).random((4, 3, 32, 32), dtype=np.float32))
        together = model.apply(y, images)
        assert together.shape == (4, 10)
        assert together.std() > 0.01
        torch.testing.assert_close(together[:1], model.apply(y, images[:1]), rtol=1e-4, atol=1e-5)

    def test_a_block_is_a_residual_one(self):
        """With convolutions of zero a block passes its positive inputs on, every second pixel where it halves."""
        from hpcfed.models.resnet import Block

        images = torch.rand(2, 8, 6, 6, generator=torch.Generator().manual_seed(0))
        for after, expected in ((8, images), (16, images[:, :, ::2, ::2])):
            block = Block(8, after)
            for parameter in block.parameters():
                torch.nn.init.zeros_(parameter)
            found = block(images)
            torch.testing.assert_close(found[:, :8], expected)
            assert not found[:, 8:].any()


class TestMasks:
    def model(self, rule, temperature=0.5):
        return MaskedModel.over(small(1, 4), rule, temperature, 0.2, Device())

    def test_only_weights_are_masked(self):
        model = self.model("sigmoid")
        weights = [
            size for shape, size in zip(model.model.shapes.values(), model.model.sizes, strict=True) if len(shape) > 1
        ]
        assert model.upper_size == sum(weights)
        assert model.kept == round(0.2 * sum(weights))
        ones = np.ones(model.lower_size, np.float32)
        pruned = model.pruned(np.linspace(-1, 1, model.upper_size, dtype=np.float32), ones)
        masked = np.delete(np.arange(model.lower_size), model.places.numpy())
        np.testing.assert_array_equal(pruned[masked], 1)

    @pytest.mark.parametrize("rule", ["sigmoid", "straight-through"])
    def test_the_pruned_network_keeps_the_largest_scores(self, rule):
        model = self.model(rule)
        x = np.random.default_rng(0).normal(size=model.upper_size).astype(np.float32)
        pruned = model.pruned(x, np.ones(model.lower_size, np.float32))[model.places.numpy()]
        largest = np.sort(np.argsort(-x)[: model.kept])
        np.testing.assert_array_equal(np.flatnonzero(pruned), largest)
        expected = 1 / (1 + np.exp(-x[largest] / 0.5)) if rule == "sigmoid" else 1.0
        np.testing.assert_allclose(pruned[largest], expected, rtol=1e-5)
        names, kept = model.kept_by_layer(x)
        assert kept.sum(axis=0).tolist() == [model.kept, model.upper_size]
        assert len(names) == len(kept) == 6

    def test_equal_scores_keep_as_many(self):
        model = self.model("straight-through")
        pruned = model.pruned(np.zeros(model.upper_size, np.float32), np.ones(model.lower_size, np.float32))
        assert np.count_nonzero(pruned[model.places.numpy()]) == model.kept

    def test_scores_start_as_magnitudes(self):
        model = self.model("sigmoid")
        x, y = model.parts(model.initial(np.random.default_rng(0)))
        assert np.count_nonzero(x > 0) == model.kept
        first = y[model.places.numpy()][: 8 * 9]
        np.testing.assert_array_equal(np.argsort(x[: 8 * 9]), np.argsort(np.abs(first)))

    def test_straight_through_is_the_hard_network_with_the_slope_of_its_weights(self):
        """The loss is the pruned network's; its derivative in a score is that in the weight's factor."""
        problem = build(mask="straight-through")
        client, start = problem.fed.any_client, problem.start()
        x, y = problem.model.parts(start)
        pruned = dataclasses.replace(client.validation.loss, model=problem.model.model)
        value, gradient = pruned.value_and_gradient(problem.model.pruned(x, y))
        assert client.upper_value(x, y) == pytest.approx(client.validation.factor * float(value[0]), rel=1e-6)
        in_x, in_y = client.upper_gradients(x, y, None)
        places = problem.model.places.numpy()
        expected = client.validation.factor * gradient
        np.testing.assert_allclose(in_x, (expected * y)[places], rtol=1e-3, atol=1e-6)
        kept = np.argsort(-x)[: problem.model.kept]
        np.testing.assert_allclose(in_y[places][kept], expected[places][kept], rtol=1e-3, atol=1e-6)


class TestDerivatives:
    def test_gradients_are_the_slopes_of_the_values(self, double):
        client, x, y = double
        rng = np.random.default_rng(1)
        for value, gradients in (
            (client.upper_value, client.upper_gradients),
            (client.lower_value, client.lower_gradients),
        ):
            in_x, in_y = gradients(x, y, None)
            assert in_x.dtype == in_y.dtype == np.float64
            for dx, dy in ((0 * x, rng.normal(size=y.size)), (rng.normal(size=x.size), 0 * y)):
                assert slope(value, x, y, dx, dy) == pytest.approx(in_x @ dx + in_y @ dy, rel=1e-4, abs=1e-6)

    def test_products_are_the_slopes_of_gradients(self, double):
        client, x, y = double
        v, u, dx = (np.random.default_rng(seed).normal(size=size) for seed, size in enumerate((y.size, y.size, x.size)))
        for sample in (None, client.draw_lower(np.random.default_rng(4), 7)):

            def in_y(x, y, sample=sample):
                return client.lower_gradients(x, y, sample)[1]

            product = client.lower_hessian_product(x, y, sample, v)
            assert product @ u == pytest.approx(slope(in_y, x, y, 0 * x, v) @ u, rel=1e-3)
            assert product @ u == pytest.approx(client.lower_hessian_product(x, y, sample, u) @ v, rel=1e-9)
            cross = client.lower_cross_product(x, y, sample, v)
            assert cross @ dx == pytest.approx(slope(in_y, x, y, dx, 0 * y) @ v, rel=1e-3)

    def test_a_batch_gives_the_gradient_in_the_mean(self, double):
        """200 draws, five standard errors along one direction of each variable."""
        client, x, y = double
        for draw, gradients in (
            (client.draw_upper, client.upper_gradients),
            (client.draw_lower, client.lower_gradients),
        ):
            found = []
            for seed in range(200):
                parts = gradients(x, y, draw(np.random.default_rng(seed), 3))
                found.append([part.sum() for part in parts])
            errors = np.std(found, axis=0, ddof=1) / np.sqrt(200)
            assert (errors > 0).all()
            exact = [part.sum() for part in gradients(x, y, None)]
            assert (np.abs(np.mean(found, axis=0) - exact) < 5 * errors).all()


def test_the_mean_of_the_clients_is_the_objective():
    """Clients of unequal sizes: the loss over all their images together."""
    problem = build(partition="dirichlet", ridge=0.01)
    start = problem.start()
    x, y = problem.model.parts(start)
    clients = list(problem.fed.clients.values())
    metrics = problem.metrics(start, problem.fed)
    for name, levels in (
        ("objective", [client.validation for client in clients]),
        ("lower_loss", [client.train for client in clients]),
    ):
        inputs, targets = (torch.cat([getattr(level.loss, part) for level in levels]) for part in ("inputs", "targets"))
        outputs = problem.model.apply(torch.from_numpy(start), inputs)
        expected = torch.nn.functional.cross_entropy(outputs, targets).item()
        expected += 0.005 * float(y.astype(float) @ y) if name == "lower_loss" else 0
        assert metrics[name] == pytest.approx(expected, rel=1e-5)
    assert len({len(client.train.loss) for client in clients}) > 1
    assert problem.holdings.sum() == 1797 - 180
    tests = [client.test for client in clients]
    outputs = problem.model.model.apply(
        torch.from_numpy(problem.model.pruned(x, y)), torch.cat([test.inputs for test in tests])
    )
    hits = (outputs.argmax(1) == torch.cat([test.targets for test in tests])).double().mean().item()
    assert metrics["test_accuracy"] == pytest.approx(hits, abs=1e-12)


def test_recorded_images_estimate_the_losses():
    problem = build()
    few = dataclasses.replace(problem, workload=dataclasses.replace(problem.workload, recorded_images=50))
    start = problem.start()
    exact, found = problem.metrics(start, problem.fed.at(1)), few.metrics(start, problem.fed.at(1))
    assert found["objective"] != exact["objective"]
    assert found["objective"] == pytest.approx(exact["objective"], rel=0.1)
    assert found["test_accuracy"] == exact["test_accuracy"]


class TestFiles:
    def save(self, path, shape, **more):
        rng = np.random.default_rng(0)
        x = rng.integers(0, 255, shape, dtype=np.uint8)
        np.savez(path, x=x, y=np.arange(len(x)) % 3, **more)
        return str(path)

    def test_files_are_put_together(self, tmp_path):
        names = tuple(self.save(tmp_path / f"{i}.npz", (40, 8, 8, 3)) for i in range(2))
        test = self.save(tmp_path / "test.npz", (9, 8, 8, 3))
        problem = build(data=names, test=test)
        assert problem.holdings.sum() == 80
        assert sum(len(client.test) for client in problem.fed.clients.values()) == 9
        inputs = problem.fed.any_client.train.loss.inputs
        assert inputs.shape[1:] == (3, 8, 8)
        assert inputs.min() >= -1
        assert inputs.max() <= 1

    def test_without_images_it_says_where_to_get_them(self):
        with pytest.raises(ConfigError, match=r"prune needs images: give --data .*cs\.toronto\.edu"):
            build(data=None)

    def test_bad_files_are_refused(self, tmp_path):
        good = self.save(tmp_path / "good.npz", (40, 8, 8, 3))
        other = self.save(tmp_path / "other.npz", (40, 8, 8))
        with pytest.raises(DataError, match="give files of one set"):
            build(data=(good, other))
        with pytest.raises(DataError, match="there is no such file"):
            build(data=(str(tmp_path / "none.npz"),))
        broken = tmp_path / "broken.npz"
        broken.write_bytes(b"PK not an archive")
        with pytest.raises(DataError, match="cannot be read"):
            build(data=(str(broken),))


def test_real_images_are_read(shared_data):
    folder = shared_data / "cifar10"
    problem = build(
        data=(str(folder / "cifar10_train_00k-05k.npz"), str(folder / "cifar10_train_05k-10k.npz")),
        test=str(folder / "cifar10_test_first1000.npz"),
    )
    assert problem.holdings.shape == (3, 10)
    assert problem.holdings.sum() == 10_000


@pytest.mark.mpi
def test_a_user_on_two_ranks_gets_the_bits_of_one(hpcfed, mpirun, tmp_path):
    options = (
        "prune",
        "--data",
        "digits",
        "--model",
        "small",
        "--rounds",
        "1",
        "--clients",
        "2",
        "--start-batch",
        "10",
        "--no-pictures",
    )
    alone = hpcfed(*options, "--out", str(tmp_path / "one"))
    two = mpirun(2, *options, "--out", str(tmp_path / "two"))
    assert (alone.status, two.status) == (0, 0), alone.err + two.err
    assert "--mask sigmoid: weights count by the sigmoid" in alone.err
    last = [json.loads((tmp_path / name / "metrics.jsonl").read_text().splitlines()[-1]) for name in ("one", "two")]
    for name in ("objective", "lower_loss", "test_loss", "test_accuracy"):
        assert last[0][name] == last[1][name]
