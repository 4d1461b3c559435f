"""What a run tells while it goes: ``metrics.jsonl`` and one progress line. Only rank 0 speaks."""

from __future__ import annotations

import json
import logging
import math
import sys
import time
from collections.abc import Mapping
from io import FileIO
from typing import Any, Protocol

from hpcfed.run.run_folder import RunFolder

logger = logging.getLogger(__name__)

# In a log, one line at most every this many seconds.
LOG_SECONDS = 10.0
# What the progress line shows, where a workload has it.
SHOWN = ("objective", "excess_risk", "relative_error", "psnr", "test_accuracy", "relative_change")


class Progress(Protocol):
    """A progress display."""

    def update(self, round: int, record: Mapping[str, Any]) -> None:
        """Show that a round is done; ``record`` holds its metrics if they were taken, otherwise nothing."""

    def close(self) -> None:
        """Leave the display."""


class Silent:
    """For the ranks that do not speak."""

    def update(self, round: int, record: Mapping[str, Any]) -> None:
        return None

    def close(self) -> None:
        return None


class LogLines:
    """Plain lines with an estimate of the time left: the first rounds, then one now and then, and the last."""

    def __init__(self, first: int, rounds: int) -> None:
        self._first, self._rounds = first, rounds
        self._start = self._shown = time.monotonic()

    def update(self, round: int, record: Mapping[str, Any]) -> None:
        now = time.monotonic()
        if round < self._rounds and round > self._first + 1 and now - self._shown < LOG_SECONDS:
            return
        self._shown = now
        done = round - self._first
        each = (now - self._start) / max(done, 1)
        left = f"  {each:.2f} s a round, {clock(each * (self._rounds - round))} left" if done else ""
        print(f"round {round}/{self._rounds}  {summary(record)}{left}", file=sys.stderr, flush=True)

    def close(self) -> None:
        return None


class Bar:
    """A bar on a terminal."""

    def __init__(self, first: int, rounds: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        self._bar = RichProgress(
            TextColumn("round"),
            MofNCompleteColumn(),
            BarColumn(bar_width=24),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[summary]}"),
            console=Console(stderr=True),
        )
        self._task = self._bar.add_task("", total=rounds, completed=first, summary="")
        self._summary = ""
        self._bar.start()

    def update(self, round: int, record: Mapping[str, Any]) -> None:
        self._summary = summary(record) or self._summary
        self._bar.update(self._task, completed=round, summary=self._summary)

    def close(self) -> None:
        self._bar.stop()


def progress(speaks: bool, first: int, rounds: int) -> Progress:
    """A bar on a terminal, lines in a log, nothing on ranks that do not speak."""
    if not speaks:
        return Silent()
    return Bar(first, rounds) if sys.stderr.isatty() else LogLines(first, rounds)


def strict(value: Any) -> Any:
    """The value with None for NaN and infinities, which JSON does not know."""
    if isinstance(value, Mapping):
        return {name: strict(inner) for name, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def summary(record: Mapping[str, Any]) -> str:
    """The metrics of a record that fit on a line."""
    return "  ".join(f"{name} {record[name]:.5g}" for name in SHOWN if record.get(name) is not None)


def clock(seconds: float) -> str:
    """Seconds as ``h:mm:ss``."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


class Recorder:
    """Appends records to ``metrics.jsonl``; on ranks other than 0 it does nothing.

    A full disk costs a warning: what has no room is written with the next record.
    """

    def __init__(self, folder: RunFolder, speaks: bool) -> None:
        self._file = folder.metrics.open("ab", buffering=0) if speaks else None
        self._waiting = b""
        self._warned = False

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one line, on the disk of the moment a killed process would leave behind."""
        if self._file is not None:
            self._waiting += json.dumps(strict(record), allow_nan=False).encode() + b"\n"
            self._write_waiting(self._file)

    def _write_waiting(self, file: FileIO) -> None:
        try:
            while self._waiting:  # a disk that fills up takes a part
                self._waiting = self._waiting[file.write(self._waiting) :]
        except OSError as error:
            if not self._warned:
                logger.warning("%s cannot be written: %s; the run goes on", file.name, error.strerror or error)
            self._warned = True

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._write_waiting(self._file)
            self._file.close()
