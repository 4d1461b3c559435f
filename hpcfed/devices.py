"""Devices: which one a rank computes on, and the way of arrays between a device and the host.

torch is loaded only where a device or a caller already uses it.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hpcfed.errors import ConfigError

# Of a GPU's free memory, the part that its ranks may share out; the rest is for MPI, contexts and fragmentation.
USABLE_SHARE = 0.8


@dataclass(frozen=True)
class Device:
    """Where a rank computes: ``"cpu"`` or ``"cuda:<index>"``, and the bytes of GPU memory that are its own.

    ``identity`` tells GPUs apart whatever index a process knows them by. ``direct``: every rank has one, and MPI takes
    tensors as they lie there.
    """

    name: str = "cpu"
    memory: int = 0
    identity: str = ""
    direct: bool = False

    @property
    def is_gpu(self) -> bool:
        return self.name != "cpu"

    @property
    def index(self) -> int:
        """The GPU's number on its node."""
        return int(self.name.removeprefix("cuda:"))

    def shared_by(self, ranks: int) -> Device:
        """This device for one of several ranks that have it: each gets an equal part of the memory."""
        return replace(self, memory=self.memory // ranks)

    def put(self, array: np.ndarray[Any, Any]) -> Any:
        """A host array as what clients compute with here: itself on a CPU, a tensor on a GPU."""
        return from_host(array, "torch", self) if self.is_gpu else array

    @contextlib.contextmanager
    def at_rest(self) -> Iterator[None]:
        """For calls that are handed tensors but do not wait for a GPU: it has done all that it was told before."""
        if not self.is_gpu:
            yield
            return
        import torch

        with torch.cuda.device(self.name):
            torch.cuda.current_stream().synchronize()
            yield


def choose(requested: str, local_rank: int) -> Device:
    """The device of this rank: ranks of a node take its GPUs in turn.

    Parameters
    ----------
    requested : ``auto`` (a GPU where ASTRA and torch both find one), ``cpu`` or ``cuda``.
    local_rank : place of this rank among those of its node.

    Raises
    ------
    ConfigError
        If ``cuda`` is requested where there is none.
    """
    if requested == "cpu":
        return Device()
    # From cheap to dear: is there a driver, can ASTRA use it, and only then torch, which takes seconds to load.
    if has_cuda_driver() and _astra_sees_gpu():
        try:
            import torch
        except ImportError:
            torch = None
        if torch is not None and torch.cuda.is_available():
            index = local_rank % torch.cuda.device_count()
            free, _ = torch.cuda.mem_get_info(index)
            identity = str(torch.cuda.get_device_properties(index).uuid)
            return Device(f"cuda:{index}", int(USABLE_SHARE * free), identity)
    if requested == "cuda":
        raise ConfigError(
            "--device cuda: no CUDA device that both ASTRA and torch can use; "
            "run hpcfed doctor, install the extra 'hpcfed[torch]', or use --device cpu"
        )
    return Device()


def has_cuda_driver() -> bool:
    """Whether NVIDIA's driver library can be loaded."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def _astra_sees_gpu() -> bool:
    try:
        import astra
    except ImportError:
        return False
    return bool(astra.use_cuda())


def backend(value: Any) -> str:
    """``"torch"`` for tensors, ``"numpy"`` for everything else."""
    return "torch" if hasattr(value, "detach") else "numpy"


def stays(value: Any) -> bool:
    """Whether it is a tensor of floats on a GPU, which need not go to the host to be sent where MPI takes it."""
    return backend(value) == "torch" and value.is_cuda and host_type(value) in (np.float32, np.float64)


def host_type(value: Any) -> np.dtype[Any]:
    """The NumPy type of an array or tensor."""
    return np.dtype(str(value.dtype).removeprefix("torch."))


def to_host(value: Any) -> np.ndarray[Any, Any]:
    """The value as a C-contiguous NumPy array, without a copy where it is one already; whole numbers as float64."""
    array = _off_device(value.detach()) if backend(value) == "torch" else np.asarray(value)
    if array.dtype.kind in "iub":
        array = array.astype(np.float64)
    return array if array.flags.c_contiguous else np.ascontiguousarray(array)


def _off_device(tensor: Any) -> np.ndarray[Any, Any]:
    """A tensor as a NumPy array; a GPU writes it into page-locked memory, which it can do without the processor."""
    if tensor.is_cuda:
        import torch

        tensor = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)
    array: np.ndarray[Any, Any] = tensor.numpy()
    return array


def from_host(array: np.ndarray[Any, Any], backend: str, device: Device) -> Any:
    """A host array as an array of the backend on the device; a 0-d NumPy array as a number."""
    if backend == "torch":
        import torch

        return torch.from_numpy(array).to(device.name)
    return float(array) if array.ndim == 0 else array
