"""The GPU's cone and fan projectors against those of the CPU: the same geometry, and nearly the same numbers."""

from __future__ import annotations

import astra
import numpy as np
import pytest

from hpcfed.operators.cone_beam import ConeBeam, FanBeam
from hpcfed.operators.cone_beam_cuda import CudaConeBeam, CudaFanBeam

if not astra.use_cuda():  # asked first: it spares loading torch where there is no GPU
    pytest.skip("ASTRA finds no CUDA device", allow_module_level=True)
torch = pytest.importorskip("torch", reason="torch is not installed")
if not torch.cuda.is_available():
    pytest.skip("torch finds no CUDA device", allow_module_level=True)

pytestmark = pytest.mark.gpu

COLUMNS, ROWS, VIEWS = 44, 20, 12


def circle(tilt: float):
    angles = np.linspace(0, 2 * np.pi, VIEWS, endpoint=False) + 0.1
    zero, one = np.zeros(VIEWS), np.ones(VIEWS)
    away = np.stack([np.sin(angles), -np.cos(angles), zero], axis=1)
    u = np.stack([np.cos(angles), np.sin(angles), zero], axis=1)
    v = np.stack([tilt * one, zero, one], axis=1)
    return np.concatenate([90 * away, -50 * away + 1.5 * u - 0.7 * v, 1.6 * u, 1.4 * v], axis=1)


@pytest.fixture(params=["cone", "tilted", "fan"])
def pair(request):
    """The projectors of both, and a blob off the centre of every axis, away from the borders."""
    shape = (24, 31, 1 if request.param == "fan" else 13)
    vectors = circle(0.05 if request.param == "tilted" else 0.0)
    if request.param == "fan":
        both = FanBeam(shape, vectors, COLUMNS), CudaFanBeam(shape, vectors, COLUMNS, memory=2**28)
    else:
        given = shape, vectors, COLUMNS, ROWS
        both = ConeBeam(*given), CudaConeBeam(*given, memory=2**28)
    y, x, z = np.meshgrid(*(np.arange(size) for size in shape), indexing="ij")
    level = 0 if request.param == "fan" else 5
    blob = np.exp(-(((y - 9) / 4) ** 2 + ((x - 18) / 5) ** 2 + ((z - level) / 2) ** 2)).astype(np.float32)
    return *both, blob


def relative(found, expected):
    return np.linalg.norm(found.cpu().numpy() - expected) / np.linalg.norm(expected)


def test_agrees_with_the_cpu(pair):
    cpu, gpu, blob = pair
    volume = torch.from_numpy(blob).cuda()
    data = cpu.forward(blob)
    views = np.array([7, 2, 3])
    assert relative(gpu.forward(volume), data) < 1e-2
    assert relative(gpu.forward(volume, views), data[views]) < 1e-2
    assert relative(gpu.adjoint(torch.from_numpy(data).cuda()), cpu.adjoint(data)) < 3e-2
    shifted = torch.from_numpy(0.5 * data).cuda()
    expected = cpu.gradient(blob, 0.5 * data, 3.0, views)
    assert relative(gpu.gradient(volume, shifted, 3.0, views), expected) < 3e-2
    assert gpu.misfit(volume, shifted) == pytest.approx(cpu.misfit(blob, 0.5 * data), rel=2e-2)
    expected = cpu.filtered_backprojection(data)
    assert relative(gpu.filtered_backprojection(torch.from_numpy(data).cuda()), expected) < 1e-3
