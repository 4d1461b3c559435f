"""A study: the runs that one file describes, each in a folder of its own within the study's folder.

A study that is started again in its folder goes on: runs that have finished or diverged are left as they are,
half-finished ones resume from their checkpoints.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from hpcfed import config
from hpcfed.errors import ConfigError
from hpcfed.run import checkpoint, result
from hpcfed.run.run_folder import RunFolder
from hpcfed.run.runner import Run
from hpcfed.studies import schedule
from hpcfed.studies.schedule import Schedule


@dataclass(frozen=True)
class Member:
    """A run of a study.

    Attributes
    ----------
    name : of its folder.
    values : what sets it apart from the others: a column of the study's table each.
    options : options that it does not have from the base, by the names of the flags, ``seed`` among them.
    source : where they stand, for messages.
    """

    name: str
    values: Mapping[str, Any]
    options: Mapping[str, Any]
    source: str


@dataclass(frozen=True)
class Study(ABC):
    """The runs of a file, in a folder.

    Attributes
    ----------
    kind : what it is called.
    file : name of the copy of the file in the folder.
    folder : where the runs are.
    text : what the file says.
    base : the tables of a configuration that all runs start from.
    members : the runs, in the order of tables.
    """

    kind: ClassVar[str]
    file: ClassVar[str]

    folder: Path
    text: str
    base: Mapping[str, Any]
    members: tuple[Member, ...]
    _ended: dict[str, dict[str, Any]] = field(default_factory=dict, compare=False, repr=False)

    @abstractmethod
    def table(self) -> str:
        """What has come out so far, for a reader."""

    @abstractmethod
    def draw(self, path: Path | None = None, metric: str | None = None) -> Path:
        """Draw what has come out so far, by default into the folder, and return where."""

    @abstractmethod
    def keep(self) -> None:
        """Keep what has come out so far in the folder. Called after runs, by any of several processes."""

    def run_folder(self, member: Member) -> RunFolder:
        """The folder of a run, whether or not it has begun."""
        return RunFolder(self.folder / member.name)

    def configure(self, member: Member) -> config.RunConfig:
        """The configuration of a run.

        Raises
        ------
        ConfigError
            If it is not sound.
        """
        try:
            configured = config.assemble(member.options, self.base, member.source)
            if configured.run.on_failure != "stop":
                raise ConfigError(f"--on-failure {configured.run.on_failure} is for single runs: leave it out")
        except ConfigError as error:
            shown = str(error)
            raise ConfigError(shown if shown.startswith(member.source) else f"{member.source}: {shown}") from None
        return configured

    def prepare(
        self,
        command: str,
        ranks: int,
        groups: int | None = None,
        part: tuple[int, int] = (1, 1),
    ) -> Schedule:
        """The job that is left to do. Makes the folder with those of the runs.

        Parameters
        ----------
        command : what the user typed, for the results.
        ranks : how many there are.
        groups : how many groups of ranks work side by side (`hpcfed.studies.schedule.group_sizes`).
        part : ``(k, n)`` for every n-th run, beginning with the k-th, where n jobs share the study.

        Raises
        ------
        ConfigError
            If the folder belongs to another study, or a run is not sound; nothing has been made then.
        """
        configurations = {member.name: self.configure(member) for member in self.members}
        own = self.members[part[0] - 1 :: part[1]]
        clients = min(each.workload.options.clients for each in configurations.values())
        schedule.group_sizes(ranks, len(own), clients, groups)
        self._claim()
        left = [member for member in own if schedule.status(self.run_folder(member)) == "pending"]
        sizes = schedule.group_sizes(ranks, len(left), clients, groups)
        runs = (self._run(member, configurations[member.name], command, len(sizes)) for member in left)
        return Schedule(
            runs=schedule.longest_first(runs),
            sizes=sizes,
            queue=self.folder / f".queue-{part[0]}of{part[1]}",
            resume=f"hpcfed resume {self.folder}" if part == (1, 1) else "the same command",
            earlier=len(own) - len(left),
            keep=self.keep,
        )

    def rows(self) -> list[dict[str, Any]]:
        """What has come out so far: a row for each run.

        Keys: ``run``, ``status`` (finished, diverged or pending), the values that set it apart, ``seed``; of a run that
        has ended also the metrics of its last record with its ``round``, ``seconds``, and ``digest`` if it finished.
        """
        return [self._row(member) for member in self.members]

    def _row(self, member: Member) -> dict[str, Any]:
        if member.name in self._ended:
            return self._ended[member.name]
        folder = self.run_folder(member)
        state = schedule.status(folder)
        row = {"run": member.name, "status": state, **member.values, "seed": member.options["seed"]}
        if state != "pending":
            last = dict(history[-1]) if (history := folder.history()) else {}
            seconds = last.pop("seconds", {}).get("total")
            digest = result.read_attributes(folder.result)["digest"] if state == "finished" else None
            row |= {name: value for name, value in last.items() if name not in row}
            row |= {"seconds": seconds, "digest": digest}
            self._ended[member.name] = row
        return row

    def _claim(self) -> None:
        """Make the folder with a copy of the file in it, all or nothing, or see that it holds this study.

        Several jobs may do so at the same time.
        """
        kept = self.folder / self.file
        if not kept.is_file():
            whole = self.folder.parent / f".{self.folder.name}-{secrets.token_hex(4)}"
            try:
                whole.mkdir(parents=True)
                (whole / self.file).write_text(self.text, encoding="utf-8")
                os.rename(whole, self.folder)  # onto nothing, or an empty folder
            except OSError as error:
                if not kept.is_file():  # otherwise another job was faster
                    full = self.folder.is_dir() and any(self.folder.iterdir())
                    reason = "is not empty" if full else f"cannot be made: {error.strerror}"
                    raise ConfigError(f"--out {self.folder} {reason}: choose another folder") from error
            finally:
                shutil.rmtree(whole, ignore_errors=True)
        if kept.read_text(encoding="utf-8") != self.text:
            raise ConfigError(f"--out {self.folder} holds another {self.kind}: choose another folder")

    def _run(self, member: Member, configuration: config.RunConfig, command: str, groups: int) -> Run:
        """The run as it goes on, with a folder. One group alone shows how it goes."""
        folder = self.run_folder(member)
        newest = checkpoint.latest(folder.checkpoints)
        if newest is not None:  # what the workload had found in its data is in the folder's configuration
            configuration = config.assemble({}, config.read_toml(folder.config), str(folder.config))
        elif not folder.config.exists():
            folder.checkpoints.mkdir(parents=True, exist_ok=True)
            folder.write_config(configuration.to_toml())
        return Run(configuration, folder, command, newest, progress=groups == 1, pictures=False)


def folder_name(text: str) -> str:
    """The text as it can stand in the name of a folder."""
    return re.sub(r"[^A-Za-z0-9.=_-]+", "-", text)


def read_seeds(table: Mapping[str, Any], source: str) -> list[int]:
    """The list ``seeds`` of a study's file, ``[0]`` if there is none.

    Raises
    ------
    ConfigError
    """
    seeds = table.get("seeds", [0])
    if not isinstance(seeds, list) or not seeds or not all(type(seed) is int and seed >= 0 for seed in seeds):
        raise ConfigError(f"{source}: seeds = {seeds}: give a list of whole numbers, at least 0")
    return list(dict.fromkeys(seeds))


def read_tables(path: Path, known: tuple[str, ...], kind: str) -> tuple[str, dict[str, Any]]:
    """The text of a study's file, and its tables.

    Raises
    ------
    ConfigError
        If it cannot be read or has others than the known ones.
    """
    file = config.read_toml(path)
    for key in file:
        if key not in known:
            raise ConfigError(f"{path}: {key} is no part of a {kind}: there are {', '.join(known)}")
    if not isinstance(file.get("base", {}), Mapping):
        raise ConfigError(f"{path}: base is not a table: write [base.workload], [base.algorithm] and so on")
    return path.read_text(encoding="utf-8"), file
