"""Sums in memory that ranks share: the bytes of the serial sum, private results, and a way out where it is refused.

``mpirun -n 3 python tests/test_shared_memory.py`` adds up on real ranks and prints a digest of what they got.
"""

from __future__ import annotations

import hashlib
import logging
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import finish, mpi_command, start
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_communicator import on_ranks
from test_exchange import CLIENTS, COHORTS, arrays, exact_mean, send, serial

from hpcfed.compressors.grid import Grid
from hpcfed.compressors.qsgd import Qsgd
from hpcfed.exchange import chain, sums
from hpcfed.ranks import shared_memory
from hpcfed.ranks.communicator import SerialCommunicator
from hpcfed.ranks.mpi import MpiCommunicator

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memfd_create is Linux's")

WEIGHTS = [0.3, 2.0, 1.0, 0.01, 7.0, 1.0]


@pytest.fixture
def small(monkeypatch):
    """Room for some thousand bytes, so that small arrays take many passes; results are mapped from a page on."""
    shrink(monkeypatch.setattr)


def shrink(setattr):
    setattr(shared_memory, "BYTES_A_RANK", 1 << 14)
    setattr(shared_memory, "SMALLEST_MAPPED", 1 << 12)
    setattr(chain, "ELEMENTS_A_BLOCK", 300)
    setattr(chain, "PAGE", 8)
    setattr(chain, "ELEMENTS_ALONE", (100, 100))


class TestSums:
    @pytest.mark.usefixtures("small")
    @pytest.mark.parametrize("dtype", [np.float32, np.float64])
    @pytest.mark.parametrize("shape", [(), (0,), (15,), (999,), (7, 11, 13), (20011,)], ids=str)
    @pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["equal", "weighted"])
    def test_bytes_of_the_serial_sum(self, shape, dtype, weights):
        """Alone, in a part of one page, in one pass and in many; ranks have one to three of the clients."""
        values = arrays(range(CLIENTS), shape, dtype)
        expected, traffic = serial(values, weights=weights)
        for ranks in (2, 3, 5):
            for found, counted in on_ranks(ranks, lambda comm: send(comm, values, weights=weights)):
                assert (found.shape, found.dtype) == (shape, dtype)
                assert found.tobytes() == expected.tobytes()
                assert counted == traffic | {"wire_bytes_down": ranks * expected.nbytes}

    @settings(max_examples=30, deadline=None)
    @given(COHORTS, st.sampled_from([1, 40, 5000, 300_000]), st.integers(2, 6))
    def test_ranks_without_a_participant_add_up_too(self, cohort, size, ranks):
        values = arrays(cohort, size, np.float32)
        expected, _ = serial(values)
        for found, _ in on_ranks(ranks, lambda comm: send(comm, values)):
            assert found.tobytes() == expected.tobytes()
        reach = np.abs(np.array(list(values.values()), float)).sum(axis=0) * 1e-14
        sample = slice(None, None, max(1, size // 1000))
        exact = exact_mean({client: value[sample] for client, value in values.items()})
        assert (np.abs(expected[sample] - exact) <= reach[sample] + np.spacing(np.abs(expected[sample]))).all()

    @pytest.mark.usefixtures("small")
    def test_arrays_that_are_not_contiguous(self):
        values = {client: value.T for client, value in arrays(range(CLIENTS), (70, 30), np.float32).items()}
        expected, _ = serial(values)
        for found, _ in on_ranks(3, lambda comm: send(comm, values)):
            np.testing.assert_array_equal(found, expected)

    @pytest.mark.usefixtures("small")
    @pytest.mark.parametrize("size", [10, 500, 5000])
    def test_one_sum_after_another(self, size):
        """Ranks that run ahead must not write where others still read."""
        rounds = [arrays(range(CLIENTS), size, np.float32 if n % 2 else np.float64) for n in range(10)]
        for n, values in enumerate(rounds):
            values[n % CLIENTS][:] = n
        expected = [serial(values)[0] for values in rounds]
        for found in on_ranks(4, lambda comm: [send(comm, values)[0] for values in rounds]):
            for one, other in zip(found, expected, strict=True):
                np.testing.assert_array_equal(one, other)


@pytest.mark.usefixtures("small")
class TestResults:
    @pytest.mark.parametrize("codec", [None, Qsgd(9, "50", route="owners"), Grid(9, "50")], ids=["raw", "qsgd", "grid"])
    @pytest.mark.parametrize("size", [20, 500, 5000], ids=["alone", "copied", "mapped"])
    def test_every_rank_has_its_own(self, monkeypatch, size, codec):
        """One rank changes its result, and the next sums leave those before as they were."""
        monkeypatch.setattr(chain, "SMALLEST_INTEGERS", 400)
        monkeypatch.setattr(sums, "ELEMENTS_A_PASS", 3000)
        values = arrays(range(CLIENTS), size, np.float32)
        expected, _ = serial(values, codec)

        def attempt(comm):
            first, _ = send(comm, values, codec)
            comm.barrier()
            if comm.rank == 1:
                first[:] = -1
            second, _ = send(comm, values, codec)
            third, _ = send(comm, {client: value + 1 for client, value in values.items()}, codec)
            comm.barrier()
            return first, second, third

        for rank, (first, second, third) in enumerate(on_ranks(3, attempt)):
            np.testing.assert_array_equal(first, -1 if rank == 1 else expected)
            np.testing.assert_array_equal(second, expected)
            assert (third != expected).any()

    @pytest.mark.parametrize("most", [3, 100])
    def test_files_stay_open_for_few_living_results_alone(self, monkeypatch, most):
        """Each rank has the memory open, each living result that is no copy, and each kept file twice."""
        monkeypatch.setattr(shared_memory, "MOST_MAPPED", most)
        values = arrays(range(CLIENTS), 5000, np.float32)
        before = open_files()

        def attempt(comm):
            kept = [send(comm, values)[0] for _ in range(20)]
            comm.barrier()
            files = open_files()
            comm.barrier()
            return kept, files

        results = on_ranks(2, attempt)
        files = min(most + 1, shared_memory.FILES)  # one for all copies
        assert max(files for _, files in results) - before == 2 * (1 + min(most, 20) + 2 * files)
        for kept, _ in results:
            for each in kept:
                np.testing.assert_array_equal(each, kept[0])
        del results, kept, each
        assert open_files() == before

    @settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(st.lists(st.sampled_from([20, 3000, 5000, 5001]), min_size=5, max_size=60), st.integers(0, 99))
    def test_a_file_is_written_anew_when_no_rank_reads_it_any_more(self, sizes, seed):
        """Ranks let go of results, and change them, each when it likes; those that they keep stay as they were."""
        base = arrays(range(CLIENTS), max(sizes), np.float32)
        rounds = [{c: value[:size] + np.float32(n) for c, value in base.items()} for n, size in enumerate(sizes)]
        expected = [serial(values)[0] for values in rounds]

        def attempt(comm):
            rng, kept = np.random.default_rng((seed, comm.rank)), {}
            for n, values in enumerate(rounds):
                kept[n] = send(comm, values)[0]
                for number in list(kept):
                    if rng.random() < 0.3:
                        kept.pop(number)[:] = -1
                for number, found in kept.items():
                    np.testing.assert_array_equal(found, expected[number])
            return True

        assert all(on_ranks(3, attempt))

    def test_memory_is_given_back_when_no_result_has_that_size_any_more(self):
        """Two results of each size live at a time: the last one, and the one that is made."""

        def attempt(comm):
            for size in (5000, 6000):
                for _ in range(shared_memory.IDLE + 2):
                    found, _ = send(comm, arrays(range(CLIENTS), size, np.float32))
                comm.barrier()
                files = open_files()
                comm.barrier()
                del found
                yield files

        first, second = on_ranks(2, lambda comm: list(attempt(comm)))[0]
        assert first == second


def open_files():
    """Files that this process has open in memory."""
    folder = Path("/proc/self/fd")
    links = [os.readlink(folder / name) if (folder / name).is_symlink() else "" for name in os.listdir(folder)]
    return sum("memfd:hpcfed" in link for link in links)


class TestRefusal:
    @pytest.mark.parametrize("where", ["_new_file", "_file_of"])
    def test_what_the_system_refuses_is_said_once_and_messages_do(self, monkeypatch, caplog, where):
        def refuse(*args):
            raise PermissionError(1, "not here")

        monkeypatch.setattr(shared_memory, where, refuse)
        caplog.set_level(logging.INFO, "hpcfed")
        before, values = open_files(), arrays(range(CLIENTS), 5000, np.float32)
        expected, _ = serial(values)
        for found in on_ranks(3, lambda comm: [send(comm, values)[0] for _ in range(3)]):
            for each in found:
                assert each.tobytes() == expected.tobytes()
        assert caplog.text.count("share no memory ([Errno 1] not here)") == 1
        assert open_files() == before

    def test_memory_of_another_process_is_not_taken_for_rank_0s(self, monkeypatch):
        """Where ranks do not see one another's processes, the number may be that of a stranger."""
        monkeypatch.setattr(shared_memory, "_file_of", lambda process, number: shared_memory._new_file(1 << 28))
        assert on_ranks(3, lambda comm: comm.shared()) == [None] * 3

    def test_one_rank_shares_with_nobody(self):
        assert SerialCommunicator().shared() is None
        assert on_ranks(1, lambda comm: comm.shared()) == [None]


# -- real ranks --------------------------------------------------------------------------------------------------------


def digest(comm):
    """Of sums small and large, weighted and not, over all clients and over few."""
    found = hashlib.sha256()
    for size, cohort, weights in [
        (3, range(CLIENTS), None),
        (5000, (0, 2, 5), None),
        (300_001, (4,), None),
        (300_001, range(CLIENTS), WEIGHTS),
    ]:
        values = arrays(cohort, size, np.float32)
        found.update(send(comm, values, weights=weights)[0].tobytes())
    return found.hexdigest()


@pytest.mark.mpi
@pytest.mark.parametrize("size", [2, 3, 4])
def test_real_ranks_get_the_same_bytes(size):
    command = [*mpi_command(size)[:3], sys.executable, __file__]
    done = finish(start(command, PYTHONPATH=str(Path(__file__).parent)), 60)
    assert (done.status, done.out.split()) == (0, [digest(SerialCommunicator())] * 2 * size), done.err


if __name__ == "__main__":
    world = MpiCommunicator()
    assert world.shared() is not None
    print(digest(world), flush=True)
    shrink(setattr)
    print(digest(MpiCommunicator()), flush=True)
