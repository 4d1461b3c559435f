"""Models as pure functions of one flat parameter vector. Only these modules import torch; nothing does at start-up."""

from __future__ import annotations

from hpcfed.errors import ConfigError


def require_torch(workload: str) -> None:
    """Refuse a workload with a network where torch is not installed; every rank must call it.

    Raises
    ------
    ConfigError
    """
    import importlib.util

    if importlib.util.find_spec("torch") is None:
        raise ConfigError(f"{workload} needs torch, which is not installed: pip install 'hpcfed[torch]'").on_all_ranks()
