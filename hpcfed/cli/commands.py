"""The command line. Rank 0 reads it; what all ranks must do is a job that it hands to the others.

So a mistake is noticed once, on rank 0, before any data is read, and the other ranks leave with the same status. This
is the only module that prints errors and decides on exit statuses.
"""

from __future__ import annotations

import logging
import os
import shlex
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, cast

import click

from hpcfed import __version__, config, environment, errors, registry
from hpcfed.cli import cluster, flags, outcomes, studies
from hpcfed.cluster.outcome import tell_folder, tell_status
from hpcfed.errors import ConfigError, HpcfedError, RankLostError
from hpcfed.planning import commands as planning_commands
from hpcfed.privacy import commands as privacy_commands
from hpcfed.ranks import communicator
from hpcfed.ranks.communicator import Communicator, SerialCommunicator
from hpcfed.run import run_folder

if TYPE_CHECKING:
    from hpcfed.run.runner import Run

logger = logging.getLogger(__name__)


class Job(Protocol):
    """Work for all ranks: picklable, so that rank 0 can hand it out."""

    def execute(self, communicator: Communicator) -> None:
        """Do this rank's part."""


@dataclass
class Session:
    """What the commands need to know: the ranks, what was tuned, and how to start a job on all ranks."""

    communicator: Communicator
    tuned: Mapping[str, str]
    started: bool = False

    def start(self, job: Job) -> None:
        """Do the job on every rank."""
        self.started = True
        _announce(self.communicator, job, 0)
        job.execute(self.communicator)


def main(tuned: Mapping[str, str], args: list[str]) -> NoReturn:
    """Run the command line ``args`` and leave with its status."""
    world: Communicator = SerialCommunicator()
    try:
        sys.path.append(os.getcwd())  # where module:Class of the user's own is looked for, on every rank
        world = _connect(args)
        logging.basicConfig(format="hpcfed: %(message)s", level=logging.WARNING)
        logging.getLogger("hpcfed").setLevel(logging.INFO if world.rank == 0 else logging.ERROR)
        status = _lead(Session(world, tuned), args) if world.rank == 0 else _follow(world)
    except BaseException as failure:
        error = _regrouped(world, failure) if isinstance(failure, RankLostError) else failure
        everywhere = getattr(error, "everywhere", False)
        status = _explain(error) if world.rank == 0 or not everywhere else getattr(error, "status", 1)
        _flush()
        if world.size > 1 and not everywhere:
            tell_status(status)
            world.abort(status)
    _flush()
    if world.rank == 0:
        tell_status(status)
    world.leave(status)


def _regrouped(world: Communicator, error: RankLostError) -> RankLostError:
    """The error as the ranks that are left have it in common, of whom the first one speaks."""
    from hpcfed.run import recovery

    before = world.members
    world.recover()
    lost = [rank for rank in before if rank not in world.members]
    return RankLostError(f"{recovery.named(lost)} lost: {error}").on_all_ranks()


def _connect(args: list[str]) -> Communicator:
    """The ranks. The doctor must also run where launcher and MPI library do not fit: it is called to say so."""
    try:
        return communicator.connect()
    except ConfigError as error:
        if environment.launched_rank(os.environ) != 0:  # every process believes it is alone: one of them speaks
            sys.exit(error.status)
        if args[:1] != ["doctor"]:
            raise
        click.echo(f"!! {error}")
        return SerialCommunicator()


def _lead(session: Session, args: list[str]) -> int:
    """Rank 0: read the command line; start a job on all ranks or send them home."""
    try:
        outcome = commands.main(args, prog_name="hpcfed", standalone_mode=False, obj=session)
        status = outcome if isinstance(outcome, int) else 0
    except BaseException as error:
        if session.started:
            raise
        status = _explain(error)
    if not session.started:
        _announce(session.communicator, None, status)
    return status


def _follow(world: Communicator) -> int:
    """Other ranks: wait for what rank 0 has read."""
    job, status = _announce(world)
    if job is not None:
        job.execute(world)
        if world.rank == 0:  # those before it were lost on the way, which a run alone survives
            _conclude(cast("Run", job).folder)
    return status


def _announce(world: Communicator, job: Job | None = None, status: int = 0) -> tuple[Job | None, int]:
    """What rank 0 says, on every rank: a job to do, or the status to leave with."""
    world.wait()
    job, status = world.broadcast((job, status))
    return job, status


def _explain(error: BaseException) -> int:
    """Print one line for an error and return the exit status that it stands for."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else 1
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        click.echo(error.format_message(), err=True)
        return error.exit_code
    if isinstance(error, click.ClickException):
        hint = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else "hpcfed"
        click.echo(f"hpcfed: {error.format_message()} (see {hint} --help)", err=True)
        return error.exit_code
    if isinstance(error, (KeyboardInterrupt, click.Abort)):
        click.echo("hpcfed: interrupted: hpcfed resume goes on from the last checkpoint, if there is one", err=True)
        return 130
    where = "; ".join(getattr(error, "__notes__", []))
    place = f" ({where})" if where else ""
    if isinstance(error, HpcfedError):
        click.echo(f"hpcfed: {error}{place}", err=True)
        return error.status
    if isinstance(error, MemoryError):
        remedy = "make the problem smaller, or start fewer ranks on a node"
        click.echo(f"hpcfed: the memory does not suffice: {error or 'no more of it'}{place}: {remedy}", err=True)
        return 1
    if os.environ.get("HPCFED_TRACEBACK"):
        traceback.print_exception(error)
    line = f" at {errors.place(error)}" if errors.place(error) else ""
    text = " ".join(str(error).split()) or "no message"
    click.echo(
        f"hpcfed: {type(error).__name__}: {text}{place}{line}; HPCFED_TRACEBACK=1 shows the whole traceback", err=True
    )
    return 1


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()


# -- the commands ------------------------------------------------------------------------------------------------------


class Commands(click.Group):
    """The fixed commands and one for each workload, whose options are found when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(dict.fromkeys([*registry.WORKLOADS, *super().list_commands(ctx)]))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in registry.WORKLOADS:
            return _workload_command(cmd_name, [])
        return super().get_command(ctx, cmd_name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name, rest = args[0], args[1:]
        if name == "private" and rest[:1] and rest[0] in privacy_commands.private.commands:
            return name, privacy_commands.private, rest
        if name in registry.WORKLOADS or ":" in name:
            return name, _workload_command(name, rest), rest
        if name == "run" and rest and not rest[0].startswith("-"):
            return name, flags.file_command(rest, _start), rest
        return super().resolve_command(ctx, args)


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Start on several ranks with mpirun -n 17 hpcfed ct, or srun --mpi=pmix hpcfed ct. The numbers are the same "
    "on any number of ranks, bit by bit.",
)
@click.version_option(__version__)
@click.option("--no-mpi-tuning", is_flag=True, help="Leave thread counts and MPI settings as they are.")
def commands(no_mpi_tuning: bool) -> None:
    """Simulate federated optimization on MPI: each rank is one or more clients.

    The first group of commands are workloads. hpcfed WORKLOAD --help explains the problem and lists its options.
    """


def _workload_command(name: str, args: list[str]) -> click.Command:
    def action(**given: Any) -> None:
        _start(config.assemble({"workload": name, **given}))

    command = flags.workload_command(name, args, action)
    if name == "private":
        command.epilog = "See also: hpcfed private budget --help, hpcfed private audit --help."
    return command


def _start(configuration: config.RunConfig) -> None:
    """Make the run folder and run on all ranks."""
    from hpcfed.run.runner import Run

    session: Session = click.get_current_context().obj
    config.refuse_ranks(configuration, session.communicator.size, session.communicator.tolerant)
    folder = run_folder.create(configuration.run.out, configuration.workload.name)
    try:
        with folder.locked():
            folder.write_config(configuration.to_toml())
            tell_folder(folder.path)
            session.start(Run(configuration, folder, shlex.join(["hpcfed", *sys.argv[1:]])))
    except Exception:
        folder.discard()
        raise
    _conclude(folder)


def _conclude(folder: run_folder.RunFolder) -> None:
    """What a finished run leaves on the terminal: where it is, its last numbers, its pictures."""
    from hpcfed.run import summary

    click.echo(summary.closing(folder))


@commands.command(name="run", short_help="Run a configuration file, such as jobs/ct.toml.")
@click.argument("file", metavar="FILE")
def run_file(file: str) -> None:
    """Run a configuration FILE, such as the config.toml of a run folder.

    FILE comes first; any option of its workload may follow and overrides it.
    """
    raise ConfigError(f"hpcfed run {file}: give the FILE first, then options")


@commands.command(short_help="Go on with a run from its last checkpoint, or with a sweep or comparison.")
@click.argument("directory", metavar="DIR")
@click.option(
    "--rounds", type=click.IntRange(min=1), help="Go on to this many rounds in all instead of the configured number."
)
@click.option(
    "--on-failure",
    type=click.Choice(["stop", "takeover", "drop"]),
    help="What happens when a rank is lost, instead of what is configured.",
)
@studies.GROUPS
def resume(directory: str, rounds: int | None, on_failure: str | None, groups: int | None) -> None:
    """Go on with the run in DIR from its last whole checkpoint, on any number of ranks; or with all runs of a sweep or
    a comparison.

    The result is the same, bit by bit, as if the run had never stopped.
    """
    from hpcfed.run import checkpoint, result
    from hpcfed.run.runner import Run

    session: Session = click.get_current_context().obj
    study = studies.found(directory)
    if study is not None:
        if rounds is not None:
            raise ConfigError(f"--rounds {rounds}: {directory} is a {study.kind}: name the folder of one of its runs")
        if on_failure is not None:
            raise ConfigError(f"--on-failure {on_failure} is for single runs: {directory} is a {study.kind}")
        studies.carry_out(study, groups)
        return
    if groups is not None:
        raise ConfigError(f"--groups {groups}: {directory} is one run: only sweeps and comparisons have groups")
    folder = run_folder.open_existing(directory)
    given: dict[str, Any] = {} if on_failure is None else {"on_failure": on_failure}
    configuration = config.assemble(given, config.read_toml(folder.config), str(folder.config))
    config.refuse_ranks(configuration, session.communicator.size, session.communicator.tolerant)
    tell_folder(folder.path)
    if rounds in (None, configuration.run.rounds) and folder.finished and result.is_whole(folder.result):
        done = checkpoint.last_round(folder.checkpoints)
        click.echo(f"{folder.path} is finished: {done} rounds; hpcfed resume {folder.path} --rounds N goes further")
        return
    folder.refuse_read_only()
    with folder.locked():
        newest = checkpoint.latest(folder.checkpoints)
        done = 0 if newest is None else checkpoint.round_of(newest)
        if rounds is not None and rounds < done:
            raise ConfigError(f"--rounds {rounds}: {folder.path} has done {done} already: ask for more")
        if newest is None and folder.finished:
            raise ConfigError(
                f"{folder.path} is finished, but its checkpoints are gone: hpcfed run {folder.config} starts it again"
            )
        if newest is None:
            logger.warning("%s has no checkpoint yet: starting from the beginning", folder.path)
        if rounds is not None:
            given["rounds"] = rounds
        configuration = config.assemble(given, config.read_toml(folder.config), str(folder.config))
        session.start(Run(configuration, folder, shlex.join(["hpcfed", *sys.argv[1:]]), newest))
    _conclude(folder)


@commands.command(short_help="List known data sets, or check files.")
@click.argument("files", metavar="[FILE...]", nargs=-1)
def data(files: tuple[str, ...]) -> None:
    """List known LIBSVM data sets with their published counts and where to get them.

    With FILEs: say which set each is and whether it is complete.
    """
    from hpcfed.data import known

    click.echo(known.table([Path(file) for file in files]))


@commands.command(name="list", short_help="List what there is and what fits together.")
def list_() -> None:
    """List algorithms, workloads and compressors, and which fit together."""
    from hpcfed.run import summary

    click.echo(summary.catalogue())


@commands.command(short_help="Check this machine and say what to do, or measure it.")
@click.option("--measure", is_flag=True, help="Measure messages, memory and disk instead, for hpcfed plan.")
@click.option("--out", metavar="FILE.json", help="Profile to write  [default: in the user's cache folder].")
def doctor(measure: bool, out: str | None) -> None:
    """Check MPI, HDF5, ASTRA, CUDA, threads and memory, and say what to do. Works under mpirun, too.

    With --measure: a profile of the machine, by which hpcfed plan predicts what a run will cost.
    """
    from hpcfed.doctor import Examination
    from hpcfed.planning.measure import Measurement

    if out is not None and not measure:
        raise ConfigError(f"--out {out} is for the profile: give --measure, or leave it out")
    session: Session = click.get_current_context().obj
    session.start(Measurement(Path(out) if out else None) if measure else Examination(dict(session.tuned)))


for command in (
    studies.compare,
    studies.sweep,
    cluster.launch,
    cluster.submit,
    outcomes.show,
    outcomes.plot,
    outcomes.export,
    outcomes.report,
    planning_commands.plan,
    privacy_commands.private,
):
    commands.add_command(command)
