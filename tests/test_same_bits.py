"""The promise of the package: one digest, alone and on any number of ranks, with and without quantization."""

from __future__ import annotations

import functools
import signal
from pathlib import Path

import pytest

from hpcfed.config import assemble
from hpcfed.ranks.communicator import SerialCommunicator
from hpcfed.run.result import read_attributes
from hpcfed.run.run_folder import RunFolder, create
from hpcfed.run.runner import STOP_SIGNALS, Run

TESTS = str(Path(__file__).parent)

# Clients that keep momentum, mini-batches, partial participation; five clients do not divide evenly.
RUNS = {
    "momentum": "--algorithm toy:Momentum --batch 2",
    "momentum-qsgd": "--algorithm toy:Momentum --batch 2 --quantize 4",
    "momentum-grid": "--algorithm toy:Momentum --batch 2 --quantize 4 --compressor grid",
    "part": "--algorithm toy:Descent --participants 2",
    "part-qsgd": "--algorithm toy:Descent --participants 2 --quantize 4 --block 100",
    "part-grid": "--algorithm toy:Descent --participants 2 --quantize 4 --compressor grid --block all",
}


def arguments(name, folder):
    return ["toy:Quadratics", "--rounds", "6", *RUNS[name].split(), "--out", str(folder)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """``alone(name)``: the folder of a run in this process, without MPI."""
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}

    @functools.cache
    def go(name):
        words = [word.removeprefix("--").replace("-", "_") for word in arguments(name, "")[1:-2]]
        run = assemble({"workload": "toy:Quadratics", **dict(zip(words[::2], words[1::2], strict=True))})
        folder = create(str(tmp_path_factory.mktemp("alone") / name), "toy:Quadratics")
        Run(run, folder, "").execute(SerialCommunicator())
        return folder

    yield go
    for number, handler in handlers.items():
        signal.signal(number, handler)


def comparable(folder):
    """Its records without what may depend on ranks: seconds, and bytes, of which every segment has a header."""
    rank_dependent = ("seconds", "wire_bytes_up", "wire_bytes_down")
    return [{k: v for k, v in record.items() if k not in rank_dependent} for record in folder.history()]


def digest(folder):
    return read_attributes(folder.result)["digest"]


def test_runs_that_should_differ_do(alone):
    assert len({digest(alone(name)) for name in RUNS}) == len(RUNS)


# All of them on 1 to 5 simulated ranks: tests/test_federation.py, tests/test_exchange.py and tests/test_conformance.py.
@pytest.mark.mpi
@pytest.mark.parametrize(
    ("ranks", "name"),
    [(1, "part"), (2, "momentum-grid"), (2, "part-qsgd"), (3, "momentum"), (3, "momentum-qsgd"), (3, "part-grid")],
)
def test_ranks_change_no_bit(mpirun, alone, tmp_path, ranks, name):
    done = mpirun(ranks, *arguments(name, tmp_path / "run"), PYTHONPATH=TESTS)
    assert done.status == 0, done.err
    found = RunFolder(tmp_path / "run")
    assert read_attributes(found.result)["ranks"] == ranks
    assert digest(found) == digest(alone(name))
    assert comparable(found) == comparable(alone(name))


@pytest.mark.mpi
def test_a_run_of_several_ranks_is_repeated_from_its_configuration_on_one(mpirun, hpcfed, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    assert mpirun(2, *arguments("momentum-grid", first), "--seed", "9", PYTHONPATH=TESTS).status == 0
    assert hpcfed("run", str(first / "config.toml"), "--out", str(second), PYTHONPATH=TESTS).status == 0
    assert digest(RunFolder(first)) == digest(RunFolder(second))
