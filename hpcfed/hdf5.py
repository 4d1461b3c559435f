"""HDF5 files whose writing may fail without harm to anything else."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[Any]:
    """A new HDF5 file, closed when the block ends, and on the disk after `sync`.

    Raises
    ------
    OSError
        If the system will not have it written: no room, a quota, no permission. Nothing is left of the file then.
    """
    try:
        with _Output(path, "w+") as output:
            with h5py.File(output, "w") as file:  # type: ignore[arg-type]
                yield file
            if output.failure is not None:
                raise output.failure
    except OSError:
        path.unlink(missing_ok=True)
        raise


def sync(path: Path) -> None:
    """Put a file, or the names of a folder's files, on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class _Output(io.FileIO):
    """A file that keeps to itself what the system says against writing it.

    HDF5 cannot close a file that it could not write; what is left of it in the library may end the process later.
    """

    failure: OSError | None = None

    def write(self, data: Any, /) -> int:
        rest = memoryview(data).cast("B")
        size = len(rest)
        while rest and self.failure is None:  # the system takes at most 2 GiB at a time
            try:
                rest = rest[super().write(rest) :]
            except OSError as error:
                self.failure = error
        return size

    def truncate(self, size: int | None = None, /) -> int:
        try:
            return super().truncate(size)
        except OSError as error:
            self.failure = self.failure or error
            return size or 0
