"""What a good run needs of its environment, set before NumPy and MPI are loaded, where the user did not set it.

Measured on two cores: 17 ranks that spin while they wait are about 20 times slower than 17 that yield, and probing for
fast networks costs a second at every start on a machine that has none. What launchers tell a process is read here, too.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Mapping, MutableMapping
from pathlib import Path

M_MMAP_THRESHOLD = -3  # from malloc.h
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def tune(environment: MutableMapping[str, str] = os.environ) -> dict[str, str]:
    """Set what the user left unset and return it."""
    chosen = {name: value for name, value in wanted(environment, usable_cores()).items() if name not in environment}
    environment.update(chosen)
    return chosen


def wanted(environment: Mapping[str, str], cores: int) -> dict[str, str]:
    """The settings for a process that a launcher described in ``environment``, on a node with that many cores.

    One thread a rank on any number of ranks: the number of threads is part of what fixes the bits of a sum. Compiled
    kernels are kept in the user's cache folder, wherever the package is installed.
    """
    settings = dict.fromkeys(THREADS, "1")
    cache = environment.get("XDG_CACHE_HOME") or os.path.join(environment.get("HOME", "/tmp"), ".cache")
    settings["NUMBA_CACHE_DIR"] = str(Path(cache) / "hpcfed" / "numba")
    ranks = local_ranks(environment)
    if ranks > cores:
        settings["OMPI_MCA_mpi_yield_when_idle"] = "1"
    if ranks and on_one_node(environment):
        # Open MPI's shared-memory transport, without probing for networks; leaving out osc/ucx silences a warning.
        settings |= {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "self,sm,tcp", "OMPI_MCA_osc": "^ucx"}
    return settings


def return_freed_memory() -> None:
    """Keep arrays of a megabyte and more out of the C library's heap, so that freeing them gives the memory back.

    glibc raises its limit for separate mappings to 32 MB as such arrays come and go; at the paper's size that left 100
    MB of holes in the heap of every rank. Other C libraries have no such call, nor the need.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 20)


def usable_cores() -> int:
    """Cores of this node that the job may use. A process bound to one core tells nothing: then all count."""
    bound = len(os.sched_getaffinity(0))
    return bound if bound > 1 else os.cpu_count() or 1


def launched_ranks(environment: Mapping[str, str]) -> int | None:
    """How many ranks a launcher says it started, from the variables it sets: None without a launcher, 0 if unsaid.

    Open MPI's mpirun sets ``OMPI_COMM_WORLD_SIZE``, MPICH's and Intel's ``PMI_SIZE``, ``srun`` the step's size (but
    not inside the batch script itself, which is a step of one task).
    """
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE"):
        if environment.get(name, "").isdigit():
            return int(environment[name])
    step = environment.get("SLURM_STEP_NUM_TASKS", "")
    if "SLURM_PROCID" in environment and step.isdigit() and int(step) > 1:
        return int(step)
    return 0 if "PMIX_RANK" in environment else None


def launched_rank(environment: Mapping[str, str]) -> int:
    """The rank that the launcher gave this process, also where MPI cannot be loaded; 0 without a launcher."""
    for name in ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID"):
        if environment.get(name, "").isdigit():
            return int(environment[name])
    return 0


def local_ranks(environment: Mapping[str, str]) -> int:
    """Ranks on this node as the launcher says, 0 without a launcher."""
    for name in ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "SLURM_NTASKS_PER_NODE"):
        if environment.get(name, "").isdigit():
            return int(environment[name])
    tasks = environment.get("SLURM_STEP_TASKS_PER_NODE", "").split("(")[0].split(",")[0]
    return int(tasks) if tasks.isdigit() else 0


def on_one_node(environment: Mapping[str, str]) -> bool:
    """Whether the launcher put all ranks on this node."""
    size = environment.get("OMPI_COMM_WORLD_SIZE")
    if size is not None:
        return size == environment.get("OMPI_COMM_WORLD_LOCAL_SIZE")
    return environment.get("SLURM_STEP_NUM_NODES") == "1"
