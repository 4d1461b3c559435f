"""The commands that start others: ``hpcfed launch`` here and now, ``hpcfed submit`` as a job of SLURM."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from hpcfed.environment import launched_ranks, usable_cores
from hpcfed.errors import ConfigError
from hpcfed.privacy import commands as privacy_commands

if TYPE_CHECKING:
    from hpcfed.cluster.batch import BatchJob
    from hpcfed.config import RunConfig

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
    checkpoint, and the job is put back into the queue, until it is done or three starts in a row have kept nothing.
    hpcfed submit plot DIR --after JOB waits for another job's success. Options of the command are checked now, not when
    the job begins.
    """
    from hpcfed.cluster import batch

    _refuse_ranks("submit")
    tasks = _tasks(words, given.pop("tasks") or (1 if given["array"] else None))
    resumed = _parsed(words)["directory"] if words[0] == "resume" else None
    job = batch.BatchJob(words=list(words), tasks=tasks, name=given.pop("job_name"), resumed=resumed, **given)
    _refuse_used(job)
    script = job.script(shlex.join(["hpcfed", *(word for word in sys.argv[1:] if word != "--dry-run")]))
    if dry_run:
        click.echo(script, nl=False)
        return
    if not os.access(os.getcwd(), os.W_OK):
        raise ConfigError(f"{os.getcwd()} cannot be written, and the job's log goes there: submit from another folder")
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


def _tasks(words: Sequence[str], asked: int | None) -> int:
    """How many ranks a command gets; its options are read, so that a mistake shows now.

    Raises
    ------
    ConfigError
        If the command is none for SLURM, or cannot run on so many ranks.
    """
    from hpcfed import config
    from hpcfed.cluster import batch

    if words[0] in batch.SHORT:
        _parsed(words)
        return asked or 1
    configuration = _configuration(words)
    if configuration is None:
        return asked or usable_cores()
    tasks = asked or configuration.workload.options.clients
    config.refuse_ranks(configuration, tasks, tolerant=True)
    return tasks


def _configuration(words: Sequence[str]) -> RunConfig | None:
    """What a command will run, None for a sweep or a comparison, which is read."""
    from hpcfed import config, registry
    from hpcfed.cli import flags, studies
    from hpcfed.run import run_folder
    from hpcfed.studies import comparison, sweep

    name, rest = words[0], list(words[1:])
    if name == "sweep":
        sweep.read(Path(_parsed(words)["file"]), Path())
        return None
    if name == "compare":
        comparison.read(Path(_parsed(words)["file"]), Path())
        return None
    if name == "resume":
        directory = _parsed(words)["directory"]
        if studies.found(directory) is not None:
            return None
        path = run_folder.open_existing(directory).config
        return config.assemble({}, config.read_toml(path), str(path))
    if name == "private" and rest[:1] and rest[0] in privacy_commands.private.commands:
        raise _refused(f"private {rest[0]}")
    found: list[RunConfig] = []
    if name == "run" and rest:
        command = flags.file_command(rest, found.append)
    elif name in registry.WORKLOADS or ":" in name:
        command = flags.workload_command(
            name, rest, lambda **given: found.append(config.assemble({"workload": name, **given}))
        )
    else:
        raise _refused(name)
    command.main(rest, prog_name=f"hpcfed {name}", standalone_mode=False)
    return found[0]


def _refused(command: str) -> ConfigError:
    from hpcfed.cluster import batch

    return ConfigError(
        f"{command} cannot be submitted: give a workload, run FILE, resume DIR, {' FILE, '.join(batch.STUDIES)} FILE, "
        f"or one of {', '.join(batch.SHORT)}"
    )


def _parsed(words: Sequence[str]) -> dict[str, Any]:
    """The options of one of the fixed commands, by name."""
    top = click.get_current_context().find_root()
    command = cast(click.Group, top.command).get_command(top, words[0])
    assert command is not None, words
    with command.make_context(words[0], list(words[1:]), parent=top) as context:
        return context.params


def _refuse_used(job: BatchJob) -> None:
    """A job goes on with what it finds in its folder, which another run must not have left there.

    Raises
    ------
    ConfigError
    """
    if job.makes_a_run and job.out is not None and (Path(job.out) / "config.toml").exists():
        raise ConfigError(
            f"--out {job.out} holds a run already: choose another folder, or go on with hpcfed submit resume {job.out}"
        )
