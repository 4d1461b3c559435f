# Sourced by the other scripts: makes a virtual environment with hpcfed in it, once, and activates it.
#
#   HPCFED_VENV    where it lies (default: .venv in the project)
#   PYTHON         the interpreter to make it with (default: python3)
#
# usage: . scripts/environment.sh EXTRAS        for example mpi, or mpi,test

project=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${HPCFED_VENV:-$project/.venv}
extras=$1
wanted=$(cksum < "$project/pyproject.toml" | cut -d ' ' -f 1)-$extras

if [ ! -e "$venv/.hpcfed-$wanted" ]; then
    echo "making an environment in $venv" >&2
    "${PYTHON:-python3}" -m venv "$venv"
    # Without a GPU torch is installed only for the tests (hpcfed ct does not load it on a CPU), in a version that is
    # fixed so that a local CPU build can serve it: the default build brings gigabytes of CUDA.
    if command -v nvidia-smi > /dev/null && nvidia-smi > /dev/null 2>&1; then
        extras=$extras,torch
    elif [[ ,$extras, == *,test,* || ,$extras, == *,torch,* ]]; then
        "$venv/bin/python" -m pip install --quiet --disable-pip-version-check torch==2.13.0
    fi
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --editable "$project[$extras]"
    touch "$venv/.hpcfed-$wanted"
fi
PATH=$venv/bin:$PATH

# mpirun on one machine: allowed as root, more ranks than cores, ranks not bound to cores that they must share.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export PRTE_MCA_rmaps_default_mapping_policy=${PRTE_MCA_rmaps_default_mapping_policy:-:oversubscribe}
export PRTE_MCA_hwloc_default_binding_policy=${PRTE_MCA_hwloc_default_binding_policy:-none}
