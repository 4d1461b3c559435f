"""What can go wrong, by who can mend it.

Every message is one line that names the thing, the value and the remedy. Only ``hpcfed.cli`` prints an error and
turns it into an exit status.
"""

from __future__ import annotations

from typing import Self


class HpcfedError(Exception):
    """Base of every error that hpcfed raises on purpose; the run failed (exit status 1).

    ``everywhere`` is set, on these and other exceptions, when all ranks hold the same error at the same point: then
    rank 0 speaks and all leave in good order, instead of the first rank aborting the others.
    """

    status = 1
    everywhere = False

    def on_all_ranks(self) -> Self:
        """This error, marked as one that every rank raises."""
        self.everywhere = True
        return self


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


class Interrupted(HpcfedError):
    """The run was asked to stop, wrote a checkpoint, and can be resumed."""

    status = 75
