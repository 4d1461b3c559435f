"""One page about a run, sweep or comparison: a single HTML file with its pictures in it, read from the folder alone."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from hpcfed.errors import ConfigError
from hpcfed.report.page import Page, render
from hpcfed.report.run import page_of_run
from hpcfed.report.study import page_of_study
from hpcfed.run.run_folder import RunFolder
from hpcfed.studies.study import Study

__all__ = ["of_run", "of_study"]


def of_run(folder: RunFolder, path: Path) -> Path:
    """Write the page of a run, finished or not, all or nothing.

    Raises
    ------
    ConfigError
        If it cannot be written.
    DataError
        If what is in the folder is damaged.
    """
    return _write(page_of_run(folder), path)


def of_study(study: Study, path: Path) -> Path:
    """Write the page of a sweep or comparison as far as it has come, all or nothing.

    Raises
    ------
    ConfigError, DataError
        As `of_run`.
    """
    return _write(page_of_study(study), path)


def _write(page: Page, path: Path) -> Path:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(render(page), encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        raise ConfigError(f"--out {path} cannot be written: {error.strerror or error}") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
    return path
