"""Sums that are handed on from node to node: the bytes of the serial sum, few of them between nodes, and when.

``mpirun -n 3 python tests/test_chain.py`` adds up on real ranks that take themselves for two nodes.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import finish, mpi_command, start
from hypothesis import given, settings
from hypothesis import strategies as st
from test_communicator import on_ranks
from test_exchange import CLIENTS, COHORTS, arrays, exact_mean, send, serial
from test_shared_memory import WEIGHTS, digest, shrink

from hpcfed.compressors import raw
from hpcfed.exchange import chain, routes
from hpcfed.exchange.routes import Routes
from hpcfed.ranks import shared_memory
from hpcfed.ranks.communicator import SerialCommunicator
from hpcfed.ranks.mpi import MpiCommunicator

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memfd_create is Linux's")

LAYOUTS = [[0, 1], [0, 0, 1, 1], [0, 1, 1], [0, 0, 0, 1], [0, 1, 2], [0, 0, 1, 1, 2]]


class Chained(Routes):
    """Wherever it can be."""

    def chains(self, *args):
        return True


@pytest.fixture
def small(monkeypatch):
    """Arrays of some thousand elements take several passes of several pieces."""
    shrink(monkeypatch.setattr)
    monkeypatch.setattr(routes, "ELEMENTS_A_HOP", 300)


@pytest.fixture
def sums(monkeypatch):
    """What has been summed along a chain, by each rank."""
    made = []
    original = chain.sum_in_memory
    monkeypatch.setattr(chain, "sum_in_memory", lambda *args: made.append(original(*args)) or made[-1])
    return made


def chained(nodes, values, **kwargs):
    return on_ranks(len(nodes), lambda comm: send(comm, values, routes=Chained(), **kwargs), nodes)


@pytest.mark.usefixtures("small")
class TestSums:
    @pytest.mark.parametrize("nodes", LAYOUTS, ids=str)
    @pytest.mark.parametrize(("shape", "dtype"), [((), "f4"), ((0,), "f8"), ((7, 11, 13), "f4"), ((20011,), "f8")])
    @pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["equal", "weighted"])
    def test_bytes_of_the_serial_sum(self, sums, nodes, shape, dtype, weights):
        values = arrays(range(CLIENTS), shape, np.dtype(dtype))
        expected, traffic = serial(values, weights=weights)
        for found, counted in chained(nodes, values, weights=weights):
            assert (found.shape, found.dtype) == (shape, np.dtype(dtype))
            assert found.tobytes() == expected.tobytes()
            assert counted == traffic | {"wire_bytes_down": len(nodes) * expected.nbytes}
        assert len(sums) == len(nodes)

    @settings(max_examples=30, deadline=None)
    @given(COHORTS, st.sampled_from([1, 40, 5000, 70_000]), st.lists(st.integers(1, 3), min_size=2, max_size=4))
    def test_nodes_without_a_participant_hand_on_what_they_get(self, cohort, size, crowds):
        values = arrays(cohort, size, np.float32)
        expected, _ = serial(values)
        for found, _ in chained(np.repeat(range(len(crowds)), crowds).tolist(), values):
            assert found.tobytes() == expected.tobytes()
        sample = slice(None, None, max(1, size // 1000))
        exact = exact_mean({client: value[sample] for client, value in values.items()})
        reach = np.abs(np.array([value[sample] for value in values.values()], float)).sum(axis=0) * 1e-14
        assert (np.abs(expected[sample] - exact) <= reach + np.spacing(np.abs(expected[sample]))).all()

    @pytest.mark.parametrize("size", [10, 500, 5000])
    def test_one_sum_after_another(self, size):
        """Ranks that run ahead must not write where others still read, nor into a result that somebody keeps."""
        rounds = [arrays(range(CLIENTS), size, np.float32 if n % 2 else np.float64) for n in range(8)]
        for n, values in enumerate(rounds):
            values[n % CLIENTS][:] = n
        expected = [serial(values)[0] for values in rounds]

        def attempt(comm):
            return [send(comm, values, routes=Chained())[0] for values in rounds]

        for found in on_ranks(5, attempt, [0, 0, 0, 1, 1]):
            for one, other in zip(found, expected, strict=True):
                np.testing.assert_array_equal(one, other)

    def test_ranks_that_do_not_come_node_after_node_send_messages(self, sums):
        """A chain would add up the clients of one node before those between them."""
        values = arrays(range(CLIENTS), 5000, np.float32)
        expected, _ = serial(values)
        for found, _ in chained([0, 1, 0, 1], values):
            assert found.tobytes() == expected.tobytes()
        assert sums == []

    def test_one_node_without_shared_memory_is_enough_to_send_messages(self, monkeypatch, sums):
        """The last node's ranks cannot open the memory of the first of them."""

        def refuse(process, number):
            raise PermissionError(1, "not here")

        monkeypatch.setattr(shared_memory, "_file_of", refuse)
        values = arrays(range(CLIENTS), 5000, np.float32)
        expected, _ = serial(values)
        for found, _ in chained([0, 1, 2, 2], values):
            assert found.tobytes() == expected.tobytes()
        assert sums == []


class TestCompiledAdditions:
    @pytest.fixture(autouse=True)
    def unloaded(self, monkeypatch):
        monkeypatch.setattr(raw, "_kernel", None)

    @pytest.mark.parametrize("dtype", [np.float32, np.float64])
    @pytest.mark.parametrize("weight", [1.0, 0.3])
    def test_bits_of_numpy(self, dtype, weight):
        """Of values of many magnitudes, and of zeros of both signs, infinities and what is no number."""
        values = np.concatenate([arrays((1,), 999, dtype)[1], np.array([0.0, -0.0, np.inf, -np.inf, np.nan], dtype)])
        before = np.concatenate([arrays((2,), 999, np.float64)[2], [-0.0, -0.0, 1.0, np.inf, 1.0]])
        plain, compiled = before.copy(), before.copy()
        with np.errstate(invalid="ignore"):
            raw.add_up([values], [weight], 1.0, plain, plain)
        values.flags.writeable = False
        raw.load_kernel()
        raw.add_up([values], [weight], 1.0, compiled, compiled)
        assert compiled.tobytes() == plain.tobytes()
        assert np.isnan(compiled).sum() == 2  # inf - inf, too

    @pytest.mark.parametrize(("dtype", "target"), [("f4", "f4"), ("f4", "f8"), ("f8", "f8")])
    @pytest.mark.parametrize("count", range(1, 12))
    @pytest.mark.parametrize("handed", [False, True])
    def test_any_number_of_arrays_in_one_go(self, dtype, target, count, handed):
        """More than the kernel has room for at a time; divided by what is no power of two."""
        values = list(arrays(range(count), 5000, np.dtype(dtype)).values())
        weights = np.random.default_rng(1).uniform(0.1, 2, count)
        before = np.random.default_rng(2).standard_normal(5000) if handed else np.empty(0)
        expected = before.copy() if handed else np.zeros(5000)
        for value, weight in zip(values, weights, strict=True):
            expected += value.astype(float) * weight
        expected = (expected / 7).astype(target)
        for _ in range(2):
            out = np.empty(5000, target)
            raw.add_up(values, weights, 7.0, out, before)
            np.testing.assert_array_equal(out, expected)
            raw.load_kernel()

    def test_arrays_that_it_cannot_take_are_left_to_numpy(self):
        raw.load_kernel()
        values = arrays((1,), 99, np.float32)[1]
        shifted = np.frombuffer(b"x" + values.tobytes(), np.uint8)[1:].view(np.float32)
        for each in (values.astype(">f4"), shifted, np.arange(99, dtype=np.float16), np.arange(99)):
            total = np.ones(99)
            raw.add_up([each], [2.0], 1.0, total, total)
            np.testing.assert_array_equal(total, 1 + 2 * each.astype(float))

    def test_many_sums_load_it(self, monkeypatch):
        monkeypatch.setattr(chain, "ADDITIONS", 1.5 * CLIENTS * 1000 / 2)
        values = arrays(range(CLIENTS), 1000, np.float32)
        expected, _ = serial(values)

        def attempt(comm):
            found = []
            for _ in range(3):
                found.append((send(comm, values)[0].tobytes(), raw._kernel is not None))
                comm.barrier()
            return found

        first, second, third = ((expected.tobytes(), loaded) for loaded in (False, True, True))
        assert on_ranks(2, attempt) == [[first, second, third]] * 2


def steps(total, start, out):
    """What a sum of integers may stand for: its elements' numbers added, halved."""
    out[:] = (total + np.arange(start, start + out.size)) / 2


class TestIntegers:
    @pytest.mark.usefixtures("small")
    @pytest.mark.parametrize("nodes", [[0, 0], [0] * 5, *LAYOUTS, [0, 1, 0, 1]], ids=str)
    @pytest.mark.parametrize(("shape", "dtype"), [((5,), "i2"), ((70, 301), "i1"), ((20011,), "i4")])
    def test_the_sum_of_all_ranks(self, monkeypatch, nodes, shape, dtype):
        """Exact, whatever the order of the nodes; ranks keep their own arrays, and get results of their own."""
        monkeypatch.setattr(chain, "SMALLEST_INTEGERS", 20)
        reach = np.iinfo(dtype).max // len(nodes)
        levels = [np.random.default_rng(rank).integers(-reach, reach + 1, shape, dtype) for rank in range(len(nodes))]
        total = np.sum(levels, axis=0, dtype=np.int64)
        expected = (total.reshape(-1) + np.arange(total.size)).reshape(shape) / 2

        def attempt(comm):
            own = levels[comm.rank].copy()
            found = [chain.sum_of_integers(comm, own, np.dtype(np.float32), steps) for _ in range(3)]
            np.testing.assert_array_equal(own, levels[comm.rank])
            comm.barrier()
            found[1][...] = comm.rank
            comm.barrier()
            return found[0], found[2]

        for each in itertools.chain(*on_ranks(len(nodes), attempt, nodes)):
            assert each.dtype == np.float32
            np.testing.assert_array_equal(each, expected.astype(np.float32))

    def test_ranks_of_a_node_send_one_sum(self, small, monkeypatch):
        """Between two nodes go as many bytes as one rank's array has, and none to all ranks."""
        monkeypatch.setattr(chain, "SMALLEST_INTEGERS", 20)
        crossed = []

        def attempt(comm):
            lane = comm.across_nodes()
            add = lane.sum
            monkeypatch.setattr(lane, "sum", lambda part: crossed.append((lane.rank, part.nbytes)) or add(part))
            monkeypatch.setattr(comm, "sum", None)
            return chain.sum_of_integers(comm, np.ones(5000, np.int8), np.dtype(np.float64), steps)

        for found in on_ranks(6, attempt, [0, 0, 0, 1, 1, 1]):
            np.testing.assert_array_equal(found, 3 + np.arange(5000) / 2)
        assert sum(sent for node, sent in crossed if node == 0) == 5000


class TestTraffic:
    @pytest.mark.parametrize("clients_here", [1, 3])
    def test_a_node_hands_on_one_array_of_float64_and_gets_one_result(self, small, monkeypatch, clients_here):
        """However many clients it has: what crosses is counted at the door between the nodes."""
        size, nodes = 5000, [0, 0, 1, 1]
        values = arrays(range(CLIENTS) if clients_here == 3 else (2, 3), size, np.float32)
        crossed = []

        def attempt(comm):
            lane = comm.across_nodes()
            exchange = lane.exchange

            def counting(outgoing, incoming):
                crossed.append((lane.rank, sum(part.size for parts in outgoing for part in parts)))
                return exchange(outgoing, incoming)

            monkeypatch.setattr(lane, "exchange", counting)
            monkeypatch.setattr(comm, "exchange", None)
            return send(comm, values, routes=Chained())[0]

        for found in on_ranks(4, attempt, nodes):
            assert found.tobytes() == serial(values)[0].tobytes()
        assert sum(sent for node, sent in crossed if node == 0) == 8 * size
        assert sum(sent for node, sent in crossed if node == 1) == 4 * size


class TestChoice:
    """Seconds of the slower direction of a node's link, by hand, for float32 of d bytes."""

    @staticmethod
    def chains(nodes, clients, elements=1 << 24, speed=1e7):
        link = SerialCommunicator()
        link.size, link.nodes = len(nodes), lambda: nodes
        return Routes(bytes_per_second=speed).chains(link, clients, elements, 4 * elements)

    def test_one_client_a_node_is_better_sent(self):
        """d / 2 to the owner and d / 2 back, against 2 d of float64."""
        assert not self.chains([0, 1], {0: 1, 1: 1})

    def test_many_clients_a_node_are_better_added_up(self):
        """Eight ranks send 4 d to owners and get d back; eight clients of one rank the same."""
        assert self.chains([0] * 8 + [1] * 8, {0: 8, 1: 8})
        assert self.chains([0, 1], {0: 8, 1: 8})

    def test_a_chain_of_many_nodes_is_for_long_arrays(self):
        """Its last node begins after all the others: 100 steps, whatever their size."""
        nodes = np.repeat(range(50), 4).tolist()
        assert self.chains(nodes, dict.fromkeys(range(50), 4), 1 << 27)
        assert not self.chains(nodes, dict.fromkeys(range(50), 4), 1 << 16)

    def test_links_are_not_measured_for_short_arrays(self):
        assert not self.chains([0] * 8 + [1] * 8, {0: 8, 1: 8}, 1 << 10, None)


# -- real ranks --------------------------------------------------------------------------------------------------------


class Halves(MpiCommunicator):
    """Ranks on one node that take themselves for two nodes."""

    def _settle(self, comm, local_rank):
        super()._settle(comm, local_rank)
        self._node = self._comm.Split(2 * self.rank // self.size)


@pytest.mark.mpi
def test_real_ranks_get_the_same_bytes():
    """Two on one node and one on the other."""
    command = [*mpi_command(3)[:3], sys.executable, __file__]
    done = finish(start(command, PYTHONPATH=str(Path(__file__).parent)), 60)
    assert (done.status, done.out.split()) == (0, [digest(SerialCommunicator())] * 3), done.err


if __name__ == "__main__":
    Routes.chains = Chained.chains
    shrink(setattr)
    world = Halves()
    assert (world.shared() is not None, max(world.nodes())) == (True, 1)
    print(digest(world), flush=True)
