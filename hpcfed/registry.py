"""What there is: three tables from a name to ``"module:Class"``. Nothing is imported before it is used.

A name with a colon is a class of the user's own: ``--algorithm my_methods:HeavyBall`` imports ``my_methods`` from the
current folder or the Python path.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

from hpcfed.capabilities import explain_missing
from hpcfed.errors import ConfigError

ALGORITHMS = {
    "fpdfp": "hpcfed.algorithms.fpdfp:Fpdfp",
    "vm-pdfp": "hpcfed.algorithms.vm_pdfp:VmPdfp",
    "fedavg": "hpcfed.algorithms.fedavg:FedAvg",
    "fedmid": "hpcfed.algorithms.fedmid:FedMid",
    "feddualavg": "hpcfed.algorithms.feddualavg:FedDualAvg",
    "fedds": "hpcfed.algorithms.fedds:FedDs",
    "fedsvrbgd": "hpcfed.algorithms.fedsvrbgd:FedSvrbgd",
    "f2bsa": "hpcfed.algorithms.f2bsa:F2bsa",
    "f2sa": "hpcfed.algorithms.f2sa:F2sa",
    "fednest": "hpcfed.algorithms.fednest:FedNest",
    "fedmbo": "hpcfed.algorithms.fedmbo:FedMbo",
    "localbsgvrm": "hpcfed.algorithms.localbsgvrm:LocalBsgvrm",
    "fedbioacc": "hpcfed.algorithms.fedbioacc:FedBioAcc",
    "memfbo": "hpcfed.algorithms.memfbo:MemFbo",
    "mfcgd": "hpcfed.algorithms.mfcgd:Mfcgd",
    "adamfcgd": "hpcfed.algorithms.adamfcgd:AdaMfcgd",
    "comfedl": "hpcfed.algorithms.comfedl:ComFedL",
    "localmoml": "hpcfed.algorithms.localmoml:LocalMoml",
    "per-fedavg": "hpcfed.algorithms.per_fedavg:PerFedAvg",
    "localscgd": "hpcfed.algorithms.localscgd:LocalScgd",
    "localscgdm": "hpcfed.algorithms.localscgdm:LocalScgdm",
    "fednest-comp": "hpcfed.algorithms.fednest_comp:FedNestComp",
    "dp-shuffle": "hpcfed.algorithms.dp_shuffle:DpShuffle",
    "priv-pub": "hpcfed.algorithms.priv_pub:PrivPub",
    "pub-priv": "hpcfed.algorithms.pub_priv:PubPriv",
    "interleaved": "hpcfed.algorithms.interleaved:Interleaved",
    "public-only": "hpcfed.algorithms.public_only:PublicOnly",
    "plain": "hpcfed.algorithms.plain:Plain",
    "dp-sgd": "hpcfed.algorithms.dp_sgd:DpSgd",
}

WORKLOADS = {
    "ct": "hpcfed.workloads.ct:Ct",
    "logreg": "hpcfed.workloads.logreg:LogReg",
    "robust": "hpcfed.workloads.robust:Robust",
    "maml": "hpcfed.workloads.maml:Maml",
    "hyperopt": "hpcfed.workloads.hyperopt:Hyperopt",
    "prune": "hpcfed.workloads.prune:Prune",
    "private": "hpcfed.workloads.private:Private",
}

COMPRESSORS = {
    "qsgd": "hpcfed.compressors.qsgd:Qsgd",
    "grid": "hpcfed.compressors.grid:Grid",
}

# What a class of the user's own must have to be one of these; the rest is said in `hpcfed.protocols`.
_MARKS = {
    "algorithm": ("needs", "state_type", "init", "round"),
    "workload": ("offers", "defaults", "build", "clients"),
    "compressor": ("kind", "quantize"),
}

_TABLES = {"algorithm": ALGORITHMS, "workload": WORKLOADS, "compressor": COMPRESSORS}


def load(kind: str, name: str) -> Any:
    """The class of this name; ``kind`` is ``algorithm``, ``workload`` or ``compressor``.

    Raises
    ------
    ConfigError
        If there is no such name, with the names that exist.
    """
    table = _TABLES[kind]
    if not isinstance(name, str):
        raise ConfigError(f"{kind} {name!r} is no name: use one of {', '.join(table)}, or module:Class for your own")
    target = name if ":" in name else table.get(name)
    if target is None:
        raise ConfigError(f"{kind} {name!r} is unknown: use one of {', '.join(table)}, or module:Class for your own")
    module, _, attribute = target.partition(":")
    try:
        loaded = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # a module of the user's own may fail in any way
        where = f"; looked in {os.getcwd()} and PYTHONPATH" if isinstance(error, ModuleNotFoundError) else ""
        raise ConfigError(f"{kind} {name!r} cannot be loaded: {type(error).__name__}: {error}{where}") from error
    missing = [each for each in _MARKS[kind] if not hasattr(loaded, each)]
    if missing:
        raise ConfigError(f"{kind} {name!r} is none: it lacks {', '.join(missing)} (see hpcfed.protocols)")
    return loaded


def fitting_algorithms(workload: str) -> list[str]:
    """The names of the algorithms whose needs the workload's clients meet."""
    offers = load("workload", workload).offers
    return [
        name for name in ALGORITHMS if explain_missing(name, load("algorithm", name).needs, workload, offers) is None
    ]


def fitting_workloads(algorithm: str) -> list[str]:
    """The names of the workloads whose clients meet the algorithm's needs."""
    needs = load("algorithm", algorithm).needs
    return [
        name for name in WORKLOADS if explain_missing(algorithm, needs, name, load("workload", name).offers) is None
    ]
