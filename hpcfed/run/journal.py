"""A journal: what has happened, known also after a crash. A checkpoint is older than the crash, a journal is not."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from hpcfed.errors import DataError
from hpcfed.hdf5 import sync


@dataclass
class Journal:
    """Entries of a file, one JSON object a line, that is only ever appended to. One rank alone writes it.

    Attributes
    ----------
    path : the file; None keeps the entries in memory.
    """

    path: Path | None = field(default=None)

    @cached_property
    def entries(self) -> list[dict[str, Any]]:
        """All entries, those of earlier processes included."""
        if self.path is None or not self.path.exists():
            return []
        text = self.path.read_bytes()
        whole = text.rfind(b"\n") + 1
        if whole < len(text):  # a line that was cut off was never acted on
            os.truncate(self.path, whole)
        try:
            return [dict(json.loads(line)) for line in text[:whole].splitlines()]
        except (ValueError, TypeError) as error:
            raise DataError(f"journal {self.path} is damaged: {error}: restore it, or start the run again") from error

    def add(self, entry: Mapping[str, Any]) -> None:
        """Append an entry. It is on the disk when this returns."""
        entries = self.entries
        if self.path is not None:
            new = not self.path.exists()
            with self.path.open("ab") as file:
                file.write(json.dumps(entry).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
            if new:
                sync(self.path.parent)
        entries.append(dict(entry))
