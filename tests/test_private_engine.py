"""Noisy steps: the right mean, the right noise, and no record that escapes clipping; and where secret noise is from."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from hpcfed.privacy import engine, entropy
from hpcfed.privacy.audit import audit, calibrated
from hpcfed.privacy.audited import Compiled
from hpcfed.privacy.engine import NoisySteps, run

# A sample variance of 20,000 normal numbers is outside of these with probability 1e-4.
LOW, HIGH = 0.9616, 1.0394
CLASSES = 3


def value(loss, x, features, target):
    """The losses by their definitions."""
    if loss == "mean":
        return np.sum((x - features) ** 2) / 2
    if loss == "softmax":
        scores = x.reshape(CLASSES, -1) @ features
        return np.log(np.exp(scores).sum()) - scores[int(target)]
    product = features @ x
    return (product - target) ** 2 if loss == "least-squares" else np.log1p(np.exp(-target * product))


def slope(loss, x, features, target, h=1e-6):
    """The gradient by central differences."""
    units = h * np.eye(x.size)
    return np.array([value(loss, x + u, features, target) - value(loss, x - u, features, target) for u in units]) / (
        2 * h
    )


def problem(loss, records=7, width=4, seed=0):
    rng = np.random.default_rng(seed)
    features = rng.standard_normal((records, width))
    targets = {
        "mean": None,
        "least-squares": rng.standard_normal(records),
        "logistic": rng.choice([-1.0, 1.0], records),
        "softmax": rng.integers(0, CLASSES, records).astype(float),
    }[loss]
    return features, targets, rng.standard_normal(width * (CLASSES if loss == "softmax" else 1))


def still(size, count, steps, rng, prefix=None):
    """``x`` after steps without gradients."""
    order = np.zeros(count if prefix is None else prefix, np.int64)
    return run("least-squares", np.zeros((1, size)), np.zeros(1), np.zeros(size), order, steps, rng)


def one_step(loss, features, target, x, clip=2.0, batch=1, eta=1e-3):
    """The gradient that one step without noise took."""
    features = np.atleast_2d(np.asarray(features, float))
    targets = None if loss == "mean" else np.atleast_1d(np.asarray(target, float))
    steps = NoisySteps(eta, clip, 0.0, batch)
    with np.errstate(invalid="ignore"):
        return (x - run(loss, features, targets, x, np.arange(len(features)), steps, np.random.default_rng(0))) / eta


@pytest.mark.parametrize("clip", [None, 0.7])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("loss", engine.LOSSES)
def test_a_pass_is_its_formula(loss, batch, clip):
    """Gradients are those of finite differences, clipped and averaged step by step; 7 records, the last batch short."""
    features, targets, x = problem(loss)
    order = np.array([4, 0, 6, 2, 2, 5, 1])
    found = run(loss, features, targets, x, order, NoisySteps(0.05, clip, 0.0, batch), np.random.default_rng(0))
    expected, clipped = x.copy(), 0
    for first in range(0, 7, batch):
        total = np.zeros(x.size)
        for place in order[first : first + batch]:
            gradient = slope(loss, expected, features[place], None if targets is None else targets[place])
            length = np.linalg.norm(gradient)
            clipped += length > (clip or np.inf)
            total += gradient * min(1.0, (clip or np.inf) / length)
        expected = expected - 0.05 * total / batch
    assert (clipped > 0) == (clip is not None)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-7)


class TestNoise:
    def test_its_scale_after_a_pass(self):
        """``(x_{n+1} - x_1) / (eta sigma sqrt(n))`` is standard normal: a variance test of 20,000 numbers."""
        x = still(20_000, 50, NoisySteps(0.3, 1.0, 7.0), np.random.default_rng(1))
        assert LOW < np.var(x / (0.3 * 7.0 * 50**0.5)) < HIGH

    def test_it_is_fresh_in_every_step(self):
        """Differences of successive steps have twice the variance of one, and steps do not correlate."""
        size, steps = 20_000, NoisySteps(0.3, 1.0, 7.0)
        places = np.array([still(size, 5, steps, np.random.default_rng(2), prefix) for prefix in range(6)])
        moves = np.diff(places, axis=0) / (0.3 * 7.0)
        for before, after in itertools.pairwise(moves):
            assert LOW < np.var(after - before) / 2 < HIGH
            assert abs(np.corrcoef(before, after)[0, 1]) < 4 / size**0.5

    @pytest.mark.parametrize("batch", [1, 4])
    def test_one_draw_for_each_step_whatever_the_batch(self, batch):
        """10 records are 10 steps, or 3; the noise is not divided by b."""
        drawn = np.random.default_rng(3).standard_normal((-(-10 // batch), 6))
        x = still(6, 10, NoisySteps(0.5, 1.0, 2.0, batch), np.random.default_rng(3))
        np.testing.assert_allclose(x, -0.5 * 2.0 * drawn.sum(axis=0), rtol=1e-12)

    def test_how_much_is_drawn_at_a_time_changes_no_bit(self, monkeypatch):
        features, targets, x = problem("logistic", records=40)
        steps = NoisySteps(0.1, 1.0, 1.0, 3)

        def bits():
            return run("logistic", features, targets, x, np.arange(40), steps, np.random.default_rng(4)).tobytes()

        whole = bits()
        for chunk in (1, 4, 13, 40):
            monkeypatch.setattr(engine, "CHUNK", chunk)
            assert bits() == whole

    def test_a_gradient_that_is_no_number_counts_as_zero_and_its_step_has_noise(self):
        bad = run("mean", np.full((1, 20_000), np.nan), None, np.zeros(20_000), [0], NoisySteps(0.5, 1.0, 2.0), rng(5))
        np.testing.assert_array_equal(bad, still(20_000, 1, NoisySteps(0.5, 1.0, 2.0), rng(5)))
        assert LOW < np.var(bad) < HIGH

    def test_none_is_drawn_without_noise(self):
        stream = rng(6)
        still(5, 3, NoisySteps(0.5, 1.0, 0.0), stream)
        assert stream.random() == rng(6).random()


def rng(seed):
    return np.random.default_rng(seed)


class TestClipping:
    # What somebody might hold who wants to be seen: too large or too small to be squared, and nothing that is a number.
    WICKED = (0.0, 1e-320, 1e-200, 1e-5, 1.0, 1e150, 1e200, 1e307, np.inf, np.nan)

    @pytest.mark.parametrize("loss", engine.LOSSES)
    @pytest.mark.parametrize("size", WICKED)
    def test_no_record_moves_the_iterate_by_more(self, loss, size):
        width = 5
        x = np.linspace(-1, 1, width * (CLASSES if loss == "softmax" else 1))
        shapes = [np.ones(width), np.array([1.0, 0, 0, -1, 0]), np.arange(width) * 1e-3]
        with np.errstate(invalid="ignore"):
            records = [size * shape for shape in shapes]
        for record in records:
            for target in (0.0, 1.0, -1.0, 1e300, -1e300, np.inf, np.nan):
                moved = one_step(loss, record, target, x, clip=2.0, eta=1.0)
                assert np.linalg.norm(moved) <= 2.0 * (1 + 1e-12), (loss, size, target)

    @pytest.mark.parametrize("size", [1e3, 1e200, 1e300])
    def test_what_is_huge_is_clipped_not_dropped(self, size):
        far = -size * np.array([3.0, 4.0])
        np.testing.assert_allclose(one_step("mean", far, None, np.zeros(2), eta=1.0), [1.2, 1.6], rtol=1e-12)
        pulled = one_step("least-squares", [0.6, 0.8], -size, np.zeros(2), eta=1.0)
        np.testing.assert_allclose(pulled, [1.2, 1.6], rtol=1e-12)

    def test_a_small_feature_with_a_huge_target_is_clipped(self):
        """The square of 1e-200 is 0, but the gradient 2e300 1e-200 is not small."""
        moved = one_step("least-squares", [1e-200, 0.0], -1e300, np.zeros(2), eta=1.0)
        np.testing.assert_allclose(moved, [2.0, 0.0], rtol=1e-12)

    def test_short_gradients_stay_as_they_are(self):
        np.testing.assert_allclose(one_step("mean", [-0.3, 0.4], None, np.zeros(2)), [0.3, -0.4], rtol=1e-12)

    def test_records_are_clipped_one_by_one(self):
        """Two records that cancel but for clipping: 10 and -1, clipped to 2 and -1, have the mean 1/2."""
        moved = one_step("mean", [[-10.0, 0.0], [1.0, 0.0]], None, np.zeros(2), clip=2.0, batch=2, eta=1e-9)
        np.testing.assert_allclose(moved, [0.5, 0.0], rtol=1e-6)

    def test_a_short_batch_is_divided_by_the_full_number(self):
        moved = one_step("mean", [[-1.0], [-1.0], [-1.0]], None, np.zeros(1), batch=2, eta=1e-9)
        np.testing.assert_allclose(moved, 1.0 + 0.5, rtol=1e-6)

    def test_without_clipping_what_is_no_number_is_seen(self):
        assert np.isnan(one_step("mean", [np.nan], None, np.zeros(1), clip=None)).all()


class TestBatches:
    def test_of_unequal_numbers(self):
        """Batches of 2, 0 and 3 records: the empty one is a step of noise alone."""
        features = -np.ones((5, 1))
        steps = NoisySteps(1e-9, 9.0, 0.0, 2, ends=np.array([2, 2, 5]))
        moved = -run("mean", features, None, np.zeros(1), np.arange(5), steps, rng(0)) / 1e-9
        np.testing.assert_allclose(moved, 1.0 + 0 + 1.5, rtol=1e-6)
        noisy = dataclasses.replace(steps, eta=1.0, noise=1.0)
        x = run("least-squares", np.zeros((5, 4)), np.zeros(5), np.zeros(4), np.arange(5), noisy, rng(1))
        np.testing.assert_allclose(x, -rng(1).standard_normal((3, 4)).sum(axis=0), rtol=1e-12)

    @pytest.mark.parametrize("ends", [[2], [3, 2, 5], [2, 6]])
    def test_ends_that_make_no_sense(self, ends):
        with pytest.raises(ValueError, match="ends"):
            NoisySteps(1.0, 1.0, 1.0, ends=np.array(ends)).bounds(5)

    def test_of_nothing(self):
        x = np.ones(3)
        assert run("mean", np.ones((2, 3)), None, x, [], NoisySteps(1.0, 1.0, 1.0), rng(0)).tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"loss": "hinge"}, "hinge"),
        ({"order": [0, 7]}, "7"),
        ({"order": [-1]}, "-1"),
        ({"x": np.zeros(5)}, "shape"),
        ({"targets": None}, "targets"),
        ({"targets": np.zeros(3)}, "3 targets"),
        ({"loss": "mean"}, "targets"),
    ],
)
def test_what_does_not_fit_is_refused(change, word):
    features, targets, x = problem("logistic")
    given = {"loss": "logistic", "features": features, "targets": targets, "x": x, "order": [0]} | change
    with pytest.raises(ValueError, match=word):
        run(**given, steps=NoisySteps(1.0, 1.0, 1.0), rng=rng(0))


def test_the_point_is_not_changed():
    features, targets, x = problem("softmax")
    before = x.copy()
    run("softmax", features, targets, x, np.arange(7), NoisySteps(1.0, 1.0, 1.0), rng(0))
    np.testing.assert_array_equal(x, before)


class TestTheEngineUnderAudit:
    @pytest.mark.parametrize("public_steps", [0, 15])
    def test_nothing_contradicts_the_claim(self, public_steps):
        mechanism = Compiled.like(calibrated(6.0, 1e-5, 10, public_steps))
        found = audit(mechanism, 1e-5, 3000, rng(1))
        assert found.contradictions == []
        assert found.mu_found > 0.6 * found.mu_claimed

    @pytest.mark.parametrize(
        ("does", "claims"), [({"noise": 0.5}, "game"), ({"clip": 2.0}, "game"), ({"noise": 0.9}, "scale")]
    )
    def test_an_engine_that_does_less_is_found(self, does, claims):
        """The same steps with less noise, or a looser clip, than the mechanism says that it has."""

        class Liar(Compiled):
            @property
            def _steps(self):
                right = super()._steps
                return dataclasses.replace(
                    right, **{name: factor * getattr(right, name) for name, factor in does.items()}
                )

        found = audit(Liar(10, 15, 1.0, calibrated(6.0, 1e-5, 10, 15).noise), 1e-5, 4000, rng(2))
        assert any(claims in each for each in found.contradictions)


class TestEntropy:
    # RFC 8439, appendix A.1, test vectors 1 and 2: key 0, nonce 0, blocks 0 and 1.
    KEYSTREAM = (
        "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
        "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586"
        "9f07e7be5551387a98ba977c732d080dcb0f29a048e3656912c6533e32ee7aed"
        "29b721769ce64e43d57133b074d839d531ed1f28510afb45ace10a1f4b794d6f"
    )

    def test_bits_are_chacha20s(self):
        assert np.random.Generator(entropy.ChaCha20(bytes(32))).bytes(128).hex() == self.KEYSTREAM

    def test_a_block_of_the_standard(self):
        """RFC 8439, section 2.3.2."""
        from hpcfed.privacy.entropy_kernels import block

        given = np.zeros(16, np.uint32)
        given[:12] = np.frombuffer(b"expand 32-byte k" + bytes(range(32)), "<u4")
        given[12:] = [1, 0x09000000, 0x4A000000, 0]
        out = np.zeros(16, np.uint32)
        block(given, out)
        assert [f"{word:08x}" for word in out[[0, 1, 7, 14, 15]]] == [
            "e4e7f110",
            "15593bd1",
            "4e6cd4c3",
            "e883d0cb",
            "4e3c50a2",
        ]

    def test_numbers_of_64_bits_and_fractions(self):
        raw = bytes.fromhex(self.KEYSTREAM)
        long = np.frombuffer(raw, "<u8")
        stream = np.random.Generator(entropy.ChaCha20(bytes(32)))
        np.testing.assert_array_equal(stream.random(16), (long >> np.uint64(11)) * 2.0**-53)

    def test_the_counter_goes_on_beyond_32_bits(self):
        source = entropy.ChaCha20(bytes(32))
        source._words[12] = 2**32 - 1
        stream = np.random.Generator(source)
        stream.bytes(128)
        assert source._words[12:14].tolist() == [1, 1]

    def test_streams_are_normal_and_differ(self):
        a, b = (entropy.fresh().standard_normal(20_000) for _ in range(2))
        assert abs(np.corrcoef(a, b)[0, 1]) < 5 / 20_000**0.5
        for each in (a, b):
            assert 0.95 < each.var() < 1.05
            assert abs(each.mean()) < 5 / 20_000**0.5
