"""From a configuration file and flags to one checked `RunConfig`.

The file is TOML with the tables ``[run]``, ``[workload]``, ``[algorithm]`` and ``[compressor]``; the last three have a
``name``. A flag overrides the file; what neither gives comes from the workload's defaults, then from the dataclasses.
Everything is checked before any data is read.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
import tomllib
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge

from hpcfed import __version__, registry
from hpcfed.capabilities import explain_missing
from hpcfed.errors import ConfigError
from hpcfed.lipschitz import check_step
from hpcfed.options import option
from hpcfed.run.checkpoint import KEEP
from hpcfed.run.state_hdf5 import keeps_clients

SECTIONS = ("workload", "algorithm", "compressor")
FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)  # of the configured value, where --tune names an option without values
_DURATION = re.compile(r"(\d+(?:\.\d+)?)([smh])")


@dataclass(frozen=True)
class RunOptions:
    """What every run has, whatever its workload and method."""

    rounds: Annotated[int, Ge(1)] = option(100, "number of rounds")
    seed: Annotated[int, Ge(0)] = option(0, "seed of all random numbers; the same seed gives the same bits")
    out: str | None = option(None, "run folder to make  [default: runs/WORKLOAD-DATE-ID]", metavar="DIR")
    record_every: Annotated[int, Ge(1)] = option(1, "write metrics every this many rounds")
    checkpoint_every: str = option("300s", "rounds (20) or time (600s, 10m, 2h) between checkpoints; 0: only the last")
    keep: Annotated[int, Ge(1)] = option(KEEP, "how many checkpoints to keep, of which older ones make up for damage")
    sum_order: Literal["client", "any"] = option(
        "client", "client: the same bits on any number of ranks; any: one plain Allreduce a sum"
    )
    error_feedback: bool = option(False, "add what --quantize took from a client's message to its next one")
    device: Literal["auto", "cpu", "cuda"] = option("auto", "where clients compute")
    pictures: bool = option(True, "draw pictures at the end; hpcfed plot draws them at any time")
    on_failure: Literal["stop", "takeover", "drop"] = option(
        "stop",
        "what happens when a rank of several is lost, with hpcfed launch or mpirun --with-ft ulfm of Open MPI 5; stop: "
        "the run ends and can be resumed; takeover: the others take its clients over, from the last checkpoint or, if "
        "clients keep nothing, at once, for the same result; drop: they go on without its clients",
    )
    tune: str | None = option(
        None,
        "choose values of the algorithm's options by short runs first, by the lowest objective: all combinations of "
        "step=0.1,0.3,1;local_steps=1,5; step alone: a quarter, half, once, twice, four times the given step",
        metavar="OPTION[=V,V...][;...]",
    )
    tune_rounds: Annotated[int, Ge(1)] | None = option(
        None, "rounds of the short runs of --tune  [default: a tenth of the rounds, at least 10]"
    )

    def __post_init__(self) -> None:
        self.checkpoint_rule()

    def checkpoint_rule(self) -> tuple[int, float]:
        """Rounds and seconds between checkpoints, 0 for the one that does not apply.

        Raises
        ------
        ConfigError
            If ``checkpoint_every`` is neither a whole number nor a duration.
        """
        text = self.checkpoint_every.strip()
        if text.isascii() and text.isdigit():
            return int(text), 0.0
        match = _DURATION.fullmatch(text)
        if match is None:
            raise ConfigError(f"--checkpoint-every {text!r}: give rounds, such as 20, or time, such as 600s, 10m or 2h")
        return 0, float(match[1]) * {"s": 1, "m": 60, "h": 3600}[match[2]]


@dataclass(frozen=True)
class Part:
    """A named workload, algorithm or compressor with its options filled in."""

    name: str
    options: Any


@dataclass(frozen=True)
class RunConfig:
    """A run, complete: everything that its numbers depend on, and where they go."""

    run: RunOptions
    workload: Part
    algorithm: Part
    compressor: Part

    def to_toml(self) -> str:
        """The file that repeats this run (``hpcfed run FILE``), without the run folder: a repetition has its own."""
        import tomli_w

        tables: dict[str, Any] = {"hpcfed": __version__, "run": _plain(self.run)}
        tables["run"].pop("out", None)
        for section in SECTIONS:
            part: Part = getattr(self, section)
            tables[section] = {"name": part.name, **_plain(part.options)}
        return tomli_w.dumps(tables)

    def with_options(self, values: Mapping[str, Any]) -> RunConfig:
        """This run with other values of the algorithm's options."""
        options = dataclasses.replace(self.algorithm.options, **values)
        return dataclasses.replace(self, algorithm=Part(self.algorithm.name, options))

    def without_tuning(self) -> RunConfig:
        """This run with nothing left to tune."""
        return dataclasses.replace(self, run=dataclasses.replace(self.run, tune=None, tune_rounds=None))

    def tune_rounds(self) -> int:
        """Rounds of a short run of ``--tune``."""
        return self.run.tune_rounds or min(self.run.rounds, max(10, self.run.rounds // 10))


def assemble(given: Mapping[str, Any], file: Mapping[str, Any] | None = None, source: str = "") -> RunConfig:
    """The configuration from flags and, if any, a parsed configuration file.

    Parameters
    ----------
    given : flags by field name, without those the user left out. The names of the three parts are under
        ``workload``, ``algorithm`` and ``compressor``.
    file : tables of a configuration file.
    source : the file's name, for messages.

    Raises
    ------
    ConfigError
        With one line that names the option, the value and the remedy.
    """
    tables = _checked_tables(file or {}, source)
    rest = dict(given)
    workload_name = rest.pop("workload", None) or tables["workload"].pop("name", None)
    if workload_name is None:
        raise ConfigError(f"{source}: the table [workload] needs a name: one of {', '.join(registry.WORKLOADS)}")
    tables["workload"].pop("name", None)
    workload_class = registry.load("workload", workload_name)
    defaults, presets = dict(workload_class.defaults), getattr(workload_class, "presets", {})
    names = {"workload": workload_name}
    for section in ("algorithm", "compressor"):
        in_file = tables[section].pop("name", None)
        names[section] = rest.pop(section, None) or in_file or defaults.pop(section)
        if in_file is not None and names[section] != in_file:
            tables[section] = {}  # the file's options belong to the part that the flag replaced
        defaults.pop(section, None)
    classes = {section: registry.load(section, names[section]) for section in SECTIONS}
    _refuse_misfit(names, classes)

    parts: dict[str, Any] = {}
    owners = {"run": RunOptions, **classes}
    for section, owner in owners.items():
        known = {field.name for field in dataclasses.fields(owner)}
        # What the workload presets for its own method or compressor says nothing about another one.
        preset = section in ("run", "workload") or names[section] == workload_class.defaults[section]
        values = {key: value for key, value in defaults.items() if preset and key in known}
        values |= {key: value for key, value in presets.get(names["algorithm"], {}).items() if key in known}
        for key, value in tables[section].items():
            if key not in known:
                raise ConfigError(
                    f"{source}: [{section}] {key} is not an option of {names.get(section, 'a run')}: {_have(known)}"
                )
            values[key] = coerce(owner, key, value, f"{source}: [{section}] {key} = {value!r}")
        for key in known & rest.keys():
            value = rest.pop(key)
            values[key] = coerce(owner, key, value, f"--{key.replace('_', '-')} {value}")
        try:
            parts[section] = owner(**values)
        except ConfigError as error:
            for key in tables[section].keys() - given.keys():
                if str(error).startswith(f"--{key.replace('_', '-')} "):  # no flag has set it, the file has
                    raise ConfigError(f"{source}: [{section}] {key} = {tables[section][key]!r}: {error}") from None
            raise
    for key in rest:
        raise ConfigError(
            f"--{key.replace('_', '-')} is not an option of {names['workload']} with {names['algorithm']} and "
            f"{names['compressor']}: see hpcfed {names['workload']} --help"
        )
    settled = getattr(parts["algorithm"], "settled", None)
    if settled is not None:
        parts["algorithm"] = settled(parts["run"])
    config = RunConfig(parts["run"], *(Part(names[section], parts[section]) for section in SECTIONS))
    _refuse_contradictions(config)
    for values in candidates(config):
        _refuse_contradictions(config.with_options(values))
    return config


def candidates(config: RunConfig) -> list[dict[str, Any]]:
    """What ``--tune`` is to try: values by option of the algorithm, all combinations, in the order that they are given.

    An option without values stands for `FACTORS` times its configured value.

    Raises
    ------
    ConfigError
        If the algorithm has no such option, or not such a value.
    """
    run, owner = config.run, type(config.algorithm.options)
    if run.tune is None:
        if run.tune_rounds is not None:
            raise ConfigError(f"--tune-rounds {run.tune_rounds} has nothing to tune: give --tune step, or leave it out")
        return []
    if (run.tune_rounds or 0) > run.rounds:
        raise ConfigError(f"--tune-rounds {run.tune_rounds} exceeds --rounds {run.rounds}: give fewer")
    known = {field.name for field in dataclasses.fields(owner)}
    grid: dict[str, list[Any]] = {}
    for entry in run.tune.split(";"):
        name, equals, text = entry.partition("=")
        name = name.strip().replace("-", "_")
        if name not in known:
            raise ConfigError(
                f"--tune {run.tune}: {name!r} is not an option of {config.algorithm.name}: {_have(known)}"
            )
        if name in grid:
            raise ConfigError(f"--tune {run.tune}: {name} is there twice: give all its values together")
        if equals:
            shown = f"--tune {run.tune}: {name}"
            grid[name] = [coerce(owner, name, value.strip(), f"{shown} = {value.strip()}") for value in text.split(",")]
        else:
            grid[name] = _multiples(name, getattr(config.algorithm.options, name), run.tune)
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


def _multiples(name: str, value: Any, tune: str) -> list[Any]:
    """`FACTORS` times a number, or a step size such as ``1.9/L``."""
    if type(value) is float:
        return [factor * value for factor in FACTORS]
    try:
        number, relative = check_step(value)
    except (ConfigError, AttributeError):
        example = name.replace("_", "-")
        raise ConfigError(
            f"--tune {tune}: {name} = {value} is not a size to multiply: list its values, --tune {example}=V,V"
        ) from None
    return [f"{factor * number:.12g}{'/L' if relative else ''}" for factor in FACTORS]


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a configuration file.

    Raises
    ------
    ConfigError
        If it is missing, unreadable or not TOML.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"configuration {path} cannot be read: {getattr(error, 'strerror', None) or error}"
        ) from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"configuration {path} is not valid TOML: {error}") from error


def coerce(owner: type, name: str, value: Any, shown: str) -> Any:
    """``value``, from a file or a command line, as the type of the owner's field.

    Raises
    ------
    ConfigError
        If it does not fit; ``shown`` says where it stood.
    """
    from pydantic import ValidationError

    hint = hints(owner)[name]
    if _bare(hint) is str and type(value) in (int, float):
        value = str(value)  # block = 512 or step = 0.1 in a file
    if type(value) is bool and bool not in (hint, _bare(hint)):
        raise ConfigError(f"{shown}: input should not be true or false")
    if isinstance(value, str) and typing.get_origin(_bare(hint)) is tuple:
        value = [piece.strip() for piece in value.split(",")]
    try:
        return _adapter(owner, name).validate_python(value)
    except ValidationError as error:
        details = error.errors()
        reason = "; or ".join(dict.fromkeys(detail["msg"].removeprefix("Value error, ").lower() for detail in details))
        form = next(field.metadata.get("metavar") for field in dataclasses.fields(owner) if field.name == name)
        if typing.get_origin(_bare(hint)) is tuple:
            reason = f"give {form}"
        raise ConfigError(f"{shown}: {reason}") from None


@cache
def hints(owner: type) -> dict[str, Any]:
    """The types of the owner's fields, bounds included."""
    return typing.get_type_hints(owner, include_extras=True)


@cache
def _adapter(owner: type, name: str) -> Any:
    from pydantic import ConfigDict, TypeAdapter

    return TypeAdapter(hints(owner)[name], config=ConfigDict(allow_inf_nan=False))


def _bare(hint: Any) -> Any:
    """The type without bounds and without ``| None``."""
    if typing.get_origin(hint) is Annotated:
        return _bare(typing.get_args(hint)[0])
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        inner = [arg for arg in typing.get_args(hint) if arg is not types.NoneType]
        return _bare(inner[0]) if len(inner) == 1 else hint
    return hint


def _plain(options: Any) -> dict[str, Any]:
    """The options as TOML values; None, which TOML lacks, is left out and is every such field's default."""
    values = {field.name: getattr(options, field.name) for field in dataclasses.fields(options)}
    return {
        key: list(value) if isinstance(value, tuple) else os.fspath(value) if isinstance(value, Path) else value
        for key, value in values.items()
        if value is not None
    }


def _checked_tables(file: Mapping[str, Any], source: str) -> dict[str, dict[str, Any]]:
    known = ("run", *SECTIONS)
    for key, value in file.items():
        if key == "hpcfed":
            continue
        if key not in known or not isinstance(value, Mapping):
            raise ConfigError(f"{source}: {key} is not a table of a run: {_have(known)}")
    return {section: dict(file.get(section, {})) for section in known}


def _refuse_misfit(names: Mapping[str, str], classes: Mapping[str, Any]) -> None:
    misfit = explain_missing(
        names["algorithm"], classes["algorithm"].needs, names["workload"], classes["workload"].offers
    )
    if misfit is not None:
        algorithms = ", ".join(registry.fitting_algorithms(names["workload"])) or "none"
        raise ConfigError(f"{misfit}. Algorithms that fit {names['workload']}: {algorithms}")


def refuse_ranks(config: RunConfig, ranks: int, tolerant: bool = False) -> None:
    """Refuse more ranks than clients: a rank may own several clients, but not none.

    And refuse to promise that the loss of a rank is survived, unless ranks outlive one another (``tolerant``).

    Raises
    ------
    ConfigError
    """
    clients, on_failure = config.workload.options.clients, config.run.on_failure
    if ranks > clients:
        raise ConfigError(f"{ranks} ranks for --clients {clients}: start at most {clients} ranks, or raise --clients")
    if on_failure != "stop" and ranks > 1 and not tolerant:
        raise ConfigError(
            f"--on-failure {on_failure}: these ranks cannot outlive one another: start them with hpcfed launch "
            f"--on-failure {on_failure}, or mpirun --with-ft ulfm, of Open MPI 5 or newer"
        )


def _refuse_contradictions(config: RunConfig) -> None:
    clients = config.workload.options.clients
    participants = getattr(config.algorithm.options, "participants", None)
    if participants is not None and participants > clients:
        raise ConfigError(f"--participants {participants} exceeds --clients {clients}: sample at most all clients")
    method = config.algorithm.options
    stale = keeps_clients(method.state_type) and not getattr(method, "sits_out", False)
    if participants is not None and participants < clients and stale:
        raise ConfigError(
            f"--participants {participants}: the clients of {config.algorithm.name} keep estimates that every round "
            "corrects, and those of a client that sat out would be of another point: leave --participants out"
        )
    if config.run.on_failure == "drop" and keeps_clients(method.state_type) and not hasattr(method, "forget"):
        raise ConfigError(
            f"--on-failure drop: what clients of {config.algorithm.name} keep cannot be taken out of its sums: use "
            "--on-failure takeover"
        )
    levels = config.compressor.options.quantize
    if config.run.error_feedback and not levels:
        raise ConfigError(
            "--error-feedback has nothing to feed back without rounding: give --quantize, or leave it out"
        )
    if config.compressor.options.kind == "integer" and levels * clients >= 2**31:
        raise ConfigError(
            f"--quantize {levels}: sums of {clients} clients exceed 32 bits with {config.compressor.name}: "
            f"give {(2**31 - 1) // clients} or fewer"
        )
    refuse = getattr(config.workload.options, "refuse", None)
    if refuse is not None:
        refuse(config.algorithm.name, config.algorithm.options)


def _have(names: Any) -> str:
    return "there are " + ", ".join(sorted(names))
