"""Starting ranks by what the machine has, and jobs for SLURM; with the real programs or stand-ins for them."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import private_slurm
import pytest
from click.testing import CliRunner
from conftest import finish, start
from test_interruption import ROUNDS, SERIAL, TESTS, TOY, uninterrupted, until  # noqa: F401

from hpcfed import registry
from hpcfed.cli import cluster, commands
from hpcfed.cluster.batch import BatchJob, _seconds, submit
from hpcfed.cluster.launcher import Launcher, find
from hpcfed.errors import ConfigError, HpcfedError
from hpcfed.run.checkpoint import last_round
from hpcfed.run.result import read_attributes

PROJECT = Path(__file__).resolve().parents[1]
VERSIONS = {"Open MPI": "mpirun (Open MPI) 5.0.8", "MPICH": "HYDRA build details:", "Intel MPI": "Intel(R) MPI Library"}


def program(folder, name, script):
    """A program of this name in a folder, from the lines of a shell script."""
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def bare(tmp_path, monkeypatch):
    """A folder that is the whole PATH, and no mpirun beside this Python."""
    monkeypatch.setattr(sys, "executable", str(tmp_path / "elsewhere" / "python"))
    return tmp_path, {"PATH": str(tmp_path)}


class TestFinding:
    @pytest.mark.parametrize("kind", VERSIONS)
    def test_it_knows_the_kinds_of_mpirun(self, bare, kind):
        folder, environment = bare
        mpiexec = program(folder, "mpiexec", f"echo '{VERSIONS[kind]}'")
        assert find(environment) == Launcher(kind, str(mpiexec))

    @pytest.mark.parametrize(
        ("said", "job", "kind"), [("pmix", "7", "srun"), ("none", "7", "MPICH"), ("pmix", "", "MPICH")]
    )
    def test_srun_is_for_allocations_with_pmix(self, bare, said, job, kind):
        folder, environment = bare
        program(folder, "mpirun", "echo HYDRA")
        program(folder, "srun", f"echo MPI plugin types are... {said} >&2")
        assert find(environment | ({"SLURM_JOB_ID": job} if job else {})).kind == kind

    def test_without_any_it_says_what_to_do(self, bare):
        with pytest.raises(ConfigError, match="load your cluster's MPI module"):
            find(bare[1])

    @pytest.mark.parametrize(
        ("said", "able"), [("mpirun (Open MPI) 5.0.11", True), ("mpirun (Open MPI) 4.1.4", False), ("HYDRA", False)]
    )
    def test_ranks_that_shall_outlive_one_another_need_open_mpi_5(self, bare, said, able):
        """Also within an allocation: srun ends all if one ends badly."""
        folder, environment = bare
        program(folder, "srun", "echo pmix")
        mpirun = program(folder, "mpirun", f"echo '{said}'")
        allocation = environment | {"SLURM_JOB_ID": "7"}
        if able:
            assert find(allocation, tolerant=True) == Launcher("Open MPI", str(mpirun), tolerant=True)
            return
        with pytest.raises(ConfigError, match="only Open MPI from version 5 on"):
            find(allocation, tolerant=True)

    def test_an_unknown_kind_is_named(self, bare):
        folder, environment = bare
        program(folder, "mpirun", "echo Homemade 1.0")
        with pytest.raises(ConfigError, match="no known kind"):
            find(environment)


class TestLine:
    """What each kind of launcher must be told, as its documentation says."""

    @pytest.mark.parametrize(
        ("kind", "ranks", "root", "options", "environment"),
        [
            ("Open MPI", 2, False, "-n 2 --bind-to none", {}),
            ("Open MPI", 17, True, "-n 17 --bind-to none --map-by :OVERSUBSCRIBE --allow-run-as-root", {}),
            ("Open MPI", None, False, "--bind-to none", {}),
            ("MPICH", 2, True, "-n 2", {}),
            ("MPICH", 17, False, "-n 17 -bind-to none", {}),
            ("Intel MPI", 17, False, "-n 17", {"I_MPI_PIN": "0"}),
            ("srun", 17, True, "--mpi=pmix -n 17", {}),
            ("srun", None, False, "--mpi=pmix", {}),
        ],
    )
    def test_it_gets_what_it_needs(self, kind, ranks, root, options, environment):
        line = Launcher(kind, "/x").line(ranks, ["hpcfed", "ct"], cores=2, root=root)
        assert shlex.join(line.command) == f"/x {options} hpcfed ct"
        assert line.environment == environment

    def test_ranks_that_shall_outlive_one_another(self):
        line = Launcher("Open MPI", "/x", tolerant=True).line(2, ["hpcfed"], cores=2)
        assert "--with-ft ulfm" in shlex.join(line.command)
        assert line.tolerant

    @pytest.mark.parametrize("words", [["resume", "run"], ["run", "run/config.toml"]])
    def test_a_command_whose_file_says_so_gets_them_unasked(self, tmp_path, monkeypatch, words):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "run").mkdir()
        for said in ("takeover", "stop"):
            (tmp_path / "run" / "config.toml").write_text(f'[run]\non_failure = "{said}"\n')
            assert cluster._on_failure(words) == said
        assert cluster._on_failure(["ct", "x"]) == "stop"


def launch(*words, **environment):
    return start([sys.executable, "-m", "hpcfed", "launch", *words], PYTHONPATH=TESTS, **environment)


@pytest.mark.mpi
class TestLaunch:
    def test_it_prints_the_line_and_runs_it(self, tmp_path, uninterrupted):  # noqa: F811
        done = finish(launch("-n", "3", *TOY, "--out", str(tmp_path / "run")), 60)
        assert done.status == 0
        assert re.search(r"mpirun -n 3 .*-m hpcfed toy:Quadratics", done.err)
        assert read_attributes(tmp_path / "run" / "result.h5")["digest"] == uninterrupted

    def test_the_status_of_a_mistake(self):
        assert finish(launch("-n", "2", "toy:Quadratics", "--rounds", "0"), 60).status == 2

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
    def test_a_signal_makes_the_ranks_save_and_leave_with_75(self, tmp_path, uninterrupted, number):  # noqa: F811
        folder = tmp_path / "run"
        slow = ["--algorithm", "toy:Momentum", "--hurt", "slow"]
        process = launch("-n", "2", *TOY, *slow, "--out", str(folder))
        until(lambda: last_round(folder / "checkpoints") >= 2, 60)
        process.send_signal(number)
        assert finish(process, 60).status == 75
        assert 2 <= last_round(folder / "checkpoints") < ROUNDS
        assert finish(launch("-n", "2", "resume", str(folder)), 60).status == 0
        assert last_round(folder / "checkpoints") == ROUNDS

    def test_ranks_within_ranks_are_refused(self, mpirun):
        done = mpirun(2, "launch", "-n", "2", *TOY)
        assert done.status == 2
        assert "leave out mpirun" in done.err


def test_a_launcher_that_reports_success_alone_is_not_believed(tmp_path):
    """As mpirun does when it loses the daemon of a node."""
    program(tmp_path, "mpirun", "case $* in *--version*) echo Open MPI;; esac; exit 0")
    environment = {"PATH": str(tmp_path), "PYTHONPATH": str(PROJECT)}
    code = "import sys; sys.executable = '/nowhere/python'; from hpcfed.__main__ import main; main()"
    done = finish(start([sys.executable, "-c", code, "launch", "ct"], **environment), 60)
    assert done.status == 1
    assert "without a word" in done.err


# -- jobs for SLURM ----------------------------------------------------------------------------------------------------


class TestScripts:
    @pytest.mark.parametrize("path", sorted(PROJECT.glob("jobs/*.sbatch")), ids=lambda path: path.name)
    def test_those_in_jobs_are_what_submit_writes(self, path, monkeypatch):
        monkeypatch.chdir(PROJECT)
        line = next(line for line in path.read_text().splitlines() if "hpcfed submit" in line)
        words = shlex.split(line.lstrip("# "))
        monkeypatch.setattr(sys, "argv", words)
        written = CliRunner().invoke(commands.commands, [*words[1:], "--dry-run"], catch_exceptions=False)
        assert written.output == path.read_text()

    @pytest.mark.parametrize(
        "job",
        [
            BatchJob(["ct"], 17),
            BatchJob(
                ["ct", "--phantom", "my file.npy"], 17, nodes=2, time="1-00:00:00", out="runs/my run", gpus_per_task=1
            ),
            BatchJob(["sweep", "s.toml"], 1, array=4),
            BatchJob(["resume", "runs/a b"], 2),
            BatchJob(["plot", "runs/a"], 1, after="17"),
            BatchJob(["doctor", "--measure"], 4, out="my profile.json"),
        ],
        ids=lambda job: job.words[0],
    )
    def test_bash_can_read_them(self, job):
        assert subprocess.run(["bash", "-n"], input=job.script("by hand"), text=True, check=False).returncode == 0

    def test_words_with_spaces_stay_whole(self):
        assert "--phantom 'my file.npy'" in BatchJob(["ct", "--phantom", "my file.npy"], 1).script("")

    @pytest.mark.parametrize(
        ("word", "given", "said"),
        [
            ("ct", {"time": "soon"}, "--time soon: give minutes"),
            ("ct", {"time": "1", "notice": 60}, "--notice 60 leaves nothing of --time 1"),
            ("ct", {"array": 4}, "--array 4 shares the runs of a sweep"),
            ("ct", {"nodes": 2}, "--nodes 2 for 1 ranks"),
            ("ct", {"name": "a/b"}, "--job-name 'a/b': give letters"),
            ("ct", {"queue": "a b"}, "--queue 'a b': give letters"),
            ("ct", {"account": "a\n#SBATCH --x"}, "--account"),
            ("plot", {"after": "-1"}, "--after -1: give the number of a job"),
            ("resume", {"out": "x"}, "--out x: resume goes on where the run is"),
        ],
    )
    def test_what_cannot_be_is_refused(self, word, given, said):
        with pytest.raises(ConfigError, match=re.escape(said)):
            BatchJob([word], 1, **given)

    @pytest.mark.parametrize(
        ("time", "seconds"),
        [("2", 120), ("2:30", 150), ("1:2:3", 3723), ("1-2", 93600), ("1-2:3", 93780), ("1-2:3:4", 93784), ("0", 0)],
    )
    def test_times_are_read_as_slurm_reads_them(self, time, seconds):
        """The forms of sbatch's manual page."""
        assert _seconds(time) == seconds
        assert BatchJob(["ct"], 1, time=time, notice=seconds - 1 if seconds else 120).time == time

    def test_no_option_of_a_run_has_a_name_that_submit_takes(self):
        taken = {parameter.name for parameter in cluster.submit.params} - {"out", "words"}
        for kind, table in (("workload", registry.WORKLOADS), ("algorithm", registry.ALGORITHMS)):
            for name in table:
                options = {field.name for field in dataclasses.fields(registry.load(kind, name))}
                assert not options & taken, name

    def test_mistakes_of_the_command_show_before_it_is_submitted(self, hpcfed):
        job = str(PROJECT / "jobs" / "ct.toml")
        for words, said in (
            (["ct", "--clients", "x"], "--clients x"),
            (["ct", "--clients", "5", "--tasks", "6"], "6 ranks for --clients 5"),
            (["tc"], "tc cannot be submitted"),
            (["run", job, "--clients", "x"], "--clients x"),
            (["run"], "run FILE"),
            (["resume", "nosuch"], "nosuch does not exist"),
            (["sweep", job], "run is no part of a sweep"),
            (["plot", "--bogus"], "--bogus"),
        ):
            done = hpcfed("submit", *words, "--dry-run")
            assert done.status == 2
            assert said in done.err
            assert done.err.count("\n") == 1
            assert done.out == ""

    def test_the_folder_of_another_run_is_refused(self, hpcfed, tmp_path):
        """A job would go on with what it finds there, whatever its options say."""
        run = str(tmp_path / "run")
        assert hpcfed("toy:Quadratics", "--rounds", "2", "--out", run, PYTHONPATH=TESTS).status == 0
        done = hpcfed("submit", "ct", "--out", run, "--dry-run")
        assert done.status == 2
        assert f"hpcfed submit resume {run}" in done.err
        assert "launch resume" in hpcfed("submit", "resume", run, "--dry-run", PYTHONPATH=TESTS).out

    def test_a_folder_of_many_runs_can_be_resumed(self, hpcfed, tmp_path):
        (tmp_path / "sweep.toml").write_text('[base.workload]\nname = "logreg"\n[sweep]\nstep = [0.1, 0.2]\n')
        assert f"launch resume {tmp_path}" in hpcfed("submit", "resume", str(tmp_path), "--dry-run").out

    def test_a_picture_goes_where_it_is_wanted(self):
        script = BatchJob(["plot", "runs/a"], 1, out="a picture.png").script("")
        assert "hpcfed plot runs/a --out 'a picture.png' \"$@\"" in script

    def test_the_doctor_measures_on_all_ranks(self, hpcfed):
        script = hpcfed("submit", "doctor", "--measure", "--tasks", "4", "--out", "p.json", "--dry-run").out
        assert "--ntasks=4" in script
        assert "hpcfed launch doctor --measure --out p.json" in script

    def test_as_many_tasks_as_clients(self, hpcfed):
        assert "--ntasks=9" in hpcfed("submit", "logreg", "--clients", "9", "--dry-run").out

    def test_slurms_refusal_is_passed_on(self, tmp_path, monkeypatch):
        program(tmp_path, "sbatch", "echo 'sbatch: error: invalid account' >&2; exit 1")
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        with pytest.raises(HpcfedError, match="invalid account"):
            submit("#!/bin/bash\n")


# -- on a real SLURM ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    """A private SLURM of three nodes."""
    if why := private_slurm.missing():
        pytest.skip(why)
    with private_slurm.PrivateSlurm(tmp_path_factory.mktemp("slurm"), ["n1", "n2", "n3"]) as running:
        yield running


class Jobs:
    """Jobs of a private SLURM in a folder of their own. Those that are ``HELD`` do not end before they are let go."""

    def __init__(self, slurm, folder):
        self.slurm, self.folder = slurm, folder
        self.hold = folder / "hold"
        self.hold.touch()

    def ask(self, *command, check=True):
        env = os.environ | self.slurm.environment
        return subprocess.run(command, env=env, cwd=self.folder, capture_output=True, text=True, check=check).stdout

    def submit(self, *words):
        """The id of the job that ``hpcfed submit`` makes."""
        command = [sys.executable, "-m", "hpcfed", "submit", *words]
        with contextlib.chdir(self.folder):
            done = finish(start(command, PYTHONPATH=TESTS, **self.slurm.environment), 60)
        assert done.status == 0, done.err
        return re.match(r"job (\d+)", done.out)[1]

    def begin(self, *words):
        """The id of a held job that has written checkpoints to the folder run."""
        job = self.submit(*HELD, "--tasks", "2", "--out", "run", *words)
        until(lambda: self.last_round() >= 2, 100)
        return job

    def last_round(self):
        return last_round(self.folder / "run" / "checkpoints")

    def rank(self, job, **named):
        """The process of a rank, which is older than what the rank has started."""
        return min(self.slurm.processes(SLURM_JOB_ID=job, **named))

    def log(self, job):
        """What the job has said."""
        return "\n".join(path.read_text() for path in self.folder.glob(f"*-{job}*.log"))

    def shown(self, job, name):
        """What SLURM knows of a job, by the name that it gives it."""
        return re.search(rf"\b{name}=(\S*)", self.ask("scontrol", "show", "job", job))[1]

    def wait(self, job, seconds=200):
        """The final state of a job: success, or one in which it stays for a while."""
        seen = []

        def rests():
            seen.append(self.shown(job, "JobState"))
            time.sleep(0.25)
            stays = len(seen) > 8 and len(set(seen[-8:])) == 1
            return seen[-1] == "COMPLETED" or (stays and seen[-1] not in ("PENDING", "RUNNING", "COMPLETING"))

        until(rests, seconds)
        return seen[-1]

    def digest(self):
        return read_attributes(self.folder / "run" / "result.h5")["digest"]


@pytest.fixture
def jobs(slurm, tmp_path):
    jobs = Jobs(slurm, tmp_path)
    yield jobs
    jobs.ask("scancel", "--user", "root")


LONG = [*TOY, "--algorithm", "toy:Momentum", "--rounds", "70"]
HELD = [*LONG, "--hurt", "hold"]  # a minute on two ranks


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The digest of the held run, alone and let go from the start."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    assert finish(start([*SERIAL, *LONG, "--out", str(folder)], PYTHONPATH=TESTS), 120).status == 0
    return read_attributes(folder / "result.h5")["digest"]


@pytest.mark.slurm
@pytest.mark.timeout(600)
class TestSlurm:
    """Whatever the cluster does to a job, it ends with the digest of an undisturbed run."""

    def test_a_notice_and_a_lost_node(self, jobs, undisturbed):
        """After the signal that comes before the time limit it saves and is requeued, after the loss of its node it is
        requeued. Each time it goes on."""
        job = jobs.begin()
        jobs.ask("scancel", "--signal=USR1", "--batch", job)
        until(lambda: "checkpoint written" in jobs.log(job), 60)
        saved = jobs.last_round()
        until(lambda: jobs.last_round() > saved, 100)
        node = jobs.shown(job, "BatchHost")
        jobs.ask("scontrol", "update", f"node={node}", "state=down", "reason=lost")
        until(lambda: jobs.shown(job, "JobState") != "RUNNING", 60)
        jobs.ask("scontrol", "update", f"node={node}", "state=resume", check=False)  # it may have come back by itself
        jobs.hold.unlink()
        assert jobs.wait(job) == "COMPLETED", jobs.log(job)
        assert jobs.shown(job, "Restarts") == "2"
        assert jobs.digest() == undisturbed

    def test_the_time_limit_itself(self, jobs, undisturbed):
        """A minute is the shortest limit that SLURM knows, and it looks at the clock twice a minute; the notice comes
        so early that some rounds are left."""
        job = jobs.begin("--time", "1", "--notice", "50")
        chain = jobs.submit("plot", "run", "--after", job)
        until(lambda: "go on with" in jobs.log(job), 100)
        jobs.hold.unlink()
        assert jobs.wait(chain) == "COMPLETED", jobs.log(job)
        assert jobs.shown(job, "JobState") == "COMPLETED"
        assert "run/convergence.png" in jobs.log(chain)
        assert jobs.digest() == undisturbed

    def test_a_cancelled_run_can_be_resumed(self, jobs, undisturbed):
        job = jobs.begin()
        jobs.ask("scancel", job)
        assert jobs.wait(job) == "CANCELLED"
        jobs.hold.unlink()
        after = jobs.submit("resume", "run", "--tasks", "1")
        assert jobs.wait(after) == "COMPLETED", jobs.log(after)
        assert jobs.digest() == undisturbed

    def test_an_array_of_four_shares_a_sweep_and_a_chain_draws_it(self, jobs):
        """One of the four is stopped and requeued; the chain waits for it, too."""
        methods = '[base.algorithm]\nname = "toy:Momentum"\n{}[sweep]\nstep = [0.1, 0.2]\nseeds = [0, 1]\n'
        base = '[base.workload]\nname = "toy:Quadratics"\n[base.run]\nrounds = 40\n'
        (jobs.folder / "s.toml").write_text(base + methods.format('hurt = "hold"\n'))
        (jobs.folder / "alone.toml").write_text(base + methods.format(""))
        array = jobs.submit("sweep", "s.toml", "--array", "4", "--out", "s")
        chain = jobs.submit("plot", "s", "--after", array)
        until(lambda: len(list(jobs.folder.glob("s/*seed*/metrics.jsonl"))) == 4, 100)
        jobs.ask("scancel", "--signal=USR1", "--batch", f"{array}_2")
        until(lambda: "checkpoints written" in jobs.log(f"{array}-2"), 60)
        jobs.hold.unlink()
        assert jobs.wait(chain) == "COMPLETED", jobs.log(chain)
        assert (jobs.folder / "s" / "sensitivity.png").is_file()
        alone = jobs.folder / "alone"
        command = [*SERIAL, "sweep", f"{alone}.toml", "--out", str(alone)]
        assert finish(start(command, PYTHONPATH=TESTS), 60).status == 0
        for other in alone.glob("*/result.h5"):
            digests = [
                read_attributes(path)["digest"] for path in (other, jobs.folder / "s" / other.parent.name / "result.h5")
            ]
            assert digests[0] == digests[1]

    def test_a_killed_rank_is_outlived_within_an_allocation(self, jobs, undisturbed):
        """By mpirun: srun would end the others."""
        job = jobs.begin("--on-failure", "takeover")
        os.kill(jobs.rank(job, OMPI_COMM_WORLD_RANK="1"), signal.SIGKILL)
        until(lambda: "rank 1 was lost" in jobs.log(job), 60)
        jobs.hold.unlink()
        assert jobs.wait(job) == "COMPLETED", jobs.log(job)
        assert jobs.shown(job, "Restarts") == "0"
        assert jobs.digest() == undisturbed

    def test_a_killed_rank_is_no_lost_node(self, jobs):
        """Whatever killed it would kill it again: the job ends."""
        job = jobs.begin()
        os.kill(jobs.rank(job, PMIX_RANK="1"), signal.SIGKILL)
        assert jobs.wait(job) == "FAILED"
        assert jobs.shown(job, "Restarts") == "0"
        assert "go on with hpcfed resume run" in jobs.log(job)

    def test_a_node_that_goes_with_all_that_runs_on_it(self, jobs, undisturbed):
        """The other node, where the script runs, sees the end of the ranks long before SLURM sees that of the node; the
        job goes on with a third one."""
        job = jobs.begin("--nodes", "2")
        assert jobs.shown(job, "NodeList") == "n[1-2]"
        jobs.slurm.lose_node("n2")
        until(lambda: (jobs.shown(job, "Restarts"), jobs.shown(job, "NodeList")) == ("1", "n2"), 100)
        time.sleep(7)  # SLURM sees it later than the job's credential, with which no node would start it, has expired
        jobs.ask("scontrol", "update", "node=n2", "state=down", "reason=lost")
        jobs.hold.unlink()
        assert jobs.wait(job) == "COMPLETED", jobs.log(job)
        assert jobs.shown(job, "NodeList") == "n[1,3]"
        assert jobs.digest() == undisturbed
