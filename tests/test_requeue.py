"""When a job of SLURM is put back into the queue: its script, run by bash with stand-ins for hpcfed and scontrol."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner
from test_cluster import program

from hpcfed.cli import commands
from hpcfed.cluster.batch import BatchJob

JOBS = {
    "run": (BatchJob(["ct"], 2, out="a run"), "a run/checkpoints"),
    "own": (BatchJob(["ct"], 2), "runs/ct-7/checkpoints"),
    "resume": (BatchJob(["resume", "a run", "--rounds", "9"], 2, resumed="a run"), "a run/checkpoints"),
    "compare": (BatchJob(["compare", "c.toml"], 2, out="c"), "c/plain-seed0/checkpoints"),
    "array": (BatchJob(["sweep", "s.toml"], 1, array=2, out="s"), "s/0-seed0/checkpoints"),
}


class Queue:
    """Starts a job's script as often as it asks for it."""

    def __init__(self, folder: Path, job: BatchJob):
        self.folder, self.script = folder, job.script("by hand")
        self.log = ""
        programs = folder / "bin"
        programs.mkdir()
        # What is to be done is written to a file, an entry for each start: words of the shell.
        program(
            programs, "hpcfed", 'n=$(cat n 2> /dev/null || echo 1); echo $((n + 1)) > n; eval "$(sed -n ${n}p todo)"'
        )
        program(programs, "scontrol", 'echo "$@" >> requeued')
        program(programs, "srun", "exit 1")

    def play(self, *starts: str) -> tuple[int, int]:
        """How often the job is started, of which ``starts`` say what they do; the status of the last one."""
        (self.folder / "todo").write_text("\n".join(starts) + "\n")
        requeued, count = self.folder / "requeued", 0
        path = os.pathsep.join([str(self.folder / "bin"), os.environ["PATH"]])
        job = {
            "SLURM_JOB_ID": "7",
            "SLURM_ARRAY_JOB_ID": "7",
            "SLURM_ARRAY_TASK_ID": "1",
            "SLURM_ARRAY_TASK_COUNT": "2",
        }
        while True:
            requeued.unlink(missing_ok=True)
            count += 1
            done = subprocess.run(
                ["bash", "-s"],
                input=self.script,
                cwd=self.folder,
                env=os.environ | job | {"PATH": path},
                capture_output=True,
                text=True,
                check=False,
            )
            self.log += done.stderr
            if not requeued.exists():
                return count, done.returncode
            assert requeued.read_text() in ("requeue 7\n", "requeue 7_1\n")


@pytest.fixture(params=JOBS)
def queue(request, tmp_path):
    """A job and where it keeps its checkpoints."""
    job, checkpoints = JOBS[request.param]
    return Queue(tmp_path, job), checkpoints


def saving(checkpoints, number, status=75):
    return f"mkdir -p '{checkpoints}/round-{number:08d}'; exit {status}"


class TestPutBack:
    def test_a_job_that_keeps_something_each_time_is_put_back_until_it_is_done(self, queue):
        jobs, checkpoints = queue
        assert jobs.play(*(saving(checkpoints, number) for number in range(1, 7)), "exit 0") == (7, 0)
        assert jobs.log == ""

    @pytest.mark.parametrize("status", [75, 138])
    def test_one_that_never_gets_anywhere_is_started_three_times(self, queue, status):
        jobs, _ = queue
        assert jobs.play(*9 * [f"exit {status}"]) == (3, status)
        assert jobs.log.count("\n") == 1
        assert f"three starts in a row have kept nothing (status {status} {status} {status})" in jobs.log
        assert "more --time" in jobs.log
        assert not list(jobs.folder.glob(".hpcfed*"))

    def test_only_three_in_a_row_count(self, queue):
        """A slow start now and then is no reason to give up; half a checkpoint, and files of old ones, are nothing."""
        jobs, checkpoints = queue
        half = f"mkdir -p '{checkpoints}/round-00000009.tmp'; exit 75"
        starts = ["exit 138", half, saving(checkpoints, 1), half, "exit 138", saving(checkpoints, 2), half, half, half]
        assert jobs.play(*starts, "exit 0") == (9, 75)
        assert jobs.log.count("three starts in a row") == 1

    @pytest.mark.parametrize("status", [0, 1, 2])
    def test_a_job_that_has_ended_leaves_no_note(self, queue, status):
        jobs, _ = queue
        assert jobs.play("exit 138", "exit 75", f"exit {status}") == (3, status)
        assert jobs.log == ""
        assert not list(jobs.folder.glob(".hpcfed*"))


def test_a_checkpoint_that_is_written_again_is_progress(tmp_path):
    """After damage a run goes back, and writes those of later rounds anew."""
    jobs = Queue(tmp_path, JOBS["run"][0])
    again = f"sleep 0.01; rm -rf 'a run/checkpoints/round-00000001'; {saving('a run/checkpoints', 1)}"
    assert jobs.play(*5 * [again], "exit 0") == (6, 0)


@pytest.mark.parametrize("ending", ["result.h5", "diverged.json"])
def test_a_run_of_a_study_that_has_ended_is_progress(tmp_path, ending):
    jobs = Queue(tmp_path, JOBS["array"][0])
    starts = [f"mkdir -p s/{number}; touch s/{number}/{ending}; exit 75" for number in range(5)]
    assert jobs.play(*starts, "exit 0") == (6, 0)


def test_a_job_that_resumes_knows_its_folder(tmp_path):
    (tmp_path / "a run").mkdir()
    (tmp_path / "a run" / "config.toml").write_text('[workload]\nname = "logreg"\n')
    words = ["submit", "resume", "--rounds", "9", str(tmp_path / "a run"), "--dry-run"]
    script = CliRunner().invoke(commands.commands, words, catch_exceptions=False).output
    assert f"\nout='{tmp_path / 'a run'}'\n" in script


@pytest.mark.parametrize("words", [["private", "audit"], ["private", "budget", "--epsilon", "1"], ["launch", "ct"]])
def test_what_is_no_job_is_told_what_is(hpcfed, words):
    done = hpcfed("submit", *words)
    assert done.status == 2
    assert "cannot be submitted: give a workload, run FILE" in done.err
    assert done.err.count("\n") == 1
