"""The run folder: where everything about a run lies.

::

    config.toml     the complete configuration; hpcfed run DIR/config.toml repeats the run
    tuning.json     what --tune tried, if it was asked for
    metrics.jsonl   one line a recorded round
    checkpoints/    the last checkpoints, two by default
    result.h5       solution, history, provenance; written last: the mark of a finished run
    *.png           pictures
    privacy.json    what a private method has spent and may claim
    journal.jsonl   what must be known after a crash, of methods that keep a journal
    losses.jsonl    ranks that were lost on the way, and what became of their clients
    .lock           which process is at work in the folder, or was when it was killed
"""

from __future__ import annotations

import datetime
import json
import os
import secrets
import shutil
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcfed.errors import ConfigError, DataError
from hpcfed.run import lock


@dataclass(frozen=True)
class RunFolder:
    """The paths of a run folder, and what can be read from it at any time."""

    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.toml"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def journal(self) -> Path:
        return self.path / "journal.jsonl"

    @property
    def losses(self) -> Path:
        return self.path / "losses.jsonl"

    @property
    def result(self) -> Path:
        return self.path / "result.h5"

    @property
    def finished(self) -> bool:
        return self.result.exists()

    def locked(self, patience: float = 0.0) -> AbstractContextManager[None]:
        """A block in which no other process writes in the folder (`hpcfed.run.lock.locked`).

        Raises
        ------
        ConfigError
            If another process is at work there.
        """
        return lock.locked(self.path / ".lock", patience)

    def history(self) -> list[dict[str, Any]]:
        """The recorded rounds. A last line that a killed run left half-written is passed over."""
        try:
            lines = self.metrics.read_text(encoding="utf-8", errors="replace").splitlines()
        except FileNotFoundError:
            return []
        records = []
        for number, line in enumerate(lines, start=1):
            try:
                record = json.loads(line)
                records.append({"round": record["round"], **record})
            except (ValueError, TypeError, KeyError) as error:
                if number == len(lines):
                    break
                raise DataError(f"{self.metrics}, line {number} is no record of a round: remove it") from error
        return records

    def go_back(self, config: str, last_round: int) -> None:
        """Make ready to go on after a round: the configuration as it now is, no later records, no result."""
        self.write_config(config)
        self.keep_history(last_round)
        self.result.unlink(missing_ok=True)

    def keep_history(self, last_round: int) -> None:
        """Drop the records after a round: a run that resumes there writes them again."""
        kept = [record for record in self.history() if record["round"] <= last_round]
        _replace(self.metrics, "".join(json.dumps(record) + "\n" for record in kept))

    def write_config(self, text: str) -> None:
        """Write ``config.toml``, all or nothing."""
        _replace(self.config, text)

    def refuse_read_only(self) -> None:
        """Refuse a folder in which nothing can be written.

        Raises
        ------
        ConfigError
        """
        for path in (self.path, self.checkpoints):
            if path.exists() and not os.access(path, os.W_OK):
                raise ConfigError(
                    f"run folder {path} cannot be written: allow it, or go on with a copy elsewhere (cp -r)"
                )

    def discard(self) -> None:
        """Remove the folder of a run that could not begin; one that holds a checkpoint or a record stays."""
        if not self.history() and not any(self.checkpoints.iterdir()):
            shutil.rmtree(self.path)


def _replace(path: Path, text: str) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def create(requested: str | None, workload: str) -> RunFolder:
    """Make a new run folder, ``runs/WORKLOAD-DATE-ID`` unless another is requested.

    Raises
    ------
    ConfigError
        If it holds something already or cannot be written.
    """
    if requested is None:
        stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        requested = f"runs/{workload.replace(':', '.')}-{stamp}-{secrets.token_hex(2)}"
    path = Path(requested)
    try:
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise FileExistsError
        path.mkdir(parents=True, exist_ok=True)
        (path / "checkpoints").mkdir()  # of two that find nothing here, one succeeds
    except FileExistsError:
        raise ConfigError(
            f"--out {path} exists already: choose another folder, or continue with hpcfed resume {path}"
        ) from None
    except OSError as error:
        raise ConfigError(f"--out {path} cannot be written: {error.strerror}") from error
    return RunFolder(path)


def open_existing(name: str | os.PathLike[str]) -> RunFolder:
    """The run folder at this path.

    Raises
    ------
    ConfigError
        If there is none.
    """
    folder = RunFolder(Path(name))
    if not folder.config.is_file():
        reason = "has no config.toml" if folder.path.is_dir() else "does not exist"
        raise ConfigError(f"run folder {folder.path} {reason}: name a folder that hpcfed made")
    return folder
