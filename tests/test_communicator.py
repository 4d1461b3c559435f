"""Communicators: one contract for serial, threads and MPI, and how a process learns which it is.

``on_ranks`` simulates ranks by threads in one process, for these and other tests; ``mpirun -n 3 python
tests/test_communicator.py`` holds the real ones to the same contract.
"""

from __future__ import annotations

import contextlib
import itertools
import pickle
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from conftest import finish, mpi_command, start

from hpcfed.environment import launched_ranks
from hpcfed.errors import ConfigError
from hpcfed.ranks import shared_memory
from hpcfed.ranks.communicator import SerialCommunicator, connect
from hpcfed.ranks.mpi import MpiCommunicator


class Board:
    """Where simulated ranks leave things for one another, all at the same step."""

    def __init__(self, size):
        self.slots = [None] * size
        self.barrier = threading.Barrier(size, timeout=30)

    def swap(self, rank, value):
        self.slots[rank] = value
        self.barrier.wait()
        everything = list(self.slots)
        self.barrier.wait()
        return everything


class ThreadCommunicator:
    """A rank that is a thread. Values are pickled and arrays copied, as on their way to another process.

    ``nodes`` says on which node each rank is; all are on one by default.
    """

    tolerant = False

    def lost(self):
        return False

    def __init__(self, board, rank, nodes=None):
        self._board = board
        self._nodes = nodes or [0] * len(board.slots)
        self.rank = self.local_rank = rank
        self.size = self.local_size = len(board.slots)
        self.members = tuple(range(self.size))
        self._made = {}  # groups and memory that somebody has asked for

    def broadcast(self, value, root=0):
        return pickle.loads(self._board.swap(self.rank, pickle.dumps(value if self.rank == root else None))[root])

    def broadcast_array(self, array):
        return self._board.swap(self.rank, array)[0].copy()

    def gather(self, value):
        return [pickle.loads(each) for each in self._board.swap(self.rank, pickle.dumps(value))]

    def exchange(self, outgoing, incoming):
        packed = [b"".join(part.tobytes() for part in parts) for parts in outgoing]
        received = [sent[self.rank] for sent in self._board.swap(self.rank, packed)]
        assert [len(each) for each in received] == list(incoming)
        return [np.frombuffer(bytearray(each), np.uint8) for each in received]

    def join(self, segment, lengths, out):
        segments = self._board.swap(self.rank, np.asarray(segment).copy())
        assert [len(each) for each in segments] == list(lengths)
        np.asarray(out)[:] = np.concatenate(segments)

    def maximum(self, array):
        return np.maximum.reduce(self._board.swap(self.rank, array.copy()))

    def sum(self, array):
        """From the last rank down: an order that no serial sum has."""
        total = np.zeros_like(array)
        for each in reversed(self._board.swap(self.rank, array.copy())):
            total += each
        return total

    def trade(self, outgoing, counts, received, lengths):
        """Arrays, and tensors on the host."""
        outgoing = np.split(np.asarray(outgoing).copy(), np.cumsum(counts))
        assert outgoing.pop().size == 0
        parts = [sent[self.rank] for sent in self._board.swap(self.rank, outgoing)]
        assert [part.size for part in parts] == list(lengths)
        np.asarray(received)[:] = np.concatenate(parts)

    def sum_into(self, array, total):
        np.asarray(total)[:] = self.sum(np.asarray(array))

    def nodes(self):
        return self._nodes

    def on_node(self):
        here = self._nodes[self.rank]
        return self._group("node", [rank for rank, node in enumerate(self._nodes) if node == here])

    def across_nodes(self):
        nodes = sorted(set(self._nodes))
        crowds = [[rank for rank, node in enumerate(self._nodes) if node == each] for each in nodes]
        lanes = list(zip(*crowds, strict=False))
        return self._group("lane", next((list(lane) for lane in lanes if self.rank in lane), None))

    def _group(self, name, mine):
        """The ranks ``mine`` as a communicator, None for nobody; all ranks make one at the same time."""
        if name not in self._made:
            boards = self._board.swap(self.rank, Board(len(mine or [])))
            self._made[name] = mine and ThreadCommunicator(boards[mine[0]], mine.index(self.rank))
        return self._made[name]

    def split(self, sizes):
        ends = list(itertools.accumulate(sizes))
        boards = self._board.swap(self.rank, [Board(size) for size in sizes])[0]
        mine = next((group for group, end in enumerate(ends) if self.rank < end), None)
        if mine is None:
            return None
        group = ThreadCommunicator(boards[mine], self.rank - ends[mine] + sizes[mine])
        group.local_rank = self.local_rank
        return group

    @contextlib.contextmanager
    def first_on_node(self):
        if self.rank != 0:
            self.wait()
        yield
        if self.rank == 0:
            self.wait()

    def shared(self):
        if "memory" not in self._made:
            self._made["memory"] = shared_memory.share(self)
        return self._made["memory"]

    def barrier(self):
        self._board.barrier.wait()

    def wait(self):
        self._board.barrier.wait()

    def abort(self, status):
        self._board.barrier.abort()


def on_ranks(size, function, nodes=None):
    """What ``function(communicator)`` returns on each of ``size`` simulated ranks; the error of one ends all."""
    board = Board(size)

    def one(rank):
        try:
            return function(ThreadCommunicator(board, rank, nodes))
        except BaseException as error:
            board.barrier.abort()
            return error

    with ThreadPoolExecutor(size) as pool:
        results = list(pool.map(one, range(size)))
    errors = [result for result in results if isinstance(result, BaseException)]
    for error in sorted(errors, key=lambda each: isinstance(each, threading.BrokenBarrierError)):
        raise error
    return results


# -- the contract ------------------------------------------------------------------------------------------------------


def contract(comm):
    """What every communicator must do; called on all ranks."""
    ranks = range(comm.size)
    assert comm.gather({"rank": comm.rank}) == [{"rank": rank} for rank in ranks]
    assert comm.nodes() == [0] * comm.size
    node = comm.on_node()
    assert (node.rank, node.size, node.gather(comm.rank)) == (comm.rank, comm.size, list(ranks))
    for root in ranks:
        assert comm.broadcast(("from", comm.rank), root) == ("from", root)
    for dtype, shape in itertools.product((np.int8, np.int32, np.int64, np.float32, np.float64), ((), (0,), (2, 3))):
        array = np.arange(np.prod(shape, dtype=int), dtype=dtype).reshape(shape)
        received = comm.broadcast_array(array if comm.rank == 0 else None)
        assert received.dtype == dtype
        np.testing.assert_array_equal(received, array)
        own = array * (comm.rank + 1) - comm.rank
        everyone = np.array([array * (rank + 1) - rank for rank in ranks])
        np.testing.assert_array_equal(comm.maximum(own), everyone.max(axis=0))
        np.testing.assert_array_equal(comm.sum(own), everyone.sum(axis=0))
        assert comm.sum(own).dtype == dtype
    transposed = np.arange(12.0).reshape(3, 4).T
    np.testing.assert_array_equal(comm.broadcast_array(transposed if comm.rank == 0 else None), transposed)
    exchange_of_parts(comm)
    for dtype in (np.float32, np.float64):
        lengths = [3 * (rank % 2) + rank for rank in ranks]  # some have nothing
        out = np.full(sum(lengths), np.nan, dtype)
        comm.join(np.full(lengths[comm.rank], comm.rank, dtype), lengths, out)
        np.testing.assert_array_equal(out, np.repeat(np.array(ranks, dtype), lengths))
        exchange_of_arrays(comm, dtype)
        total = np.full(5, np.nan, dtype)
        comm.sum_into(np.arange(5, dtype=dtype) + comm.rank, total)
        np.testing.assert_array_equal(total, comm.size * np.arange(5) + sum(ranks))
    groups(comm)
    comm.wait()


def groups(comm):
    """The first rank alone, the others but the last together: apart from one another, in the order of the ranks."""
    sizes = [1, comm.size - 2] if comm.size > 2 else [1]
    group = comm.split(sizes)
    if comm.rank >= sum(sizes):
        assert group is None
        return
    members = [0] if comm.rank == 0 else list(range(1, comm.size - 1))
    assert (group.size, group.rank) == (len(members), members.index(comm.rank))
    assert group.gather(comm.rank) == members
    assert group.broadcast(comm.rank) == members[0]
    np.testing.assert_array_equal(group.sum(np.array([comm.rank])), [sum(members)])
    assert group.local_rank == comm.local_rank  # of the whole job's: on one node no two ranks have the same
    assert group.local_size == group.size
    with group.first_on_node():
        pass
    group.wait()


def exchange_of_parts(comm):
    """Rank a sends rank b ``a + 2 b`` bytes, in two parts where there are any, that tell whose they are."""

    def parcel(sender, receiver):
        return np.full(sender + 2 * receiver, 16 * sender + receiver, np.uint8)

    ranks = range(comm.size)
    outgoing = [[parcel(comm.rank, to)[:1], parcel(comm.rank, to)[1:]] for to in ranks]
    received = comm.exchange(outgoing, [parcel(sender, comm.rank).size for sender in ranks])
    for sender in ranks:
        np.testing.assert_array_equal(received[sender], parcel(sender, comm.rank))
    nothing = comm.exchange([[] for _ in ranks], [0] * comm.size)
    assert [part.size for part in nothing] == [0] * comm.size


def exchange_of_arrays(comm, dtype):
    """Rank a sends rank b ``(a + b) % 3`` numbers that tell whose they are."""
    ranks = range(comm.size)
    counts = [(comm.rank + to) % 3 for to in ranks]
    outgoing = np.repeat(np.array([10 * comm.rank + to for to in ranks], dtype), counts)
    received = np.full(sum(counts), np.nan, dtype)
    comm.trade(outgoing, counts, received, counts)
    expected = np.repeat(np.array([10 * sender + comm.rank for sender in ranks], dtype), counts)
    np.testing.assert_array_equal(received, expected)


def test_one_process_keeps_the_contract():
    contract(SerialCommunicator())


@pytest.mark.parametrize("size", [1, 2, 5])
def test_threads_keep_the_contract(size):
    on_ranks(size, contract)


@pytest.mark.mpi
@pytest.mark.parametrize("size", [1, 3, 4])
def test_mpi_keeps_the_contract(size):
    command = [*mpi_command(size)[:3], sys.executable, __file__]
    done = finish(start(command, PYTHONPATH=str(Path(__file__).parent)), 60)
    assert (done.status, done.out.split()) == (0, ["kept"] * size), done.err


def test_the_first_on_a_node_leaves_before_the_others_enter():
    order = []

    def visit(comm):
        with comm.first_on_node():
            order.append(("in", comm.rank))
            order.append(("out", comm.rank))

    on_ranks(3, visit)
    assert order[:2] == [("in", 0), ("out", 0)]
    with SerialCommunicator().first_on_node():
        pass


# -- which one a process gets ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, 4),
        ({"PMI_SIZE": "17"}, 17),
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "8"}, 8),
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "8"}, None),
        ({"PMIX_RANK": "0"}, 0),
        ({"OMPI_COMM_WORLD_SIZE": "many"}, None),
    ],
    ids=["alone", "Open MPI", "MPICH", "srun", "inside a batch script", "other PMIx launcher", "nonsense"],
)
def test_the_launcher_is_found_from_its_variables(environment, expected):
    assert launched_ranks(environment) == expected


def test_without_a_launcher_mpi_is_not_loaded():
    code = "import sys; from hpcfed.ranks.communicator import connect; connect({}); print('mpi4py' in sys.modules)"
    assert finish(start([sys.executable, "-c", code]), 30).out.strip() == "False"
    assert isinstance(connect({}), SerialCommunicator)


def test_an_mpi_that_does_not_load_is_a_mistake_of_the_environment(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(ConfigError, match=r"started 3 ranks.*hpcfed\[mpi\]"):
        connect({"OMPI_COMM_WORLD_SIZE": "3"})


@pytest.mark.mpi
def test_a_launcher_of_another_mpi_is_noticed_before_every_rank_runs_alone():
    done = finish(start([sys.executable, "-m", "hpcfed", "list"], PMI_SIZE="3"), 60)
    assert done.status == 2
    assert "started 3 ranks" in done.err
    assert "MPI sees 1" in done.err


if __name__ == "__main__":
    contract(MpiCommunicator())
    MpiCommunicator.piece = 2  # long messages travel in pieces
    contract(MpiCommunicator())
    print("kept", flush=True)
