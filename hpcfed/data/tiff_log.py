"""What tifffile only logs of a damaged file, as an error."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def raised() -> Iterator[None]:
    """A block in which tifffile reads: it returns what is left of a file cut short, and logs the rest.

    Raises
    ------
    ValueError
        At the end, with the first error that was logged; nothing is printed.
    """
    complaints: list[str] = []

    def overhear(record: logging.LogRecord) -> bool:
        if record.levelno >= logging.ERROR:
            complaints.append(record.getMessage())
        return record.levelno < logging.ERROR

    logger = logging.getLogger("tifffile")
    logger.addFilter(overhear)
    try:
        yield
    finally:
        logger.removeFilter(overhear)
    if complaints:
        raise ValueError(complaints[0])
