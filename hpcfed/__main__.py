"""Entry point: tune the environment before NumPy and MPI are loaded, then hand over to the command line."""

from __future__ import annotations

import sys

from hpcfed import environment


def main() -> None:
    """The ``hpcfed`` command."""
    leave_alone = "--no-mpi-tuning" in sys.argv
    if leave_alone:  # anywhere on the line: it is no option of a command
        sys.argv.remove("--no-mpi-tuning")
    tuned = {} if leave_alone else environment.tune()
    environment.return_freed_memory()
    from hpcfed import cli

    cli.main(tuned)


if __name__ == "__main__":
    main()
