"""From files and flags to one checked configuration, and back."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import pytest
from annotated_types import Ge, Gt
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcfed import config, registry
from hpcfed.capabilities import LinearComposite, Smooth, explain_missing
from hpcfed.config import Part, RunConfig, RunOptions, assemble, coerce, read_toml, refuse_ranks
from hpcfed.environment import local_ranks, on_one_node, tune, wanted
from hpcfed.errors import ConfigError
from hpcfed.options import option

TOY = {"workload": "toy:Quadratics"}


@dataclass(frozen=True)
class Every:
    """An option of every kind."""

    offers: ClassVar[tuple[type, ...]] = (Smooth, LinearComposite)
    defaults: ClassVar[Mapping[str, Any]] = {"algorithm": "fpdfp", "compressor": "grid", "rounds": 7, "step": "1.5/L"}

    clients: Annotated[int, Ge(1)] = option(4, "how many")
    ratio: Annotated[float, Gt(0)] = option(0.5, "a real number")
    label: str = option("plain", "a text")
    shape: tuple[int, int, int] | None = option(None, "three numbers")
    start: Literal["auto"] | Annotated[float, Gt(0)] = option("auto", "a word or a number")
    positive: bool = option(False, "a switch")
    where: Path = option(Path("data"), "a path")

    def build(self, fed: Any) -> Any:
        raise NotImplementedError


EVERY = {"workload": f"{__name__}:Every"}


class TestWhereValuesComeFrom:
    def test_flag_before_file_before_workload_before_class(self):
        file = {"workload": {"name": EVERY["workload"], "clients": 5, "ratio": 0.25}, "run": {"seed": 8}}
        found = assemble({"ratio": "0.125"}, file, "run.toml")
        assert found.workload.options == Every(clients=5, ratio=0.125)
        assert (found.run.seed, found.run.rounds, found.run.record_every) == (8, 7, RunOptions().record_every)
        assert (found.algorithm.name, found.compressor.name) == ("fpdfp", "grid")

    def test_a_flag_that_replaces_a_part_drops_the_options_the_file_gives_it(self):
        file = {
            "algorithm": {"name": "toy:Momentum", "hurt": "raise", "step": 0.5},
            "workload": {"name": "toy:Quadratics"},
        }
        found = assemble({"algorithm": "toy:Descent"}, file, "run.toml")
        assert found.algorithm.name == "toy:Descent"
        assert found.algorithm.options.step == type(found.algorithm.options)().step
        assert assemble({"algorithm": "toy:Momentum"}, file, "run.toml").algorithm.options.step == 0.5

    def test_the_workloads_defaults_for_its_method_are_not_another_methods(self):
        """Of fpdfp's step, which may be words, another method's step, a number, knows nothing."""
        assert assemble(EVERY).algorithm.options.step == "1.5/L"
        momentum = assemble({**EVERY, "algorithm": "toy:Momentum"}).algorithm.options
        assert momentum == type(momentum)()

    def test_a_preset_for_a_method_is_before_other_defaults_and_after_file_and_flags(self, monkeypatch):
        monkeypatch.setattr(
            Every, "presets", {"fpdfp": {"rounds": 9, "lam": 0.01}, "fedavg": {"seed": 3}}, raising=False
        )
        found = assemble(EVERY)
        assert (found.run.rounds, found.run.seed) == (9, RunOptions().seed)
        assert (found.algorithm.options.lam, found.algorithm.options.step) == (0.01, "1.5/L")
        file = {"workload": {"name": EVERY["workload"]}, "run": {"rounds": 5}, "algorithm": {"lam": 0.02}}
        found = assemble({"lam": "0.03"}, file, "run.toml")
        assert (found.run.rounds, found.algorithm.options.lam) == (5, 0.03)
        found = assemble({**EVERY, "algorithm": "fedavg"})
        assert (found.run.rounds, found.run.seed) == (7, 3)

    def test_nothing_given_is_not_changed(self):
        file = {"workload": {"name": "toy:Quadratics"}, "algorithm": {"step": 0.5}}
        before = repr(file)
        assemble({}, file, "run.toml")
        assert repr(file) == before


class TestRoundTrip:
    @settings(max_examples=40, deadline=None)
    @given(
        ratio=st.floats(1e-300, 1e300),
        label=st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
        shape=st.none() | st.tuples(*[st.integers(1, 10**6)] * 3),
        start=st.just("auto") | st.floats(1e-300, 1e300),
        positive=st.booleans(),
        rounds=st.integers(1, 10**9),
    )
    def test_the_file_of_a_run_gives_the_same_run(self, ratio, label, shape, start, positive, rounds):
        options = Every(2, ratio, label, shape, start, positive)
        run = RunConfig(
            RunOptions(rounds=rounds, out="elsewhere"),
            Part(EVERY["workload"], options),
            Part("fpdfp", registry.load("algorithm", "fpdfp")()),
            Part("qsgd", registry.load("compressor", "qsgd")(20, "7")),
        )
        found = assemble({}, tomllib.loads(run.to_toml()), "config.toml")
        assert found.workload.options == options
        assert found.run == dataclasses.replace(run.run, out=None)
        assert (found.algorithm, found.compressor) == (run.algorithm, run.compressor)

    def test_it_is_complete(self):
        """Every option that has a value is written, so that later defaults cannot change an old run."""
        run = assemble({**EVERY, "shape": "1,2,3", "out": "there"})
        tables = tomllib.loads(run.to_toml())
        for section in ("run", *config.SECTIONS):
            owner = run.run if section == "run" else getattr(run, section).options
            given = {f.name for f in dataclasses.fields(owner) if getattr(owner, f.name) is not None} - {"out"}
            assert set(tables[section]) - {"name"} == given


class TestCoercion:
    @pytest.mark.parametrize(
        ("name", "text", "value"),
        [
            ("clients", "7", 7),
            ("clients", 7, 7),
            ("ratio", "1e-3", 1e-3),
            ("ratio", 2, 2.0),
            ("label", 512, "512"),
            ("label", 0.1, "0.1"),
            ("shape", "4, 5,6", (4, 5, 6)),
            ("shape", [4, 5, 6], (4, 5, 6)),
            ("start", "auto", "auto"),
            ("start", "0.5", 0.5),
            ("positive", True, True),
            ("where", "a/b", Path("a/b")),
        ],
    )
    def test_what_fits(self, name, text, value):
        found = coerce(Every, name, text, "here")
        assert found == value
        assert type(found) is type(value)

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("clients", "many"),
            ("clients", "0"),
            ("clients", 2.5),
            ("clients", True),
            ("clients", [3]),
            ("ratio", "half"),
            ("ratio", "nan"),
            ("ratio", float("inf")),
            ("ratio", "0"),
            ("ratio", True),
            ("label", [1]),
            ("label", True),
            ("shape", "4,5"),
            ("shape", "4,5,6,7"),
            ("shape", "4,x,6"),
            ("shape", 4),
            ("start", "fast"),
            ("start", "-1"),
            ("positive", "perhaps"),
            ("positive", 2),
        ],
    )
    def test_what_does_not_is_refused_in_one_line_that_says_where(self, name, value):
        with pytest.raises(ConfigError) as caught:
            coerce(Every, name, value, f"--{name} {value}")
        assert str(caught.value).startswith(f"--{name} {value}: ")
        assert "\n" not in str(caught.value)


def refusal(given, file=None):
    with pytest.raises(ConfigError) as caught:
        assemble(given, file, "run.toml")
    message = str(caught.value)
    assert caught.value.status == 2
    assert "\n" not in message
    return message


class TestRefusals:
    """Every message names the thing and the value, and what there is instead."""

    def test_unknown_names(self):
        assert "'ctt'" in refusal({"workload": "ctt"})
        assert "ct" in refusal({"workload": "ctt"})
        for section in ("algorithm", "compressor"):
            message = refusal({**TOY, section: "best"})
            assert f"{section} 'best' is unknown" in message
            assert {"algorithm": "fpdfp", "compressor": "grid"}[section] in message

    @pytest.mark.parametrize("target", ["nowhere:Class", "toy:Nothing", "toy:", ":Momentum"])
    def test_classes_that_cannot_be_loaded(self, target):
        assert repr(target) in refusal({**TOY, "algorithm": target})

    @pytest.mark.parametrize(("section", "target"), [
        ("algorithm", "toy:Problem"), ("algorithm", "toy:Quadratics"), ("workload", "toy:Momentum"),
        ("compressor", "toy:Momentum"), ("algorithm", "os:path"),
    ])  # fmt: skip
    def test_classes_that_are_something_else(self, section, target):
        assert target in refusal({**TOY, section: target})

    def test_an_option_of_another_algorithm(self):
        message = refusal({**TOY, "algorithm": "toy:Descent", "hurt": "raise"})
        assert "--hurt" in message
        assert "toy:Descent" in message

    def test_keys_that_no_part_has(self):
        base = {"workload": {"name": "toy:Quadratics"}}
        owners = {"run": "a run", "workload": "toy:Quadratics", "algorithm": "toy:Momentum", "compressor": "qsgd"}
        for section, name in owners.items():
            message = refusal({}, {**base, section: {**base.get(section, {}), "roundz": 3}})
            assert f"run.toml: [{section}] roundz" in message
            assert name in message

    def test_tables_that_there_are_not(self):
        assert "extra" in refusal(TOY, {"extra": {"a": 1}})
        assert "workload" in refusal(TOY, {"extra": {"a": 1}})
        assert "rounds" in refusal(TOY, {"rounds": 3})
        assert "algorithm" in refusal(TOY, {"algorithm": "fpdfp"})

    @pytest.mark.parametrize("name", [3, ["qsgd"], True, {"a": 1}])
    @pytest.mark.parametrize("section", ["algorithm", "compressor", "workload"])
    def test_names_that_are_not_text(self, section, name):
        message = refusal({} if section == "workload" else TOY, {section: {"name": name}})
        assert "run.toml" in message or section in message

    def test_a_value_of_the_wrong_type_in_a_file(self):
        message = refusal(TOY, {"run": {"rounds": "many"}})
        assert "run.toml: [run] rounds = 'many'" in message

    def test_no_workload(self):
        assert "[workload]" in refusal({}, {"run": {"rounds": 3}})

    def test_a_method_that_does_not_fit(self):
        message = refusal({**TOY, "algorithm": "fpdfp"})
        assert "LinearComposite" in message
        assert "Smooth" in message
        assert explain_missing("a", (Smooth,), "w", (LinearComposite, Smooth)) is None

    def test_more_participants_than_clients(self):
        message = refusal({**TOY, "algorithm": "toy:Descent", "participants": "6", "clients": "5"})
        assert "--participants 6" in message
        assert "--clients 5" in message

    def test_more_ranks_than_clients(self):
        run = assemble({**TOY, "clients": "3"})
        refuse_ranks(run, 3)
        with pytest.raises(ConfigError, match="4 ranks for --clients 3"):
            refuse_ranks(run, 4)

    @pytest.mark.parametrize("text", ["often", "-1", "5 s", "1.5", "s", "", "1d", "²", "inf s"])
    def test_how_often_to_checkpoint(self, text):
        assert "--checkpoint-every" in refusal({**TOY, "checkpoint_every": text})

    def test_what_a_file_says_is_named_as_it_stands_there_unless_a_flag_overrides_it(self):
        file = {"run": {"checkpoint_every": 1.5}}
        message = refusal(TOY, file)
        assert message.startswith("run.toml: [run] checkpoint_every = 1.5: --checkpoint-every '1.5': give rounds")
        message = refusal({**TOY, "checkpoint_every": "1.5"}, file)
        assert message.startswith("--checkpoint-every '1.5': give rounds")

    @pytest.mark.parametrize(
        ("text", "rule"),
        [("20", (20, 0)), ("0", (0, 0)), ("600s", (0, 600)), ("1.5m", (0, 90)), ("2h", (0, 7200)), (" 5 ", (5, 0))],
    )
    def test_rounds_or_time_between_checkpoints(self, text, rule):
        assert RunOptions(checkpoint_every=text).checkpoint_rule() == rule


class TestFiles:
    def test_missing_broken_or_binary(self, tmp_path):
        broken, binary = tmp_path / "broken.toml", tmp_path / "binary.toml"
        broken.write_text("[run\nrounds = 3")
        binary.write_bytes(b"\xff\xfe\x00")
        for path, reason in (
            (tmp_path / "no.toml", "No such file"),
            (broken, "TOML"),
            (binary, "read"),
            (tmp_path, "directory"),
        ):
            with pytest.raises(ConfigError, match=reason) as caught:
                read_toml(path)
            assert str(path) in str(caught.value)
            assert "\n" not in str(caught.value)


class TestEnvironment:
    """What is set before NumPy and MPI are loaded."""

    mpirun: ClassVar = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "HOME": "/home/me"}

    def test_what_the_user_set_stays(self):
        environment = {"OMP_NUM_THREADS": "8", "HOME": "/home/me"}
        chosen = tune(environment)
        assert environment["OMP_NUM_THREADS"] == "8"
        assert "OMP_NUM_THREADS" not in chosen
        assert environment["OPENBLAS_NUM_THREADS"] == "1"

    def test_ranks_that_wait_give_way_where_there_are_more_than_cores(self):
        assert wanted(self.mpirun, cores=2)["OMPI_MCA_mpi_yield_when_idle"] == "1"
        assert "OMPI_MCA_mpi_yield_when_idle" not in wanted(self.mpirun, cores=4)

    def test_networks_are_not_looked_for_on_one_node_alone(self):
        assert wanted(self.mpirun, 4)["OMPI_MCA_pml"] == "ob1"
        assert "OMPI_MCA_pml" not in wanted({**self.mpirun, "OMPI_COMM_WORLD_SIZE": "8"}, 4)
        assert "OMPI_MCA_pml" not in wanted({"HOME": "/home/me"}, 4)

    def test_slurm_says_it_in_its_own_words(self):
        step = {"SLURM_STEP_TASKS_PER_NODE": "8(x2),3", "SLURM_STEP_NUM_NODES": "3"}
        assert local_ranks(step) == 8
        assert not on_one_node(step)
        assert on_one_node({"SLURM_STEP_NUM_NODES": "1"})

    def test_compiled_kernels_are_kept_in_the_users_cache(self):
        assert wanted({"HOME": "/home/me"}, 1)["NUMBA_CACHE_DIR"] == "/home/me/.cache/hpcfed/numba"
        assert wanted({"HOME": "/home/me", "XDG_CACHE_HOME": "/c"}, 1)["NUMBA_CACHE_DIR"] == "/c/hpcfed/numba"
