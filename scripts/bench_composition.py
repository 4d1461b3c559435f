#!/usr/bin/env python3
"""Methods for compositions on `hpcfed robust`: local steps a second, and what a step of MFCGD costs beside its oracles.

    python scripts/bench_composition.py [--rounds 20] [--hidden 40,40] [--batch 20]
    mpirun -n 2 python scripts/bench_composition.py

The first table has every registered method for compositions in its default form: local steps of all clients a second,
and the share of the time that went into exchanges, the waiting for other ranks included. The second one times a local
step of MFCGD (products, then as published) on one client, in turn with the oracle calls that it is made of: their
ratio is what the method itself costs.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

from hpcfed import environment

environment.tune()  # before NumPy, torch and MPI are loaded

import numpy as np  # noqa: E402

from hpcfed import registry  # noqa: E402
from hpcfed.algorithms.mfcgd import Mfcgd  # noqa: E402
from hpcfed.capabilities import Compositional  # noqa: E402
from hpcfed.federation import Federation  # noqa: E402
from hpcfed.ranks.mpi import MpiCommunicator  # noqa: E402
from hpcfed.streams import Streams  # noqa: E402
from hpcfed.workloads.robust import Robust  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--hidden", default="40,40")
    parser.add_argument("--batch", type=int, default=20)
    parser.add_argument("--steps", type=int, default=300, help="repetitions in the second table")
    options = parser.parse_args()

    world = MpiCommunicator()
    workload = Robust(hidden=tuple(map(int, options.hidden.split(","))))
    problem = workload.build(Federation(workload.clients, Streams(0), world))
    if world.rank == 0:
        print(f"robust, {problem.model.size:,} parameters, batch {options.batch}, {world.size} ranks")
        print(f"{'method':14}{'local steps/s':>14}{'exchange':>10}")
    for name in registry.ALGORITHMS:
        method = registry.load("algorithm", name)
        if Compositional in method.needs:
            rate, share = throughput(method(batch=options.batch), problem, options.rounds)
            if world.rank == 0:
                print(f"{name:14}{rate:14,.0f}{share:10.1%}")
    if world.rank == 0:
        print(f"\n{'a step of mfcgd':18}{'step':>10}{'oracles':>10}{'ratio':>8}")
        for jacobian in ("product", "exact"):
            step, oracles = medians(*one_step(problem, jacobian, options.batch), options.steps)
            print(f"{jacobian:18}{1e6 * step:7.0f} us{1e6 * oracles:7.0f} us{step / oracles:7.2f}x")
    world.wait()


def throughput(method: Any, problem: Any, rounds: int) -> tuple[float, float]:
    """Local steps of all clients a second, and the share of exchanges, over some rounds after the first."""
    fed = problem.fed
    state = method.round(method.init(fed.at(0), problem.start()), fed.at(1))
    fed.communicator.wait()
    before, begin = fed.ledger.seconds["exchange"], time.perf_counter()
    for number in range(2, rounds + 2):
        state = method.round(state, fed.at(number))
    fed.communicator.wait()
    seconds = time.perf_counter() - begin
    steps = rounds * getattr(method, "local_steps", 1) * fed.num_clients
    return steps / seconds, (fed.ledger.seconds["exchange"] - before) / seconds


def one_step(problem: Any, jacobian: str, batch: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """A local step of a client, estimates included, and the oracle calls in it alone."""
    client, fed = problem.fed.any_client, problem.fed
    method = Mfcgd(batch=batch, jacobian=jacobian)
    old = problem.start()
    estimates = next(iter(method.init(fed.at(0), old).estimates.values()))
    rng = np.random.default_rng(0)

    def step() -> Any:
        new = old - method.eta(1) * estimates.w
        return method._correct(client, rng, estimates, old, new, method.eta(1))

    new = old - method.eta(1) * estimates.w

    def oracles() -> None:
        sample = client.draw_inner(rng, batch)
        for x in (new, old):
            _, pull = client.inner_pullback(x, sample)
            client.outer_gradient(estimates.h, None)
            pull(estimates.v)

    return step, oracles


def medians(step: Callable[[], Any], oracles: Callable[[], Any], repetitions: int) -> tuple[float, float]:
    """Seconds of either, timed in turn."""
    times = np.empty((repetitions, 2))
    for row in times:
        for place, action in enumerate((step, oracles)):
            begin = time.perf_counter()
            action()
            row[place] = time.perf_counter() - begin
    return tuple(np.median(times[repetitions // 10 :], axis=0))


if __name__ == "__main__":
    main()
