"""How a run tells the process that launched it how it ended; all that a run needs of `launcher`."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

# The file that says how the run ended: mpirun may report success after it has lost a node.
STATUS_FILE = "HPCFED_STATUS_FILE"
# Beside it, the file in which rank 0 names the run folder as soon as there is one.
FOLDER = "folder"


def tell_folder(folder: Path) -> None:
    """Rank 0 says which folder a run has, if somebody waits for it who will have to say how to resume it."""
    path = os.environ.get(STATUS_FILE)
    if path:
        with suppress(OSError):
            Path(path).with_name(FOLDER).write_text(str(folder), encoding="utf-8")


def tell_status(status: int) -> None:
    """Rank 0, or one that ends all others, says how the run ended, if `run` waits for it."""
    path = os.environ.get(STATUS_FILE)
    if path:
        with suppress(OSError):
            Path(path).write_text(str(status), encoding="ascii")
