"""The commands that start others: ``hpcfed launch`` here and now, ``hpcfed submit`` as a job of SLURM."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from hpcfed.environment import launched_ranks, usable_cores
from hpcfed.errors import ConfigError

# The words of the command that is started follow; what is not ours is its own.
_PASSES_ON = {"ignore_unknown_options": True}


@click.command(
    short_help="Start ranks with what this machine has, such as: hpcfed launch -n 17 ct.", context_settings=_PASSES_ON
)
@click.option(
    "-n", "--ranks", type=click.IntRange(min=1), help="Number of ranks  [default: the allocation's, or the cores]."
)
@click.option(
    "--on-failure",
    type=click.Choice(["stop", "takeover", "drop"]),
    help="What happens when a rank is lost, for the COMMAND; all but stop need mpirun of Open MPI 5, also within an "
    "allocation  [default: as the COMMAND is configured].",
)
@click.option("--dry-run", is_flag=True, help="Print the line and stop.")
@click.argument("words", metavar="COMMAND [OPTIONS]...", nargs=-1, required=True, type=click.UNPROCESSED)
def launch(ranks: int | None, on_failure: str | None, dry_run: bool, words: Sequence[str]) -> None:
    """Start an hpcfed COMMAND on several ranks: by srun within an allocation of SLURM, else by the mpirun or mpiexec of
    Open MPI, MPICH or Intel.

    What this machine needs is added: more ranks than cores, no binding, the superuser. The line is printed. SIGTERM,
    SIGUSR1 and the first Ctrl-C make the ranks write a checkpoint and leave with status 75; the status is that of the
    run, 1 if its ranks were killed.
    """
    from hpcfed.cluster import launcher

    _refuse_ranks("launch")
    ranks = ranks or launcher.default_ranks()
    hpcfed = [sys.executable, "-m", "hpcfed", *words]
    if on_failure is not None:
        hpcfed += ["--on-failure", on_failure]
    tolerant = (on_failure or _on_failure(words)) != "stop"
    start = launcher.find(tolerant=tolerant).line(ranks, hpcfed, cores=usable_cores(), root=os.geteuid() == 0)
    shown = [f"{name}={value}" for name, value in start.environment.items()] + start.command
    click.echo(shlex.join(shown), err=True)
    if not dry_run:
        sys.exit(launcher.run(start))


@click.command(short_help="Submit a command to SLURM, resumed until it is done.", context_settings=_PASSES_ON)
@click.option(
    "--tasks", type=click.IntRange(min=1), help="Ranks  [default: one for each client; 1 for a plot or the like]."
)
@click.option("--nodes", type=click.IntRange(min=1), help="Nodes to spread them on  [default: SLURM's choice].")
@click.option("--time", default="1:00:00", show_default=True, metavar="H:MM:SS", help="Time limit of one go.")
@click.option(
    "--notice",
    type=click.IntRange(min=5),
    default=120,
    show_default=True,
    help="Seconds before the limit at which the ranks are told: to end a round and write a checkpoint.",
)
@click.option("--cpus-per-task", type=click.IntRange(min=1), default=1, show_default=True, help="Cores for a rank.")
@click.option("--mem-per-cpu", metavar="SIZE", help="Memory for a core, such as 2G  [default: SLURM's].")
@click.option("--gpus-per-task", type=click.IntRange(min=1), help="GPUs for a rank  [default: none].")
@click.option("--queue", metavar="NAME", help="SLURM's partition  [default: SLURM's].")
@click.option("--account", metavar="NAME", help="Whom to charge.")
@click.option("--job-name", metavar="NAME", help="Name of job, log and folder  [default: the command's].")
@click.option("--array", type=click.IntRange(min=2), help="Share the runs of a sweep among so many jobs.")
@click.option("--after", metavar="JOB", help="Wait until this job has succeeded, such as to plot what it made.")
@click.option("--out", metavar="DIR", help="Folder of the run  [default: runs/NAME-JOB].")
@click.option("--dry-run", is_flag=True, help="Print the script and stop.")
@click.argument("words", metavar="COMMAND [OPTIONS]...", nargs=-1, required=True, type=click.UNPROCESSED)
def submit(words: Sequence[str], dry_run: bool, **given: Any) -> None:
    """Write a script for SLURM that runs an hpcfed COMMAND, and submit it.

    hpcfed submit ct --clients 17 --nodes 2 --time 4:00:00. Two minutes before the time limit the ranks write a
    checkpoint, and the job is put back into the queue, as often as it takes. hpcfed submit plot DIR --after JOB waits
    for another job's success. Options of the command are checked now, not when the job begins.
    """
    from hpcfed.cluster import batch

    _refuse_ranks("submit")
    clients = _clients(words)
    job = batch.BatchJob(
        words=list(words),
        tasks=given.pop("tasks") or (1 if given["array"] else clients),
        name=given.pop("job_name"),
        **given,
    )
    script = job.script(shlex.join(["hpcfed", *(word for word in sys.argv[1:] if word != "--dry-run")]))
    if dry_run:
        click.echo(script, nl=False)
        return
    # The job's shell finds the hpcfed that submitted it.
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    number = batch.submit(script)
    log = f"hpcfed-{job.short_name}-{number}{'-*' if job.array else ''}.log"
    click.echo(f"job {number}: squeue -j {number} shows it, {log} what it says")


def _on_failure(words: Sequence[str]) -> str:
    """What the file of a command that has one says of lost ranks."""
    from hpcfed import config

    if len(words) < 2 or words[0] not in ("run", "resume"):
        return "stop"
    path = Path(words[1]) / "config.toml" if words[0] == "resume" else Path(words[1])
    table = config.read_toml(path).get("run", {}) if path.is_file() else {}
    return str(table.get("on_failure", "stop")) if isinstance(table, Mapping) else "stop"


def _refuse_ranks(command: str) -> None:
    if launched_ranks(os.environ) is not None:
        raise ConfigError(f"hpcfed {command} starts ranks itself: leave out mpirun or srun before it").on_all_ranks()


def _clients(words: Sequence[str]) -> int:
    """How many ranks a command can use; its options are read, so that a mistake shows now."""
    from hpcfed import comparison, config, flags, registry, sweep
    from hpcfed.cluster import batch

    name = words[0]
    if name in batch.SHORT:
        return 1
    if name in batch.STUDIES:
        study = {"sweep": sweep, "compare": comparison}[name]
        study.read(Path(words[1] if len(words) > 1 else ""), Path())
        return usable_cores()
    if name in ("run", "resume"):
        path = Path(words[1] if len(words) > 1 else "")
        file = config.read_toml(path / "config.toml" if name == "resume" else path)
        return _of(config.assemble({}, file, str(path)))
    if name not in registry.WORKLOADS and ":" not in name:
        raise ConfigError(f"{name} cannot be submitted: give a workload, run, resume, sweep, compare or plot")
    found: list[int] = []
    command = flags.workload_command(
        name, list(words[1:]), lambda **given: found.append(_of(config.assemble({"workload": name, **given})))
    )
    command.main(list(words[1:]), prog_name=f"hpcfed {name}", standalone_mode=False)
    return found[0]


def _of(configuration: Any) -> int:
    clients: int = configuration.workload.options.clients
    return clients
