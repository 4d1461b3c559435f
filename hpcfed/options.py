"""Options: dataclass fields that say what they mean.

A workload, an algorithm or a compressor is a frozen dataclass. Each field made with `option` is at once a
hyperparameter, a key of the configuration file and a flag of the command line; bounds are part of the type
(``Annotated[int, Ge(1)]``, from the small package ``annotated_types``), so that pydantic checks them in one place.
"""

from __future__ import annotations

import dataclasses
from typing import Any


def option(default: Any, help: str, *, metavar: str | None = None) -> Any:
    """A dataclass field that is also a command-line option.

    Parameters
    ----------
    default : value used when neither the configuration file nor the command line gives one.
    help : one sentence for ``--help``; units included.
    metavar : how the value is written on the command line, for example ``NY,NX,NZ``.
    """
    return dataclasses.field(default=default, metadata={"help": help, "metavar": metavar})
