#!/usr/bin/env bash
# From a fresh checkout to a first reconstruction: installs hpcfed with an MPI of its own into .venv and reconstructs a
# small Shepp-Logan phantom on 17 ranks. Needs Python 3.11 to 3.13, no root and no compiler. Options are passed on.
set -euo pipefail
. "$(dirname "$0")/environment.sh" mpi

out=runs/quickstart-$(date +%Y%m%d-%H%M%S)
mpirun -n 17 hpcfed ct --shape 128,128,32 --views 340 --detector 192 --out "$out" "$@"
