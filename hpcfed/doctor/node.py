"""Checks of a node, made by its first rank, which is told how many ranks there are on the node."""

from __future__ import annotations

import importlib
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import hpcfed
from hpcfed.doctor.findings import Finding
from hpcfed.doctor.system import (
    GIBI,
    MEBI,
    core_limit,
    disk_speed,
    human_size,
    memory_limit,
    plural,
    proc_size,
    version,
)

# Modules by the name of their package.
PACKAGES = {
    "numpy": "numpy",
    "scipy": "scipy",
    "numba": "numba",
    "h5py": "h5py",
    "astra-toolbox": "astra",
    "scikit-image": "skimage",
    "matplotlib": "matplotlib",
    "mpi4py": "mpi4py",
}
# Bytes that are written to find out how fast a disk is, and bytes a second below which it is slow.
WRITTEN, SLOW = 16 * MEBI, 20 * MEBI
# What Open MPI may map of /dev/shm for a rank.
SHARED_MEMORY = 16 * MEBI


def python(local_size: int) -> Iterator[Finding]:
    yield Finding("ok", "Python", f"{platform.python_version()}, {sys.executable}, on {platform.platform()}")
    yield Finding("ok", "hpcfed", f"{hpcfed.__version__}, {Path(hpcfed.__file__).parent}")


def packages(local_size: int) -> Iterator[Finding]:
    """Every package can be imported; numba, for one, refuses a numpy that is too new for it."""
    found = []
    for package, module in PACKAGES.items():
        try:
            importlib.import_module(module)
        except Exception as error:  # an ImportError, or what the package makes of a library that it cannot load
            yield Finding("!!", package, f"cannot be imported: {error}", f"pip install --upgrade {package}")
        else:
            found.append(f"{package} {version(package)}")
    yield Finding("ok", "packages", ", ".join(found))


def kernel_cache(local_size: int) -> Iterator[Finding]:
    """Compiled kernels can be kept; otherwise each start compiles them again."""
    folder = Path(os.environ.get("NUMBA_CACHE_DIR") or Path(hpcfed.__file__).parent / "__pycache__")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        remedy = "export NUMBA_CACHE_DIR=a folder that can be written"
        yield Finding("!!", "kernel cache", f"{folder} cannot be written: {error.strerror}", remedy)
    else:
        yield Finding("ok", "kernel cache", str(folder))


def storage(local_size: int) -> Iterator[Finding]:
    """The current folder, where run folders are made, has room and keeps what HDF5 writes."""
    h5py: Any = importlib.import_module("h5py")
    kind = "parallel" if h5py.get_config().mpi else "serial, which is all that hpcfed needs"
    library = f"h5py {h5py.__version__}, HDF5 {h5py.version.hdf5_version}, {kind}"
    free = shutil.disk_usage(".").free
    small = free < GIBI
    remedy = "free some, or choose another disk with --out" if small else ""
    yield Finding("!!" if small else "ok", "disk", f"{human_size(free)} free in {Path.cwd()}", remedy)
    try:
        with tempfile.TemporaryDirectory(dir=".", prefix=".hpcfed-doctor-") as folder:
            path, values = os.path.join(folder, "test.h5"), np.arange(1000.0)
            with h5py.File(path, "w") as file:
                file["values"] = values
            with h5py.File(path, "r") as file:
                same = np.array_equal(file["values"][:], values)
            speed = disk_speed(folder, WRITTEN)
    except OSError as error:
        remedy = "change to a folder that can be written; if locking is refused: export HDF5_USE_FILE_LOCKING=FALSE"
        yield Finding("!!", "HDF5", f"{library}; no file can be written in {Path.cwd()}: {error}", remedy)
    else:
        yield Finding("ok" if same else "!!", "HDF5", f"{library}; a file reads {'' if same else 'NOT '}as written")
        remedy = "checkpoints will take long: choose another disk with --out" if speed < SLOW else ""
        yield Finding("!!" if remedy else "ok", "disk speed", f"{human_size(int(speed))}/s written and on it", remedy)


def memory(local_size: int) -> Iterator[Finding]:
    total, available = proc_size("meminfo", "MemTotal"), proc_size("meminfo", "MemAvailable")
    limit = memory_limit()
    text = f"{human_size(available)} of {human_size(total)} available"
    if limit is not None and limit < total:
        text += f", limited to {human_size(limit)} by the control group"
        available = min(available, limit)
    scarce = available < local_size * 256 * MEBI
    remedy = f"{local_size} ranks need more: ask the scheduler for memory, or start fewer ranks" if scarce else ""
    yield Finding("!!" if scarce else "ok", "memory", text, remedy)


def shared_memory(local_size: int) -> Iterator[Finding]:
    disk = shutil.disk_usage("/dev/shm")
    scarce = disk.free < max(local_size * SHARED_MEMORY, 128 * MEBI)
    remedy = "MPI ranks of a node talk through it: docker run --shm-size=1g" if scarce else ""
    yield Finding(
        "!!" if scarce else "ok", "/dev/shm", f"{human_size(disk.free)} of {human_size(disk.total)} free", remedy
    )


def cores(local_size: int) -> Iterator[Finding]:
    """A limit that the process's core mask does not show, as containers have it."""
    limit, mask = core_limit(), len(os.sched_getaffinity(0))
    if limit is not None and limit < mask:
        remedy = "start no more ranks than that, or give the container more" if local_size > limit else ""
        text = f"the control group leaves {limit:.3g} of {mask} cores to {plural(local_size, 'rank')}"
        yield Finding("!!" if remedy else "--", "core limit", text, remedy)


def astra(local_size: int) -> Iterator[Finding]:
    """Forward and back-projection are transposes: <Ax, y> = <x, A'y>. In 2D: without a GPU, 3D kills the process."""
    import astra

    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((32, 32), np.float32), rng.standard_normal((12, 48), np.float32)
    views = astra.create_proj_geom("parallel", 1.0, 48, np.arange(12) * (np.pi / 12))
    projector = astra.create_projector("linear", views, astra.create_vol_geom(32, 32))
    projections_id, forward = astra.create_sino(x, projector)
    volume_id, back = astra.create_backprojection(y, projector)
    astra.data2d.delete([projections_id, volume_id])
    astra.projector.delete(projector)
    gap = abs(np.vdot(forward, y) - np.vdot(x, back)) / (np.linalg.norm(forward) * np.linalg.norm(y))
    good = bool(gap < 1e-5)
    remedy = "" if good else "reinstall it: pip install --force-reinstall astra-toolbox"
    text = (
        f"{astra.__version__}; 2D projector and back-projector are {'' if good else 'NOT '}transposes, up to {gap:.1g}"
    )
    yield Finding("ok" if good else "!!", "ASTRA", text, remedy)


def cuda(local_size: int) -> Iterator[Finding]:
    """GPUs that both ASTRA and torch see. torch, slow to load, is asked only if ASTRA sees one."""
    import astra

    torch_version = version("torch")
    if not astra.use_cuda():
        if Path("/dev/nvidia0").exists():
            remedy = "compare nvidia-smi with the CUDA version of astra-toolbox, and look at CUDA_VISIBLE_DEVICES"
            yield Finding("!!", "CUDA", "this node has a GPU, but ASTRA cannot use it", remedy)
        else:
            yield Finding("--", "CUDA", f"no GPU: clients compute on the CPU (torch {torch_version})")
        return
    if torch_version == "not installed":
        remedy = "to compute on it: pip install 'hpcfed[torch]'"
        yield Finding("--", "CUDA", "ASTRA sees a GPU, but torch is not installed: clients compute on the CPU", remedy)
        return
    import torch

    if not torch.cuda.is_available():
        remedy = "install a torch that is built for the CUDA version of the driver"
        yield Finding("!!", "CUDA", f"ASTRA sees a GPU, torch {torch_version} does not", remedy)
        return
    devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    names = ", ".join(f"{device.name} with {human_size(device.total_memory)}" for device in devices)
    yield Finding("ok", "CUDA", f"{names}; shared by {plural(local_size, 'rank')}; torch {torch_version}")


CHECKS: Sequence[Callable[[int], Iterator[Finding]]] = (
    python, packages, kernel_cache, storage, memory, shared_memory, cores, astra, cuda,
)  # fmt: skip
