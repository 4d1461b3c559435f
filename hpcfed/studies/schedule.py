"""Many runs on groups of ranks: each group draws the next run when it has done one, so that all are busy to the end.

What the groups need to know of one another passes through files in a folder, which all ranks see anyway because the
runs are there: a number is drawn by making the file of that name, which the system grants to one process only. No group
waits for another that computes, whatever the MPI library and the network.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hpcfed.errors import ConfigError, DivergedError, Interrupted, everywhere, portable
from hpcfed.ranks.communicator import Communicator, together
from hpcfed.run import checkpoint, result
from hpcfed.run.lock import locked
from hpcfed.run.recorder import clock
from hpcfed.run.run_folder import RunFolder
from hpcfed.run.runner import Run, Stop

Status = Literal["finished", "diverged", "pending"]

DIVERGED = "diverged.json"
# A group looks every so many seconds whether the others have been asked to stop.
LOOK_SECONDS = 0.5
# What has come out is kept after each run, but of short runs at most every so many seconds.
KEEP_SECONDS = 1.0


def status(folder: RunFolder) -> Status:
    """How the run in this folder ended; ``pending`` if it has not, or if its result was cut off."""
    if folder.finished and result.is_whole(folder.result):
        return "finished"
    return "diverged" if (folder.path / DIVERGED).exists() else "pending"


def mark_diverged(folder: RunFolder, reason: str) -> None:
    """Leave a mark that the run diverged: to go on with it would end the same. Without the mark it is run again."""
    temporary = folder.path / f"{DIVERGED}.{os.getpid()}"
    temporary.write_text(json.dumps({"reason": reason}) + "\n", encoding="utf-8")
    os.replace(temporary, folder.path / DIVERGED)


def longest_first(runs: Iterable[Run]) -> tuple[Run, ...]:
    """The runs by the rounds that they have still to do: a long one at the end would keep the other groups waiting."""

    def rounds_left(run: Run) -> int:
        return run.config.run.rounds - (checkpoint.round_of(run.resume_from) if run.resume_from else 0)

    return tuple(sorted(runs, key=rounds_left, reverse=True))


def group_sizes(ranks: int, runs: int, clients: int, groups: int | None = None) -> list[int]:
    """How many ranks each group has: nearly the same number, never more than the clients of a run.

    Parameters
    ----------
    ranks, runs : what there is, and what is to be done. There are never more groups than runs.
    clients : those of the run that has fewest.
    groups : how many groups are wanted; by default as few as leave no rank without a client.

    Raises
    ------
    ConfigError
        If more groups than ranks are wanted.
    """
    if groups is not None and groups > ranks:
        raise ConfigError(f"--groups {groups}: a group needs a rank, and there are {ranks}: start more, with mpirun -n")
    count = min(groups or -(-ranks // clients), runs)
    ends = [ranks * place // count for place in range(count + 1)] if count else [0]
    return [min(end - begin, clients) for begin, end in itertools.pairwise(ends)]


class Queue:
    """The numbers 0, 1, ..., each drawn by one process only, and a stop sign for all who draw.

    Parameters
    ----------
    folder : where the files of a queue are.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._sign = folder / "stop"
        self._next = 0
        self._locks = ExitStack()

    def open(self) -> None:
        """Make the folder anew, whatever a killed job has left. One process calls it, before the others draw.

        Raises
        ------
        ConfigError
            If a job that is still alive has opened the same queue; unnoticed on a file system without locks.
        """
        self._locks.enter_context(locked(self._folder.with_suffix(".lock")))
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir()
        # A network file system hides a new file from others for a while, but not what is written to one they can open.
        self._sign.touch()

    def close(self) -> None:
        """Remove the folder, after the others have done with it. Called by the process that opened the queue."""
        shutil.rmtree(self._folder, ignore_errors=True)
        self._locks.close()

    def draw(self) -> int:
        """The next number that nobody has drawn."""
        while True:
            number, self._next = self._next, self._next + 1
            try:
                os.close(os.open(self._folder / str(number), os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                continue
            return number

    def stop(self) -> None:
        """Put up the stop sign."""
        self._sign.write_text("stop", encoding="ascii")

    def stopped(self) -> bool:
        """Whether the stop sign is up."""
        return bool(self._sign.read_bytes())


class _CommonStop(Stop):
    """A stop by a signal to this process or by the queue's stop sign."""

    def __init__(self, queue: Queue) -> None:
        super().__init__()
        self._queue = queue
        self._looked = time.monotonic()

    def asked(self) -> bool:
        if not self.wished and time.monotonic() - self._looked >= LOOK_SECONDS:
            self.wished = self._queue.stopped()
            self._looked = time.monotonic()
        return self.wished


@dataclass(frozen=True)
class Schedule:
    """Runs as a job for all ranks.

    A run that diverges is marked so and does not end the job; any other error does, after the other groups have written
    checkpoints.

    Attributes
    ----------
    runs : in the order in which they are drawn.
    sizes : ranks of each group (`group_sizes`).
    queue : folder that does not exist, for the time of the job.
    resume : the command that goes on with the job, for messages.
    earlier : how many other runs of the same whole were done before.
    keep : keeps what has come out; called after runs, on the first rank of a group.
    """

    runs: tuple[Run, ...]
    sizes: Sequence[int]
    queue: Path
    resume: str
    earlier: int
    keep: Callable[[], None]

    def execute(self, communicator: Communicator) -> None:
        """Do all of them. Every rank must call it.

        Raises
        ------
        Interrupted
            On every rank, after a signal to any of them and a checkpoint of every run in progress.
        """
        stop = Stop()  # ranks outside the groups must survive signals, too
        queue = Queue(self.queue)
        with together(communicator):
            if communicator.rank == 0:
                queue.open()
        group = communicator.split(self.sizes)
        failure = None if group is None else _Worker(self, group, queue, stop).work()
        communicator.wait()
        failures = [each for each in communicator.gather(failure) if each is not None]
        if communicator.rank == 0:
            queue.close()
        for error in sorted(failures, key=lambda each: isinstance(each, Interrupted)):
            raise everywhere(error)


class _Worker:
    """A rank's part in the work of its group."""

    def __init__(self, schedule: Schedule, group: Communicator, queue: Queue, stop: Stop) -> None:
        self.schedule, self.group, self.queue = schedule, group, queue
        self.leads = group.rank == 0
        self.stop = _CommonStop(queue) if self.leads else stop
        if self.leads and len(schedule.runs) > 1:
            # Of many runs nobody reads what each has to say of its data; warnings matter in every group.
            logging.getLogger("hpcfed").setLevel(logging.WARNING)
        self.begun = self.kept = time.monotonic()

    def work(self) -> Exception | None:
        """Draw runs and do them until none is left; what ended it sooner, the same on all ranks of the group."""
        failure = self._work()
        if self.leads:
            self.schedule.keep()
        return failure

    def _work(self) -> Exception | None:
        runs = self.schedule.runs
        while (number := self.group.broadcast(self._draw() if self.leads else None)) < len(runs):
            if any(self.group.gather(self.stop.asked())):
                return self._interrupted()
            try:
                self._do(runs[number])
            except Interrupted:
                return self._interrupted()
            except Exception as error:
                error.add_note(f"run {runs[number].folder.path.name}")
                if not self._common(error):
                    raise
                if self.leads:
                    self.queue.stop()
                return portable(error)
        return None

    def _draw(self) -> int:
        """The number of the next run that is left to do; another job that shares the folder may have done some."""
        runs = self.schedule.runs
        while (number := self.queue.draw()) < len(runs) and status(runs[number].folder) != "pending":
            continue
        return number

    def _do(self, run: Run) -> None:
        begun = time.monotonic()
        try:
            run.execute(self.group, self.stop)
            news = f"took {clock(time.monotonic() - begun)}"
        except DivergedError as error:
            news = str(error)
            if self.leads or not self._common(error):
                mark_diverged(run.folder, news)
            if not self._common(error):
                raise
        if self.leads:
            self._report(f"{run.folder.path.name}: {news}")
            if time.monotonic() - self.kept >= KEEP_SECONDS:
                self.schedule.keep()
                self.kept = time.monotonic()

    def _common(self, error: Exception) -> bool:
        """Whether all ranks of the group hold the error, so that none waits for this one in vain."""
        return self.group.size == 1 or getattr(error, "everywhere", False)

    def _interrupted(self) -> Interrupted:
        if self.leads:
            self.queue.stop()
        return Interrupted(f"stopped by a signal, checkpoints written: go on with {self.schedule.resume}")

    def _report(self, news: str) -> None:
        runs, earlier = self.schedule.runs, self.schedule.earlier
        done = sum(run.folder.finished or (run.folder.path / DIVERGED).exists() for run in runs)
        seconds = (time.monotonic() - self.begun) / max(done, 1) * (len(runs) - done)
        left = f", about {clock(seconds)} left" if done < len(runs) else ""
        print(f"{earlier + done} of {earlier + len(runs)} runs done{left}  {news}", file=sys.stderr, flush=True)
