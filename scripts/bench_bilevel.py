#!/usr/bin/env python3
"""Bilevel methods: client steps a second on one core, and what a step asks of a client.

    python scripts/bench_bilevel.py [--data FILE] [--lower mlp] [--batch 10] [--seconds 3]

Each registered method for bilevel problems runs `hpcfed hyperopt` with its default options but the batch, round after
round of all methods in turn. The table has the steps of the median round by processor time, which other programs on the
machine change little, and how much longer a step takes than one of fedds. A step is one of ``local_steps``; where a
method has inner loops, they are part of it.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from typing import Any

from hpcfed import environment

environment.tune()  # before NumPy is loaded

from hpcfed import registry  # noqa: E402
from hpcfed.federation import Federation  # noqa: E402
from hpcfed.streams import Streams  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default=None, help="LIBSVM file  [default: breast cancer]")
    parser.add_argument("--lower", default="mlp", choices=("mlp", "logistic"))
    parser.add_argument("--batch", type=int, default=10)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=3.0, help="for each method")
    options = parser.parse_args()
    workload = registry.load("workload", "hyperopt")(clients=options.clients, data=options.data, lower=options.lower)
    races = [Race(name, workload, options.batch) for name in registry.fitting_algorithms("hyperopt")]
    end = time.perf_counter() + options.seconds * len(races)
    while time.perf_counter() < end:
        for race in races:
            race.go()
    client = races[0].fed.any_client
    print(
        f"--lower {options.lower}, x {client.upper_size}, y {client.lower_size}, {options.clients} clients, "
        f"batch {options.batch}"
    )
    base = next((race.seconds for race in races if race.name == "fedds"), races[0].seconds)
    print(f"{'method':<14}{'steps/s':>10}{'time':>8}{'gradients':>11}{'products':>10}")
    for race in sorted(races, key=lambda race: race.seconds):
        gradients, products = (race.per_step(kind) for kind in ("gradients", "hessian_products"))
        print(f"{race.name:<14}{1 / race.seconds:10.0f}{race.seconds / base:8.2f}{gradients:11.1f}{products:10.1f}")


class Race:
    """One method on its own federation."""

    def __init__(self, name: str, workload: Any, batch: int) -> None:
        self.name = name
        problem = workload.build(Federation(workload.clients, Streams(0)))
        self.fed = problem.fed
        self.method = dataclasses.replace(registry.load("algorithm", name)(), batch=batch)
        self.state = self.method.init(self.fed.at(0), problem.start())
        self.steps = workload.clients * self.method.local_steps
        self.work = dict(self.fed.ledger.work)
        self.times: list[float] = []

    def go(self) -> None:
        """One round. It starts from the same state each time, so that a method cannot diverge."""
        begin = time.process_time()
        self.method.round(self.state, self.fed.at(1))
        self.times.append(time.process_time() - begin)

    @property
    def seconds(self) -> float:
        """Of a step."""
        return statistics.median(self.times) / self.steps

    def per_step(self, kind: str) -> float:
        """Work of a step."""
        return (self.fed.ledger.work[kind] - self.work[kind]) / (len(self.times) * self.steps)


if __name__ == "__main__":
    main()
