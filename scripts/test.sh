#!/usr/bin/env bash
# The whole suite: format, lint, types, then the tests, those on several ranks and on a private SLURM last. Makes the
# environment if needed, and installs SLURM where root may (slurm.sh says when, and what leaves the system as it is).
# Arguments go to pytest: scripts/test.sh -k checkpoint
set -euo pipefail
. "$(dirname "$0")/environment.sh" mpi,test
cd "$project"

ruff format --check .
ruff check .
mypy
export OMP_NUM_THREADS=1
if [ $# -gt 0 ]; then
    exec pytest "$@"
fi
pytest -n auto -m "not mpi and not slurm"
pytest -m mpi
bash scripts/slurm.sh
pytest -m slurm
