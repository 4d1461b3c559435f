"""Pages about runs and studies: whole, self-contained, and true to the folder."""

from __future__ import annotations

import json
from base64 import b64decode
from html.parser import HTMLParser

import h5py
import numpy as np
import pytest
from click.testing import CliRunner

from hpcfed import config, report
from hpcfed.cli import outcomes
from hpcfed.errors import ConfigError, DataError
from hpcfed.report.page import Page, Section, Table, render
from hpcfed.run.run_folder import RunFolder
from hpcfed.studies import comparison, sweep

VOID = {"meta", "img", "br", "link", "hr", "input"}


class Reader(HTMLParser):
    """Reads a page: texts by element, pictures, tables, and whatever would be fetched or run."""

    def __init__(self, path):
        super().__init__()
        self.open, self.pictures, self.foreign, self.texts, self.rows = [], [], [], [], []
        self.feed(path.read_text(encoding="utf-8"))
        self.close()
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        known = dict(attrs)
        if tag not in VOID:
            self.open.append(tag)
        if tag == "img":
            assert known["alt"]
            self.pictures.append(known["src"])
        if tag == "tr":
            self.rows.append([])
        if tag in ("th", "td"):
            self.rows[-1].append("")
        if tag in ("script", "link", "iframe", "object") or any(
            name in ("src", "href", "srcset") and not value.startswith("data:") for name, value in attrs
        ):
            self.foreign.append((tag, attrs))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.texts.append(data)
        if {"th", "td"} & set(self.open):
            self.rows[-1][-1] += data

    @property
    def text(self):
        return " ".join(" ".join(self.texts).split())


def read(path):
    page = Reader(path)
    assert not page.foreign
    assert "url(" not in path.read_text(encoding="utf-8")
    for picture in page.pictures:
        assert b64decode(picture.removeprefix("data:image/png;base64,"))[:4] == b"\x89PNG"
    return page


def record(number, **metrics):
    seconds = {"total": 3.0 + number, "compute": 1.5, "exchange": 0.75}
    return {
        "round": number,
        "objective": 8.0 / (1 + number),
        "paper_bits_up": 32 * number,
        "seconds": seconds,
    } | metrics


def make_run(path, records, options=None, finished=True):
    folder = RunFolder(path)
    folder.checkpoints.mkdir(parents=True)
    folder.write_config(config.assemble({"workload": "logreg", "rounds": 4, **(options or {})}).to_toml())
    folder.metrics.write_text("".join(json.dumps(each) + "\n" for each in records))
    if finished:
        with h5py.File(folder.result, "w") as file:
            file.attrs.update(workload="logreg", ranks=2, digest="ab" * 32, peak_memory_bytes=3 * 2**20)
            file["x"] = np.zeros(3)
            file.create_group("provenance").attrs.update(command="hpcfed logreg --step 0.1", numpy="2.0.1", host="tor1")
    return folder


@pytest.fixture
def folder(tmp_path):
    accuracies = (0.5, 0.7, 0.8125)
    return make_run(
        tmp_path / "fast <&> good",
        [record(number, test_accuracy=each) for number, each in zip((0, 2, 4), accuracies, strict=True)],
    )


def test_a_run(folder, tmp_path):
    path = tmp_path / "page.html"
    assert report.of_run(folder, path) == path
    page = read(path)
    assert "logreg by fpdfp: fast <&> good" in page.text  # escaped in the file, or the reader would have stumbled
    assert "4 rounds, 10 clients on 2 ranks, took 0:00:07" in page.text
    assert len(page.pictures) == 1
    assert ["objective", "8", "1.6"] in page.rows
    assert ["test accuracy", "0.5", "0.8125"] in page.rows
    assert ["paper bits up", "128"] in page.rows
    assert ["compute", "1.5", "21%"] in page.rows
    assert ["command", "hpcfed logreg --step 0.1"] in page.rows
    assert ["digest", "ab" * 32] in page.rows
    assert ["memory", "3 MiB a rank at most"] in page.rows
    assert ["numpy", "2.0.1"] in page.rows
    tables = {name: table for name, table in config.read_toml(folder.config).items() if isinstance(table, dict)}
    for section, table in tables.items():
        assert section in page.text
        for name in table:
            assert name.replace("_", " ") in {row[0] for row in page.rows}
    assert "Privacy" not in page.text
    assert "Tuning" not in page.text


def test_every_picture_in_the_folder_is_in_the_page(folder, tmp_path):
    report.of_run(folder, tmp_path / "page.html")
    (folder.path / "holdings.png").write_bytes((folder.path / "convergence.png").read_bytes() + b"holdings")
    page = read(report.of_run(folder, tmp_path / "page.html"))
    contents = [b64decode(picture.partition(",")[2]) for picture in page.pictures]
    assert contents == [(folder.path / f"{name}.png").read_bytes() for name in ("convergence", "holdings")]
    assert "What each client holds." in page.text


def test_a_run_that_has_not_ended(tmp_path):
    folder = make_run(tmp_path / "run", [record(0), record(1)], finished=False)
    page = read(report.of_run(folder, tmp_path / "page.html"))
    assert "not finished" in page.text
    assert "Provenance" not in page.text
    assert ["objective", "8", "4"] in page.rows
    page = read(report.of_run(make_run(tmp_path / "new", [], finished=False), tmp_path / "new.html"))
    assert "No round has been recorded yet." in page.text
    assert not page.pictures


def test_privacy_and_tuning(folder, tmp_path):
    known = {
        "private": False,
        "noise": "the seed is known: this run has NO privacy",
        "epsilon": 1.25,
        "delta": 1e-6,
        "clients": [{"client": 0, "rho": 0.5, "epsilon_gaussian": None}, {"client": 1, "rho": 0.25}],
        "released": ["each client's iterate"],
        "unaccounted": [],
        "ledgers": {"0": {"entries": [1, 2, 3]}},
    }
    (folder.path / "privacy.json").write_text(json.dumps(known))
    tried = [{"step": "1/L", "objective": 0.5}, {"step": "2/L", "objective": None}]
    tuning = {"tune": "step", "rounds": 10, "tried": tried, "chosen": {"step": "1/L"}}
    (folder.path / "tuning.json").write_text(json.dumps(tuning))
    page = read(report.of_run(folder, tmp_path / "page.html"))
    assert "The seed is known: this run has NO privacy" in page.text
    assert ["private", "no"] in page.rows
    assert ["delta", "1e-06"] in page.rows
    assert ["0", "0.5", "–"] in page.rows
    assert ["1", "0.25", "–"] in page.rows
    assert "each client's iterate" in page.text
    assert "entries" not in page.text
    assert "Chosen: step 1/L, after 10 rounds each" in page.text
    assert ["2/L", "–"] in page.rows
    (folder.path / "privacy.json").write_text('{"private": ')
    with pytest.raises(DataError, match=r"privacy\.json is damaged"):
        report.of_run(folder, tmp_path / "page.html")


COMPARISON = """
seeds = [0, 1]

[base.workload]
name = "logreg"

[variants."not <rounded>"]

[variants.diverging]
"""


def test_a_comparison(tmp_path):
    file = tmp_path / "compare.toml"
    file.write_text(COMPARISON)
    study = comparison.read(file, tmp_path / "study")
    study.folder.mkdir()
    for member, objective in zip(study.members, (1.0, 3.0, 5.0, 5.0), strict=True):
        records = [record(0), record(4) | {"objective": objective}]
        make_run(study.run_folder(member).path, records, {"seed": member.options["seed"]})
    page = read(report.of_study(study, tmp_path / "page.html"))
    assert "comparison: study" in page.text
    assert "4 runs: 4 finished" in page.text
    assert len(page.pictures) == 1
    # mean 2, standard deviation sqrt(2); equal numbers have no spread
    assert ["not <rounded>", "2/2", "2\u00a0±\u00a01.4", "128"] in page.rows
    assert ["diverging", "2/2", "5", "128"] in page.rows
    assert 'name = "logreg"' in page.text
    assert ["command", "hpcfed logreg --step 0.1"] in page.rows


def test_a_sweep_that_has_not_ended(tmp_path):
    file = tmp_path / "sweep.toml"
    file.write_text('[base.workload]\nname = "logreg"\n\n[sweep]\nstep = [0.25, 0.5, 1.0]\n')
    study = sweep.read(file, tmp_path / "study")
    study.folder.mkdir()
    page = read(report.of_study(study, tmp_path / "page.html"))
    assert "3 runs: 3 pending" in page.text
    assert "No run has ended yet." in page.text
    make_run(study.run_folder(study.members[1]).path, [record(0), record(4)])
    page = read(report.of_study(study, tmp_path / "page.html"))
    assert "3 runs: 1 finished, 2 pending" in page.text
    assert ["0.5", "1/1", "1.6", "128"] in page.rows
    assert ["0.25", "0/1", "–", "–"] in page.rows
    assert ["1", "finished", "0.5", "0", "1.6", "128", "0:00:07"] in page.rows


def test_whatever_stands_in_the_folder_is_escaped(tmp_path):
    hostile = "<script>alert('&')</script>"
    sections = [Section(hostile, hostile, tables=[Table([(hostile, hostile)], (hostile, hostile), hostile)])]
    sections.append(Section("b", lists={hostile: [hostile]}, text=hostile))
    path = tmp_path / "page.html"
    path.write_text(render(Page(hostile, hostile, {hostile: hostile}, sections)), encoding="utf-8")
    assert read(path).text.count(hostile) == 15


def test_the_command(folder, tmp_path):
    outcome = CliRunner().invoke(outcomes.report, [str(folder.path)])
    assert outcome.exit_code == 0, outcome.output
    assert outcome.output.strip() == str(folder.path / "report.html")
    read(folder.path / "report.html")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        report.of_run(folder, tmp_path / "file" / "page.html")
    with pytest.raises(ConfigError, match=r"has no config\.toml"):
        CliRunner().invoke(outcomes.report, [str(tmp_path)], catch_exceptions=False)
