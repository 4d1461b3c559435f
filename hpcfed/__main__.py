"""Entry point: tune the environment before NumPy and MPI are loaded, then hand over to the command line."""

from __future__ import annotations

import sys

from hpcfed import environment


def main() -> None:
    """The ``hpcfed`` command."""
    # This option may stand anywhere on the line: it must be known before the line is parsed.
    args = [word for word in sys.argv[1:] if word != "--no-mpi-tuning"]
    tuned = environment.tune() if len(args) == len(sys.argv) - 1 else {}
    environment.return_freed_memory()
    from hpcfed.cli import commands

    commands.main(tuned, args)


if __name__ == "__main__":
    main()
