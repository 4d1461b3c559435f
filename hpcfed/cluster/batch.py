"""Scripts for SLURM: a job that saves its work before its time is up and goes on until it is done."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from hpcfed.errors import ConfigError, HpcfedError

# Commands that make a folder and, started again, go on with what is in it.
STUDIES = ("sweep", "compare")
# Commands that are done at once: nothing to save, nothing to resume.
SHORT = ("plot", "show", "export", "report", "data", "list", "doctor")


@dataclass(frozen=True)
class BatchJob:
    """A command for SLURM.

    Attributes
    ----------
    words : the hpcfed command and its options, without ``--out``.
    tasks, nodes : ranks, and nodes to spread them on (None: as SLURM likes).
    time : limit, as SLURM writes it.
    out : the folder, None for one named after the job.
    resumed : the folder that ``resume`` goes on with.
    notice : seconds before the time limit at which the ranks are told: enough to end a round and write a checkpoint.
    array : number of tasks of an array that share a sweep.
    after : id of a job that must have succeeded first.
    """

    words: Sequence[str]
    tasks: int
    nodes: int | None = None
    time: str = "1:00:00"
    notice: int = 120
    cpus_per_task: int = 1
    mem_per_cpu: str | None = None
    gpus_per_task: int | None = None
    queue: str | None = None
    account: str | None = None
    name: str | None = None
    out: str | None = None
    resumed: str | None = None
    array: int | None = None
    after: str | None = None

    def __post_init__(self) -> None:
        limit = _seconds(self.time)
        if limit is None:
            raise ConfigError(f"--time {self.time}: give minutes, H:MM:SS or D-HH:MM:SS, such as 4:00:00")
        if limit and self.notice >= limit and self.words[0] not in SHORT:
            raise ConfigError(
                f"--notice {self.notice} leaves nothing of --time {self.time}: give more time, or less notice"
            )
        if self.nodes is not None and self.nodes > self.tasks:
            raise ConfigError(
                f"--nodes {self.nodes} for {self.tasks} ranks: every node needs one: give at most {self.tasks} nodes"
            )
        if self.out is not None and self.words[0] == "resume":
            raise ConfigError(f"--out {self.out}: resume goes on where the run is: leave --out out")
        if self.after is not None and not re.fullmatch(r"\d+(_\d+)?", self.after, re.ASCII):
            raise ConfigError(f"--after {self.after}: give the number of a job, such as 17, as squeue shows it")
        words = {"job-name": self.name, "queue": self.queue, "account": self.account, "mem-per-cpu": self.mem_per_cpu}
        for option, value in words.items():
            if value is not None and not re.fullmatch(r"[\w.,:+@=-]+", value):
                raise ConfigError(f"--{option} {value!r}: give letters, digits and any of . , : + @ = - _")
        if self.array is not None and self.words[0] != "sweep":
            raise ConfigError(f"--array {self.array} shares the runs of a sweep: {self.words[0]} is one run")

    @property
    def short_name(self) -> str:
        """Names the job, its log and its folder."""
        return self.name or self.words[0].replace(":", "-")

    @property
    def makes_a_run(self) -> bool:
        """Whether the command makes a folder that it would not go on with by itself."""
        return self.words[0] not in (*SHORT, *STUDIES, "resume")

    def script(self, written_by: str) -> str:
        """The script. ``written_by`` is the command that repeats it."""
        return "\n".join([*self._head(written_by), *self._options(), "", *self._body()]) + "\n"

    def _head(self, written_by: str) -> list[str]:
        command = shlex.join(["hpcfed", *self.words])
        lines = ["#!/bin/bash", f"# {command}, written by", "#", f"#     {written_by}", "#"]
        if self.words[0] in SHORT:
            return lines
        return [
            *lines,
            f"# {self.notice} seconds before the time limit SLURM sends USR1 to this shell. The ranks then write a",
            "# checkpoint and leave with status 75, the job is put back into the queue and goes on from there, until",
            "# it is done, or three starts in a row have kept nothing. Further options of the command may follow the",
            "# script's name.",
            "#",
        ]

    def _options(self) -> list[str]:
        log = "%A-%a" if self.array else "%j"
        saves = self.words[0] not in SHORT
        options = {
            "job-name": f"hpcfed-{self.short_name}",
            "array": f"1-{self.array}" if self.array else None,
            "ntasks": self.tasks,
            "nodes": self.nodes,
            "cpus-per-task": self.cpus_per_task,
            "gpus-per-task": self.gpus_per_task,
            "mem-per-cpu": self.mem_per_cpu,
            "time": self.time,
            "partition": self.queue,
            "account": self.account,
            "dependency": f"afterok:{self.after}" if self.after else None,
            "kill-on-invalid-dep": "yes" if self.after else None,
            "signal": f"B:USR1@{self.notice}" if saves else None,
            "output": f"hpcfed-{self.short_name}-{log}.log",
        }
        lines = [f"#SBATCH --{name}={value}" for name, value in options.items() if value is not None]
        return [*lines, "#SBATCH --requeue", "#SBATCH --open-mode=append"] if saves else lines

    def _body(self) -> list[str]:
        launch = "hpcfed launch"
        words = shlex.join(self.words)
        if self.words[0] in SHORT:
            out = f" --out {shlex.quote(self.out)}" if self.out else ""
            return [f'{launch if self.words[0] == "doctor" else "hpcfed"} {words}{out} "$@"']
        job = "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID" if self.array else "$SLURM_JOB_ID"
        folder = "$SLURM_ARRAY_JOB_ID" if self.array else "$SLURM_JOB_ID"
        given = self.out or self.resumed
        out = f"out={shlex.quote(given) if given else f'runs/{self.short_name}-{folder}'}"
        if self.words[0] == "resume":
            begin = [out, "", f'{launch} {words} "$@" &']
        elif self.words[0] in STUDIES:
            part = ' --part "$SLURM_ARRAY_TASK_ID/$SLURM_ARRAY_TASK_COUNT"' if self.array else ""
            begin = [out, "", "# The same command begins and goes on.", f'{launch} {words} --out "$out"{part} "$@" &']
        else:
            begin = [
                out,
                "",
                'if [ -e "$out/config.toml" ]; then',
                f'    {launch} resume "$out" &',
                "else",
                f'    {launch} {words} --out "$out" "$@" &',
                "fi",
            ]
        begin[1:1] = [
            "",
            "# What is there, checkpoints and runs that have ended, and a note of the last starts that added nothing.",
            r"""ended='.*/\(round-[0-9]+\|result.h5\|diverged.json\)'""",
            r"""kept() { find "$out" -regex "$ended" -printf '%T@ %p\n' 2> /dev/null | sort; }""",
            "before=$(kept)",
            "idle=.hpcfed-idle-$SLURM_JOB_ID",
        ]
        return [
            *begin,
            "ranks=$!",
            "",
            "# USR1 interrupts wait; asked once more after the ranks have gone, wait tells how they ended.",
            "trap 'kill -USR1 $ranks' USR1",
            "wait $ranks",
            "while kill -0 $ranks 2> /dev/null; do",
            "    wait $ranks",
            "done",
            "wait $ranks",
            "status=$?",
            "",
            "# Another node may have been lost, which SLURM sees minutes later: does it still start something there?",
            "answers() { timeout 120 srun --overlap --mpi=none --nodes=$1 --ntasks=$1 ${2:+--nodelist=$2} true; }",
            "lost() { answers 1 $SLURMD_NODENAME && ! answers $SLURM_JOB_NUM_NODES; }",
            "",
            "# 75: a checkpoint is written and there is more to do; 138: USR1 came before there was anything to save.",
            "if [ $status -eq 75 ] || [ $status -eq 138 ] || { [ $status -eq 1 ] && lost 2> /dev/null; }; then",
            '    if [ "$(kept)" = "$before" ]; then echo $status >> $idle; else rm -f $idle; fi',
            "    if [ ! -e $idle ] || [ $(wc -l < $idle) -lt 3 ]; then",
            f'        scontrol requeue "{job}"',
            "        exit $status",
            "    fi",
            '    echo "hpcfed: three starts in a row have kept nothing (status $(paste -sd " " $idle)), there" \\',
            '        "is no fourth: give it more --time; hpcfed submit resume $out goes on with what is there" >&2',
            "fi",
            "rm -f $idle",
            "exit $status",
        ]


def _seconds(time: str) -> int | None:
    """A time limit as SLURM reads it: M, M:S, H:M:S, D-H, D-H:M or D-H:M:S; 0 is none. None if it is no time."""
    if not re.fullmatch(r"(\d+-)?\d+(:\d{1,2}){0,2}", time, re.ASCII):
        return None
    days, _, clock = time.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    if not days and len(parts) < 3:
        parts.insert(0, 0)
    return sum(part * unit for part, unit in zip([int(days or 0), *parts], (86400, 3600, 60, 1), strict=False))


def submit(script: str) -> str:
    """Hand a script to SLURM; the id of the job.

    Raises
    ------
    ConfigError
        If there is no ``sbatch`` here.
    HpcfedError
        If SLURM refuses the job, with its words.
    """
    sbatch = shutil.which("sbatch")
    if sbatch is None:
        raise ConfigError("no sbatch is on the PATH: submit from a login node of the cluster, or look with --dry-run")
    done = subprocess.run([sbatch, "--parsable"], input=script, capture_output=True, text=True, check=False)
    if done.returncode:
        raise HpcfedError(f"SLURM refuses the job: {' '.join(done.stderr.split())}")
    return done.stdout.strip().split(";")[0]
