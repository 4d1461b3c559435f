"""Entry point: tune the environment before NumPy and MPI are loaded, then hand over to the command line."""

from __future__ import annotations

import sys

from hpcfed import environment


def main() -> None:
    """The ``hpcfed`` command."""
    tuned = {} if "--no-mpi-tuning" in sys.argv else environment.tune()
    from hpcfed import cli

    cli.main(tuned)


if __name__ == "__main__":
    main()
