#!/usr/bin/env python3
"""Let runs be killed, stopped, damaged and misconfigured at random, and see whether they keep their word.

    python scripts/soak.py [--minutes 8] [--seed 0] [--keep-failed DIR]

Episodes of six kinds take turns until the time is over:

kill      mpirun -n 2 to 4; SIGKILL to a random rank at a random moment, up to twice, each time resumed
signal    the same with SIGTERM or SIGUSR1, after which a run must leave with 75 and lose no round
takeover  hpcfed launch --on-failure takeover; SIGKILL to some of the ranks, and the others must finish the run
damage    files of the newest checkpoint cut off or with a flipped bit: each must be noticed by what resume asks, and
          one of them by resume itself, which must go back to the one before; with both damaged it must say so
fuzz      configurations of random options and values: 0, or 2 (1 if it diverges) with one line, and no traceback
scans     measured scans with one thing amiss, in their arrays or in a file's bytes: the same

Whatever happens, a finished run has the digest of the undisturbed one, checkpoints that were due are there, and nothing
takes longer than the time limit. A line an episode, a table at the end; exit status 1 if anything failed.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import importlib
import logging
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import click

from hpcfed import environment

environment.tune()

import fuzz_scans  # noqa: E402

from hpcfed.cluster import launcher  # noqa: E402
from hpcfed.errors import CheckpointError  # noqa: E402
from hpcfed.run import checkpoint  # noqa: E402
from hpcfed.run.result import read_attributes  # noqa: E402
from hpcfed.run.run_folder import RunFolder  # noqa: E402

LIMIT = 120.0  # seconds after which a command counts as hanging
EVERY = 3
COMMON = [
    "--clients",
    "4",
    "--record-every",
    "1",
    "--checkpoint-every",
    str(EVERY),
    "--quantize",
    "20",
    "--device",
    "cpu",
]
INTERRUPTIONS = 2
# The last two have states that a thread writes: 1.6 MB replicated, and 0.4 MB at each client beside them.
LOGREG = ["logreg", "--rounds", "90", "--batch", "8", *COMMON]
CT = ["ct", "--rounds", "60", "--shape", "64,64,24", "--views", "8", "--detector", "96", *COMMON]
CASES = {
    "logreg": [*LOGREG, "--B", "identity"],
    "feedback": [*LOGREG, "--algorithm", "fedavg", "--error-feedback"],
    "fpdfp": [*CT, "--algorithm", "fpdfp"],
    "vm-pdfp": [*CT, "--algorithm", "vm-pdfp"],
}
FUZZED = {
    "logreg": ["--rounds", "2", "--clients", "3"],
    "ct": ["--rounds", "2", "--shape", "8,8,2", "--views", "4", "--detector", "12", "--clients", "2"],
    "private": ["--rounds", "2", "--clients", "2"],
}
VALUES = [
    "0",
    "1",
    "2",
    "3",
    "-1",
    "0.5",
    "1.5",
    "-0.5",
    "1e-9",
    "1e9",
    "nan",
    "inf",
    "-inf",
    "1e400",
    "",
    " ",
    "x",
    "1,2",
]
VALUES += [
    "3,3,3",
    "0,0,0",
    "8,8",
    "true",
    "none",
    "auto",
    "99999999999999999999",
    "/nowhere",
    "a\nb",
    "\u221e",
    "[1]",
    "300s",
]
# Nobody's mistake: these ask for more work than there is time, or for folders.
NOT_FUZZED = {"rounds", "out", "tune_rounds", "local_steps", "shape", "clients"}
SERIAL = [sys.executable, "-m", "hpcfed"]


class Failed(Exception):
    """What an episode must not show."""


@dataclass
class Command:
    """hpcfed on some ranks, found by a mark in its environment."""

    words: list[str]
    ranks: int = 1
    tolerant: bool = False
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)

    def __post_init__(self) -> None:
        command = [*SERIAL, *self.words]
        if self.tolerant:
            command = [*SERIAL, "launch", "-n", str(self.ranks), "--on-failure", "takeover", *self.words]
        elif self.ranks > 1:
            cores, root = environment.usable_cores(), os.geteuid() == 0
            command = launcher.find().line(self.ranks, command, cores=cores, root=root).command
        self.output = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        self.process = subprocess.Popen(
            command,
            env={**os.environ, "HPCFED_SOAK": self.mark},
            stdout=subprocess.DEVNULL,
            stderr=self.output,
            start_new_session=True,
        )

    def alive(self) -> dict[int, int]:
        """Process ids by rank."""
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                variables = (entry / "environ").read_bytes().decode(errors="replace")
                rank = re.search(r"OMPI_COMM_WORLD_RANK=(\d+)", variables)
                if self.mark in variables and (rank or self.ranks == 1):
                    found[int(rank[1]) if rank else 0] = int(entry.name)
        return found

    def wait_for(self, condition: Callable[[], bool], seconds: float) -> None:
        """Until it holds, the time is over or the command has ended."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and self.process.poll() is None and not condition():
            time.sleep(0.01)

    def wait(self) -> tuple[int, str]:
        """Its status and what it said; a failure if it hangs, or if any rank outlives it."""
        end = time.monotonic() + LIMIT
        try:
            status = self.process.wait(LIMIT)
            while self.alive() and time.monotonic() < end:
                time.sleep(0.05)
            if self.alive():
                raise Failed(f"ranks {sorted(self.alive())} outlived {' '.join(self.words)}")
        except subprocess.TimeoutExpired:
            raise Failed(f"no end within {LIMIT:.0f} s: {' '.join(self.words)}") from None
        finally:
            for pid in self.alive().values():
                os.kill(pid, signal.SIGKILL)
            if self.process.poll() is None:
                self.process.kill()
        self.output.seek(0)
        text = self.output.read()
        if "Traceback" in text:
            raise Failed(f"a traceback of {' '.join(self.words)}:\n{text}")
        return status, text


def said(text: str) -> list[str]:
    """The lines of ours."""
    lines = text.replace("\0", "\n").splitlines()
    return [line for line in lines if line.startswith("hpcfed:") and "messages of" not in line]


def require(truth: bool, complaint: str) -> None:
    if not truth:
        raise Failed(complaint)


@dataclass
class Case:
    """A run and what comes out of it undisturbed."""

    name: str
    folder: Path
    digest: str
    seconds: float

    @property
    def rounds(self) -> int:
        return int(CASES[self.name][2])

    @classmethod
    def undisturbed(cls, name: str, parent: Path) -> Case:
        folder = parent / f"whole-{name}"
        begin = time.monotonic()
        status, text = Command([*CASES[name], "--keep", "1000", "--out", str(folder)]).wait()
        require(status == 0, f"undisturbed {name} left with {status}: {text}")
        return cls(name, folder, read_attributes(folder / "result.h5")["digest"], time.monotonic() - begin)

    def check(self, folder: Path) -> None:
        digest = read_attributes(folder / "result.h5")["digest"]
        require(digest == self.digest, f"digest {digest} instead of {self.digest} in {folder}")


def last_checkpoint(folder: RunFolder) -> int:
    """The round of the last whole checkpoint, 0 if there is none; those that were due must be there.

    One that is due is certain when the next one has begun, which is before the next round is recorded.
    """
    newest = checkpoint.latest(folder.checkpoints)
    number = 0 if newest is None else checkpoint.round_of(newest)
    certain = (recorded(folder) - 1) // EVERY * EVERY - EVERY
    require(number >= certain, f"round {recorded(folder)} is recorded, but the last checkpoint is of round {number}")
    return number


def recorded(folder: RunFolder) -> int:
    """The last recorded round, -1 before the first."""
    records = folder.history()
    return records[-1]["round"] if records else -1


def disturbed(case: Case, chance: random.Random, parent: Path, numbers: list[signal.Signals]) -> str:
    """Interrupt a run, before its rounds or at a random one, and resume it."""
    folder = RunFolder(parent / uuid.uuid4().hex[:8])
    words = [*CASES[case.name], "--out", str(folder.path)]
    story, reached = [], 0
    for attempt in range(INTERRUPTIONS + 1):
        ranks = chance.choice([2, 3, 4])
        command = Command(words, ranks)
        number, target = chance.choice(numbers), chance.randrange(ranks)
        early, moment = chance.random() < 0.2, chance.random()
        if attempt < INTERRUPTIONS:
            until = (lambda: False) if early else (lambda end=moment * case.rounds: recorded(folder) >= end)
            command.wait_for(until, moment * case.seconds if early else LIMIT)
            victim = command.alive().get(target)
            if victim is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(victim, number)
        status, text = command.wait()
        now = last_checkpoint(folder) if folder.path.exists() else 0
        require(now >= reached, f"checkpoint of round {reached} is lost, the last one is of round {now}")
        story.append(
            f"n={ranks} {number.name if attempt < INTERRUPTIONS else 'left alone'} after round {now}: {status}"
        )
        if folder.finished:
            killed = attempt < INTERRUPTIONS and number == signal.SIGKILL  # when all but the pictures was done
            require(status == 0 or killed, f"finished with status {status}: {text}")
            case.check(folder.path)
            return f"{case.name}: {len(story) - 1} interruption(s), {'; '.join(story)}"
        if status == 75:
            require(
                now == recorded(folder), f"stopped after round {recorded(folder)}, the checkpoint is of round {now}"
            )
            require(text.count("stopped by a signal") == 1, f"status 75 and not one line: {text}")
        require(status != 0 or ranks > 1, f"status 0 without a result: {text}")  # mpirun's 0 may belie its ranks
        reached = now
        words = ["resume", str(folder.path)]
        if not folder.config.exists():  # killed before anything was made
            shutil.rmtree(folder.path, ignore_errors=True)
            words = [*CASES[case.name], "--out", str(folder.path)]
    raise Failed(f"left alone it did not finish: {'; '.join(story)}\n{text}")


def taken_over(case: Case, chance: random.Random, parent: Path) -> str:
    """Kill some ranks, but not all, at random moments: the others finish the run."""
    folder = RunFolder(parent / uuid.uuid4().hex[:8])
    ranks = chance.choice([2, 3, 4])
    command = Command([*CASES[case.name], "--out", str(folder.path)], ranks, tolerant=True)
    victims = chance.sample(range(ranks), chance.randrange(1, ranks))
    killed = []
    for victim, moment in zip(victims, sorted(chance.random() for _ in victims), strict=True):
        command.wait_for(lambda end=moment * case.rounds: recorded(folder) >= end, LIMIT)
        process = command.alive().get(victim)
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
                killed.append(f"rank {victim} after round {recorded(folder)}")
    status, text = command.wait()
    require(status == 0, f"n={ranks}, {', '.join(killed)}: {status}: {text}")
    case.check(folder.path)
    return f"{case.name}: n={ranks}, {', '.join(killed) or 'nobody in time'}"


def damage(path: Path, chance: random.Random) -> str:
    """Cut a file off or flip one of its bits."""
    content = bytearray(path.read_bytes())
    place = chance.randrange(len(content))
    if chance.random() < 0.4:
        path.write_bytes(content[:place])
        return f"{path.parent.name}/{path.name} cut to {place} bytes"
    content[place] ^= 1 << chance.randrange(8)
    path.write_bytes(content)
    return f"a bit of byte {place} of {path.parent.name}/{path.name}"


def damaged(case: Case, chance: random.Random, parent: Path) -> str:
    """Twenty damages that `latest` must notice, and one or two that resume must get over."""
    folder = RunFolder(parent / uuid.uuid4().hex[:8])
    shutil.copytree(case.folder, folder.path)
    folder.result.unlink()
    rounds = sorted(folder.checkpoints.iterdir())
    for path in rounds[:-2]:
        shutil.rmtree(path)
    before, newest = rounds[-2:]
    for _ in range(20):
        path = chance.choice(sorted(newest.iterdir()))
        original = path.read_bytes()
        what = damage(path, chance)
        require(checkpoint.latest(folder.checkpoints) == before or is_as_good(path, original), f"unnoticed: {what}")
        path.write_bytes(original)
    hit = [newest] if chance.random() < 0.8 else [newest, before]
    story = "; ".join(damage(chance.choice([*each.glob("*.h5")]), chance) for each in hit)
    status, text = Command(["resume", str(folder.path)], chance.choice([1, 2, 3])).wait()
    lines = [line for line in said(text) if "damaged" in line]
    require(len(lines) == 1, f"{story}: not one line: {text}")
    if len(hit) == 1:
        require(status == 0 and f"going back to {before.name}" in lines[0], f"{story}: {status} {text}")
        case.check(folder.path)
    else:
        require(status == 1 and "no whole checkpoint is left" in lines[0], f"{story}: {status} {text}")
    return f"{case.name}: 20 noticed, resumed with {story}"


def is_as_good(path: Path, original: bytes) -> bool:
    """Whether a list of checksums still says the same: another sign may end its lines."""
    return path.name == checkpoint.SUMS and path.read_text().splitlines() == original.decode().splitlines()


def fuzzed(chance: random.Random, parent: Path) -> str:
    """Fifty configurations, each in a child of this process that has all modules loaded."""
    from hpcfed.cli import flags

    told: collections.Counter[int] = collections.Counter()
    for _ in range(50):
        workload = chance.choice(list(FUZZED))
        options = [
            option
            for option in flags.workload_command(workload, [], print).params
            if isinstance(option, click.Option) and option.name not in NOT_FUZZED
        ]
        words = [workload, *FUZZED[workload], "--device", "cpu", "--out", str(parent / uuid.uuid4().hex[:8])]
        for option in chance.sample(options, chance.choice([1, 1, 2, 3])):
            flag = chance.choice([*option.opts, *option.secondary_opts])
            words += [flag] if option.is_flag else [f"{flag}={chance.choice(VALUES)}"]
        told[run_or_refused(words, str(words), parent / "fuzz.txt")] += 1
        shutil.rmtree(words[words.index("--out") + 1], ignore_errors=True)
    return counted(told)


def fuzzed_scans(chance: random.Random, parent: Path) -> str:
    """Fifty scans with one thing amiss: reconstructed, or refused with one line."""
    told: collections.Counter[int] = collections.Counter()
    importlib.import_module("hpcfed.operators.parallel_beam_kernels")  # children have it then
    for _ in range(50):
        folder = parent / uuid.uuid4().hex[:8]
        folder.mkdir()
        path, what = fuzz_scans.broken(folder, chance, damage)
        words = ["ct", "--projections", str(path), "--axis", "7.5", "--rounds", "2", "--clients", "2"]
        told[run_or_refused([*words, "--out", str(folder / "run")], what, parent / "fuzz.txt")] += 1
        shutil.rmtree(folder)
    return counted(told)


def run_or_refused(words: list[str], what: str, output: Path) -> int:
    """The status of a command that runs, or is refused with one line."""
    status, text = in_a_child(words, output)
    line = f"{what}: {status}\n{text}"
    require("Traceback" not in text, f"a traceback of {line}")
    require(status in (0, 2) or (status == 1 and "diverged" in text), f"a status that is not its own: {line}")
    require(status == 0 or len(said(text)) == 1, f"not one line: {line}")
    return status


def counted(told: Mapping[int, int]) -> str:
    return ", ".join(f"{count} left with {status}" for status, count in sorted(told.items()))


def in_a_child(words: list[str], output: Path) -> tuple[int, str]:
    child = os.fork()
    if child == 0:
        status = 70
        try:
            with output.open("w") as file:
                for stream in (1, 2):
                    os.dup2(file.fileno(), stream)
            from hpcfed import plots
            from hpcfed.cli import commands

            plots.draw = lambda *args: []  # pictures take most of the time, and others test them
            commands.main({}, words)
        except SystemExit as leave:
            status = leave.code if isinstance(leave.code, int) else 70
        finally:
            sys.stderr.flush()
            os._exit(status)
    end = time.monotonic() + LIMIT
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status), output.read_text(errors="replace")
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise Failed(f"no end within {LIMIT:.0f} s: {words}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=8.0, help="[default: %(default)s]")
    parser.add_argument("--seed", type=int, default=0, help="of all that is random  [default: %(default)s]")
    parser.add_argument("--kinds", default="kill,signal,takeover,damage,fuzz,scans", help="[default: %(default)s]")
    options = parser.parse_args()
    logging.getLogger("hpcfed").setLevel(logging.ERROR)  # what runs say is read from their own output
    chance = random.Random(options.seed)
    begin = time.monotonic()
    parent = Path(tempfile.mkdtemp(prefix="soak-"))
    cases = [Case.undisturbed(name, parent) for name in CASES]
    for case in cases:
        print(f"{time.monotonic() - begin:6.0f} s  undisturbed  {case.name}: {case.seconds:.1f} s, {case.digest[:12]}")
    episodes: dict[str, Callable[[], str]] = {
        "kill": lambda: disturbed(chance.choice(cases), chance, parent, [signal.SIGKILL]),
        "signal": lambda: disturbed(chance.choice(cases), chance, parent, [signal.SIGTERM, signal.SIGUSR1]),
        "takeover": lambda: taken_over(chance.choice(cases), chance, parent),
        "damage": lambda: damaged(chance.choice(cases), chance, parent),
        "fuzz": lambda: fuzzed(chance, parent),
        "scans": lambda: fuzzed_scans(chance, parent),
    }
    count: collections.Counter[str] = collections.Counter()
    bad: collections.Counter[str] = collections.Counter()
    kinds = options.kinds.split(",")
    while time.monotonic() < begin + 60 * options.minutes:
        kind = kinds[count.total() % len(kinds)]
        count[kind] += 1
        try:
            outcome = episodes[kind]()
        except (Failed, CheckpointError) as error:
            bad[kind] += 1
            outcome = f"FAILED: {error}"
        print(f"{time.monotonic() - begin:6.0f} s  {kind:12} {outcome}", flush=True)
    print(f"\n{'':12}{'episodes':>10}{'failed':>8}")
    for kind in kinds:
        print(f"{kind:12}{count[kind]:>10}{bad[kind]:>8}")
    if bad:
        print(f"\nwhat failed is in {parent}")
        sys.exit(1)
    shutil.rmtree(parent)


if __name__ == "__main__":
    main()
