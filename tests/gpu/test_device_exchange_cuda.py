"""Sums that never leave the GPU against those by way of the host, to the last bit, on real ranks.

MPI must take tensors on GPUs (``mpirun -n 2 hpcfed doctor`` says so); ranks may share one GPU.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import astra
import numpy as np
import pytest

from hpcfed import devices
from hpcfed.federation import Federation
from hpcfed.ranks.communicator import SerialCommunicator
from hpcfed.ranks.mpi import MpiCommunicator
from hpcfed.streams import Streams

if not astra.use_cuda():  # asked first: it spares loading torch where there is no GPU
    pytest.skip("ASTRA finds no CUDA device", allow_module_level=True)
torch = pytest.importorskip("torch", reason="torch is not installed")
if not torch.cuda.is_available():
    pytest.skip("torch finds no CUDA device", allow_module_level=True)

pytestmark = pytest.mark.gpu

CLIENTS = 5
WEIGHTS = (0.3, 1.7, 1.0, 0.1, 2.9)
# Of the last one a rank sends more than one pass.
SIZES = (0, 1, 1003, (1 << 23) + 5)


def means(comm, device, size, dtype):
    """Means of numbers of many magnitudes: of all clients, weighted, and of some."""
    fed = Federation(CLIENTS, streams=Streams(4), communicator=comm, weights=WEIGHTS, device=device)
    fed = fed.build(lambda client, rng: client)

    def make(client, rng):
        return device.put((rng.standard_normal(size) * 10.0 ** rng.integers(-6, 6, size)).astype(dtype))

    values, some = fed.map(make), fed.at(3).sample(2)
    found = [fed.mean(values), fed.mean(values, weighted=True), some.total(some.map(make))]
    return [devices.to_host(each) for each in found]


def test_a_gpu_adds_up_as_a_processor_does():
    """One rank: the arithmetic alone, without MPI."""
    gpu = replace(devices.choose("cuda", 0), direct=True)
    for dtype in (np.float32, np.float64):
        for size in SIZES[:-1]:
            pairs = zip(
                means(SerialCommunicator(), gpu, size, dtype),
                means(SerialCommunicator(), devices.Device(), size, dtype),
                strict=True,
            )
            assert all(found.tobytes() == expected.tobytes() for found, expected in pairs)


@pytest.mark.mpi
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_give_the_same_bits(ranks):
    from conftest import finish, mpi_command, start

    command = [*mpi_command(ranks)[:3], sys.executable, __file__]
    done = finish(start(command, PYTHONPATH=str(Path(__file__).parents[1])), 300)
    if "not aware" in done.out:
        pytest.skip("MPI does not take tensors on GPUs")
    assert (done.status, done.out.split()) == (0, ["kept"] * ranks), done.err


if __name__ == "__main__":
    world = MpiCommunicator()
    if not all(world.gather(world.cuda_aware().yes)):
        print("not aware", flush=True)
        sys.exit()
    own = replace(devices.choose("cuda", world.local_rank), direct=True)
    for kind in (np.float32, np.float64):
        for length in SIZES:
            results = means(world, own, length, kind)
            for result, right in zip(results, means(SerialCommunicator(), devices.Device(), length, kind), strict=True):
                assert result.tobytes() == right.tobytes()
    print("kept", flush=True)
