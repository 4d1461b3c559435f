"""Locks: of the jobs that would write the same files one does, and the others are told whose turn it is.

A lock is a file. It belongs to the process that has locked it (flock(2)), not to its children, and goes when that ends,
however it does; on a network file system also some time after its node was lost. The file stays behind: whoever removed
it might remove one that another process has just opened.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import fcntl
import logging
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from hpcfed.errors import ConfigError

logger = logging.getLogger(__name__)

# For so long a lock is waited for whose process has ended: NFS frees those of a lost node after 90 seconds.
PATIENCE = 120.0
LOOK_SECONDS = 0.2

# Descriptors of what this process has locked, by path.
_held: dict[str, int] = {}


def _forget() -> None:
    """In a child that was forked. Others are never given a descriptor."""
    for file in _held.values():
        os.close(file)
    _held.clear()


os.register_at_fork(after_in_child=_forget)


@contextlib.contextmanager
def locked(path: Path, patience: float = 0.0) -> Iterator[None]:
    """A block that one process at a time is in, of all that name the same file; on a file system without locks, all.

    The file says who is in it. The process itself may enter further such blocks within.

    Parameters
    ----------
    path : the file, in the folder that is locked. It is made if need be.
    patience : seconds to wait for another process. A job that SLURM has put back into the queue waits `PATIENCE`.

    Raises
    ------
    ConfigError
        That says who is in the block, or why the file cannot be written.
    """
    name = os.path.realpath(path)
    if name in _held:
        yield
        return
    if os.environ.get("SLURM_RESTART_COUNT", "0") != "0":  # its last start may have been on a node that is lost
        patience = max(patience, PATIENCE)
    _held[name] = file = _opened(path)
    try:
        _lock(file, path, patience)
        _say(file, f"{_whoami()}\n")
        try:
            yield
        finally:
            if name in _held:
                _say(file, "")
    finally:
        if _held.pop(name, None) is not None:
            os.close(file)


def _opened(path: Path) -> int:
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        raise ConfigError(
            f"{path.parent} cannot be locked: {error.strerror}: allow {path.name} in it to be written, or go on with a "
            "copy elsewhere (cp -r)"
        ) from error
    with contextlib.suppress(OSError):  # another's file; who may write in the folder may lock it
        os.fchmod(file, path.parent.stat().st_mode & 0o666)
    return file


def _lock(file: int, path: Path, patience: float) -> None:
    end = time.monotonic() + patience
    told = False
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):  # no locks here: ENOTSUP, ENOLCK, ENOSYS
                return
        if time.monotonic() >= end:
            raise ConfigError(
                f"another job is at work in {path.parent}: {_holder(file)}: wait for it, or stop it; if it is gone "
                f"for certain, remove {path}"
            )
        if not told:
            logger.info("waiting up to %g s for another job in %s: %s", patience, path.parent, _holder(file))
            told = True
        time.sleep(LOOK_SECONDS)


def _say(file: int, text: str) -> None:
    """Write who is at work. That a full disk has no room for it is no reason to refuse the work."""
    with contextlib.suppress(OSError):
        os.ftruncate(file, 0)
        os.pwrite(file, text.encode(), 0)


def _holder(file: int) -> str:
    with contextlib.suppress(OSError):
        text = os.pread(file, 300, 0).decode(errors="replace").partition("\n")[0]
        return text if text.isprintable() and text else "it does not say which"
    return "which cannot be read"


def _whoami() -> str:
    job = os.environ.get("SLURM_JOB_ID")
    if "SLURM_ARRAY_TASK_ID" in os.environ:
        job = f"{os.environ.get('SLURM_ARRAY_JOB_ID', job)}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    slurm = f"SLURM job {job}, " if job else ""
    since = datetime.datetime.now().astimezone().isoformat(" ", "seconds")
    return f"{slurm}process {os.getpid()} on {socket.gethostname()}, since {since}"
