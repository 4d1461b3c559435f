"""Work shared out among ranks: the pieces of one call each, once a node, the same bits on any number of ranks."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from test_communicator import ThreadCommunicator, on_ranks

from hpcfed.algorithms.vm_pdfp import VmPdfp
from hpcfed.exchange import sharing
from hpcfed.federation import Federation
from hpcfed.ranks.communicator import SerialCommunicator
from hpcfed.streams import Streams
from hpcfed.workloads.ct import Ct

SHAPE = (13, 5, 9)
NODES = [None, [0, 0, 0, 1, 1], [0, 1, 1, 1, 2]]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(sharing, "ELEMENTS_ALONE", 1)
    monkeypatch.setattr(sharing, "ELEMENTS_A_MESSAGE", 100)


@pytest.fixture(params=["shared memory", "messages"])
def way(request, monkeypatch):
    if request.param == "messages":
        monkeypatch.setattr(ThreadCommunicator, "shared", lambda self: None)


def reversed_sum(values, piece, axis):
    """A piece of something that needs the whole array: each place is added to that opposite to it."""
    whole = values + np.flip(values, axis)
    return np.take(whole, range(*piece.indices(values.shape[axis])), axis)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("nodes", NODES, ids=str)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("axis", "unit"), [(0, 4), (1, 1), (2, 2), (2, 100)])
def test_every_rank_has_the_whole_and_every_node_has_computed_each_piece_once(nodes, dtype, axis, unit):
    values = np.random.default_rng(0).standard_normal(SHAPE).astype(dtype)
    done = []

    def work(comm):
        def piece_of(piece):
            done.append((comm.nodes()[comm.rank], piece.start))
            return reversed_sum(values, piece, axis)

        found = sharing.shared_out(comm, piece_of, SHAPE, np.dtype(dtype), axis, unit)
        mine = found.copy()
        found += comm.rank  # nobody else's
        comm.barrier()
        return mine, found - comm.rank

    for mine, after in on_ranks(5, work, nodes):
        np.testing.assert_array_equal(mine, values + np.flip(values, axis))
        np.testing.assert_allclose(after, mine, atol=1e-5)
    pieces = range(0, SHAPE[axis], unit)
    if len(pieces) > 1:
        assert Counter(done) == {(node, start): 1 for node in set(nodes or [0]) for start in pieces}


def test_alone_and_where_it_does_not_pay(monkeypatch):
    values = np.arange(np.prod(SHAPE), dtype=np.float32).reshape(SHAPE)

    def work(comm):
        return sharing.shared_out(comm, lambda piece: values[piece], SHAPE, values.dtype, 0, 3)

    np.testing.assert_array_equal(work(SerialCommunicator()), values)
    monkeypatch.setattr(sharing, "ELEMENTS_ALONE", values.size + 1)
    monkeypatch.setattr(ThreadCommunicator, "shared", lambda self: pytest.fail("nothing is to be shared"))
    for found in on_ranks(2, work):
        np.testing.assert_array_equal(found, values)


@pytest.mark.parametrize("options", [{}, {"nonnegative": True, "mask": "cylinder"}], ids=["free", "constrained"])
def test_a_reconstruction_has_the_same_bits(options):
    """Also where the ranks of two nodes share the work."""
    workload = Ct(shape=(20, 18, 12), views=30, detector=28, clients=5, **options)

    def work(comm):
        problem = workload.build(Federation(5, streams=Streams(0), communicator=comm))
        method = VmPdfp()
        state = method.init(problem.fed.at(0), problem.start())
        for number in (1, 2, 3):
            state = method.round(state, problem.fed.at(number))
        return method.solution(state).tobytes()

    alone = work(SerialCommunicator())
    for ranks, nodes in ((2, None), (3, None), (5, [0, 0, 0, 1, 1])):
        assert set(on_ranks(ranks, work, nodes)) == {alone}
