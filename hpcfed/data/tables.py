"""Tables of numbers: records as rows, features as columns, and a column that is to be predicted."""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcfed.errors import DataError


@dataclass(frozen=True, eq=False)
class Table:
    """Records.

    Attributes
    ----------
    features : (n, d) float64, row after row in memory.
    targets : (n,) float64; zeros where nothing is to be predicted.
    """

    features: NDArray[np.float64]
    targets: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.targets)

    def take(self, rows: Any) -> Table:
        """Some of the records."""
        return Table(self.features[rows], self.targets[rows])


def read_csv(path: str | Path, target: str | None) -> tuple[Table, tuple[str, ...]]:
    """Read comma-separated numbers below a line of names.

    Parameters
    ----------
    path
        The file; empty lines are skipped.
    target
        Name of the column that is to be predicted; None if all columns are features.

    Returns
    -------
    table
        The records in the order of the file.
    names
        Those of the features.

    Raises
    ------
    DataError
        The file is missing, no text or without records; the target is no column, or the only one; a line has too few
        or too many fields, or a field that is no finite number (with the line and the column).
    """
    path = Path(path)
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file)
            head = [name.strip() for name in next(reader, [])]
            place = _place(path, head, target)
            rows = [_numbers(path, reader.line_num, head, fields) for fields in reader if any(fields)]
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); check the path of the data") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path}: is no comma-separated text ({error})") from error
    if not rows:
        raise DataError(f"{path}: the file has no records below the line of names; write or download it again")
    values = np.array(rows)
    if place is None:
        return Table(values, np.zeros(len(values))), tuple(head)
    features = np.ascontiguousarray(np.delete(values, place, axis=1))
    return Table(features, values[:, place].copy()), tuple(head[:place] + head[place + 1 :])


def _place(path: Path, head: list[str], target: str | None) -> int | None:
    """Where the target stands among the names."""
    if not head or all(_is_number(name) for name in head):
        raise DataError(f"{path}, line 1: the first line must name the columns")
    double = sorted({name for name in head if head.count(name) > 1})
    if double:
        raise DataError(f"{path}, line 1: there are two columns {double[0]!r}; rename one")
    if target is None:
        return None
    if target not in head:
        raise DataError(f"{path}, line 1: there is no column {target!r}; there are {_listed(head)}")
    if len(head) == 1:
        raise DataError(f"{path}, line 1: there is no column besides {target!r} to predict it from")
    return head.index(target)


def _numbers(path: Path, line: int, head: list[str], fields: list[str]) -> list[float]:
    if len(fields) != len(head):
        raise DataError(f"{path}, line {line}: there are {len(fields)} fields for {len(head)} columns")
    for name, field in zip(head, fields, strict=True):
        if not _is_number(field):
            raise DataError(f"{path}, line {line}: {field.strip()[:40]!r} in column {name!r} is no finite number")
    return [float(field) for field in fields]


def _is_number(text: str) -> bool:
    try:
        return "_" not in text and math.isfinite(float(text))
    except ValueError:
        return False


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 10} more" if len(names) > 10 else ""
    return ", ".join(names[:10]) + more
