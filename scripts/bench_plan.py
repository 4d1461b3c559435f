#!/usr/bin/env python3
"""Plans against runs: seconds a round, bytes a round and memory a rank of `hpcfed plan`, over what a run measures.

    python scripts/bench_plan.py [--ranks 1,2,4,8,17] [--rounds 30] [--only ct] [--hosts n1,n2]

The machine is measured with as many ranks as a case has, then the case is planned, then run; waiting ranks yield. With
hosts the ranks are spread over them, which mpirun must be able to reach (PRTE_MCA_plm_ssh_agent names another ssh). All
seconds are those of the fastest round, without metrics, since what others do on the machine only adds to them. Where
they never cease, `cpu` tells more: the processor seconds a round of all ranks together, over the cores in use.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from hpcfed import environment

environment.tune()  # before NumPy and MPI are loaded

import h5py  # noqa: E402

from hpcfed import config  # noqa: E402
from hpcfed.ranks import communicator  # noqa: E402
from hpcfed.run.run_folder import RunFolder  # noqa: E402
from hpcfed.run.runner import Run, Stop  # noqa: E402

CASES = {
    "ct": "ct --shape 64,64,16 --views 165 --detector 96 --device cpu",
    "ct-quantized": "ct --shape 64,64,16 --views 165 --detector 96 --device cpu --quantize 20",
    "logreg": "logreg --clients 17",
}


class Watch(Stop):
    """Notes the time, and this process's processor seconds, at the end of each round; never asks to stop."""

    def __init__(self) -> None:
        super().__init__()
        self.times: list[tuple[float, float]] = []

    def asked(self) -> bool:
        self.times.append((time.perf_counter(), time.process_time()))
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", default="1,2,4,8,17", help="numbers of ranks, comma-separated")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--only", default="", help="the case of this name")
    parser.add_argument("--hosts", default="", help="nodes to spread the ranks over, comma-separated")
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.folder:
        run(options.only, options.rounds, options.folder)
        return
    cases = {name: words for name, words in CASES.items() if options.only in ("", name)}
    heads = ("ranks", "planned", "measured", "cpu", "ratio", "to cpu", "up", "down", "memory")
    print(f"{'':14}" + "".join(f"{head:>10}" for head in heads))
    with tempfile.TemporaryDirectory() as folder:
        for ranks in map(int, options.ranks.split(",")):
            profile = Path(folder, f"profile-{ranks}.json")
            hosts = [host for host in options.hosts.split(",") if host]
            start(ranks, hosts, "-m", "hpcfed", "doctor", "--measure", "--out", str(profile))
            for name, words in cases.items():
                line = [*words.split(), "--ranks", str(ranks), "--profile", str(profile), "--json"]
                line += ["--nodes", str(len(hosts) or 1)]
                planned = json.loads(start(1, [], "-m", "hpcfed", "plan", *line))
                place = RunFolder(Path(folder, f"{name}-{ranks}"))
                words = ["--only", name, "--rounds", str(options.rounds), "--folder", str(place.path)]
                wall, cpu, up, down, memory = json.loads(start(ranks, hosts, __file__, *words).splitlines()[-1])
                seconds = planned["seconds"]
                times = f"{ranks:10}" + "".join(f"{1e3 * each:7.2f} ms" for each in (seconds, wall, cpu))
                sizes = (planned["bytes_up"] / up, planned["bytes_down"] / down, planned["memory"] / memory)
                ratios = (seconds / wall, seconds / cpu, *sizes)
                print(f"{name:14}{times}" + "".join(f"{ratio:10.2f}" for ratio in ratios), flush=True)


def start(ranks: int, hosts: list[str], *words: str) -> str:
    """What Python prints, on so many ranks."""
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    binding = {"PRTE_MCA_hwloc_default_binding_policy": "none", "OMPI_MCA_mpi_yield_when_idle": "1"}
    variables = {**os.environ, **root, **binding}
    command = [sys.executable, *words]
    if ranks > 1:
        places = ["--oversubscribe"]
        if hosts:
            variables.pop("PRTE_MCA_rmaps_default_mapping_policy", None)  # it would put all ranks on the first host
            places = ["--host", ",".join(f"{host}:{-(-ranks // len(hosts))}" for host in hosts)]
            places += [word for name in variables if name.startswith(("OMPI_MCA", "OMP_")) for word in ("-x", name)]
        command = [str(Path(sys.executable).parent / "mpirun"), *places, "-n", str(ranks), *command]
    done = subprocess.run(command, env=variables, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    return done.stdout


def run(case: str, rounds: int, folder: str) -> None:
    """Run a case on these ranks; rank 0 prints what a round took."""
    world, watch, place = communicator.connect(), Watch(), RunFolder(Path(folder))
    name, *words = CASES[case].split()
    given = {flag.removeprefix("--"): value for flag, value in zip(words[::2], words[1::2], strict=True)}
    options = config.assemble({"workload": name, **given, "rounds": rounds, "record_every": rounds})
    if world.rank == 0:
        place.path.mkdir()
        place.write_config(options.to_toml())
    world.wait()
    Run(options, place, case, progress=False, pictures=False).execute(world, watch)
    wall, cpu = (
        [later - before for before, later in itertools.pairwise(each[1:])] for each in zip(*watch.times, strict=True)
    )
    every = world.gather(cpu)
    if world.rank == 0:
        cores = min(world.size, environment.usable_cores())
        first, last = place.history()
        sent = [(last[name] - first[name]) / rounds for name in ("wire_bytes_up", "wire_bytes_down")]
        with h5py.File(place.result) as file:
            memory = int(file.attrs["peak_memory_bytes"])
        numbers = (min(wall), min(map(sum, zip(*every, strict=True))) / cores)
        print(json.dumps([*numbers, *sent, memory]))


if __name__ == "__main__":
    main()
