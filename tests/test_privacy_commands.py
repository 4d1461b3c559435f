"""``hpcfed private budget`` and ``audit``: numbers, refusals, pictures."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from click.testing import CliRunner
from matplotlib.image import imread

from hpcfed.errors import ConfigError
from hpcfed.privacy.audit import FAULTS
from hpcfed.privacy.commands import private

PAPER = ("budget", "--delta", "1e-6", "--epochs", "50")
MIXED = ("--method", "interleaved", "--samples", "1000", "--private-samples", "750", "--clip", "10")


def call(*args):
    return CliRunner().invoke(private, args, catch_exceptions=False, standalone_mode=False)


def facts(*args):
    return json.loads(call(*args, "--json").output)


@pytest.mark.parametrize(
    ("options", "sigma"),
    [
        (("--clip", "1", "--method", "dp-shuffle"), 75.6601),
        (("--clip", "10", "--method", "pub-priv", "--switch", "12"), 659.59),
        (("--clip", "10", "--method", "priv-pub", "--switch", "37"), 650.85),
        (MIXED, 47.756),
    ],
)
def test_noise_for_a_budget_and_back(options, sigma):
    found = facts(*PAPER, "--epsilon", "1", *options)
    assert found["sigma"] == pytest.approx(sigma, rel=1e-5)
    assert found["epsilon"] == pytest.approx(1, rel=1e-9)
    back = facts(*PAPER, "--sigma", repr(found["sigma"]), *options)
    assert back["epsilon"] == pytest.approx(1, rel=1e-9)
    name, told = call(*PAPER, "--epsilon", "1", *options).output.splitlines()[0].split()
    assert (name, float(told)) == ("sigma", pytest.approx(sigma, rel=1e-5))


def test_what_else_a_budget_says():
    plain = facts(*PAPER, "--epsilon", "1", "--clip", "1")
    assert plain["epsilon_renyi"] == pytest.approx(0.8372, abs=1e-4)
    assert plain["epsilon_gaussian"] == pytest.approx(0.7756, abs=1e-4)
    assert plain["adjacency"] == "replace one record"
    mixed = facts(*PAPER, "--epsilon", "1", *MIXED)
    assert mixed["amplification"] == pytest.approx(1 / 251)
    assert mixed["epsilon_gaussian"] is None
    assert mixed["epsilon_unamplified"] > 15
    assert any("assumed" in condition for condition in mixed["conditions"])


def test_a_batch_needs_less_noise():
    alone, many = (facts(*PAPER, "--epsilon", "1", "--clip", "1", "--batch", batch)["sigma"] for batch in ("1", "10"))
    assert many == pytest.approx(alone / 10)


def test_amplification_is_checked_where_it_can_be():
    checked = ("--step", "0.5", "--smoothness", "2")
    good = facts(*PAPER, "--epsilon", "1", *MIXED, "--loss", "logistic", *checked)
    assert good["amplification"] == pytest.approx(1 / 251)
    for bad in (("--loss", "softmax", *checked), ("--loss", "logistic", "--step", "1.1", "--smoothness", "2")):
        found = facts(*PAPER, "--epsilon", "1", *MIXED, *bad)
        assert found["amplification"] == 1
        assert "no amplification" in found["reason"]
        assert found["sigma"] == pytest.approx(756.60, rel=1e-5)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (("--epsilon", "0", "--clip", "1"), "epsilon = 0"),
        (("--epsilon", "-1", "--clip", "1"), "epsilon = -1"),
        (("--epsilon", "1"), "--clip"),
        (("--epsilon", "1", "--clip", "0"), "clip = 0"),
        (("--sigma", "0", "--clip", "1"), "sigma = 0"),
        (("--clip", "1"), "--epsilon"),
        (("--clip", "1", "--epsilon", "1", "--sigma", "1"), "--sigma"),
        (("--epsilon", "1", "--clip", "1", "--method", "interleaved", "--samples", "9"), "--private-samples"),
        ((*MIXED[:4], "--private-samples", "0", "--clip", "1", "--epsilon", "1"), "--private-samples 0"),
        (("--epsilon", "1", "--clip", "1", "--method", "priv-pub"), "--switch"),
        (("--epsilon", "1", "--clip", "1", "--method", "adam"), "adam"),
        (("--epsilon", "1", "--clip", "1", "--step", "1"), "--loss"),
        (("--epsilon", "1", "--clip", "1", "--loss", "mean"), "--smoothness"),
        (("--epsilon", "1", "--clip", "1", "--plot", "a.nonsense"), "a.nonsense"),
    ],
)
def test_refusals(options, word):
    with pytest.raises(ConfigError) as refused:
        call(*PAPER, *options)
    assert word in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("delta", ["1", "1.5", "0"])
def test_no_delta(delta):
    with pytest.raises(ConfigError, match="delta"):
        call("budget", "--delta", delta, "--epochs", "5", "--epsilon", "1", "--clip", "1")


def test_a_large_delta_is_warned_of():
    options = ("budget", "--delta", "1e-2", "--epochs", "5", "--epsilon", "1", "--clip", "1", "--samples")
    assert "WARNING" in call(*options, "100").output
    assert "WARNING" not in call(*options, "99").output


@pytest.mark.parametrize("options", [("--clip", "1"), MIXED, ("--clip", "1", "--method", "pub-priv", "--switch", "9")])
def test_a_picture(tmp_path, options):
    picture = tmp_path / "budget.png"
    done = call(*PAPER, "--epsilon", "1", *options, "--plot", str(picture))
    assert f"picture {picture}" in done.output
    assert imread(picture).std() > 0.01


def test_an_audit_passes_what_is_right_and_fails_what_is_not():
    right = call("audit", "--runs", "4000")
    assert right.return_value == 0
    assert "no proof of privacy" in right.output
    wrong = call("audit", "--runs", "4000", "--fault", "no-clipping")
    assert wrong.return_value == 1
    assert "CONTRADICTED" in wrong.output


def test_all_faults_are_found():
    found = facts("audit", "--fault", "all", "--runs", "4000")
    assert list(found) == ["no fault", *FAULTS]
    assert [name for name, each in found.items() if not each["contradictions"]] == ["no fault"]


@pytest.mark.parametrize("options", [("--epochs", "0"), ("--public-steps", "-1"), ("--runs", "1"), ("--fault", "x")])
def test_audits_that_make_no_sense(options):
    with pytest.raises(ConfigError):
        call("audit", *options)


def test_the_commands_load_nothing_before_they_are_called():
    code = (
        "import sys, hpcfed.privacy.commands; print([m for m in ('numpy', 'scipy', 'matplotlib') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
