"""The only round loop: build, iterate, record, checkpoint, stop in good order, write the result."""

from __future__ import annotations

import contextlib
import importlib
import logging
import math
import resource
import signal
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from hpcfed import devices
from hpcfed.config import Part, RunConfig
from hpcfed.errors import ConfigError, DivergedError, HpcfedError, Interrupted, RankLostError
from hpcfed.exchange.feedback import ErrorFeedback
from hpcfed.federation import Federation
from hpcfed.ledger import Ledger
from hpcfed.lipschitz import norm
from hpcfed.protocols import Report
from hpcfed.ranks.communicator import Communicator, together
from hpcfed.run import checkpoint, lock, recorder, recovery, result, state_hdf5, tuning
from hpcfed.run.checkpoint import Checkpoint
from hpcfed.run.journal import Journal
from hpcfed.run.recovery import Endurance
from hpcfed.run.run_folder import RunFolder
from hpcfed.streams import Streams

logger = logging.getLogger(__name__)

# The first asks for a checkpoint and an end in good order; a second Ctrl-C ends at once.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class Stop:
    """The wish, by a signal to this process, that it end in good order. The last one made gets the signals."""

    def __init__(self) -> None:
        self.wished = False
        for number in STOP_SIGNALS:
            signal.signal(number, self._note_signal)

    def asked(self) -> bool:
        """Whether it shall end. Asked once a round, on every rank."""
        return self.wished

    def _note_signal(self, number: int, frame: object) -> None:
        if self.wished and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.wished = True


@dataclass(frozen=True)
class Run:
    """A run to start (``resume_from`` is None) or to go on with from a checkpoint.

    ``progress`` and ``pictures``: whether it shows how it goes, and draws what came out.
    """

    config: RunConfig
    folder: RunFolder
    command: str
    resume_from: Path | None = None
    progress: bool = True
    pictures: bool = True

    def execute(self, communicator: Communicator, stop: Stop | None = None) -> None:
        """Do it. Every rank must call it; ``stop`` is asked after every round whether to end, signals by default.

        Raises
        ------
        ConfigError
            On every rank, if another process is at work in the run folder.
        Interrupted
            On every rank, after SIGTERM or SIGUSR1 on any of them and a checkpoint.
        DivergedError
            If the solution is no longer finite; the last checkpoint is as it was.
        RankLostError
            On the ranks that are left where one is lost, if the run is to stop then.
        """
        absent = () if self.resume_from is None else checkpoint.absent(self.resume_from)
        left = self.config.workload.options.clients - len(absent)
        if communicator.size > left:
            raise ConfigError(
                f"{communicator.size} ranks for the {left} clients that have not left: start at most {left} ranks"
            ).on_all_ranks()
        endurance = Endurance(communicator, self.config.run.on_failure, left + len(absent), absent)
        with contextlib.ExitStack() as locks:
            execution = _Execution(self, communicator, stop or Stop(), endurance, locks)
            if endurance.active:
                communicator.guard()
                while not recovery.completed(execution.go, communicator):
                    execution = execution.renewed()
                return
            try:
                execution.go()
            except Exception as error:
                if isinstance(recovery.understood(error, communicator), RankLostError):
                    raise RankLostError(f"go on with hpcfed resume {self.folder.path}") from None
                raise


@dataclass
class _Execution:
    run: Run
    communicator: Communicator
    stop: Stop
    endurance: Endurance
    locks: contextlib.ExitStack
    ledger: Ledger = field(default_factory=Ledger)
    begun: float = field(default_factory=time.monotonic)

    def renewed(self) -> _Execution:
        """The next attempt, by the ranks that are left."""
        return replace(self, endurance=self.endurance.renewed(), ledger=Ledger(self.ledger.seconds))

    def go(self) -> None:
        with together(self.communicator):
            if self.communicator.rank == 0:  # who writes; one that did so before is lost, its lock is free in a moment
                patience = lock.PATIENCE if self.endurance.losses else 0.0
                self.locks.enter_context(self.run.folder.locked(patience))
        # Numbers that stop being finite are noticed and named once; NumPy need not warn of them on every rank.
        with np.errstate(all="ignore"):
            self._loop()

    def _build(self) -> Any:
        """The problem."""
        config = self.run.config
        workload = config.workload.options
        fed = self._federation()
        with self.communicator.first_on_node():
            for module in (*workload.compiled, *getattr(fed.compressor, "compiled", ())):
                importlib.import_module(module)
        problem = workload.build(fed)
        # What the workload found in its data is part of the configuration from now on: a resumed run need not search.
        found = Part(config.workload.name, getattr(problem, "workload", workload))
        self.run = replace(self.run, config=replace(config, workload=found))
        return problem

    def _tune(self, problem: Any) -> None:
        """Let ``--tune`` choose; what it finds is part of the configuration, too."""
        if self.run.config.run.tune is not None:
            with self.ledger.clock("tuning"), self.ledger.uncounted():
                tuned = tuning.search(self.run.config, problem, self.run.folder, _method, self._leave_if_asked)
            self.run = replace(self.run, config=tuned)

    def _leave_if_asked(self) -> None:
        if any(self.communicator.maximum(np.array([self.stop.asked()], np.int32))):
            raise Interrupted("stopped by a signal while tuning: nothing is lost, start the run again").on_all_ranks()

    def _first_state(self, problem: Any, algorithm: Any) -> tuple[Any, int]:
        """The state after the rounds that are done."""
        lost = bool(self.endurance.losses)
        begin: Checkpoint | Path | None = self.run.resume_from
        if lost:
            begin = self.endurance.regroup(problem.fed, algorithm.state_type, self.run.folder)
        if begin is None:
            return algorithm.init(problem.fed.at(0), problem.start()), 0
        saved = begin
        if isinstance(saved, Path):
            saved = checkpoint.load(saved, algorithm.state_type, problem.fed)
        if not lost:  # otherwise the clocks have gone on
            self.ledger.seconds |= saved.seconds
            self.begun -= saved.seconds.get("total", 0.0)
        if self.communicator.rank == 0:  # the totals of all ranks, carried on by one
            self.ledger.carry_on(saved.totals)
        state = saved.state
        if lost and self.endurance.drops and hasattr(algorithm, "forget"):
            with self.ledger.uncounted():
                state = algorithm.forget(state, problem.fed.at(saved.round))
        return state, saved.round

    def _federation(self) -> Federation:
        config = self.run.config
        compressor = config.compressor.options
        return self.endurance.federation(
            streams=Streams(config.run.seed),
            compressor=compressor if compressor.quantize else None,
            sum_order=config.run.sum_order,
            device=self._device(config.run.device),
            ledger=self.ledger,
            journal=Journal(self.run.folder.journal),
        )

    def _device(self, requested: str) -> devices.Device:
        """This rank's device, its memory shared with the ranks that have the same one."""
        with together(self.communicator):
            device = devices.choose(requested, self.communicator.local_rank)
            direct = device.is_gpu and self.communicator.cuda_aware().yes
        # Every rank takes part, whether or not it has a GPU: a node may lack one.
        identities, directs = zip(*self.communicator.gather((device.identity, direct)), strict=True)
        device = device.shared_by(identities.count(device.identity))
        return replace(device, direct=all(directs))

    def _loop(self) -> None:
        with self.ledger.clock("setup"):
            problem = self._build()
        self._tune(problem)
        algorithm = _method(self.run.config)
        # The state lives in this frame alone: whoever else held the first one would keep its memory to the end.
        with self.ledger.clock("setup"):
            state, first = self._first_state(problem, algorithm)
        # Who has lost one rank may lose another, and who goes on must not find again those that have left.
        endurance = self.endurance
        insecure = bool(endurance.losses) and (endurance.drops or endurance.standing is not None)
        endurance.losses = ()
        fed, run, folder = problem.fed, self.run.config.run, self.run.folder
        speaks = self.communicator.rank == 0
        if speaks:
            folder.go_back(self.run.config.to_toml(), first or -1)
        tol, hopeless = getattr(algorithm, "tol", None), getattr(problem, "hopeless", math.inf)
        number, residual = first, math.nan
        if tol is not None and first > 0:
            residual = algorithm.residual(state)
        rounds = () if residual <= (tol or 0.0) else range(first + 1, run.rounds + 1)
        every_rounds, every_seconds = run.checkpoint_rule()
        saved_time = time.monotonic()
        writer = checkpoint.Writer(folder.checkpoints, fed, run.keep)
        records = recorder.Recorder(folder, speaks)
        progress = recorder.progress(speaks and self.run.progress, first, run.rounds)
        try:
            record: dict[str, Any] = {}
            if first == 0:
                record = self._record(problem, fed, algorithm.solution(state), 0, 0, math.nan)
                records.write(record)
            progress.update(first, record)
            if insecure:
                self._save(writer, state, first)
            totals, (keeps,) = self.ledger.consult(self.communicator, state_hdf5.keeps(state))
            endurance.reach(first, state, keeps, totals)
            for number in rounds:
                endurance.round = number
                before = algorithm.solution(state)
                self.ledger.participants = None
                state = algorithm.round(state, fed.at(number))
                self._refuse_idle_compressor(number)
                solution = algorithm.solution(state)
                residual = math.nan if tol is None else algorithm.residual(state)
                last = number == run.rounds or residual <= (tol or 0.0)
                record = {}
                if number % run.record_every == 0 or last:
                    change = norm(solution - before) / max(norm(solution), 1e-30)
                    participants = self.ledger.participants or fed.num_present
                    record = self._record(problem, fed, solution, number, participants, change)
                    if tol is not None:
                        record["residual"] = residual
                    records.write(record)
                    self._refuse_divergence(number, "objective", record["objective"], hopeless)
                del before
                progress.update(number, record)
                # A signal may reach any rank and clocks differ: what one rank sees, all do.
                totals, (stop, due, keeps) = self.ledger.consult(
                    self.communicator,
                    self.stop.asked(),
                    bool(every_seconds) and time.monotonic() - saved_time >= every_seconds,
                    state_hdf5.keeps(state),
                )
                endurance.reach(number, state, keeps, totals)  # the round's record is written
                due = due or (bool(every_rounds) and number % every_rounds == 0)
                if stop or due or last:
                    self._refuse_divergence(number, "norm of the solution", norm(solution))
                    self._refuse_difference(number, solution)
                    self._save(writer, state, number)
                    saved_time = time.monotonic()
                with self.ledger.clock("checkpoint"):
                    if stop or last:
                        writer.finish()
                    else:
                        writer.settle()
                if last:
                    break
                if stop and not writer.last_round:  # started again, it would stop here again
                    raise HpcfedError(
                        f"stopped by a signal after round {number} of {run.rounds}, and no checkpoint could be "
                        f"written: make room, then go on with hpcfed resume {folder.path}"
                    ).on_all_ranks()
                if stop:
                    kept = "checkpoint written"
                    if writer.last_round != number:
                        kept = f"the last checkpoint is of round {writer.last_round or first}"
                    raise Interrupted(
                        f"stopped by a signal after round {number} of {run.rounds}, {kept}: "
                        f"go on with hpcfed resume {folder.path}"
                    ).on_all_ranks()
        except Exception as error:
            if getattr(error, "everywhere", False):  # all ranks are here, and what they were writing is sound
                writer.finish()
            elif endurance.active:
                writer.abandon()
            raise
        finally:
            records.close()
            progress.close()
        report = algorithm.report(state, fed.at(run.rounds)) if hasattr(algorithm, "report") else Report()
        memory = max(self.communicator.gather(1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss))
        if speaks:
            ended = "all rounds" if tol is None else f"all rounds, residual {residual:.3g} above --tol {tol:g}"
            if residual <= (tol or 0.0):
                ended = f"round {number}: residual {residual:.3g} is at most --tol {tol:g}"
            facts = {
                "command": self.run.command,
                "losses": [entry["text"] for entry in Journal(folder.losses).entries],
                "ranks": self.communicator.size,
                "peak_memory_bytes": memory,
                "ended": ended,
            }
            try:
                result.write(folder, self.run.config, problem, algorithm, state, report, **facts)
            except OSError as error:
                raise HpcfedError(
                    f"result {folder.result} cannot be written: {error.strerror or error}: "
                    f"hpcfed resume {folder.path} writes it once it can be"
                ) from error
            if report.text:
                logger.info("%s", report.text)
            wanted = self.run.pictures and self.run.config.run.pictures
            if wanted and self.run.config.workload.options.pictures:
                _draw(folder)
        self.communicator.wait()

    def _record(
        self, problem: Any, fed: Federation, solution: Any, number: int, participants: int, change: float
    ) -> dict[str, Any]:
        """The line of a recorded round. Measuring is neither charged to the method nor counted as its messages."""
        with self.ledger.clock("metrics"), self.ledger.uncounted():
            metrics = problem.metrics(solution, fed.beside(number))
        seconds = self._seconds()
        totals = self.ledger.totals(self.communicator)
        record = {"round": number, **metrics, "participants": participants, **totals, "seconds": seconds}
        if fed.absent:
            record["clients"] = fed.num_present
        if not math.isnan(change):
            record["relative_change"] = change
        return record

    def _seconds(self) -> dict[str, float]:
        total = time.monotonic() - self.begun
        seconds = dict(self.ledger.seconds)
        seconds.pop("total", None)
        seconds["other"] = total - sum(value for name, value in seconds.items() if name != "other")
        return {"total": total, **seconds}

    def _save(self, writer: checkpoint.Writer, state: Any, number: int) -> None:
        with self.ledger.clock("checkpoint"):
            writer.begin(Checkpoint(number, state, self._seconds(), self.ledger.totals(self.communicator)))

    def _refuse_idle_compressor(self, number: int) -> None:
        """Nobody shall believe that messages were rounded which the method sends as they are."""
        config = self.run.config
        if config.compressor.options.quantize and not self.ledger.offered:
            raise ConfigError(
                f"--quantize {config.compressor.options.quantize}: no message that {config.algorithm.name} has sent by "
                f"round {number} may be rounded: leave it out"
            ).on_all_ranks()

    def _refuse_divergence(self, number: int, name: str, value: float, hopeless: float = math.inf) -> None:
        if math.isfinite(value) and value <= hopeless:
            return
        algorithm = self.run.config.algorithm
        step = getattr(algorithm.options, "step", None)
        remedy = "choose a smaller step" if step is None else f"choose a smaller --step than {step}"
        raise DivergedError(f"{algorithm.name} diverged: {name} {value} at round {number}: {remedy}").on_all_ranks()

    def _refuse_difference(self, number: int, solution: Any) -> None:
        """Replicated values must be the same bits on every rank; a rank that errs is noticed before it is saved."""
        digests = self.communicator.gather(result.digest(solution) if self.communicator.size > 1 else "")
        if len(set(digests)) > 1:
            wrong = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
            raise HpcfedError(
                f"ranks 0 and {wrong} hold different solutions after round {number}: a fault of a node, or a method "
                "that computes a replicated value from what is not; resume from the last checkpoint"
            ).on_all_ranks()


def _method(config: RunConfig) -> Any:
    """The algorithm of a run."""
    method = config.algorithm.options
    return ErrorFeedback(method) if config.run.error_feedback else method


def _draw(folder: RunFolder) -> None:
    """The pictures of a finished run. That they fail does not undo the run."""
    from hpcfed import plots

    try:
        plots.draw([folder])
    except Exception as error:
        logger.warning(
            "pictures of %s could not be drawn: %s; hpcfed plot %s tries again", folder.path, error, folder.path
        )
