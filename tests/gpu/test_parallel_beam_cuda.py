"""The GPU projector against the CPU projector: the same geometry, and nearly the same numbers."""

from __future__ import annotations

import astra
import numpy as np
import pytest

from hpcfed.errors import DataError
from hpcfed.operators.parallel_beam import ParallelBeam
from hpcfed.operators.parallel_beam_cuda import CudaParallelBeam

if not astra.use_cuda():  # asked first: it spares loading torch where there is no GPU
    pytest.skip("ASTRA finds no CUDA device", allow_module_level=True)
torch = pytest.importorskip("torch", reason="torch is not installed")
if not torch.cuda.is_available():
    pytest.skip("torch finds no CUDA device", allow_module_level=True)

pytestmark = pytest.mark.gpu

SHAPE, COLUMNS, AXIS = (24, 31, 5), 44, 20.25
ANGLES = np.linspace(0, np.pi, 12, endpoint=False) + 0.1


@pytest.fixture
def pair():
    return ParallelBeam(SHAPE, ANGLES, COLUMNS, AXIS), CudaParallelBeam(SHAPE, ANGLES, COLUMNS, AXIS, memory=2**28)


@pytest.fixture
def smooth():
    """A blob off the centre of every axis, away from the borders, where the two interpolations agree."""
    y, x, z = np.meshgrid(*(np.arange(size) for size in SHAPE), indexing="ij")
    return np.exp(-(((y - 9) / 4) ** 2 + ((x - 18) / 5) ** 2 + ((z - 1) / 2) ** 2)).astype(np.float32)


def relative(found, expected):
    return np.linalg.norm(found.cpu().numpy() - expected) / np.linalg.norm(expected)


def test_agrees_with_the_cpu(pair, smooth):
    cpu, gpu = pair
    volume = torch.from_numpy(smooth).cuda()
    data = cpu.forward(smooth)
    views = np.array([7, 2, 3])
    assert relative(gpu.forward(volume), data) < 1e-2
    assert relative(gpu.forward(volume, views), data[views]) < 1e-2
    assert relative(gpu.adjoint(torch.from_numpy(data).cuda()), cpu.adjoint(data)) < 2e-2
    assert relative(gpu.normal(volume), cpu.normal(smooth)) < 2e-2
    shifted = torch.from_numpy(0.5 * data).cuda()
    expected = cpu.gradient(smooth, 0.5 * data, 3.0, views)
    assert relative(gpu.gradient(volume, shifted, 3.0, views), expected) < 2e-2
    assert gpu.misfit(volume, shifted) == pytest.approx(cpu.misfit(smooth, 0.5 * data), rel=2e-2)
    expected = cpu.filtered_backprojection(data)
    assert relative(gpu.filtered_backprojection(torch.from_numpy(data).cuda()), expected) < 3e-2


def test_is_nearly_its_own_transpose(pair):
    _, gpu = pair
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.rand(SHAPE, generator=generator, device="cuda")
    p = torch.rand((ANGLES.size, COLUMNS, SHAPE[2]), generator=generator, device="cuda")
    left = float((gpu.forward(x).double() * p.double()).sum())
    assert left == pytest.approx(float((x.double() * gpu.adjoint(p).double()).sum()), rel=2e-2)


def test_refuses_another_shape(pair):
    with pytest.raises(DataError, match=r"expected torch\.float32"):
        pair[1].forward(torch.zeros((3, 3, 3), device="cuda"))
