"""The command line: what it makes and prints, and how it says no."""

from __future__ import annotations

import dataclasses
import json
import re
import signal
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
import toy
from conftest import Finished, finish, start

from hpcfed import registry
from hpcfed.cli import commands
from hpcfed.config import RunOptions
from hpcfed.errors import ConfigError, DataError
from hpcfed.ledger import TRAFFIC
from hpcfed.run.checkpoint import latest, round_of
from hpcfed.run.recorder import clock, summary
from hpcfed.run.run_folder import RunFolder, create
from hpcfed.run.runner import STOP_SIGNALS

TOY = ("toy:Quadratics", "--size", "10", "--rounds", "4")


@pytest.fixture
def command(monkeypatch, capsys, tmp_path):
    """``command(*args)``: the command line in this process, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK", "SLURM_PROCID", "HPCFED_TRACEBACK"):
        monkeypatch.delenv(name, raising=False)
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}

    def go(*args):
        monkeypatch.setattr(sys, "argv", ["hpcfed", *args])
        with pytest.raises(SystemExit) as left:
            commands.main({}, list(args))
        return Finished(left.value.code, *capsys.readouterr())

    yield go
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def run(command):
    """``run(out, *args)``: a small run that succeeds, and its facts."""

    def go(out, *args):
        done = command(*TOY, *args, "--out", str(out))
        assert done.status == 0, done.err
        return facts(command, out)

    return go


def facts(command, folder):
    return json.loads(command("show", str(folder), "--json").out, parse_constant=lambda word: pytest.fail(word))


def one_line(done, status, *words):
    """The process ended with this status and said why in one line of its own, without a traceback."""
    assert done.status == status, done.err
    lines = [line for line in done.err.splitlines() if line and not re.match(r"round \d+/\d+ ", line)]
    assert len(lines) == 1, done.err
    assert lines[0].startswith("hpcfed: ")
    for word in words:
        assert word in lines[0], f"{word!r} not in {lines[0]!r}"


class TestWhatItMakes:
    def test_a_run_folder_with_everything(self, command, run, tmp_path):
        run("a")
        made = {path.name for path in (tmp_path / "a").iterdir()}
        assert made >= {"config.toml", "metrics.jsonl", "checkpoints", "result.h5"}
        assert [path.name for path in (tmp_path / "a" / "checkpoints").iterdir()] == ["round-00000004"]
        assert not list((tmp_path / "a").rglob("*.tmp"))

    def test_the_solution_is_the_one_that_plain_numpy_finds(self, run, tmp_path):
        """Gradient descent with client momentum, from the problem's definition."""
        run("a", "--step", "0.25", "--seed", "3")
        client = [(1.0 + c % 3, self.target(c)) for c in range(5)]
        x, momentum = np.zeros(10), [np.zeros(10)] * 5
        for _ in range(4):
            momentum = [0.5 * m + w * (x - b) for m, (w, b) in zip(momentum, client, strict=True)]
            x = x - 0.25 * np.mean(momentum, axis=0)
        with h5py.File(tmp_path / "a" / "result.h5") as file:
            np.testing.assert_allclose(file["x"], x, rtol=1e-5)

    @staticmethod
    def target(client):
        stream = np.random.Generator(np.random.Philox(np.random.SeedSequence(3, spawn_key=(1, 0, 0, client))))
        return stream.standard_normal(10).astype(np.float32)

    def test_without_out_the_folder_has_a_name_of_its_own(self, command, tmp_path):
        assert command(*TOY).status == command(*TOY).status == 0
        assert len(list((tmp_path / "runs").glob("toy.Quadratics-*"))) == 2

    def test_an_empty_folder_will_do(self, run, tmp_path):
        (tmp_path / "empty").mkdir()
        run("empty")

    def test_the_last_words_are_the_numbers_and_the_folder(self, command):
        out = command(*TOY, "--out", "a").out
        for word in ("toy:Quadratics by toy:Momentum", "4 rounds", "5 clients on 1 rank\n", "objective", "digest"):
            assert word in out
        assert out.endswith("run folder a\n")

    def test_the_history_holds_the_recorded_rounds_and_the_last(self, command, run, tmp_path):
        run("a", "--rounds", "7", "--record-every", "3", "--checkpoint-every", "2")
        records = RunFolder(tmp_path / "a").history()
        assert [record["round"] for record in records] == [0, 3, 6, 7]
        with h5py.File(tmp_path / "a" / "result.h5") as file:
            for name in ("objective", *TRAFFIC):
                np.testing.assert_array_equal(file["history"][name], [record[name] for record in records])
            assert set(file["history/seconds"]) == set(records[-1]["seconds"])

    def test_seconds_by_kind_add_up(self, run, tmp_path):
        run("a", "--rounds", "6", "--checkpoint-every", "2")
        for record in RunFolder(tmp_path / "a").history():
            seconds = record["seconds"]
            assert sum(value for name, value in seconds.items() if name != "total") == pytest.approx(seconds["total"])
            assert min(seconds.values()) >= 0
        assert {"compute", "exchange", "metrics", "checkpoint", "other"} <= set(seconds)

    def test_the_result_says_where_it_comes_from(self, run, tmp_path):
        run("a")
        with h5py.File(tmp_path / "a" / "result.h5") as file:
            assert file.attrs["config"] == (tmp_path / "a" / "config.toml").read_text()
            provenance = dict(file["provenance"].attrs)
        assert provenance["command"] == "hpcfed toy:Quadratics --size 10 --rounds 4 --out a"
        assert provenance["numpy"] == np.__version__

    def test_the_digest_is_that_of_the_solution(self, run, tmp_path):
        import hashlib

        digest = run("a")["digest"]
        with h5py.File(tmp_path / "a" / "result.h5") as file:
            assert hashlib.sha256(file["x"][()].tobytes()).hexdigest() == digest


class TestShow:
    def test_json_has_the_promised_keys(self, run):
        found = run("a", "--quantize", "3")
        assert (found["workload"], found["algorithm"]) == ("toy:Quadratics", "toy:Momentum")
        assert (found["clients"], found["ranks"], found["rounds"], found["finished"]) == (5, 1, 4, True)
        assert re.fullmatch("[0-9a-f]{64}", found["digest"])
        assert {"objective", *TRAFFIC} <= set(found["metrics"])
        assert {"total", "compute", "exchange"} <= set(found["seconds"])

    def test_uncompressed_traffic_is_counted_in_closed_form(self, run):
        metrics = run("a")["metrics"]
        up, down = 4 * 5 * 10, 4 * 10  # rounds times clients times elements; measuring and init are not counted
        assert [metrics[name] for name in TRAFFIC] == [4 * up, 4 * down, 32 * up, 32 * down]

    def test_a_table_for_readers(self, command, run):
        found = run("a")
        table = command("show", "a").out
        for word in ("toy:Momentum", found["digest"], "paper bits up", "finished", "yes", "compute seconds"):
            assert word in table

    def test_a_run_that_failed_is_shown_as_far_as_it_came(self, command):
        assert command(*TOY, "--hurt", "raise", "--out", "a").status == 1
        found = facts(command, "a")
        assert (found["finished"], found["digest"], found["rounds"]) == (False, None, 2)
        assert "objective" in found["metrics"]

    def test_a_run_that_diverged_is_still_json(self, command):
        """JSON has no NaN: programs that read it strictly must not fail."""
        assert command(*TOY, "--hurt", "nan", "--out", "a").status == 1
        assert facts(command, "a")["rounds"] == 3

    def test_a_line_that_was_half_written_is_passed_over(self, command, run, tmp_path):
        run("a")
        with (tmp_path / "a" / "metrics.jsonl").open("a") as file:
            file.write('{"round": 5, "obj')
        assert facts(command, "a")["rounds"] == 4

    def test_a_broken_line_in_between_is_named(self, command, run, tmp_path):
        run("a")
        path = tmp_path / "a" / "metrics.jsonl"
        lines = path.read_text().splitlines()
        path.write_text("\n".join([lines[0], "oops", *lines[2:]]))
        one_line(command("show", "a"), 2, "metrics.jsonl, line 2")

    def test_a_broken_result_is_named(self, command, run, tmp_path):
        run("a")
        (tmp_path / "a" / "result.h5").write_bytes(b"nothing")
        one_line(command("show", "a"), 2, "result.h5", "is damaged")

    @pytest.mark.parametrize("verb", ["show", "resume", "plot"])
    def test_folders_that_are_no_runs(self, command, tmp_path, verb):
        (tmp_path / "empty").mkdir()
        one_line(command(verb, "nowhere"), 2, "nowhere", "does not exist")
        one_line(command(verb, "empty"), 2, "empty", "config.toml")


class TestList:
    def test_everything_registered_is_listed_with_what_fits(self, command):
        done = command("list")
        assert done.status == 0
        for table in (registry.WORKLOADS, registry.ALGORITHMS, registry.COMPRESSORS):
            for name in table:
                assert re.search(rf"^  {name} +\S", done.out, re.MULTILINE), name
        for algorithm in registry.fitting_algorithms("ct"):
            assert algorithm in re.search(r"^  ct .*\n +algorithms: (.*)$", done.out, re.MULTILINE)[1]


class TestHelp:
    def test_a_workload_lists_every_option_with_its_default_under_its_part(self, command):
        out = command("ct", "--help").out
        owners = [registry.load("algorithm", name) for name in registry.fitting_algorithms("ct")]
        owners += [registry.load("compressor", name) for name in registry.COMPRESSORS]
        for owner in (*owners, registry.load("workload", "ct"), RunOptions):
            for option in dataclasses.fields(owner):
                assert f"--{option.name.replace('_', '-')}" in out
        for heading in ("Problem: ct", "Algorithm: fpdfp", "Messages", "Run", "What to run"):
            assert f"{heading}:" in out
        assert re.search(r"--clients INT .*\[default: 17\]", out)
        assert re.search(r"--step .*\[default:\s+1\.9/L with fpdfp, else auto\]", out, re.DOTALL)

    def test_a_workload_of_ones_own(self, command):
        out = command("toy:Quadratics", "--algorithm=toy:Descent", "-h").out
        assert "--participants" in out
        assert "--hurt" not in out

    def test_no_command_shows_the_help_as_it_is(self, command):
        done = command()
        assert "Usage: hpcfed [OPTIONS] COMMAND" in done.out + done.err
        assert "hpcfed: Usage" not in done.err

    def test_version(self, command):
        assert re.search(r"\d+\.\d+", command("--version").out)


class TestRepeating:
    @pytest.mark.parametrize("options", ["", "--quantize 3", "--quantize 5 --compressor grid --block 7"])
    def test_the_configuration_of_a_run_repeats_it(self, command, run, options):
        first = run("a", "--seed", "5", "--batch", "2", "--step", "0.1", *options.split())
        assert command("run", "a/config.toml", "--out", "b").status == 0
        second = facts(command, "b")
        assert second["digest"] == first["digest"]
        assert second["metrics"] == first["metrics"]

    def test_options_override_the_file(self, command, run):
        run("a")
        assert command("run", "a/config.toml", "--rounds", "2", "--out", "b").status == 0
        assert facts(command, "b")["rounds"] == 2

    def test_options_of_a_method_that_the_file_names(self, command, run):
        """The file's algorithm is neither registered nor the workload's default: its options count all the same."""
        run("a", "--algorithm", "toy:Descent")
        expected = run("b", "--algorithm", "toy:Descent", "--participants", "2")
        done = command("run", "a/config.toml", "--participants", "2", "--out", "c")
        assert done.status == 0, done.err
        assert facts(command, "c")["digest"] == expected["digest"]

    def test_another_seed_gives_other_numbers(self, run):
        assert run("a", "--seed", "1")["digest"] != run("b", "--seed", "2")["digest"]

    def test_going_on_for_longer_is_as_if_it_had_been_asked_for_at_once(self, command, run, tmp_path):
        expected = run("a", "--rounds", "9", "--batch", "1", "--quantize", "2")
        run("b", "--rounds", "5", "--batch", "1", "--quantize", "2")
        assert command("resume", "b", "--rounds", "9").status == 0
        found = facts(command, "b")
        assert (found["digest"], found["metrics"]) == (expected["digest"], expected["metrics"])
        histories = [RunFolder(tmp_path / name).history() for name in "ab"]
        for one, other in zip(*histories, strict=True):
            assert {**one, "seconds": None} == {**other, "seconds": None}

    def test_a_finished_run_says_so(self, command, run):
        found = run("a")
        done = command("resume", "a")
        assert done.status == 0
        assert "finished" in done.out
        assert facts(command, "a") == found

    def test_what_is_done_cannot_be_undone(self, command, run):
        run("a")
        one_line(command("resume", "a", "--rounds", "2"), 2, "--rounds 2", "4")
        one_line(command("resume", "a", "--rounds", "0"), 2, "--rounds", ": 0 ")

    def test_a_run_without_a_checkpoint_starts_again(self, command, run, tmp_path):
        expected = run("a", "--seed", "2")
        assert command(*TOY, "--seed", "2", "--hurt", "raise", "--out", "b").status == 1
        config = tmp_path / "b" / "config.toml"
        config.write_text(config.read_text().replace('hurt = "raise"', 'hurt = ""'))
        assert command("resume", "b").status == 0
        assert facts(command, "b")["digest"] == expected["digest"]
        assert [record["round"] for record in RunFolder(tmp_path / "b").history()] == [0, 1, 2, 3, 4]

    def test_a_folder_that_cannot_be_written(self, command, run, monkeypatch):
        run("a", "--seed", "2")
        Path("a/result.h5").unlink()
        monkeypatch.setattr("os.access", lambda path, mode: path.name != "checkpoints")
        one_line(command("resume", "a"), 2, "run folder a/checkpoints cannot be written", "cp -r")


MISTAKES = [
    (("toy:Quadratics", "--rounds", "many"), ("--rounds many", "integer")),
    (("toy:Quadratics", "--rounds", "0"), ("--rounds 0", "1")),
    (("toy:Quadratics", "--rounds", "2.5"), ("--rounds 2.5",)),
    (("toy:Quadratics", "--seed", "-1"), ("--seed -1", "0")),
    (("toy:Quadratics", "--step", "nan"), ("--step nan", "finite")),
    (("toy:Quadratics", "--sum-order", "random"), ("--sum-order random", "client", "any")),
    (("toy:Quadratics", "--device", "tpu"), ("--device tpu", "cpu", "cuda")),
    (("toy:Quadratics", "--checkpoint-every", "often"), ("--checkpoint-every 'often'", "600s")),
    (("toy:Quadratics", "--quantize", "-1"), ("--quantize -1",)),
    (("toy:Quadratics", "--block", "rows"), ("--block 'rows'", "slice")),
    (("toy:Quadratics", "--clints", "4"), ("--clints", "--help")),
    (("toy:Quadratics", "--rounds"), ("--rounds", "--help")),
    (("toy:Quadratics", "surplus"), ("surplus",)),
    (("toy:Quadratics", "--algorithm", "best"), ("algorithm 'best'", "fpdfp", "module:Class")),
    (("toy:Quadratics", "--algorithm", "nowhere:Best"), ("nowhere:Best",)),
    (("toy:Quadratics", "--algorithm", "toy:Best"), ("toy:Best",)),
    (("toy:Quadratics", "--algorithm", "fpdfp"), ("fpdfp", "LinearComposite", "toy:Quadratics")),
    (("toy:Quadratics", "--algorithm", "toy:Descent", "--hurt", "nan"), ("--hurt",)),
    (("toy:Quadratics", "--algorithm", "toy:Descent", "--participants", "6"), ("--participants 6", "--clients 5")),
    (("toy:Quadratics", "--compressor", "zip"), ("compressor 'zip'", "qsgd", "grid")),
    (("toy:Nothing",), ("toy:Nothing",)),
    (("ctt",), ("ctt",)),
    (("ct", "--shape", "8,8"), ("--shape 8,8",)),
    (("ct", "--shape", "8,8,0"), ("--shape 8,8,0",)),
    (("ct", "--views", "5", "--clients", "6"), ("--views 5", "--clients 6")),
    (("ct", "--mu", "-1"), ("--mu -1",)),
    (("ct", "--algorithm", "fpdfp", "--step", "fast"), ("--step fast", "auto")),
    (("ct", "--algorithm", "toy:Descent", "--lam", "0.1"), ("--lam", "toy:Descent")),
    (("run",), ("FILE",)),
    (("run", "nowhere.toml"), ("nowhere.toml", "No such file")),
    (("run", "broken.toml"), ("broken.toml", "TOML")),
    (("run", "key.toml"), ("key.toml", "[run] roundz", "rounds")),
    (("run", "table.toml"), ("table.toml", "extra", "workload")),
    (("run", "type.toml"), ("type.toml", "[run] rounds = 'many'")),
    (("run", "name.toml"), ("name.toml", "[workload]", "ct")),
    (("run", "number.toml"), ("3", "algorithm")),
    (("show",), ("DIR",)),
]

FILES = {
    "broken.toml": "[run\n",
    "key.toml": '[workload]\nname = "toy:Quadratics"\n[run]\nroundz = 3\n',
    "table.toml": '[workload]\nname = "toy:Quadratics"\n[extra]\na = 3\n',
    "type.toml": '[workload]\nname = "toy:Quadratics"\n[run]\nrounds = "many"\n',
    "name.toml": "[run]\nrounds = 3\n",
    "number.toml": '[workload]\nname = "toy:Quadratics"\n[algorithm]\nname = 3\n',
}


class TestMistakes:
    """What the user can mend is found before anything is made."""

    @pytest.mark.parametrize(("args", "words"), MISTAKES, ids=[" ".join(args) for args, _ in MISTAKES])
    def test_one_line_says_what_and_how_to_mend_it(self, command, tmp_path, args, words):
        for name, text in FILES.items():
            (tmp_path / name).write_text(text)
        one_line(command(*args), 2, *words)
        assert {path.name for path in tmp_path.iterdir()} == set(FILES)

    def test_a_folder_that_holds_something_stays_as_it_is(self, command, run, tmp_path):
        found = run("a")
        one_line(command(*TOY, "--out", "a"), 2, "--out a", "resume")
        assert facts(command, "a") == found

    def test_a_folder_that_cannot_be_made(self, command, tmp_path):
        (tmp_path / "file").write_text("")
        one_line(command(*TOY, "--out", "file"), 2, "--out file")
        one_line(command(*TOY, "--out", "file/below"), 2, "--out file/below", "cannot be written")
        one_line(command(*TOY, "--out", "/proc/hpcfed"), 2, "--out /proc/hpcfed", "cannot be written")
        one_line(command(*TOY, "--out", "x" * 300), 2, "cannot be written")

    def test_a_mistake_that_only_the_problem_knows(self, command):
        small = ("ct", "--shape", "8,8,2", "--views", "4", "--detector", "12", "--clients", "2", "--device", "cpu")
        one_line(command(*small, "--algorithm", "fpdfp", "--lam", "1", "--out", "a"), 2, "--lam 1", "1/12")


class TestFailures:
    def test_a_round_that_raises_says_where(self, command):
        place = f"{toy.__file__}:"
        done = command(*TOY, "--hurt", "raise", "--out", "a")
        one_line(done, 1, "RuntimeError: something is wrong here", "client 1, round 3", place, "HPCFED_TRACEBACK=1")
        assert "Traceback" not in done.err

    def test_the_traceback_is_shown_to_who_asks(self, command, monkeypatch):
        monkeypatch.setenv("HPCFED_TRACEBACK", "1")
        assert "Traceback (most recent call last)" in command(*TOY, "--hurt", "raise", "--out", "a").err

    def test_data_that_cannot_be_built_say_whose(self, command):
        one_line(command(*TOY, "--fail", "2", "--out", "a"), 1, "cannot be built", "client 2")

    def test_memory_that_does_not_suffice_is_no_error_of_the_program(self, command):
        done = command("toy:Quadratics", "--size", "9" * 14, "--out", "a")
        one_line(done, 1, "the memory does not suffice", "client 0", "make the problem smaller")
        assert "TRACEBACK" not in done.err

    @pytest.mark.parametrize("options", [(), ("--quantize", "4"), ("--quantize", "4", "--compressor", "grid")])
    def test_numbers_that_stop_being_numbers(self, command, options):
        """The last checkpoint is from before."""
        done = command(*TOY, "--hurt", "nan", "--checkpoint-every", "1", *options, "--out", "a")
        one_line(done, 1)
        assert round_of(latest(Path("a/checkpoints"))) == 2

    def test_no_checkpoint_holds_them_even_between_recorded_rounds(self, command):
        """Otherwise the last two checkpoints, all that is kept, could both be worthless."""
        done = command(
            *TOY, "--hurt", "nan", "--rounds", "8", "--record-every", "5", "--checkpoint-every", "1", "--out", "a"
        )
        one_line(done, 1, "diverged")
        assert round_of(latest(Path("a/checkpoints"))) == 2

    def test_divergence_is_named_with_a_remedy(self, command):
        done = command(*TOY, "--hurt", "nan", "--out", "a")
        one_line(done, 1, "toy:Momentum diverged", "round 3", "a smaller --step than 0.2")

    @pytest.mark.filterwarnings("ignore:overflow")
    def test_a_step_that_is_too_long(self, command):
        done = command("toy:Quadratics", "--rounds", "200", "--step", "1e30", "--out", "a")
        one_line(done, 1, "diverged", "a smaller --step than 1e+30")

    def test_interrupted_by_the_user(self, command, monkeypatch):
        def interrupt(self, fed):
            raise KeyboardInterrupt

        monkeypatch.setattr(toy.Quadratics, "build", interrupt)
        one_line(command(*TOY, "--out", "a"), 130, "resume")


class TestAsAProcess:
    def test_success_and_failure_have_their_statuses(self, hpcfed, tmp_path):
        folder = str(tmp_path / "a")
        assert hpcfed(*TOY, "--out", folder, PYTHONPATH=toy.__file__.rpartition("/")[0]).status == 0
        one_line(hpcfed("show", str(tmp_path / "b")), 2, "does not exist")

    def test_a_reader_that_left_is_no_error(self):
        """hpcfed list | head -1"""
        done = finish(start(["bash", "-c", f"{sys.executable} -m hpcfed list | true"]), 60)
        assert (done.status, done.err) == (0, "")

    def test_a_small_run_loads_neither_mpi_nor_torch(self, tmp_path):
        code = (
            "import sys; from hpcfed.cli import commands; sys.argv = ['hpcfed', *sys.argv[1:]]\n"
            "try: commands.main({})\n"
            "finally: print('loaded', *{'mpi4py', 'torch', 'astra', 'numba'} & set(sys.modules))"
        )
        command = [sys.executable, "-c", code, *TOY, "--out", str(tmp_path / "a")]
        done = finish(start(command, PYTHONPATH=toy.__file__.rpartition("/")[0]), 60)
        assert done.out.splitlines()[-1] == "loaded", done.err


class TestRunFolder:
    def test_two_at_the_same_time_do_not_share_one(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        assert len({create(None, "ct").path for _ in range(20)}) == 20

    def test_an_existing_one_is_refused(self, tmp_path):
        create(str(tmp_path / "a"), "ct")
        with pytest.raises(ConfigError, match="exists already"):
            create(str(tmp_path / "a"), "ct")

    def test_the_history_is_kept_up_to_a_round(self, tmp_path):
        folder = create(str(tmp_path / "a"), "ct")
        assert folder.history() == []
        folder.metrics.write_text("".join(json.dumps({"round": n}) + "\n" for n in range(5)) + '{"rou')
        folder.keep_history(2)
        assert [record["round"] for record in folder.history()] == [0, 1, 2]
        folder.metrics.write_text('{"round": 0}\nnonsense\n{"round": 2}\n')
        with pytest.raises(DataError, match="line 2"):
            folder.history()


def test_times_and_summaries_are_written_for_people():
    assert [clock(seconds) for seconds in (0, 59.6, 3661, 360_000)] == ["0:00:00", "0:01:00", "1:01:01", "100:00:00"]
    assert summary({"objective": 1.5, "psnr": 20.123456, "other": 3}) == "objective 1.5  psnr 20.123"
