"""Sums of clients' arrays: the same bytes on any number of ranks, right to the last place, and counted exactly."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_communicator import on_ranks

from hpcfed.compressors.grid import Grid
from hpcfed.compressors.qsgd import Qsgd
from hpcfed.errors import ConfigError, DivergedError
from hpcfed.exchange import sums
from hpcfed.exchange.routes import Routes
from hpcfed.exchange.sums import Parcel, combine
from hpcfed.ledger import TRAFFIC, Ledger
from hpcfed.ranks import shared_memory
from hpcfed.ranks.communicator import SerialCommunicator
from hpcfed.streams import Purpose, Streams

CLIENTS = 6
SIZES = st.sampled_from([0, 1, 7, 8, 9, 31, 1000])
COHORTS = st.sets(st.integers(0, CLIENTS - 1), min_size=1).map(lambda chosen: tuple(sorted(chosen)))
COMPRESSORS = st.sampled_from(
    [
        None,
        Qsgd(1),
        Qsgd(20, "7"),
        Qsgd(300, "all", route="owners"),
        Qsgd(300, "11", route="gather"),
        Qsgd(300, "all", quantize_down=7),
        Grid(3),
        Grid(1000, "5"),
        Grid(40000, "all"),
    ]
)


def rng(client):
    return Streams(3).generator(Purpose.COMPRESSION, 1, 0, client)


def arrays(cohort, shape, dtype):
    """Values of many magnitudes, so that another order of addition shows."""
    drawn = {c: np.random.default_rng((7, c)) for c in cohort}
    return {c: (r.standard_normal(shape) * 10.0 ** r.integers(-6, 6, shape)).astype(dtype) for c, r in drawn.items()}


def mean_rng(part):
    return Streams(3).generator(Purpose.COMPRESSION, 1, 0, CLIENTS + part)


def send(comm, values, compressor=None, weights=None, sum_order="client", divisor=None, routes=None):
    """The combination of all clients' arrays on one rank, and the traffic of all."""
    cohort = tuple(values)
    owners = tuple(((client + 1) * comm.size - 1) // CLIENTS for client in cohort)
    ledger = Ledger()
    if divisor is None:
        divisor = float(len(cohort) if weights is None else sum(weights))
    parcel = Parcel(comm, cohort, owners, rng, weights, divisor, ledger, mean_rng, routes or Routes())
    own = {client: values[client] for client, owner in zip(cohort, owners, strict=True) if owner == comm.rank}
    some = next(iter(values.values()))
    mean = combine(parcel, own, some.shape, some.dtype, compressor, sum_order)
    totals = ledger.totals(comm)
    return mean, {name: totals[name] for name in TRAFFIC}


def serial(values, *args, **kwargs):
    return send(SerialCommunicator(), values, *args, **kwargs)


def exact_mean(values, weights=None):
    """Sums without rounding errors (`math.fsum`), element by element."""
    weights = [1.0] * len(values) if weights is None else weights
    stacked = np.array([np.asarray(value, float).reshape(-1) for value in values.values()])
    sums = [math.fsum(w * v for w, v in zip(weights, column, strict=True)) for column in stacked.T]
    shape = next(iter(values.values())).shape
    return np.array(sums).reshape(shape) / math.fsum(weights)


class TestInOrder:
    @settings(max_examples=40, deadline=None)
    @given(SIZES, COHORTS, st.sampled_from([np.float32, np.float64]), COMPRESSORS, st.integers(2, 5))
    def test_the_same_bytes_on_any_number_of_ranks(self, size, cohort, dtype, compressor, ranks):
        values = arrays(cohort, size, dtype)
        expected, _ = serial(values, compressor)
        assert (expected.shape, expected.dtype) == ((size,), dtype)
        for found, _ in on_ranks(ranks, lambda comm: send(comm, values, compressor)):
            assert found.dtype == dtype
            assert found.tobytes() == expected.tobytes()

    @settings(max_examples=20, deadline=None)
    @given(st.data(), SIZES, COHORTS, st.sampled_from([None, Qsgd(5, "9")]), st.integers(2, 5))
    def test_weights_change_nothing_about_that(self, data, size, cohort, compressor, ranks):
        weights = data.draw(st.lists(st.floats(0.01, 100), min_size=len(cohort), max_size=len(cohort)))
        values = arrays(cohort, size, np.float32)
        expected, _ = serial(values, compressor, weights)
        for found, _ in on_ranks(ranks, lambda comm: send(comm, values, compressor, weights)):
            assert found.tobytes() == expected.tobytes()
        if compressor is None:
            reach = np.abs(np.array(list(values.values()), float)).sum(axis=0) * 1e-14
            limit = reach + np.spacing(np.abs(expected))
            assert (np.abs(expected - exact_mean(values, weights)) <= limit).all()

    @pytest.mark.parametrize("shape", [(), (1,), (5, 3), (2, 3, 4), (3, 2, 3, 4)])
    @pytest.mark.parametrize("compressor", [None, Qsgd(4), Grid(4)], ids=["raw", "qsgd", "grid"])
    def test_arrays_of_any_number_of_axes(self, shape, compressor):
        values = arrays(range(CLIENTS), shape, np.float32)
        expected, _ = serial(values, compressor)
        assert expected.shape == shape
        for found, _ in on_ranks(4, lambda comm: send(comm, values, compressor)):
            np.testing.assert_array_equal(found, expected)

    @pytest.mark.parametrize("compressor", [None, Qsgd(4, "100"), Qsgd(4, "all")], ids=["raw", "100", "all"])
    def test_long_arrays_travel_in_several_passes(self, monkeypatch, compressor):
        values = arrays(range(CLIENTS), 1003, np.float32)
        expected, _ = serial(values, compressor)
        monkeypatch.setattr(sums, "ELEMENTS_A_PASS", 200)
        np.testing.assert_array_equal(serial(values, compressor)[0], expected)
        for ranks in (2, 3, 5):
            for found, _ in on_ranks(ranks, lambda comm: send(comm, values, compressor)):
                np.testing.assert_array_equal(found, expected)

    @pytest.mark.parametrize("compressor", [Qsgd(4, "all"), Grid(4)], ids=["qsgd", "grid"])
    def test_what_one_rank_cannot_round_is_an_error_on_every_rank(self, compressor):
        values = arrays(range(CLIENTS), 100, np.float32)
        values[1][3] = np.inf

        def attempt(comm):
            with pytest.raises(DivergedError, match="block 0 of a message"):
                send(comm, values, compressor)
            return comm.gather("here")  # all have left the exchange together

        assert on_ranks(3, attempt) == [["here"] * 3] * 3

    def test_the_mean_is_right_to_the_last_place(self):
        """Float64: the error of n additions is at most n eps sum|v|; float32: one rounding of that."""
        for dtype in (np.float64, np.float32):
            values = arrays(range(CLIENTS), 500, dtype)
            found, exact = serial(values)[0], exact_mean(values)
            slack = np.abs(np.array(list(values.values()), float)).sum(axis=0) * np.finfo(float).eps
            limit = slack if dtype == np.float64 else slack + np.spacing(np.abs(found)) / 2
            assert (np.abs(found - exact) <= limit).all()

    def test_float32_is_added_in_float64(self):
        """1 + 2^-30 - 1 vanishes in float32."""
        values = {0: np.float32([1]), 1: np.float32([2**-30]), 2: np.float32([-1])}
        assert serial(values, divisor=1.0)[0][0] == np.float32(2**-30)

    def test_the_mean_of_quantized_messages_is_that_of_the_messages(self):
        qsgd, values = Qsgd(6, "50"), arrays((0, 2, 5), 333, np.float64)
        decoded = []
        for client, value in values.items():
            total = np.zeros(value.size)
            message = qsgd.encode(value, rng(client)).segment(0, value.size)
            qsgd.accumulate(total, message, value.shape, value.dtype, 0, value.size)
            decoded.append(total)
        found = serial(values, qsgd)[0]
        np.testing.assert_allclose(found, np.mean(decoded, axis=0), rtol=1e-14, atol=0)


class TestOfIntegers:
    def test_one_client_is_rounded_to_the_grid(self):
        values = arrays((4,), 200, np.float64)
        levels = serial(values, Grid(7, "all"))[0] / np.float32(np.abs(values[4]).max()) * 7
        np.testing.assert_allclose(levels, np.round(levels), atol=1e-9)
        assert np.abs(levels).max() == pytest.approx(7)

    def test_levels_of_all_clients_fit_in_the_sum(self):
        """Everybody at the largest level: the sum of levels is clients times s, which int8 no longer holds."""
        values = {client: np.full(9, -3.0, np.float32) for client in range(CLIENTS)}
        for found, _ in on_ranks(3, lambda comm: send(comm, values, Grid(127))):
            np.testing.assert_allclose(found, -3.0, rtol=1e-6)

    def test_weights_are_refused(self):
        with pytest.raises(ConfigError, match="qsgd"):
            serial(arrays((0, 1), 3, np.float32), Grid(3), [1.0, 2.0])

    def test_another_divisor_scales(self):
        values = arrays((0, 1, 2), 20, np.float64)
        np.testing.assert_allclose(serial(values, Grid(9), divisor=1.0)[0], 3 * serial(values, Grid(9))[0])


class TestInAnyOrder:
    @settings(max_examples=15, deadline=None)
    @given(SIZES, COHORTS, st.integers(1, 5))
    def test_it_is_the_mean_within_rounding(self, size, cohort, ranks):
        values = arrays(cohort, size, np.float64)
        limit = 4 * CLIENTS * np.finfo(float).eps * np.abs(np.array(list(values.values()))).sum(axis=0)
        for found, _ in on_ranks(ranks, lambda comm: send(comm, values, sum_order="any")):
            assert (np.abs(found - exact_mean(values)) <= limit).all()

    def test_weights_count(self):
        values, weights = arrays((1, 3, 4), 50, np.float32), [1.0, 0.5, 4.0]
        for found, _ in on_ranks(2, lambda comm: send(comm, values, None, weights, "any")):
            assert found.dtype == np.float32
            reach = np.abs(np.array(list(values.values()))).max(axis=0)
            assert (np.abs(found - exact_mean(values, weights)) <= 1e-5 * reach).all()

    def test_lossy_messages_keep_their_order(self):
        values = arrays(range(CLIENTS), 100, np.float32)
        expected = serial(values, Qsgd(3))[0]
        for found, _ in on_ranks(3, lambda comm: send(comm, values, Qsgd(3), sum_order="any")):
            np.testing.assert_array_equal(found, expected)

    def test_numbers(self):
        values = {client: np.asarray(float(client)) for client in range(CLIENTS)}
        assert [float(found) for found, _ in on_ranks(2, lambda c: send(c, values, sum_order="any"))] == [2.5, 2.5]


class TestRoutes:
    """The way that messages go changes no bit, except where the mean is rounded on its way."""

    @pytest.mark.parametrize("shape", [(1003,), (6, 5, 4)])
    @pytest.mark.parametrize("ranks", [1, 2, 5])
    def test_owners_and_gathering_give_the_same_bytes(self, shape, ranks):
        values = arrays(range(CLIENTS), shape, np.float32)
        expected, _ = serial(values, Qsgd(9, "50" if len(shape) == 1 else "slice"))
        for route in ("owners", "gather"):
            compressor = Qsgd(9, "50" if len(shape) == 1 else "slice", route=route)
            for found, _ in on_ranks(ranks, lambda comm, each=compressor: send(comm, values, each)):
                assert found.tobytes() == expected.tobytes()

    @pytest.mark.parametrize("nodes", [[0, 0, 1, 1], [0, 1, 0, 1, 1], [0, 1, 2]], ids=str)
    def test_a_mean_on_every_node_has_the_same_bytes(self, monkeypatch, nodes):
        """In several passes, into memory that the ranks of a node share."""
        monkeypatch.setattr(shared_memory, "SMALLEST_MAPPED", 4000)
        monkeypatch.setattr(sums, "ELEMENTS_A_PASS", 500)
        values = arrays(range(CLIENTS), 1003, np.float32)
        expected, _ = serial(values, Qsgd(9, "50"))
        for found, _ in on_ranks(len(nodes), lambda comm: send(comm, values, Qsgd(9, "50", route="node")), nodes):
            assert found.tobytes() == expected.tobytes()

    def test_what_a_node_gets_is_counted(self):
        """All messages reach both nodes, if not every rank; in between every rank gets the floats of the mean."""
        values = arrays(range(CLIENTS), 240, np.float32)
        codec = Qsgd(5, "all", coding="fixed", route="node")
        for _, traffic in on_ranks(4, lambda comm: send(comm, values, codec), [0, 0, 1, 1]):
            assert traffic["wire_bytes_down"] == 2 * traffic["wire_bytes_up"] + 4 * 240 * 4

    def test_gathering_delivers_every_message_to_every_rank(self):
        values = arrays(range(CLIENTS), 240, np.float32)
        for _, traffic in on_ranks(3, lambda comm: send(comm, values, Qsgd(5, "all", route="gather"))):
            assert traffic["wire_bytes_down"] == 3 * traffic["wire_bytes_up"]
            assert traffic["paper_bits_down"] == 240 * 32

    def test_a_mean_rounded_on_its_way_is_a_qsgd_message_of_each_part(self, monkeypatch):
        """Right in the mean (five standard errors) and with the variance of the formula, part by part."""
        monkeypatch.setattr(sums, "SMALLEST_PART", 64)
        values = {client: np.random.default_rng(client).standard_normal(160) for client in range(CLIENTS)}
        exact = np.mean(list(values.values()), axis=0)
        fine, levels = 1 << 20, 4
        draws = []
        for seed in range(400):
            parcel = Parcel(
                SerialCommunicator(),
                tuple(values),
                (0,) * CLIENTS,
                rng,
                None,
                float(CLIENTS),
                Ledger(),
                lambda part, seed=seed: np.random.default_rng((seed, part)),
            )
            draws.append(combine(parcel, values, (160,), np.dtype(float), Qsgd(fine, quantize_down=levels)))
        parts = np.split(exact, (64, 128))
        a = np.concatenate([levels * np.abs(part) / np.linalg.norm(part) for part in parts])
        norms = np.concatenate([np.full(part.size, np.linalg.norm(part)) for part in parts])
        variance = (norms / levels) ** 2 * (a % 1) * (1 - a % 1)
        error = np.mean(draws, axis=0) - exact
        assert (np.abs(error) <= 5 * np.sqrt(variance / len(draws)) + 1e-4).all()
        assert np.var(draws, axis=0).sum() == pytest.approx(variance.sum(), rel=0.1)

    def test_its_bits_are_counted(self):
        values = arrays(range(CLIENTS), 240, np.float32)
        whole = serial(values, Qsgd(5))[1]
        rounded = serial(values, Qsgd(5, quantize_down=5))[1]
        assert rounded["paper_bits_up"] == whole["paper_bits_up"]
        assert rounded["paper_bits_down"] < whole["paper_bits_down"]
        for ranks in (2, 3):
            for _, traffic in on_ranks(ranks, lambda comm: send(comm, values, Qsgd(5, quantize_down=5))):
                assert traffic["paper_bits_down"] == rounded["paper_bits_down"]

    def test_few_ranks_gather_small_codes_and_many_do_not(self):
        """2 ranks, one client each, 16 million values over 100 MB/s: 1.7 MB of codes beat 34 MB of floats; 64 ranks
        of 16 clients each would decode 1,024 messages whole."""
        routes, link = Routes(bytes_per_second=1e8), SerialCommunicator()
        link.size = 2
        assert routes.choose(link, "auto", 2, 1 << 24, 1.7e6, 1 << 26) == "gather"
        link.size = 64
        assert routes.choose(link, "auto", 1024, 1 << 24, 1.7e6, 1 << 26) == "owners"
        assert routes.choose(link, "gather", 1024, 1 << 24, 1.7e6, 1 << 26) == "gather"

    def test_nodes_of_several_ranks_share_the_decoding(self):
        """2 nodes of 8 ranks, 16 million values over 10 MB/s a rank: floats of the mean would take 6 s, and each rank
        would decode 16 messages in 0.27 s."""
        routes, link = Routes(bytes_per_second=1e7), SerialCommunicator()
        link.size, link.nodes = 16, lambda: [0] * 8 + [1] * 8
        assert routes.choose(link, "auto", 16, 1 << 24, 1.7e5, 1 << 26) == "node"


class TestCounting:
    @pytest.mark.parametrize("ranks", [1, 2, 5])
    @pytest.mark.parametrize("sum_order", ["client", "any"])
    @pytest.mark.parametrize("dtype", [np.float32, np.float64])
    def test_uncompressed(self, ranks, sum_order, dtype):
        """Each of n participants sends its m elements, each rank gets m elements back; the papers count 32 bits."""
        cohort, m = (0, 2, 3, 5), 101
        values = arrays(cohort, m, dtype)
        expected = {
            "wire_bytes_up": 4 * m * values[0].itemsize,
            "wire_bytes_down": ranks * m * values[0].itemsize,
            "paper_bits_up": 4 * m * 32,
            "paper_bits_down": m * 32,
        }
        for _, traffic in on_ranks(ranks, lambda comm: send(comm, values, sum_order=sum_order)):
            assert traffic == expected

    @pytest.mark.parametrize("ranks", [1, 3])
    def test_qsgd(self, ranks):
        """1 + ceil(log2(s + 1)) bits an element, in whole bytes for 8 of them; 4 bytes a norm and 1 for the format."""
        values = arrays(range(CLIENTS), 240, np.float32)
        fixed = Qsgd(5, "all", coding="fixed", route="owners")
        for _, traffic in on_ranks(ranks, lambda comm: send(comm, values, fixed)):
            assert traffic["wire_bytes_up"] == CLIENTS * (240 * 4 // 8 + 5 * ranks)
            assert traffic["wire_bytes_down"] == ranks * 240 * 4
            bits = [Qsgd(5, "all").encode(value, rng(client)).paper_bits for client, value in values.items()]
            assert traffic["paper_bits_up"] == sum(bits)

    @pytest.mark.parametrize("ranks", [1, 3])
    def test_grid(self, ranks):
        """Levels up to 6 s in int8, scales in float32; 3 bits of level and one of sign in the papers' count."""
        values = arrays(range(CLIENTS), 240, np.float32)
        for _, traffic in on_ranks(ranks, lambda comm: send(comm, values, Grid(5, "60"))):
            assert traffic["wire_bytes_up"] == CLIENTS * (240 + 4 * 4)
            assert traffic["paper_bits_up"] == CLIENTS * (4 * 32 + 240 * 4)
            assert traffic["paper_bits_down"] == 240 * 32

    def test_measurements_are_not_counted(self):
        ledger = Ledger()
        parcel = Parcel(SerialCommunicator(), (0,), (0,), rng, None, 1.0, ledger)
        for compressor in (None, Qsgd(2), Grid(2)):
            with ledger.uncounted():
                combine(parcel, {0: np.ones(4)}, (4,), np.dtype(float), compressor)
        assert set(ledger.traffic.values()) == {0}


class TestLedger:
    def test_the_outer_clock_alone_is_charged(self):
        ledger = Ledger()
        with ledger.clock("exchange"), ledger.clock("compute"):
            sum(range(1000))
        assert ledger.seconds["exchange"] > 0
        assert ledger.seconds["compute"] == 0

    def test_a_clock_stops_when_its_block_fails(self):
        ledger = Ledger()
        with pytest.raises(KeyError), ledger.clock("compute"):
            raise KeyError
        with ledger.clock("metrics"):
            sum(range(1000))
        assert ledger.seconds["metrics"] > 0

    def test_uncounted_blocks_may_nest(self):
        ledger = Ledger()
        with ledger.uncounted():
            with ledger.uncounted():
                ledger.send(wire_bytes_up=1)
            ledger.send(wire_bytes_up=2)
        ledger.send(wire_bytes_up=4)
        assert ledger.traffic["wire_bytes_up"] == 4
