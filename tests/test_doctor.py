"""The doctor: it finishes whatever is broken, and what it says is true."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import types
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hpcfed.doctor import Examination, node, system, world
from hpcfed.doctor.findings import Finding, attempt, merge, report
from hpcfed.doctor.system import Library
from hpcfed.doctor.world import Rank, World
from hpcfed.ranks.communicator import SerialCommunicator
from hpcfed.ranks.cuda_aware import SWITCH, Answer

OPEN_MPI = Library("Open MPI", "Open MPI v5.0.0", "/lib/libmpi.so")


def rank(**facts: object) -> Rank:
    """A rank of a healthy run under Open MPI on two cores."""
    healthy = Rank(
        host="one",
        versions="hpcfed 1",
        cores=frozenset({0, 1}),
        yields=True,
        resident=1 << 20,
        mpi=OPEN_MPI,
        seconds=1e-3,
        right=True,
    )
    return replace(healthy, **facts)


def marks(findings: list[Finding], what: str) -> list[str]:
    return [finding.mark for finding in findings if finding.what == what]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path


@pytest.mark.parametrize("check", node.CHECKS, ids=lambda check: check.__name__)
def test_every_check_of_a_node_returns(check, here):
    findings = attempt(check, 1)
    assert not [finding for finding in findings if "check failed" in finding.found]
    assert all(finding.what and finding.found for finding in findings)


@pytest.mark.parametrize("check", world.CHECKS, ids=lambda check: check.__name__)
def test_every_check_of_the_ranks_returns(check):
    findings = attempt(check, World([world.tell(SerialCommunicator())], {}))
    assert findings
    assert not [finding for finding in findings if "check failed" in finding.found]


def test_a_failing_check_becomes_a_line():
    def broken_thing(local_size: int) -> Iterator[Finding]:
        yield Finding("ok", "before", "fine")
        raise ZeroDivisionError("no luck\nat all")

    text = report(attempt(broken_thing, 1))
    assert text.splitlines() == [
        "ok  before        fine",
        "!!  broken thing  check failed: ZeroDivisionError: no luck at all",
        "1 problem",
    ]


def test_a_failing_check_does_not_stop_the_examination(here, monkeypatch, capsys):
    def broken(local_size: int) -> Iterator[Finding]:
        raise OSError("gone")

    monkeypatch.setattr(node, "CHECKS", (broken, node.python))
    Examination({}).execute(SerialCommunicator())
    out = capsys.readouterr().out
    assert "!!  broken " in out
    assert "ok  Python " in out
    assert re.search(r"^[1-9]\d* problems?$", out.splitlines()[-1])


def test_report_without_problems_ends_well():
    findings = [Finding("ok", "a", "x"), Finding("--", "longer", "y " * 100, "do this")]
    lines = report(findings).splitlines()
    assert lines[0] == "ok  a       x"
    assert all(line.startswith(" " * 12) for line in lines[2:-1])
    assert lines[-2].strip() == "-> do this"
    assert lines[-1] == "all well"
    assert max(map(len, lines)) <= 120


def test_nodes_that_agree_are_reported_once():
    same, other = Finding("ok", "memory", "enough"), Finding("!!", "memory", "scarce", "buy some")
    assert merge([("n1", [same]), ("n2", [same])]) == [same]
    assert merge([("n1", [same]), ("n2", [other])]) == [
        replace(same, found="n1: enough"),
        replace(other, found="n2: scarce"),
    ]


# -- ASTRA and CUDA ----------------------------------------------------------------------------------------------------


def test_astra_is_asked_for_nothing_three_dimensional(here, monkeypatch):
    """Without a GPU, ASTRA's 3D objects end the process with SIGFPE."""
    import astra

    made = []

    def spy(kind, *args, **kwargs):
        made.append(kind)
        return create(kind, *args, **kwargs)

    def forbidden(*args, **kwargs):
        raise AssertionError("a 3D object")

    create = astra.create_projector
    monkeypatch.setattr(astra, "create_projector", spy)
    for name in ("create", "link"):
        monkeypatch.setattr(astra.data3d, name, forbidden)
    assert [finding.mark for finding in attempt(node.astra, 1)] == ["ok"]
    assert made == ["linear"]


def test_a_pair_that_is_not_matched_is_a_problem(monkeypatch):
    import astra

    right = astra.create_backprojection
    monkeypatch.setattr(astra, "create_backprojection", lambda *args: (right(*args)[0], 1.01 * right(*args)[1]))
    assert [finding.mark for finding in attempt(node.astra, 1)] == ["!!"]


def test_torch_is_not_loaded_where_astra_sees_no_gpu(monkeypatch):
    import astra

    monkeypatch.setattr(astra, "use_cuda", lambda: False)
    monkeypatch.setitem(sys.modules, "torch", None)  # importing it now fails
    monkeypatch.setattr(node, "version", lambda package: "9.9")
    (finding,) = attempt(node.cuda, 1)
    assert "check failed" not in finding.found
    assert finding.mark == "--" or Path("/dev/nvidia0").exists()


@pytest.mark.parametrize(("available", "mark"), [(True, "ok"), (False, "!!")])
def test_gpus_are_named(monkeypatch, available, mark):
    import astra

    device = types.SimpleNamespace(name="Imaginary 1", total_memory=80 << 30)
    cuda = types.SimpleNamespace(
        is_available=lambda: available, device_count=lambda: 2, get_device_properties=lambda index: device
    )
    monkeypatch.setattr(astra, "use_cuda", lambda: True)
    monkeypatch.setattr(node, "version", lambda package: "9.9")
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=cuda))
    (finding,) = attempt(node.cuda, 4)
    assert finding.mark == mark
    if available:
        assert finding.found.startswith("Imaginary 1 with 80.0 GiB, Imaginary 1 with 80.0 GiB; shared by 4 ranks")


# -- the system --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "family"),
    [
        ("mpirun (Open MPI) 5.0.11\n\nReport bugs to https://www.open-mpi.org/community/help/", "Open MPI"),
        ("Open MPI v4.1.4, package: Debian OpenMPI, ident: 4.1.4", "Open MPI"),
        ("prterun (PRRTE) 3.0.2", "Open MPI"),
        ("HYDRA build details:\n    Version:                                 4.1.1", "MPICH"),
        ("MPICH Version:      4.1.1", "MPICH"),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.11 Build 20231005", "MPICH"),
        ("MPI VERSION    : CRAY MPICH version 8.1.28.15", "MPICH"),
        ("MVAPICH2 Version      : 2.3.7", "MPICH"),
        ("slurm 23.11.4", ""),
    ],
)
def test_families_of_mpi(text, family):
    assert system.family(text) == family


def control_groups(root: Path, groups: str, files: dict[str, str]) -> Path:
    files = {"proc/self/cgroup": groups, **{f"sys/fs/cgroup/{name}": text for name, text in files.items()}}
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text and text + "\n")
    return root


@pytest.mark.parametrize(
    ("groups", "files", "memory", "cores"),
    [
        pytest.param(
            "0::/a/b", {"memory.max": "max", "a/memory.max": "1000", "a/b/memory.max": "2000"}, 1000, None, id="v2"
        ),
        pytest.param("0::/", {"memory.max": "max", "cpu.max": "150000 100000"}, None, 1.5, id="v2 cores"),
        pytest.param("0::/", {"cpu.max": "max 100000"}, None, None, id="v2 unlimited"),
        pytest.param(
            "4:memory:/x\n0::/", {"memory/memory.limit_in_bytes": "512"}, 512, None, id="v1, path of the host"
        ),
        pytest.param("1:cpu:/", {"cpu/cpu.cfs_quota_us": "-1"}, None, None, id="v1 unlimited"),
        pytest.param("1:cpu:/", {"cpu/cpu.cfs_quota_us": "50000"}, None, 0.5, id="v1 cores"),
        pytest.param("", {}, None, None, id="none"),
    ],
)
def test_limits_of_control_groups(tmp_path, groups, files, memory, cores):
    root = control_groups(tmp_path, groups, files)
    assert system.memory_limit(root) == memory
    assert system.core_limit(root) == cores


def test_no_control_groups(tmp_path):
    assert system.memory_limit(tmp_path) is None


def test_a_folder_that_cannot_be_written_is_a_problem(here, monkeypatch):
    """A file stands where the folder should be, which stops root as well."""
    (here / "file").touch()
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(here / "file" / "cache"))
    assert marks(attempt(node.kernel_cache, 1), "kernel cache") == ["!!"]


# -- the ranks ---------------------------------------------------------------------------------------------------------


def launcher(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\necho '{text}'\n")
    path.chmod(0o755)


@pytest.mark.parametrize(
    ("text", "mark"), [("HYDRA build details: Version: 4.1.1", "!!"), ("mpirun (Open MPI) 5.0.1", "ok")]
)
def test_launcher_and_library_must_be_of_one_family(tmp_path, monkeypatch, text, mark):
    launcher(tmp_path, "mpirun", text)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    findings = attempt(world.mpi_library, World([rank()], {}))
    assert marks(findings, "launcher")[0] == mark


def test_no_launcher_is_a_problem(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert marks(attempt(world.mpi_library, World([rank()], {})), "launcher") == ["!!"]


def test_no_mpi_library_is_a_problem_with_a_remedy(monkeypatch):
    def none() -> Library:
        raise RuntimeError("cannot load MPI library")

    monkeypatch.setattr(world, "library_of_new_process", none)
    (finding,) = attempt(world.mpi_library, World([rank(mpi=None)], {}))
    assert finding.mark == "!!"
    assert "hpcfed[mpi]" in finding.remedy


@pytest.mark.parametrize("allowed", [False, True])
def test_root_must_be_allowed(monkeypatch, allowed):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(world, "library_of_new_process", lambda: OPEN_MPI)
    for name in ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"):
        monkeypatch.setenv(name, "1")
        if not allowed:
            monkeypatch.delenv(name)
    findings = attempt(world.mpi_library, World([rank(mpi=None)], {}))
    assert marks(findings, "root") == ([] if allowed else ["!!"])


@pytest.mark.parametrize(
    ("ranks", "mark"),
    [
        ([rank()] * 2, "ok"),
        ([rank()] * 3, "--"),
        ([rank(yields=False)] * 3, "!!"),
        ([rank(yields=False, mpi=Library("MPICH", "4", ""))] * 3, "--"),
        ([rank(cores=frozenset({core})) for core in (0, 1)], "ok"),
        ([rank(cores=frozenset({0}))] * 2, "--"),
    ],
)
def test_ranks_that_outnumber_the_cores_must_yield(ranks, mark):
    assert marks(attempt(world.cores, World(ranks, {})), "cores") == [mark]


def test_cores_are_counted_for_each_node():
    ranks = [rank(), rank(), rank(host="two", cores=frozenset({0}))]
    assert marks(attempt(world.cores, World(ranks, {})), "cores") == ["ok", "ok"]


def test_a_wrong_sum_names_the_ranks():
    findings = attempt(world.ranks, World([rank(), rank(right=False), rank(right=False)], {}))
    (finding,) = [finding for finding in findings if finding.what == "Allreduce"]
    assert finding.mark == "!!"
    assert "1, 2" in finding.found


def test_ranks_of_different_versions_are_a_problem():
    findings = attempt(world.ranks, World([rank(), rank(versions="hpcfed 2")], {}))
    assert marks(findings, "versions") == ["!!"]


@pytest.mark.parametrize(
    ("answers", "gpus", "mark", "words", "remedy"),
    [
        ((True, True), ("0", "1"), "ok", "MPI is (asked): sums go from GPU to GPU;", ""),
        ((True, True), ("0", ""), "ok", "MPI is (asked): sums go from GPU to GPU if every rank has one;", ""),
        ((True, False), ("0", "1"), "--", "MPI is not (asked): sums of GPUs go by way of the host", f"{SWITCH}=1"),
        ((False, False), ("", ""), "--", "MPI is not (asked): sums of GPUs go by way of the host", ""),
    ],
)
def test_whether_mpi_takes_what_lies_on_gpus(answers, gpus, mark, words, remedy):
    ranks = [rank(cuda_aware=Answer(yes, "asked"), gpu=gpu) for yes, gpu in zip(answers, gpus, strict=True)]
    (finding,) = [each for each in attempt(world.mpi_library, World(ranks, {})) if each.what == "CUDA-aware"]
    assert (finding.mark, finding.found[: len(words)]) == (mark, words)
    assert remedy in finding.remedy
    assert bool(remedy) == bool(finding.remedy)


def test_a_library_that_breaks_when_it_is_asked_takes_nothing():
    class Broken(SerialCommunicator):
        def cuda_aware(self) -> Answer:
            raise OSError("gone")

    assert world.tell(Broken()).cuda_aware == Answer(False, "OSError: gone")


@pytest.mark.parametrize(("threads", "mark"), [("1", "ok"), ("64", "!!")])
def test_too_many_threads_are_a_problem(monkeypatch, threads, mark):
    def missing() -> list[dict[str, object]]:
        raise ImportError

    monkeypatch.setattr(world, "_thread_pools", missing)
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.setenv(name, threads)
    assert marks(attempt(world.threads, World([rank()] * 2, {})), "threads") == [mark]


def test_settings_say_who_set_them(monkeypatch):
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        monkeypatch.setenv(name, "3")
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    found = [finding.found for finding in attempt(world.settings, World([rank()], {"OMP_NUM_THREADS": "3"}))]
    assert found[0] == "set by hpcfed: OMP_NUM_THREADS=3"
    assert "OPENBLAS_NUM_THREADS=3" in found[1]
    assert "OMP_NUM_THREADS" not in found[1].replace("OPENBLAS_NUM", "")
    assert "MKL_NUM_THREADS" in found[2]


# -- the command -------------------------------------------------------------------------------------------------------


def mpi_version() -> str:
    """What the mpirun beside this Python says of itself."""
    command = [str(Path(sys.executable).parent / "mpirun"), "--version"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[3]


def test_command(hpcfed):
    done = hpcfed("doctor")
    assert done.status == 0, done.err
    assert f"Open MPI v{mpi_version()}" in done.out
    assert "one process without a launcher" in done.out
    assert "check failed" not in done.out
    assert re.fullmatch(r"all well|\d+ problems?", done.out.splitlines()[-1])


@pytest.mark.mpi
def test_command_on_two_ranks_prints_one_report(mpirun):
    done = mpirun(2, "doctor")
    assert done.status == 0, done.err
    assert len(re.findall(r"^.. {2}MPI library ", done.out, re.MULTILINE)) == 1
    assert f"Open MPI v{mpi_version()}" in done.out
    assert re.search(r"^ok {2}ranks +2 on 1 node: \S+ 2$", done.out, re.MULTILINE)
    assert re.search(r"^ok {2}Allreduce +right on all ranks", done.out, re.MULTILINE)
    assert re.search(r"^.. {2}CUDA-aware +MPI is ", done.out, re.MULTILINE)
    assert "check failed" not in done.out
