"""The verbs of the federation against what NumPy says, alone and on simulated ranks."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_communicator import on_ranks

from hpcfed.compressors.grid import Grid
from hpcfed.compressors.qsgd import Qsgd
from hpcfed.errors import ConfigError
from hpcfed.federation import Federation, PerClient
from hpcfed.streams import Purpose, Streams


def federation(count, **options):
    """Clients that are their own numbers."""
    return Federation(count, **options).build(lambda client, rng: client)


def values_of(fed, dtype, shape):
    """A different array at each client, of the client's DATA stream."""
    return fed.map(lambda client, rng: rng.standard_normal(shape).astype(dtype))


class Stubborn(Exception):
    """It is made from two arguments, but remembers one: unpickling fails."""

    def __init__(self, file, line):
        super().__init__(f"{file} is bad at {line}")


class TestWhoTakesPart:
    @given(st.integers(1, 40), st.integers(1, 40))
    def test_ranks_own_blocks_of_consecutive_clients_of_nearly_equal_size(self, clients, ranks):
        ranks = min(ranks, clients)

        class Ranks:
            size = ranks

        fed = Federation(clients, communicator=Ranks())
        owners = [fed.owner(client) for client in range(clients)]
        assert owners == sorted(owners)
        counts = np.bincount(owners, minlength=ranks)
        assert len(counts) == ranks
        assert counts.max() - counts.min() <= 1

    def test_each_client_lives_on_one_rank(self):
        everyone = on_ranks(3, lambda comm: federation(8, communicator=comm).local)
        assert sorted(sum(everyone, ())) == list(range(8))

    def test_every_client_is_equally_likely(self):
        """The number of inclusions in R rounds is binomial(R, n/N): 5 standard deviations are allowed."""
        fed, rounds, count = Federation(10), 3000, 3
        included = np.bincount([client for r in range(rounds) for client in fed.at(r).sample(count).cohort])
        assert included.sum() == rounds * count
        share = count / 10
        assert np.abs(included - rounds * share).max() < 5 * math.sqrt(rounds * share * (1 - share))

    def test_every_pair_is_equally_likely(self):
        fed, rounds = Federation(5), 2000
        pairs = [fed.at(r).sample(2).cohort for r in range(rounds)]
        counts = np.unique(pairs, axis=0, return_counts=True)[1]
        assert len(counts) == 10
        statistic = ((counts - rounds / 10) ** 2 / (rounds / 10)).sum()
        assert statistic < 27.9  # chi-square with 9 degrees of freedom, one in a thousand

    def test_a_cohort_is_sorted_distinct_and_the_same_on_every_rank(self):
        for number in range(20):
            cohorts = on_ranks(4, lambda comm, r=number: Federation(9, communicator=comm).at(r).sample(4).cohort)
            assert set(cohorts) == {Federation(9).at(number).sample(4).cohort}
            assert cohorts[0] == tuple(sorted(set(cohorts[0])))
            assert len(cohorts[0]) == 4

    def test_cohorts_differ_between_rounds_seeds_and_calls(self):
        fed = Federation(100).at(1)
        cohorts = {fed.sample(10).cohort, fed.sample(10).cohort, fed.at(2).sample(10).cohort}
        assert len(cohorts | {Federation(100, Streams(1)).at(1).sample(10).cohort}) == 4

    @pytest.mark.parametrize("count", [None, 7])
    def test_all_clients_take_part_unless_fewer_are_asked_for(self, count):
        assert Federation(7).at(1).sample(count).cohort == tuple(range(7))

    @pytest.mark.parametrize("count", [0, -1, 8])
    def test_a_cohort_that_cannot_be_is_refused(self, count):
        with pytest.raises(ValueError, match=str(count)):
            Federation(7).at(1).sample(count)


class TestWorkAtTheClients:
    def test_clients_are_built_from_their_own_streams(self):
        fed = Federation(4, Streams(9)).build(lambda client, rng: (client, rng.random()))
        expected = {c: (c, Streams(9).generator(Purpose.DATA, client=c).random()) for c in range(4)}
        assert dict(fed.clients) == expected

    def test_map_gives_each_client_its_number_its_stream_and_its_own_values(self):
        fed = federation(4, streams=Streams(2)).at(3)
        own = fed.map(lambda client, rng: client * 10)
        result = fed.map(lambda client, rng, mine, shared: (client, rng.random(), mine, shared), own, "all")
        for client, (number, drawn, mine, shared) in result.items():
            stream = Streams(2).generator(Purpose.CLIENT, 3, 1, client)
            assert (number, drawn, mine, shared) == (client, stream.random(), client * 10, "all")

    def test_map_asks_the_cohort_alone_in_order(self):
        fed = federation(9).at(5).sample(4)
        asked = []
        assert tuple(fed.map(lambda client, rng: asked.append(client))) == fed.cohort
        assert tuple(asked) == fed.cohort

    def test_streams_do_not_depend_on_the_cohort_or_the_ranks(self):
        def drawn(comm):
            fed = federation(6, communicator=comm).at(2)
            return fed.collect(fed.map(lambda client, rng: rng.random()))

        alone = drawn(Federation(6).communicator)
        assert on_ranks(3, drawn) == [alone] * 3
        part = replace(federation(6).at(2), cohort=(1, 4))
        assert part.collect(part.map(lambda client, rng: rng.random())) == [alone[1], alone[4]]

    def test_rounds_start_anew_and_differ(self):
        def draw(round):
            return dict(federation(2).at(round).map(lambda client, rng: rng.random()))

        assert draw(4) == draw(4)
        assert draw(4) != draw(5)

    def test_an_error_says_which_client_and_round(self):
        def fails(client, rng):
            if client == 2:
                raise ZeroDivisionError("of nothing")

        with pytest.raises(ZeroDivisionError) as caught:
            federation(4).at(7).map(fails)
        assert caught.value.__notes__ == ["client 2, round 7"]

    @pytest.mark.parametrize("ranks", [1, 2, 4])
    def test_an_error_while_building_is_the_lowest_clients_on_every_rank(self, ranks):
        def fails(client, rng):
            if client in (1, 3):
                raise OSError(f"no data of {client}")

        def attempt(comm):
            with pytest.raises(OSError, match="no data of 1") as caught:
                Federation(4, communicator=comm).build(fails)
            return caught.value.everywhere, caught.value.__notes__

        assert on_ranks(ranks, attempt) == [(True, ["client 1, while its data were built"])] * ranks

    def test_an_error_that_cannot_be_pickled_is_still_told(self):
        def fails(client, rng):
            raise Stubborn("data.csv", 3)

        with pytest.raises(Exception, match=r"data\.csv is bad at 3"):
            on_ranks(2, lambda comm: Federation(2, communicator=comm).build(fails))

    def test_once_runs_on_one_rank_and_tells_all(self):
        calls = []

        def make():
            calls.append(1)
            return np.arange(4.0)

        for array in on_ranks(3, lambda comm: Federation(3, communicator=comm).once(make)):
            np.testing.assert_array_equal(array, np.arange(4.0))
        assert calls == [1]
        assert on_ranks(2, lambda comm: Federation(3, communicator=comm).once(lambda: {"a": 1})) == [{"a": 1}] * 2

    def test_an_error_of_once_is_every_ranks(self):
        def fails():
            raise ConfigError("no such file")

        def attempt(comm):
            with pytest.raises(ConfigError, match="no such file") as caught:
                Federation(2, communicator=comm).once(fails)
            return caught.value.everywhere

        assert on_ranks(2, attempt) == [True, True]


class TestPerClient:
    def test_it_is_a_mapping_in_the_order_of_ids(self):
        values = PerClient({3: "c", 1: "a"})
        assert list(values.items()) == [(1, "a"), (3, "c")]
        assert len(values) == 2

    def test_unzip_takes_tuples_apart(self):
        first, second = PerClient({1: ("a", 10), 4: ("b", 20)}).unzip(2)
        assert dict(first) == {1: "a", 4: "b"}
        assert dict(second) == {1: 10, 4: 20}

    def test_unzip_of_nothing_is_as_many_nothings(self):
        assert [len(each) for each in PerClient({}).unzip(3)] == [0, 0, 0]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("shape", [(7,), (2, 3, 4), (0,), (1, 1)])
class TestSums:
    """Sums are rounded once to the arrays' type: half a unit in the last place, and float64's own on the way."""

    def close(self, found, expected, dtype):
        assert found.dtype == dtype
        assert found.shape == expected.shape
        np.testing.assert_allclose(found, expected, rtol=4 * np.finfo(dtype).eps, atol=4 * np.finfo(dtype).eps)

    def test_mean(self, dtype, shape):
        fed = federation(6).at(1)
        values = values_of(fed, dtype, shape)
        self.close(fed.mean(values), np.mean(list(values.values()), axis=0, dtype=float), dtype)

    def test_mean_of_a_cohort_counts_the_cohort_alone(self, dtype, shape):
        fed = federation(6).at(1).sample(4)
        values = values_of(fed, dtype, shape)
        self.close(fed.mean(values), np.mean(list(values.values()), axis=0, dtype=float), dtype)

    def test_total(self, dtype, shape):
        fed = federation(6).at(1).sample(5)
        values = values_of(fed, dtype, shape)
        self.close(fed.total(values), np.sum(list(values.values()), axis=0, dtype=float), dtype)

    def test_weighted_mean_normalises_over_the_cohort(self, dtype, shape):
        weights = (1.0, 2.0, 0.0, 5.0, 0.25, 3.0)
        fed = federation(6, weights=weights).at(1).sample(4)
        values = values_of(fed, dtype, shape)
        chosen = [weights[client] for client in fed.cohort]
        self.close(
            fed.mean(values, weighted=True),
            np.average(np.array(list(values.values()), float), axis=0, weights=chosen),
            dtype,
        )
        self.close(fed.mean(values), np.mean(list(values.values()), axis=0, dtype=float), dtype)

    def test_largest(self, dtype, shape):
        fed = federation(6).at(1)
        values = values_of(fed, dtype, shape)
        found = fed.largest(values)
        assert found.dtype == dtype
        np.testing.assert_array_equal(found, np.max(list(values.values()), axis=0))


class TestNumbers:
    @pytest.mark.parametrize("kind", [int, float, np.float32, np.float64, np.int64])
    def test_numbers_come_back_as_numbers(self, kind):
        fed = federation(4).at(1)
        values = fed.map(lambda client, rng: kind(client + 1))
        for found, expected in ((fed.mean(values), 2.5), (fed.total(values), 10.0), (fed.largest(values), 4)):
            assert found == expected
            assert np.ndim(found) == 0
        assert isinstance(fed.mean(values), float)

    def test_one_client_has_its_own_mean(self):
        fed = federation(1).at(1)
        assert fed.mean(fed.map(lambda client, rng: 0.1)) == 0.1

    def test_collect_is_in_the_order_of_ids_on_every_rank(self):
        def names(comm):
            fed = federation(7, communicator=comm).at(2).sample(5)
            return fed.cohort, fed.collect(fed.map(lambda client, rng: f"client {client}"))

        for cohort, collected in on_ranks(3, names):
            assert collected == [f"client {client}" for client in cohort]


def test_arrays_are_left_as_they_were_and_views_are_as_good_as_arrays():
    base = np.arange(24, dtype=np.float32).reshape(4, 6)
    for compressor in (None, Qsgd(3), Grid(3)):
        fed = federation(3, compressor=compressor).at(1)
        views = fed.map(lambda client, rng: base.T[:, ::2] * 1 if client == 0 else base.T[:, ::2])
        before = {client: view.copy() for client, view in views.items()}
        means = [fed.at(1).mean(views, lossy=True) for _ in range(2)]
        np.testing.assert_array_equal(means[0], means[1])
        for client, view in views.items():
            np.testing.assert_array_equal(view, before[client])
        means[0][:] = -1  # the result is the caller's
        for client, view in views.items():
            np.testing.assert_array_equal(view, before[client])


def test_the_mean_of_one_client_is_not_its_own_array():
    fed = federation(1).at(1)
    own = np.ones(4)
    fed.mean(PerClient({0: own}))[:] = 7
    assert own.tolist() == [1, 1, 1, 1]


def test_only_lossy_messages_are_compressed():
    fed = federation(3, compressor=Qsgd(1)).at(1)
    values = values_of(fed, np.float64, (50,))
    exact = np.mean(list(values.values()), axis=0)
    np.testing.assert_allclose(fed.mean(values), exact, rtol=1e-15)
    assert np.abs(fed.mean(values, lossy=True) - exact).max() > 0.1


def test_a_client_with_another_shape_or_type_is_named():
    fed = federation(3).at(1)
    with pytest.raises(ValueError, match=r"client 2 .*\(3,\).*\(2,\)"):
        fed.mean(fed.map(lambda client, rng: np.zeros(3 if client == 2 else 2)))
    with pytest.raises(ValueError, match=r"client 1 .*float32.*float64"):
        fed.mean(fed.map(lambda client, rng: np.zeros(2, np.float32 if client == 1 else np.float64)))


@settings(max_examples=15, deadline=None)
@given(
    ranks=st.integers(2, 5),
    participants=st.integers(1, 5),
    compressor=st.sampled_from([None, Qsgd(4), Grid(4)]),
    round=st.integers(0, 10**6),
)
def test_a_round_has_the_same_bits_on_any_number_of_ranks(ranks, participants, compressor, round):
    """Also where whole ranks sit the round out."""

    def one_round(comm):
        fed = federation(5, communicator=comm, compressor=compressor).at(round).sample(participants)
        values = values_of(fed, np.float32, (3, 4, 2))
        numbers = fed.map(lambda client, rng: rng.random())
        return (
            fed.mean(values, lossy=True).tobytes(),
            fed.mean(values).tobytes(),
            fed.total(numbers),
            fed.largest(numbers),
            [fed.ledger.totals(comm)[name] for name in ("paper_bits_up", "paper_bits_down")],
        )

    assert on_ranks(ranks, one_round) == [one_round(Federation(1).communicator)] * ranks
