"""The only round loop: build, iterate, record, checkpoint, stop in good order, write the result."""

from __future__ import annotations

import importlib
import logging
import math
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hpcfed import checkpoint, devices, recorder, result
from hpcfed.checkpoint import Checkpoint
from hpcfed.communicator import Communicator
from hpcfed.config import RunConfig
from hpcfed.errors import DivergedError, Interrupted
from hpcfed.federation import Federation
from hpcfed.ledger import Ledger
from hpcfed.lipschitz import norm
from hpcfed.run_folder import RunFolder
from hpcfed.streams import Streams

logger = logging.getLogger(__name__)

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


@dataclass(frozen=True)
class Run:
    """A run to start (``resume_from`` is None) or to go on with from a checkpoint."""

    config: RunConfig
    folder: RunFolder
    command: str
    resume_from: Path | None = None

    def execute(self, communicator: Communicator) -> None:
        """Do it. Every rank must call it.

        Raises
        ------
        Interrupted
            On every rank, after SIGTERM or SIGUSR1 on any of them and a checkpoint.
        DivergedError
            If the solution is no longer finite; the last checkpoint is as it was.
        """
        _Execution(self, communicator).go()


@dataclass
class _Execution:
    run: Run
    communicator: Communicator
    ledger: Ledger = field(default_factory=Ledger)
    begun: float = field(default_factory=time.monotonic)
    signalled: bool = False

    def go(self) -> None:
        for number in STOP_SIGNALS:
            signal.signal(number, self._note_signal)
        config = self.run.config
        algorithm, workload = config.algorithm.options, config.workload.options
        fed = self._federation()
        with self.communicator.first_on_node():
            for module in (*workload.compiled, *getattr(fed.compressor, "compiled", ())):
                importlib.import_module(module)
        problem = workload.build(fed)
        fed = problem.fed
        if self.run.resume_from is None:
            start = problem.start()
            state, first = algorithm.init(fed, start), 0
        else:
            saved = checkpoint.load(self.run.resume_from, algorithm.state_type, fed)
            state, first = saved.state, saved.round
            self.ledger.seconds |= saved.seconds
            self.ledger.traffic |= saved.traffic
            self.begun -= saved.seconds.get("total", 0.0)
        self._loop(algorithm, problem, fed, state, first)

    def _federation(self) -> Federation:
        config = self.run.config
        compressor = config.compressor.options
        return Federation(
            num_clients=config.workload.options.clients,
            streams=Streams(config.run.seed),
            communicator=self.communicator,
            compressor=compressor if compressor.quantize else None,
            sum_order=config.run.sum_order,
            device=devices.choose(config.run.device, self.communicator.local_rank, self.communicator.local_size),
            ledger=self.ledger,
        )

    def _note_signal(self, number: int, frame: object) -> None:
        self.signalled = True

    def _loop(self, algorithm: Any, problem: Any, fed: Federation, state: Any, first: int) -> None:
        run, folder = self.run.config.run, self.run.folder
        speaks = self.communicator.rank == 0
        every_rounds, every_seconds = run.checkpoint_rule()
        saved_time = time.monotonic()
        records = recorder.Recorder(folder, speaks)
        progress = recorder.progress(speaks, first, run.rounds)
        latest: dict[str, Any] = {}
        try:
            if first == 0:
                latest = self._record(problem, fed, algorithm.solution(state), 0, 0, math.nan)
                records.write(latest)
            progress.update(first, latest)
            for number in range(first + 1, run.rounds + 1):
                before = algorithm.solution(state)
                state = algorithm.round(state, fed.at(number))
                solution = algorithm.solution(state)
                if number % run.record_every == 0 or number == run.rounds:
                    change = norm(solution - before) / max(norm(solution), 1e-30)
                    latest = self._record(problem, fed, solution, number, _participants(algorithm, fed), change)
                    records.write(latest)
                    self._refuse_divergence(number, "objective", latest["objective"])
                del before
                progress.update(number, latest)
                stop, due = self._agree(
                    self.signalled, bool(every_seconds) and time.monotonic() - saved_time >= every_seconds
                )
                due = due or (bool(every_rounds) and number % every_rounds == 0)
                if stop or due or number == run.rounds:
                    self._refuse_divergence(number, "norm of the solution", norm(solution))
                    self._save(state, fed, number)
                    saved_time = time.monotonic()
                if stop and number < run.rounds:
                    raise Interrupted(
                        f"stopped by a signal after round {number} of {run.rounds}, checkpoint written: "
                        f"go on with hpcfed resume {folder.path}"
                    ).on_all_ranks()
        finally:
            records.close()
            progress.close()
        if speaks:
            result.write(folder, self.run, problem, algorithm, state, self.communicator.size)
            if self.run.config.workload.options.pictures:
                _draw(folder)
        self.communicator.wait()

    def _record(
        self, problem: Any, fed: Federation, solution: Any, number: int, participants: int, change: float
    ) -> dict[str, Any]:
        """The line of a recorded round. Measuring is neither charged to the method nor counted as its messages."""
        with self.ledger.clock("metrics"), self.ledger.uncounted():
            metrics = problem.metrics(solution, fed.beside(number))
        seconds = self._seconds()
        record = {"round": number, **metrics, "participants": participants, **self.ledger.traffic, "seconds": seconds}
        if not math.isnan(change):
            record["relative_change"] = change
        return record

    def _seconds(self) -> dict[str, float]:
        total = time.monotonic() - self.begun
        seconds = dict(self.ledger.seconds)
        seconds.pop("total", None)
        seconds["other"] = total - sum(value for name, value in seconds.items() if name != "other")
        return {"total": total, **seconds}

    def _save(self, state: Any, fed: Federation, number: int) -> None:
        with self.ledger.clock("checkpoint"):
            seconds = self._seconds()
            checkpoint.save(self.run.folder.checkpoints, Checkpoint(number, state, seconds, self.ledger.traffic), fed)

    def _agree(self, stop: bool, due: bool) -> tuple[bool, bool]:
        """A signal may reach any rank and clocks differ: what one rank sees, all do."""
        verdict = self.communicator.maximum(np.array([stop, due], np.int32))
        return bool(verdict[0]), bool(verdict[1])

    def _refuse_divergence(self, number: int, name: str, value: float) -> None:
        if math.isfinite(value):
            return
        algorithm = self.run.config.algorithm
        step = getattr(algorithm.options, "step", None)
        remedy = "choose a smaller step" if step is None else f"choose --step below {step}"
        raise DivergedError(f"{algorithm.name} diverged: {name} {value} at round {number}: {remedy}").on_all_ranks()


def _draw(folder: RunFolder) -> None:
    """The pictures of a finished run. That they fail does not undo the run."""
    from hpcfed import plots

    try:
        plots.draw([folder])
    except Exception as error:
        logger.warning(
            "pictures of %s could not be drawn: %s; hpcfed plot %s tries again", folder.path, error, folder.path
        )


def _participants(algorithm: Any, fed: Federation) -> int:
    return getattr(algorithm, "participants", None) or fed.num_clients
