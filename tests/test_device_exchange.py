"""Sums of tensors that stay on their devices: the same bytes as by way of the host, on any number of ranks.

Tensors on the host stand in for those on GPUs: MPI takes them, too. ``mpirun -n 3 python
tests/test_device_exchange.py`` holds real ranks to what simulated ones do here.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import types
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from conftest import finish, mpi_command, start
from hypothesis import given, settings
from hypothesis import strategies as st
from test_communicator import on_ranks

from hpcfed import devices
from hpcfed.compressors.qsgd import Qsgd
from hpcfed.devices import Device
from hpcfed.exchange import on_devices
from hpcfed.federation import Federation
from hpcfed.ledger import TRAFFIC, Ledger
from hpcfed.ranks import cuda_aware
from hpcfed.ranks.communicator import SerialCommunicator
from hpcfed.ranks.cuda_aware import SWITCH, ask
from hpcfed.ranks.mpi import MpiCommunicator
from hpcfed.run import runner
from hpcfed.streams import Streams

torch = pytest.importorskip("torch")

CLIENTS = 5
SHAPES = [(), (0,), (1,), (7, 3), (1003,)]
TYPES = [np.float32, np.float64]


class Rest(threading.local):
    """Whether this simulated rank, which is a thread, has its device at rest."""

    now = False


resting = Rest()


@dataclass(frozen=True)
class Stage(Device):
    """A device whose memory is the host's, and which can tell whether it is at rest."""

    direct: bool = True

    @contextlib.contextmanager
    def at_rest(self):
        resting.now = True
        yield
        resting.now = False


class Careful:
    """A communicator that takes tensors of a device at rest only; ``tensors`` counts the calls that have some."""

    def __init__(self, inner):
        self.inner, self.tensors = inner, 0

    def __getattr__(self, name):
        found = getattr(self.inner, name)
        if not callable(found):
            return found

        def call(*args):
            if any(isinstance(arg, torch.Tensor) for arg in args):
                assert resting.now
                self.tensors += 1
            return found(*args)

        return call


def any_tensor(value):
    """In place of `devices.stays`."""
    return isinstance(value, torch.Tensor) and value.dtype in (torch.float32, torch.float64)


@pytest.fixture
def staged(monkeypatch):
    monkeypatch.setattr(devices, "stays", any_tensor)


def values_of(fed, shape, dtype):
    """Values of many magnitudes, so that another order of addition shows; some tensors are not contiguous."""

    def make(client, rng):
        array = (rng.standard_normal(shape) * 10.0 ** rng.integers(-6, 6, shape)).astype(dtype)
        return torch.from_numpy(np.array(array, order="F" if client % 2 else "C"))

    return fed.map(make)


def outcome(
    comm, shape, dtype, device=None, count=None, weighted=False, total=False, sum_order="client", clients=CLIENTS
):
    """The mean of all clients' tensors on one rank, the traffic of all, and how often tensors were handed over."""
    comm = Careful(comm)
    fed = Federation(
        clients,
        streams=Streams(4),
        communicator=comm,
        sum_order=sum_order,
        weights=tuple(np.random.default_rng(1).uniform(0.01, 3, clients).tolist()),
        device=device or Stage(),
        ledger=Ledger(),
    ).build(lambda client, rng: client)
    cohort = fed.at(3).sample(count)
    values = values_of(cohort, shape, dtype)
    before = {client: value.clone() for client, value in values.items()}
    mean = cohort.total(values) if total else cohort.mean(values, weighted=weighted)
    assert isinstance(mean, torch.Tensor)
    assert all(torch.equal(before[client], value) for client, value in values.items())
    totals = fed.ledger.totals(comm)
    return mean.numpy().copy(), {name: totals[name] for name in TRAFFIC}, comm.tensors


def by_the_host(*args, **kwargs):
    """The same in one process, where MPI takes no tensors."""
    mean, traffic, tensors = outcome(SerialCommunicator(), *args, device=Device(), **kwargs)
    assert tensors == 0
    return mean, traffic


def cases():
    """What real ranks are asked, too."""
    for shape in SHAPES:
        for dtype in TYPES:
            yield (shape, dtype), {}
            yield (shape, dtype), {"weighted": True}
            yield (shape, dtype), {"weighted": True, "count": 2}
            yield (shape, dtype), {"count": 1}
    yield ((1003,), np.float32), {"total": True}
    yield ((9,), np.float64), {"clients": 1}


def check(comm):
    """All cases on this rank of a communicator."""
    for args, kwargs in cases():
        if kwargs.get("clients", CLIENTS) < comm.size:
            continue
        expected, traffic = by_the_host(*args, **kwargs)
        found, counted, tensors = outcome(comm, *args, **kwargs)
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
        assert found.tobytes() == expected.tobytes()
        assert counted == traffic | {"wire_bytes_down": comm.size * traffic["wire_bytes_down"]}
        assert tensors > 0 or found.size == 0


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_the_same_bytes_as_by_way_of_the_host(staged, ranks):
    on_ranks(ranks, check)


@pytest.mark.mpi
def test_real_ranks_do_so_too():
    command = [*mpi_command(3)[:3], sys.executable, __file__]
    done = finish(start(command, PYTHONPATH=str(Path(__file__).parent)), 90)
    assert (done.status, done.out.split()) == (0, ["kept"] * 3), done.err


def test_long_tensors_travel_in_several_passes(staged, monkeypatch):
    monkeypatch.setattr(on_devices, "ELEMENTS_A_PASS", 600)
    expected, _ = by_the_host((1003,), np.float32, weighted=True)
    for ranks in (2, 3):
        for found, _, tensors in on_ranks(ranks, lambda comm: outcome(comm, (1003,), np.float32, weighted=True)):
            assert found.tobytes() == expected.tobytes()
            assert tensors > 2


@settings(max_examples=25, deadline=None)
@given(st.data(), st.sampled_from(TYPES), st.integers(2, 4))
def test_whatever_the_numbers(data, dtype, ranks):
    """Infinite and tiny ones, too."""
    width = np.dtype(dtype).itemsize * 8
    numbers = st.lists(st.floats(width=width, allow_nan=False), min_size=CLIENTS, max_size=CLIENTS)
    columns = np.array(data.draw(st.lists(numbers, min_size=1, max_size=9)), dtype).T
    weights = tuple(data.draw(st.lists(st.floats(0.01, 100), min_size=CLIENTS, max_size=CLIENTS)))

    def mean(comm, device, array):
        fed = Federation(CLIENTS, communicator=comm, weights=weights, device=device).build(lambda client, rng: client)
        values = fed.map(lambda client, rng: array(columns[client].copy()))
        return np.asarray(fed.mean(values, weighted=True))

    with pytest.MonkeyPatch.context() as patch, np.errstate(all="ignore"):
        patch.setattr(devices, "stays", any_tensor)
        expected = mean(SerialCommunicator(), Device(), lambda array: array)
        for found in on_ranks(ranks, lambda comm: mean(Careful(comm), Stage(), torch.from_numpy)):
            np.testing.assert_array_equal(found, expected)
            assert (np.signbit(found) == np.signbit(expected))[~np.isnan(expected)].all()


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", TYPES)
def test_in_any_order_the_ranks_meet_once(staged, ranks, weighted, dtype):
    on_ranks(ranks, lambda comm: check_any_order(comm, dtype, weighted))


def check_any_order(comm, dtype, weighted):
    expected, traffic = by_the_host((50,), dtype, weighted=weighted)
    mean, counted, tensors = outcome(comm, (50,), dtype, weighted=weighted, sum_order="any")
    assert tensors == 1
    assert mean.dtype == dtype
    assert counted == traffic | {"wire_bytes_down": comm.size * traffic["wire_bytes_down"]}
    reach = np.abs(by_client((50,), dtype)).max(axis=0)
    assert (np.abs(mean - expected) <= 40 * np.finfo(dtype).eps * reach).all()


def by_client(shape, dtype):
    """The values that `outcome` sums."""
    fed = Federation(CLIENTS, streams=Streams(4)).build(lambda client, rng: client)
    return [value.numpy() for value in values_of(fed.at(3), shape, dtype).values()]


class TestWhatGoesByTheHost:
    """What is no tensor of floats on a GPU, or is compressed, or whose device does not allow it."""

    def sent(self, value, device=None, lossy=False, **options):
        def mean(comm):
            comm = Careful(comm)
            device_here = device or Stage()
            fed = Federation(2, communicator=comm, device=device_here, **options).build(lambda client, rng: client)
            found = fed.mean(fed.map(lambda client, rng: value), lossy=lossy)
            assert isinstance(found, type(value))
            return comm.tensors

        return on_ranks(2, mean)

    def test_arrays_and_numbers(self, staged):
        assert self.sent(np.ones(3)) == [0, 0]
        assert self.sent(2.5) == [0, 0]

    def test_whole_numbers(self, staged):
        assert self.sent(torch.ones(3, dtype=torch.int32)) == [0, 0]

    def test_compressed_messages(self, staged):
        tensor = torch.arange(8, dtype=torch.float32)
        assert self.sent(tensor, lossy=True, compressor=Qsgd(3)) == [0, 0]
        assert min(self.sent(tensor, lossy=True)) > 0

    def test_tensors_where_mpi_does_not_take_them(self, staged):
        assert self.sent(torch.ones(3), Stage(direct=False)) == [0, 0]

    def test_tensors_that_are_on_no_gpu(self):
        assert not devices.stays(torch.ones(3))
        assert self.sent(torch.ones(3)) == [0, 0]


def test_what_others_do_not_offer_is_an_error(staged):
    fed = Federation(2, device=Stage()).build(lambda client, rng: client)
    with pytest.raises(ValueError, match=r"client 1 offers float32 \(4,\) where others offer float32 \(3,\)"):
        fed.mean(fed.map(lambda client, rng: torch.ones(3 + client)))


def test_a_gpu_is_at_rest_and_the_current_one_while_mpi_has_its_tensors(monkeypatch):
    seen = []

    @contextlib.contextmanager
    def current(name):
        seen.append(name)
        yield
        seen.append("left")

    stream = types.SimpleNamespace(synchronize=lambda: seen.append("done"))
    cuda = types.SimpleNamespace(device=current, current_stream=lambda: stream)
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=cuda))
    with Device("cuda:2").at_rest():
        seen.append("call")
    assert seen == ["cuda:2", "done", "call", "left"]
    monkeypatch.setitem(sys.modules, "torch", None)
    with Device().at_rest():
        pass


# -- whether MPI takes them --------------------------------------------------------------------------------------------

OPEN_MPI = "Open MPI v4.1.6, package: Debian OpenMPI, ident: 4.1.6, Sep 30, 2023"
MPICH = "MPICH Version:      4.2.0\nMPICH Release date: Fri Feb  9 12:29:21 CST 2024\n"
INTEL = "Intel(R) MPI Library 2021.14 for Linux* OS\n"
CRAY = "MPI VERSION    : CRAY MPICH version 8.1.28.15 (ANL base 3.4a2)\n"


def answer(monkeypatch, tmp_path, version, library=None, loaded="", **environment):
    """What a pretended MPI library is found to be."""
    variable = types.SimpleNamespace(
        in_dll=lambda library, name: types.SimpleNamespace(value=variable_of(library, name))
    )

    def variable_of(library, name):
        if not hasattr(library, name):
            raise ValueError(name)
        return getattr(library, name)

    pretended = types.SimpleNamespace(
        CDLL=lambda module: types.SimpleNamespace(**(library or {})), c_bool=variable, c_int=FakeInt, byref=lambda n: n
    )
    monkeypatch.setattr(cuda_aware, "ctypes", pretended)
    (tmp_path / "maps").write_text(loaded)
    return ask(version, "module", environment, tmp_path / "maps")


@dataclass
class FakeInt:
    value: int


def mpich(supported, status=0):
    def query(kind, flag):
        assert kind == 0
        flag.value = supported
        return status

    return {"MPIX_GPU_query_support": query}


def open_mpi(built, switched_on):
    return {"MPIX_Query_cuda_support": lambda: built, "opal_cuda_support": switched_on}


@pytest.mark.parametrize(
    ("version", "library", "environment", "expected"),
    [
        (OPEN_MPI, open_mpi(1, True), {}, True),
        (OPEN_MPI, open_mpi(1, False), {}, False),
        (OPEN_MPI, open_mpi(0, True), {}, False),
        (OPEN_MPI, {"MPIX_Query_cuda_support": lambda: 1}, {}, False),
        (OPEN_MPI, {}, {}, False),
        (OPEN_MPI, {}, {"MPICH_GPU_SUPPORT_ENABLED": "1", "I_MPI_OFFLOAD": "1", "I_MPI_OFFLOAD_MODE": "cuda"}, False),
        (OPEN_MPI, open_mpi(1, True), {SWITCH: "0"}, False),
        (OPEN_MPI, open_mpi(1, True), {SWITCH: "what?"}, False),
        (OPEN_MPI, open_mpi(1, True), {SWITCH: ""}, True),
        (OPEN_MPI, {}, {SWITCH: "1"}, True),
        (MPICH, mpich(1), {}, True),
        (MPICH, mpich(0), {}, False),
        (MPICH, mpich(1, status=5), {}, False),
        (MPICH, {}, {}, False),
        (INTEL, mpich(1), {}, False),
        (INTEL, {}, {"I_MPI_OFFLOAD": "1"}, False),
        (INTEL, {}, {"I_MPI_OFFLOAD": "0", "I_MPI_OFFLOAD_MODE": "cuda"}, False),
        (INTEL, {}, {"I_MPI_OFFLOAD": "1", "I_MPI_OFFLOAD_MODE": "CUDA"}, True),
        ("MVAPICH2 Version      : 2.3.7", open_mpi(1, True), {}, False),
    ],
)
def test_mpi_is_believed_only_if_it_says_so(monkeypatch, tmp_path, version, library, environment, expected):
    assert answer(monkeypatch, tmp_path, version, library, **environment).yes == expected


@pytest.mark.parametrize("switch", ["0", "1"])
@pytest.mark.parametrize("loaded", ["", "7f00-7f01 r-xp 0 00:00 1 /opt/cray/libmpi_gtl_cuda.so.0\n"])
def test_cray_needs_a_library_and_a_variable(monkeypatch, tmp_path, switch, loaded):
    found = answer(monkeypatch, tmp_path, CRAY, mpich(1), loaded, MPICH_GPU_SUPPORT_ENABLED=switch)
    assert found.yes == (switch == "1" and loaded != "")


@pytest.mark.parametrize("gpus", [(True, True), (True, False)])
@pytest.mark.parametrize("aware", [(True, True), (True, False)])
def test_tensors_go_directly_if_every_rank_has_a_gpu_and_mpi_takes_them(monkeypatch, gpus, aware):
    chosen = [Device(f"cuda:{rank}" if gpus[rank] else "cpu", 8, f"gpu-{rank}") for rank in range(2)]
    monkeypatch.setattr(devices, "choose", lambda requested, local_rank: chosen[local_rank])

    def device(comm):
        comm.cuda_aware = lambda: cuda_aware.Answer(aware[comm.rank], "")
        return runner._Execution._device(types.SimpleNamespace(communicator=comm), "auto")

    for rank, found in enumerate(on_ranks(2, device)):
        assert found == replace(chosen[rank], direct=all(gpus) and all(aware))


if __name__ == "__main__":
    devices.stays = any_tensor
    world = MpiCommunicator()
    world.piece = 20
    for comm in (world, world.split([2, 1])):
        check(comm)
        for own in TYPES:
            check_any_order(comm, own, weighted=True)
    assert isinstance(world.cuda_aware().yes, bool)
    print("kept", flush=True)
