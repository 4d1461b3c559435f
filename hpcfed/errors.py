"""What can go wrong, by who can mend it.

Every message is one line that names the thing, the value and the remedy. Only `hpcfed.cli.commands` prints an error
and turns it into an exit status.
"""

from __future__ import annotations

import pickle
import traceback
from typing import Self, TypeVar

Failure = TypeVar("Failure", bound=BaseException)


class HpcfedError(Exception):
    """Base of every error that hpcfed raises on purpose; the run failed (exit status 1).

    ``everywhere`` is set, on these and other exceptions, when all ranks hold the same error at the same point: then
    rank 0 speaks and all leave in good order, instead of the first rank aborting the others.
    """

    status = 1
    everywhere = False

    def on_all_ranks(self) -> Self:
        """This error, marked as one that every rank raises."""
        return everywhere(self)


class ConfigError(HpcfedError):
    """An option, a configuration file or a combination of them that the user can mend before the run."""

    status = 2


class DataError(HpcfedError):
    """An input file that is missing, unreadable, or does not hold what it should."""

    status = 2


class CheckpointError(HpcfedError):
    """No checkpoint that can be trusted is left in the run folder."""


class DivergedError(HpcfedError):
    """The iterates stopped being numbers."""


class RankLostError(HpcfedError):
    """A rank is gone: killed, crashed, or taken for dead. Every rank that is left gets this error, at its own time."""


class Interrupted(HpcfedError):
    """The run was asked to stop, wrote a checkpoint, and can be resumed."""

    status = 75


def everywhere(error: Failure) -> Failure:
    """The error, marked as one that every rank raises at this point."""
    error.everywhere = True  # type: ignore[attr-defined]
    return error


def place(error: BaseException) -> str:
    """``file:line`` of where an error was raised, also on another rank; empty if unknown."""
    frames = traceback.extract_tb(error.__traceback__)
    return getattr(error, "place", f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "")


def portable(error: Exception) -> Exception:
    """The error as one that other ranks can be told: it knows its `place`, and survives pickling."""
    error.place = place(error)  # type: ignore[attr-defined]
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        stand_in = RuntimeError(f"{type(error).__name__}: {error}")
        stand_in.__dict__.update(place=place(error), __notes__=getattr(error, "__notes__", []))
        return stand_in
    return error
