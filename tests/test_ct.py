"""`hpcfed ct` as its user runs it: simulated and real scans, the same bits, honest metrics, bad input."""

from __future__ import annotations

import json
import shutil
import sys
import time
import tomllib
from pathlib import Path

import h5py
import numpy as np
import pytest
from conftest import finish, start
from skimage.metrics import peak_signal_noise_ratio, structural_similarity

from hpcfed.errors import ConfigError
from hpcfed.federation import Federation
from hpcfed.lipschitz import lipschitz_constant
from hpcfed.run import run_folder, summary
from hpcfed.streams import Streams
from hpcfed.workloads.ct import Ct

SMALL = [
    "--shape",
    "24,24,8",
    "--views",
    "34",
    "--detector",
    "36",
    "--rounds",
    "6",
    "--record-every",
    "1",
    "--no-pictures",
]
FEDERATED = [*SMALL, "--participants", "5", "--quantize", "100", "--batch", "1"]


def build(**options):
    workload = Ct(**{"shape": (12, 10, 8), "views": 17, "detector": 18, "clients": 3, **options})
    return workload.build(Federation(workload.clients, Streams(1)))


def facts(folder):
    """What hpcfed show tells, without starting it."""
    return summary.facts(run_folder.open_existing(folder))


def test_the_mean_of_the_clients_is_the_data_misfit():
    problem = build(noise=0.5)
    x = np.random.default_rng(0).random((12, 10, 8), dtype=np.float32)
    fed = problem.fed
    mean = fed.mean(fed.map(lambda client, rng: client.value(x)))
    residuals = [client.projector.forward(x) - client.projections for client in fed.clients.values()]
    assert mean == pytest.approx(sum(float((r.astype(float) ** 2).sum()) for r in residuals) / 2, rel=1e-6)
    assert problem.metrics(x, fed)["misfit"] == pytest.approx(mean, rel=1e-6)


def test_gradients_from_batches_are_unbiased():
    problem = build()
    x = np.random.default_rng(0).random((12, 10, 8), dtype=np.float32)
    client = problem.fed.clients[0]
    full = client.gradient(x)
    views = client.projector.num_views
    each = [client.gradient(x, _Fixed(view), 1) for view in range(views)]
    np.testing.assert_allclose(np.mean(each, axis=0), full, rtol=1e-3, atol=1e-3 * np.abs(full).max())


class _Fixed:
    """A stream that always draws one view."""

    def __init__(self, view: int) -> None:
        self._view = view

    def choice(self, total, size, replace):
        return np.array([self._view])


def test_views_are_dealt_without_loss():
    problem = build(views=20)
    sizes = [client.projector.num_views for client in problem.fed.clients.values()]
    assert sizes == [7, 7, 6]
    dealt = np.concatenate([client.projector.angles for client in problem.fed.clients.values()])
    np.testing.assert_allclose(np.sort(dealt), np.arange(20) * np.pi / 20)
    assert not np.array_equal(dealt, np.sort(dealt))


def test_noise_has_the_variance_that_was_asked_for():
    quiet, noisy = build(noise=0.0, views=170), build(noise=0.3, views=170)
    noise = np.concatenate(
        [
            (loud.projections - still.projections).ravel()
            for loud, still in zip(noisy.fed.clients.values(), quiet.fed.clients.values(), strict=True)
        ]
    )
    assert noise.var() == pytest.approx(0.3, rel=5 * np.sqrt(2 / noise.size))
    assert abs(noise.mean()) < 5 * np.sqrt(0.3 / noise.size)


def test_metrics_agree_with_scikit_image():
    problem = build()
    truth = problem.workload.reference((12, 10, 8))
    x = truth + np.random.default_rng(0).normal(0, 0.1, truth.shape).astype(np.float32)
    metrics = problem.metrics(x, problem.fed)
    assert metrics["psnr"] == pytest.approx(peak_signal_noise_ratio(truth, x, data_range=1.0), rel=1e-6)
    slices = [structural_similarity(truth[:, :, z], x[:, :, z], data_range=1.0) for z in range(8)]
    assert metrics["ssim"] == pytest.approx(np.mean(slices), rel=1e-6)
    gradients = [np.diff(x, axis=axis, append=np.take(x, [-1], axis)) for axis in range(3)]
    assert metrics["tv"] == pytest.approx(np.sqrt(sum(g.astype(float) ** 2 for g in gradients)).sum(), rel=1e-5)
    assert metrics["objective"] == pytest.approx(metrics["misfit"] + problem.workload.mu * metrics["tv"], rel=1e-9)


def test_the_automatic_step_is_one_over_the_squared_norm():
    problem = build()
    clients = problem.fed.clients.values()
    voxels = np.eye(12 * 10, dtype=np.float32).reshape(-1, 12, 10)
    matrix = []
    for voxel in voxels:  # all slices are alike: the norm of A is that of one slice
        volume = np.zeros((12, 10, 8), np.float32)
        volume[:, :, 3] = voxel
        matrix.append(np.concatenate([client.projector.forward(volume)[:, :, 3].ravel() for client in clients]))
    exact = np.linalg.norm(np.array(matrix), 2) ** 2
    assert lipschitz_constant(problem.fed, problem.start()) == pytest.approx(exact, rel=0.01)


def test_a_default_run_improves_on_filtered_back_projection(hpcfed, tmp_path):
    finished = hpcfed(
        "ct",
        "--shape",
        "48,48,12",
        "--views",
        "102",
        "--detector",
        "72",
        "--rounds",
        "60",
        "--out",
        str(tmp_path / "r"),
    )
    assert finished.status == 0, finished.err
    lines = [json.loads(line) for line in (tmp_path / "r" / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["psnr"] > lines[0]["psnr"] + 2
    assert lines[-1]["objective"] < lines[0]["objective"]
    assert (tmp_path / "r" / "slices.png").stat().st_size > 10_000
    with h5py.File(tmp_path / "r" / "result.h5") as file:
        assert file["volume"].shape == file["reference"].shape == (48, 48, 12)
        assert file["dual"].shape == (3, 48, 48, 12)
        assert file["volume"].attrs["rotation_axis"] == 35.5
        assert file["history/psnr"].shape == (13,)
        assert file["provenance"].attrs["command"].startswith("hpcfed ct")


def test_nonnegative_is_kept(hpcfed, tmp_path):
    assert hpcfed("ct", *SMALL, "--nonnegative", "--out", str(tmp_path / "r")).status == 0
    assert not list((tmp_path / "r").glob("*.png"))  # --no-pictures
    with h5py.File(tmp_path / "r" / "result.h5") as file:
        assert file["volume"][()].min() >= 0


def test_nonnegative_is_kept_when_messages_are_rounded(hpcfed, tmp_path):
    options = ["--nonnegative", "--quantize", "10", "--out", str(tmp_path / "r")]
    assert hpcfed("ct", *SMALL, *options).status == 0
    with h5py.File(tmp_path / "r" / "result.h5") as file:
        assert file["volume"][()].min() >= 0


def test_the_reference_is_the_phantom_that_was_projected(hpcfed, tmp_path):
    """Also when its file has gone by the end of the run."""
    np.save(tmp_path / "box.npy", np.pad(np.ones((4, 8, 8)), 4))
    options = ["--phantom", str(tmp_path / "box.npy"), "--out", str(tmp_path / "r")]
    process = start([sys.executable, "-m", "hpcfed", "ct", *SMALL[:6], "--rounds", "150", *options])
    while not (tmp_path / "r/metrics.jsonl").exists() and process.poll() is None:
        time.sleep(0.05)
    (tmp_path / "box.npy").unlink()
    finished = finish(process, 120)
    assert finished.status == 0, finished.err
    with h5py.File(tmp_path / "r/result.h5") as file:
        assert file["reference"][()].max() == 1.0


def test_input_paths_hold_from_any_folder(hpcfed, tmp_path, monkeypatch):
    np.save(tmp_path / "box.npy", np.pad(np.ones((4, 8, 8)), 4))
    monkeypatch.chdir(tmp_path)
    assert hpcfed("ct", *SMALL, "--phantom", "box.npy", "--out", "r").status == 0
    monkeypatch.chdir("/")
    again = hpcfed("run", str(tmp_path / "r/config.toml"), "--out", str(tmp_path / "again"))
    assert again.status == 0, again.err
    assert facts(tmp_path / "again")["digest"] == facts(tmp_path / "r")["digest"]


def test_torch_is_never_asked_for(hpcfed, tmp_path):
    """A finder at the head of the import path ends the process if anything asks for torch."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "class Refuse:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] == 'torch':\n"
        "            sys.exit('torch was asked for')\n"
        "sys.meta_path.insert(0, Refuse())\n"
    )
    finished = hpcfed("ct", *SMALL, "--quantize", "20", "--out", str(tmp_path / "r"), PYTHONPATH=str(tmp_path))
    assert finished.status == 0, finished.err


def test_astra_is_loaded_only_for_its_projector(hpcfed, tmp_path):
    (tmp_path / "astra.py").write_text("raise RuntimeError('astra was asked for')\n")
    arguments = ["ct", *SMALL, "--device", "cpu"]
    assert hpcfed(*arguments, "--out", str(tmp_path / "a"), PYTHONPATH=str(tmp_path)).status == 0
    finished = hpcfed(*arguments, "--projector", "astra", "--out", str(tmp_path / "b"), PYTHONPATH=str(tmp_path))
    assert "astra was asked for" in finished.err


def test_the_astra_projector_gives_nearly_the_same_volume(hpcfed, tmp_path):
    for name in ("joseph", "astra"):
        assert hpcfed("ct", *SMALL, "--projector", name, "--out", str(tmp_path / name)).status == 0
    with h5py.File(tmp_path / "joseph/result.h5") as one, h5py.File(tmp_path / "astra/result.h5") as other:
        np.testing.assert_allclose(one["volume"], other["volume"], atol=5e-3)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--shape", "24,24"], "--shape 24,24"),
        (["--shape", "24,x,8"], "--shape 24,x,8"),
        (["--shape", "0,24,8"], "--shape 0,24,8"),
        (["--views", "3"], "--views 3 for --clients 17"),
        (["--participants", "18"], "--participants 18 exceeds --clients 17"),
        (["--algorithm", "fpdfp", "--lam", "0.5"], "--lam 0.5"),
        (["--algorithm", "fpdfp", "--step", "fast"], "--step fast"),
        (["--mu", "nan"], "--mu nan"),
        (["--noise", "-1"], "--noise -1"),
        (["--start", "warm"], "--start warm"),
        (["--phantom", "nowhere.npy"], "nowhere.npy"),
        (["--projections", "nowhere.h5"], "nowhere.h5"),
        (["--axis", "3"], "--axis 3"),
        (["--algorithm", "fedavg", "--nonnegative"], "--nonnegative"),
        (
            ["--quantize", "1000000", "--compressor", "grid", "--clients", "3000", "--views", "3000"],
            "--quantize 1000000",
        ),
        (["--momentum", "0.9"], "--momentum"),
        (["--algorithm", "sgd"], "'sgd' is unknown"),
        (["--quantize", "5", "--block", "row"], "--block 'row'"),
        (["--device", "cuda"], "--device cuda"),
    ],
)
def test_bad_options_are_one_line_and_status_2(hpcfed, tmp_path, options, words):
    finished = hpcfed("ct", *SMALL, *options, "--out", str(tmp_path / "r"))
    assert finished.status == 2
    assert words in finished.err
    assert finished.err.startswith("hpcfed: ")
    assert finished.err.count("\n") == 1


def write_scan(path: Path, views: int = 34) -> None:
    """A scan of an off-centre disc, its axis at column 19.5 of 40."""
    theta = np.arange(views) * 180 / views
    columns = np.arange(40)
    centre = 4 * np.cos(np.deg2rad(theta)) + 2 * np.sin(np.deg2rad(theta))
    chord = 2 * np.sqrt(np.maximum(36 - (columns[None] - 19.5 - centre[:, None]) ** 2, 0))
    counts = 1000 * np.exp(-0.05 * chord)[:, None, :].repeat(2, axis=1)
    with h5py.File(path, "w") as file:
        file["exchange/data"] = (counts + 10).astype(np.float32)
        file["exchange/data_white"] = np.full((3, 2, 40), 1010, np.float32)
        file["exchange/data_dark"] = np.full((3, 2, 40), 10, np.float32)
        file["exchange/theta"] = theta


def test_a_scan_is_reconstructed_at_its_own_scale(hpcfed, tmp_path):
    write_scan(tmp_path / "scan.h5")
    finished = hpcfed(
        "ct", "--projections", str(tmp_path / "scan.h5"), "--rounds", "40", "--mu", "0.05", "--out", str(tmp_path / "r")
    )
    assert finished.status == 0, finished.err
    assert "psnr" not in facts(tmp_path / "r")["metrics"]
    with h5py.File(tmp_path / "r/result.h5") as file:
        volume = file["volume"][()] * file["volume"].attrs["attenuation_scale"]
        assert file["geometry"].attrs["rotation_axis"] == pytest.approx(19.5, abs=0.5)
    kept = tomllib.loads((tmp_path / "r/config.toml").read_text())["workload"]
    assert kept["axis"] == pytest.approx(19.5, abs=0.5)
    assert (kept["shape"], kept["views"], kept["detector"]) == ([40, 40, 2], 34, 40)
    assert "phantom" not in kept
    assert "noise" not in kept
    y, x = np.mgrid[19.5:-20:-1, -19.5:20]
    inside = np.hypot(x - 4, y - 2) < 4.5
    assert volume[inside].mean() == pytest.approx(0.05, rel=0.03)
    assert np.abs(volume[np.hypot(x - 4, y - 2) > 8]).mean() < 0.002


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--axis", "-50"], "--axis -50"),
        (["--axis", "5000"], "--axis 5000"),
        (["--noise", "1"], "--noise 1"),
        (["--phantom", "shepp-logan"], "--phantom shepp-logan"),
        (["--shape", "40,40,3"], "2 detector rows"),
        (["--detector", "41"], "40 columns"),
        (["--views", "35"], "34 views"),
    ],
)
def test_what_does_not_fit_a_scan(hpcfed, tmp_path, options, words):
    write_scan(tmp_path / "scan.h5")
    finished = hpcfed("ct", "--projections", str(tmp_path / "scan.h5"), *options, "--out", str(tmp_path / "r"))
    assert finished.status == 2
    assert words in finished.err
    assert finished.err.strip().count("\n") == 0
    assert not (tmp_path / "r").exists()


def test_divergence_is_one_line(hpcfed, tmp_path):
    options = ["--algorithm", "fpdfp", "--rounds", "300", "--step", "1e30"]
    finished = hpcfed("ct", *SMALL, *options, "--out", str(tmp_path / "r"))
    assert finished.status == 1
    lines = [line for line in finished.err.splitlines() if not line.startswith("round ")]
    assert len(lines) == 1
    assert "diverged" in lines[0]


def test_nan_in_a_view_is_named(hpcfed, tmp_path):
    write_scan(tmp_path / "scan.h5")
    with h5py.File(tmp_path / "scan.h5", "a") as file:
        file["exchange/data"][21, 1, 7] = np.nan
    finished = hpcfed("ct", "--projections", str(tmp_path / "scan.h5"), "--out", str(tmp_path / "r"))
    assert finished.status == 2
    assert "view 21" in finished.err
    assert finished.err.strip().count("\n") == 0


def test_a_phantom_from_a_file(hpcfed, tmp_path):
    volume = np.zeros((9, 20, 20))
    volume[2:7, 5:15, 5:15] = 40.0
    np.save(tmp_path / "box.npy", volume)
    assert hpcfed("ct", *SMALL, "--phantom", str(tmp_path / "box.npy"), "--out", str(tmp_path / "r")).status == 0
    with h5py.File(tmp_path / "r/result.h5") as file:
        assert file["reference"][()].max() == 1.0
        assert file["reference"][12, 12, 4] == 1.0


@pytest.mark.mpi
@pytest.mark.parametrize("options", [SMALL, FEDERATED, [*FEDERATED, "--compressor", "grid", "--block", "all"]])
def test_same_bits_on_any_number_of_ranks(hpcfed, mpirun, tmp_path, options):
    assert hpcfed("ct", *options, "--out", str(tmp_path / "1")).status == 0
    digest = facts(tmp_path / "1")["digest"]
    for ranks in (2, 3):
        finished = mpirun(ranks, "ct", *options, "--out", str(tmp_path / f"{ranks}"))
        assert finished.status == 0, finished.err
        assert facts(tmp_path / f"{ranks}")["digest"] == digest
        assert facts(tmp_path / f"{ranks}")["ranks"] == ranks


@pytest.mark.mpi
def test_same_bits_on_17_ranks_and_resumed_on_two(hpcfed, mpirun, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    finished = mpirun(17, "ct", *FEDERATED, "--checkpoint-every", "2", "--out", str(whole), timeout=240)
    assert finished.status == 0, finished.err
    digest = facts(whole)["digest"]
    short = [word if word != "6" else "3" for word in FEDERATED]
    assert hpcfed("ct", *short, "--out", str(parts)).status == 0
    assert facts(parts)["digest"] != digest
    finished = mpirun(2, "resume", str(parts), "--rounds", "6")
    assert finished.status == 0, finished.err
    assert facts(parts)["digest"] == digest
    assert facts(parts)["rounds"] == 6


@pytest.mark.mpi
def test_any_order_is_close(hpcfed, mpirun, tmp_path):
    assert hpcfed("ct", *SMALL, "--out", str(tmp_path / "a")).status == 0
    assert mpirun(3, "ct", *SMALL, "--sum-order", "any", "--out", str(tmp_path / "b")).status == 0
    with h5py.File(tmp_path / "a/result.h5") as one, h5py.File(tmp_path / "b/result.h5") as other:
        np.testing.assert_allclose(one["volume"], other["volume"], atol=1e-5)


@pytest.mark.mpi
def test_more_ranks_than_clients(mpirun, tmp_path):
    finished = mpirun(3, "ct", *SMALL, "--clients", "2", "--out", str(tmp_path / "r"))
    assert finished.status == 2
    assert "3 ranks for --clients 2" in finished.err
    assert not (tmp_path / "r").exists()


@pytest.mark.mpi
def test_nan_in_a_view_ends_all_ranks(mpirun, tmp_path):
    write_scan(tmp_path / "scan.h5")
    with h5py.File(tmp_path / "scan.h5", "a") as file:
        file["exchange/data"][21, 1, 7] = np.nan
    finished = mpirun(3, "ct", "--projections", str(tmp_path / "scan.h5"), "--out", str(tmp_path / "r"))
    assert finished.status == 2
    assert sum(line.startswith("hpcfed: ") for line in finished.err.splitlines()) == 1


def test_the_real_tooth(hpcfed, shared_data, tmp_path):
    scan = shared_data / "ct" / "tomopy_tooth.h5"
    arguments = ["--projections", str(scan), "--views", "61", "--rounds", "3"]
    finished = hpcfed("ct", *arguments, "--out", str(tmp_path / "r"), timeout=200)
    assert finished.status == 0, finished.err
    with h5py.File(tmp_path / "r/result.h5") as file:
        assert file["volume"].attrs["rotation_axis"] == pytest.approx(295.5, abs=0.5)
        assert file["volume"].shape == (640, 640, 2)


def test_a_resume_that_cannot_begin_leaves_the_result(hpcfed, tmp_path):
    folder = tmp_path / "r"
    assert hpcfed("ct", *SMALL, "--out", str(folder)).status == 0
    digest = facts(folder)["digest"]
    text = (folder / "config.toml").read_text()
    (folder / "config.toml").write_text(text.replace("clients = 17", "clients = 16"))
    assert hpcfed("resume", str(folder), "--rounds", "7").status == 1
    (folder / "config.toml").write_text(text)
    for checkpoint in (folder / "checkpoints").iterdir():
        shutil.rmtree(checkpoint)
    refused = hpcfed("resume", str(folder), "--rounds", "8")
    assert refused.status == 2
    assert "checkpoints are gone" in refused.err
    assert facts(folder)["digest"] == digest
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 7


def test_a_result_that_was_cut_off_is_written_again(hpcfed, tmp_path):
    folder = tmp_path / "r"
    assert hpcfed("ct", *SMALL, "--out", str(folder)).status == 0
    digest = facts(folder)["digest"]
    (folder / "result.h5").write_bytes((folder / "result.h5").read_bytes()[:5000])
    assert "hpcfed resume" in hpcfed("show", str(folder)).err
    assert hpcfed("resume", str(folder)).status == 0
    assert facts(folder)["digest"] == digest


@pytest.mark.parametrize("options", [{"projections": "a.h5", "phantom": "b.npy"}, {"axis": 3.0}, {"views": 2}])
def test_contradictions_are_refused(options):
    with pytest.raises(ConfigError):
        Ct(**options)
