"""The command ``hpcfed plan``."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import click

from hpcfed import config, registry
from hpcfed.cli import flags
from hpcfed.errors import ConfigError


class Planner(click.Group):
    """One command for each workload, with the workload's own options beside those of the plan."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(registry.WORKLOADS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return _command(cmd_name, []) if cmd_name in registry.WORKLOADS else None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name, rest = args[0], args[1:]
        if name in registry.WORKLOADS or ":" in name:
            return name, _command(name, rest), rest
        return super().resolve_command(ctx, args)


@click.group(cls=Planner, short_help="Say what a run will cost, without doing it.")
def plan() -> None:
    """Predict memory, bytes and seconds a round of a run that is not started.

    hpcfed plan ct --clients 10000 --nodes 625. A part of the run is done here: a rank's own clients, or two of them,
    for a few rounds. The network's part is computed from the profile of the machine (hpcfed doctor --measure).
    """


def _command(name: str, args: list[str]) -> click.Command:
    own = [
        click.Option(["--nodes"], type=click.IntRange(min=1), default=1, help="Nodes  [default: 1]."),
        click.Option(
            ["--ranks"],
            type=click.IntRange(min=1),
            help="Ranks in all  [default: one a core, but no more than clients].",
        ),
        click.Option(
            ["--profile"], metavar="FILE", help="The machine, by hpcfed doctor --measure  [default: the last]."
        ),
        click.Option(["--json", "as_json"], is_flag=True, help="One JSON object."),
    ]
    return flags.workload_command(name, args, lambda **given: _plan(name, **given), params=own)


def _plan(
    workload: str, nodes: int, as_json: bool, ranks: int | None = None, profile: str | None = None, **given: Any
) -> None:
    from hpcfed.planning import measure
    from hpcfed.planning import plan as planning
    from hpcfed.planning import profile as profiles
    from hpcfed.ranks.communicator import SerialCommunicator

    run = config.assemble({"workload": workload, **given})
    if click.get_current_context().obj.communicator.size > 1:
        raise ConfigError("hpcfed plan needs no ranks: leave out mpirun or srun before it")
    path = Path(profile) if profile is not None else profiles.default_path()
    known = profile is not None or os.path.exists(path)
    machine = profiles.read(path) if known else measure.measure(SerialCommunicator())
    logging.getLogger("hpcfed").setLevel(logging.WARNING)  # what the workload finds in its data is not the plan
    made = planning.make(run, nodes, ranks, machine)
    click.echo(json.dumps(planning.facts(made)) if as_json else planning.table(made))
