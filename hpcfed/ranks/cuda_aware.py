"""Whether the MPI library takes arrays that lie in the memory of an NVIDIA GPU.

To hand such an array to a library that does not take it ends the process. So the answer is yes only where the library
says so, or the user does.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

# 1 or 0, the user's own answer: for libraries that say nothing, and for such as promise too much.
SWITCH = "HPCFED_CUDA_AWARE_MPI"
CUDA = 0  # MPIX_GPU_SUPPORT_CUDA in MPICH's mpi.h


@dataclass(frozen=True)
class Answer:
    """Whether it does, and who says so."""

    yes: bool
    reason: str


def ask(version: str, module: str, environment: Mapping[str, str], maps: Path = Path("/proc/self/maps")) -> Answer:
    """The answer of the MPI library, which must be initialised.

    Parameters
    ----------
    version : what the library says of itself.
    module : path of a loaded library in which the names of the MPI library are found, such as mpi4py's own.
    maps : the list of what is loaded.
    """

    def says(name: str, value: str) -> bool:
        return environment.get(name, "").lower() == value

    if environment.get(SWITCH):
        return Answer(any(says(SWITCH, word) for word in ("1", "true", "yes", "on")), SWITCH)
    if "Intel" in version:  # left to itself it may look for GPUs of Intel
        return Answer(says("I_MPI_OFFLOAD", "1") and says("I_MPI_OFFLOAD_MODE", "cuda"), "I_MPI_OFFLOAD_MODE")
    if "CRAY" in version:  # it needs both the variable and a library of its own
        ready = says("MPICH_GPU_SUPPORT_ENABLED", "1") and "libmpi_gtl_cuda" in maps.read_text()
        return Answer(ready, "MPICH_GPU_SUPPORT_ENABLED and libmpi_gtl_cuda")
    library = ctypes.CDLL(module)
    if version.startswith("Open MPI") and hasattr(library, "MPIX_Query_cuda_support"):
        # Before version 5 this tells how the library was built, but not whether that is switched on.
        yes = library.MPIX_Query_cuda_support() == 1 and _flag(library, "opal_cuda_support")
        return Answer(yes, "MPIX_Query_cuda_support")
    if version.startswith("MPICH") and hasattr(library, "MPIX_GPU_query_support"):
        supported = ctypes.c_int(0)
        failed = library.MPIX_GPU_query_support(CUDA, ctypes.byref(supported))
        return Answer(not failed and supported.value == 1, "MPIX_GPU_query_support")
    return Answer(False, "the library does not say")


def _flag(library: ctypes.CDLL, name: str) -> bool:
    """A variable of a library; False if it has none of the name."""
    try:
        return ctypes.c_bool.in_dll(library, name).value
    except ValueError:
        return False
