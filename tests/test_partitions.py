"""Partitions: every sample once, no client empty, the same on every rank, and distributed as they say."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from hpcfed.data.partitions import SCHEMES, contents, deal, describe, skew
from hpcfed.errors import ConfigError
from hpcfed.streams import Purpose, Streams


def rng(seed=0):
    return Streams(seed).generator(Purpose.SPLIT)


def some_labels(number, classes=2, seed=0):
    return np.random.default_rng(seed).integers(0, classes, number)


# -- what holds for all ------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=200)
@given(
    scheme=st.sampled_from(SCHEMES),
    num_clients=st.integers(1, 60),
    extra=st.integers(0, 200),
    classes=st.integers(1, 12),
    alpha=st.sampled_from([1e-6, 1e-3, 0.1, 1.0, 100.0, 1e9]),
    seed=st.integers(0, 2**32),
)
def test_every_sample_once_and_no_client_empty(scheme, num_clients, extra, classes, alpha, seed):
    labels = some_labels(num_clients + extra, classes, seed)
    shards = 1 + extra // num_clients
    parts = deal(scheme, labels, num_clients, rng(seed), alpha=alpha, shards=shards)
    assert len(parts) == num_clients
    assert all(part.dtype == np.int64 and part.size > 0 for part in parts)
    assert all((np.diff(part) > 0).all() for part in parts)
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(labels.size))
    again = deal(scheme, labels, num_clients, rng(seed), alpha=alpha, shards=shards)
    assert all(map(np.array_equal, parts, again))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_another_seed_deals_otherwise(scheme):
    labels = some_labels(1000)
    one, other = (deal(scheme, labels, 10, rng(seed)) for seed in (0, 1))
    assert not all(map(np.array_equal, one, other))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_labels_of_any_kind(scheme):
    signs = np.where(some_labels(100) == 1, 1.0, -1.0)
    words = np.where(signs > 0, "yes", "no")
    assert all(map(np.array_equal, deal(scheme, signs, 7, rng()), deal(scheme, words, 7, rng())))


@pytest.mark.parametrize("scheme", ["dirichlet", "quantity"])
def test_almost_all_samples_with_one_client_leaves_one_for_each_other(scheme):
    parts = deal(scheme, np.zeros(5000), 1000, rng(), alpha=1e-6)
    assert sorted(part.size for part in parts) == [1] * 999 + [4001]


# -- each scheme -------------------------------------------------------------------------------------------------------


def test_iid_sizes_differ_by_one_at_most():
    sizes = [part.size for part in deal("iid", np.zeros(1003), 17, rng())]
    assert set(sizes) == {59}
    assert {part.size for part in deal("iid", np.zeros(1000), 17, rng())} == {58, 59}


def test_iid_labels_are_independent_of_clients():
    # the chi-square statistic of the table is distributed as it should, over many seeds
    labels = np.sort(some_labels(4000, 4))
    p_values = [
        stats.chi2_contingency(contents(deal("iid", labels, 20, rng(seed)), labels)).pvalue for seed in range(200)
    ]
    assert stats.kstest(p_values, "uniform").pvalue > 1e-3


def test_iid_samples_and_clients_pair_up_equally_often():
    counts = np.zeros((12, 4))
    for seed in range(800):
        for client, part in enumerate(deal("iid", np.zeros(12), 4, rng(seed))):
            counts[part, client] += 1
    assert stats.chisquare(counts.ravel(), ddof=14).pvalue > 1e-3


def assert_distributed(sample, expected):
    """The empirical distribution is within four standard errors of the expected one, at points across [0, 1]."""
    points = np.array([1e-3, 0.01, 0.03, 0.1, 0.2, 0.4, 0.7])
    probability = expected.cdf(points)
    found = (np.asarray(sample)[:, None] <= points).mean(axis=0)
    assert (np.abs(found - probability) <= 4 * np.sqrt(probability * (1 - probability) / len(sample)) + 1e-3).all()


@pytest.mark.parametrize("alpha", [0.2, 1.0, 5.0])
def test_dirichlet_shares_have_beta_marginals(alpha):
    # a client's share of a class is Beta(alpha, (N - 1) alpha)
    num_clients, labels = 5, np.repeat([0, 1], 20_000)
    shares = np.array(
        [
            contents(deal("dirichlet", labels, num_clients, rng(seed), alpha=alpha), labels) / 20_000
            for seed in range(200)
        ]
    )
    for client, label in [(0, 0), (0, 1), (2, 1), (4, 0)]:
        assert_distributed(shares[:, client, label], stats.beta(alpha, (num_clients - 1) * alpha))
    # classes are dealt independently of one another
    assert abs(stats.pearsonr(shares[:, 0, 0], shares[:, 0, 1]).statistic) < 4 / np.sqrt(200)


def test_dirichlet_with_large_alpha_is_even_and_with_small_alpha_is_not():
    labels = some_labels(20_000, 4)
    even = contents(deal("dirichlet", labels, 10, rng(), alpha=1e9), labels)
    np.testing.assert_allclose(even / even.sum(axis=0), 0.1, atol=0.002)
    assert skew(even).mean() < 0.01
    assert skew(contents(deal("dirichlet", labels, 10, rng(), alpha=0.01), labels)).mean() > 0.5


def test_shards_limit_the_classes_of_a_client():
    # 10 classes of 600 over 20 clients with 2 shards of 150 each: no shard straddles two classes
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 600))
    table = contents(deal("shards", labels, 20, rng(), shards=2), labels)
    assert (table.sum(axis=1) == 300).all()
    assert (table % 150 == 0).all()
    assert (np.count_nonzero(table, axis=1) <= 2).all()


def test_shards_of_one_label_are_shuffled():
    parts = deal("shards", np.zeros(1000), 2, rng(), shards=1)
    # were they in order, the halves would have mean indices 249.5 and 749.5
    assert abs(parts[0].mean() - 499.5) < 5 * np.sqrt(1000**2 / 12 / 1000)


@pytest.mark.parametrize("alpha", [0.3, 2.0])
def test_quantity_sizes_have_beta_marginals(alpha):
    num_samples, num_clients = 40_000, 8
    sizes = np.array(
        [
            [part.size for part in deal("quantity", np.zeros(num_samples), num_clients, rng(seed), alpha=alpha)]
            for seed in range(200)
        ]
    )
    for client in (0, 3, 7):
        shares = (sizes[:, client] - 1) / (num_samples - num_clients)
        assert_distributed(shares, stats.beta(alpha, (num_clients - 1) * alpha))


def test_quantity_leaves_the_labels_as_they_come():
    labels = np.sort(some_labels(20_000, 3))
    table = contents(deal("quantity", labels, 10, rng(), alpha=2.0), labels)
    assert stats.chi2_contingency(table).pvalue > 1e-3
    assert np.ptp(table.sum(axis=1)) > 500


# -- mistakes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", SCHEMES)
def test_fewer_samples_than_clients(scheme):
    with pytest.raises(ConfigError, match="9 samples are too few for 10 clients"):
        deal(scheme, np.zeros(9), 10, rng(), shards=1)
    assert all(part.size == 1 for part in deal(scheme, some_labels(10), 10, rng(), shards=1))


@pytest.mark.parametrize("alpha", [0.0, -1.0, np.nan, np.inf])
@pytest.mark.parametrize("scheme", ["dirichlet", "quantity"])
def test_alpha_out_of_range(scheme, alpha):
    with pytest.raises(ConfigError, match="alpha"):
        deal(scheme, np.zeros(9), 3, rng(), alpha=alpha)


@pytest.mark.parametrize("shards", [0, -1, 4])
def test_shards_out_of_range(shards):
    with pytest.raises(ConfigError, match="use 1 to 3"):
        deal("shards", np.zeros(10), 3, rng(), shards=shards)


def test_unknown_scheme_and_no_clients():
    with pytest.raises(ConfigError, match="'random' is unknown: use one of iid"):
        deal("random", np.zeros(9), 3, rng())
    with pytest.raises(ConfigError, match="0 clients"):
        deal("iid", np.zeros(9), 0, rng())


# -- what came of it ---------------------------------------------------------------------------------------------------


def test_contents_and_skew():
    labels = np.array([1, -1, -1, 1, -1, -1, -1, -1])
    parts = [np.array([0, 3]), np.array([1, 2, 4]), np.array([5, 6, 7])]
    table = contents(parts, labels)
    np.testing.assert_array_equal(table, [[0, 2], [3, 0], [3, 0]])
    # overall shares are 3/4 and 1/4
    np.testing.assert_allclose(skew(table), [0.75, 0.25, 0.25])


def test_few_clients_have_a_line_each():
    labels = np.array([-1.0, -1.0, 1.0, 1.0, -1.0, 1.0])
    lines = describe([np.array([0, 1, 2]), np.array([3, 4, 5])], labels).splitlines()
    assert lines[0] == "6 samples of 2 classes, 2 clients"
    assert lines[1].split("  ")[-2:] == ["label -1", "label 1"]
    assert lines[2].split() == ["client", "0", "3", "2", "1"]
    assert lines[3].split() == ["client", "1", "3", "1", "2"]
    assert lines[4].startswith("skew 0.167")


def test_many_clients_are_summed_up():
    labels = some_labels(20_000)
    parts = deal("quantity", labels, 1000, rng(), alpha=0.5)
    sizes = np.array([part.size for part in parts])
    text = describe(parts, labels)
    assert len(text.splitlines()) < 15
    assert f"client {sizes.argmax()}, largest" in text
    (row,) = [line.split() for line in text.splitlines() if line.startswith("maximum")]
    assert row[1] == str(sizes.max())


def test_many_classes_are_counted():
    labels = np.arange(100) % 50
    lines = describe([np.arange(60), np.arange(60, 100)], labels).splitlines()
    assert lines[2].split() == ["client", "0", "60", "50", "2"]
    assert lines[3].split() == ["client", "1", "40", "40", "1"]
