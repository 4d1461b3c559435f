"""Command-line options made from dataclass fields, grouped in ``--help`` by the part that they belong to."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal

import click

from hpcfed import config, registry
from hpcfed.errors import ConfigError


class GroupedCommand(click.Command):
    """A command whose ``--help`` lists the options under headings."""

    def __init__(self, *args: Any, headings: Mapping[str, str], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._headings = headings  # option name -> heading

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            row = parameter.get_help_record(ctx)
            if row is not None:
                groups.setdefault(self._headings.get(parameter.name or "", "Other"), []).append(row)
        for heading, rows in groups.items():
            with formatter.section(heading):
                formatter.write_dl(rows)


def workload_command(
    workload: str,
    args: list[str],
    action: Callable[..., Any],
    *,
    params: Any = (),
    named: Mapping[str, str] = MappingProxyType({}),
) -> click.Command:
    """The command that runs a workload: options of the run, the workload and whatever fits it.

    Parameters
    ----------
    workload : its name.
    args : the words that follow on the command line; an algorithm or compressor of the user's own that they name
        adds its options.
    named : the names of the algorithm and the compressor that a configuration file gives.
    action : called with the options that were given, by field name, and those of ``params``.
    """
    workload_class = registry.load("workload", workload)
    defaults, presets = workload_class.defaults, getattr(workload_class, "presets", {})
    chosen = {
        section: _named(args, section) or named.get(section) or defaults[section]
        for section in ("algorithm", "compressor")
    }
    algorithms = _with_own(registry.fitting_algorithms(workload), chosen["algorithm"])
    compressors = _with_own(list(registry.COMPRESSORS), chosen["compressor"])
    options: dict[str, click.Option] = {}
    headings: dict[str, str] = {}

    def add(owner: type, heading: str) -> None:
        for field in dataclasses.fields(owner):
            if field.name not in options:
                options[field.name] = _option(owner, field, defaults, presets)
                headings[field.name] = heading

    for section, names in (("algorithm", algorithms), ("compressor", compressors)):
        options[section] = click.Option(
            [f"--{section}"],
            metavar="NAME",
            help=f"{' | '.join(names)} | module:Class  [default: {defaults[section]}]",
        )
        headings[section] = "What to run"
    add(workload_class, f"Problem: {workload}")
    takers: dict[str, list[str]] = {}  # option name -> the algorithms that have it
    for name in algorithms:
        owner = registry.load("algorithm", name)
        add(owner, "")
        for field in dataclasses.fields(owner):
            takers.setdefault(field.name, []).append(name)
    headings.update({option: f"Algorithm: {', '.join(names)}" for option, names in takers.items()})
    for name in compressors:
        add(registry.load("compressor", name), "Messages")
    add(config.RunOptions, "Run")

    def callback(**values: Any) -> Any:
        return action(**{name: value for name, value in values.items() if value is not None})

    return GroupedCommand(
        workload,
        headings=headings,
        params=[*params, *options.values()],
        callback=callback,
        help=_paragraphs(workload_class),
        short_help=_paragraphs(workload_class).split(".")[0] + ".",
    )


def file_command(args: list[str], action: Callable[[config.RunConfig], Any]) -> click.Command:
    """The command that runs a configuration file, the first of ``args``, with the options of the workload it names.

    Parameters
    ----------
    action : called with the configuration.
    """
    path = Path(args[0])
    file = config.read_toml(path)
    table = file.get("workload")
    name = table.get("name") if isinstance(table, Mapping) else None
    if not isinstance(name, str):
        raise ConfigError(
            f"{path}: a configuration needs [workload] with name = one of {', '.join(registry.WORKLOADS)}"
        )

    def assembled(file_name: str, **given: Any) -> Any:
        return action(config.assemble({"workload": name, **given}, file, str(path)))

    argument = click.Argument(["file_name"], metavar="FILE")
    tables = {section: file.get(section) for section in ("algorithm", "compressor")}
    names = {section: table.get("name") for section, table in tables.items() if isinstance(table, Mapping)}
    named = {section: name for section, name in names.items() if isinstance(name, str)}
    return workload_command(name, args, assembled, params=[argument], named=named)


def _option(
    owner: type, field: Any, defaults: Mapping[str, Any], presets: Mapping[str, Mapping[str, Any]]
) -> click.Option:
    """A field as an option; its value stays text, which `config.coerce` checks as it checks the file's."""
    default = defaults.get(field.name, field.default)
    hint = config.hints(owner)[field.name]
    dashed = field.name.replace("_", "-")
    text = field.metadata.get("help", "")
    special = [f"{_shown(preset[field.name])} with {name}" for name, preset in presets.items() if field.name in preset]
    if default is not None:
        text += f"  [default: {', '.join([*special, 'else ' * bool(special) + _shown(default)])}]"
    elif special:
        text += f"  [{', '.join(special)}]"
    if hint is bool:
        return click.Option([f"--{dashed}/--no-{dashed}", field.name], default=None, help=text)
    metavar = field.metadata.get("metavar") or _metavar(hint)
    return click.Option([f"--{dashed}", field.name], type=str, default=None, metavar=metavar, help=text)


def _metavar(hint: Any) -> str:
    origin = typing.get_origin(hint)
    if origin is Annotated:
        return _metavar(typing.get_args(hint)[0])
    if origin is Literal:
        return "|".join(map(str, typing.get_args(hint)))
    if origin in (typing.Union, types.UnionType):
        return "|".join(_metavar(arg) for arg in typing.get_args(hint) if arg is not types.NoneType)
    if origin is tuple:
        return ",".join(_metavar(arg) for arg in typing.get_args(hint))
    return {int: "INT", float: "FLOAT", str: "TEXT"}.get(hint, "VALUE")


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _named(args: list[str], section: str) -> str | None:
    """The value of ``--section`` among the words of a command line."""
    for place, word in enumerate(args):
        if word == f"--{section}" and place + 1 < len(args):
            return args[place + 1]
        if word.startswith(f"--{section}="):
            return word.partition("=")[2]
    return None


def _with_own(names: list[str], chosen: str) -> list[str]:
    return [*names, chosen] if ":" in chosen else names


def _paragraphs(owner: type) -> str:
    return str(getattr(owner, "explanation", None) or (owner.__doc__ or "").split("\n\n")[0])
