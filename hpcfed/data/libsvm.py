"""Labelled samples for binary classification: LIBSVM text, and a small real set that needs no file."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from hpcfed.errors import DataError

ENCODINGS = ((0.0, 1.0), (1.0, 2.0), (-1.0, 1.0))
"""Pairs of labels that are understood; the greater of the two becomes +1."""

_HIGHEST_INDEX = 2**31 - 1


@dataclass(frozen=True, eq=False)
class LabelledData:
    """Samples of two classes.

    Attributes
    ----------
    features : CSR array, float64, (n, d); no zeros are stored.
    labels : ndarray, float64, (n,), in {-1, +1}.
    notes : what a user should know about how the data were read, a sentence each.
    """

    features: sparse.csr_array[Any, Any]
    labels: NDArray[np.float64]
    notes: tuple[str, ...] = ()


def read_libsvm(path: str | Path, num_features: int | None = None) -> LabelledData:
    """Read LIBSVM text: ``label index:value index:value ...``, a sample a line.

    Indices are whole numbers from 1, increasing along a line; features that are not named are 0. An index of 0 is an
    error, never taken for the first feature. Empty lines, comments after ``#`` and a ``qid:`` are skipped. Files whose
    names end in ``.bz2``, ``.gz`` or ``.xz`` are decompressed.

    Parameters
    ----------
    path
        The file.
    num_features
        The number of features d; the highest index in the file if None. Give it for a test file, which may lack some.

    Returns
    -------
    LabelledData
        Labels {0, 1}, {1, 2} and {-1, 1} become {-1, +1} in this order.

    Raises
    ------
    DataError
        The file is missing, empty, cut short or damaged; a line is broken (with its number): a label, index or value
        is no finite number, a colon is missing, indices do not increase, or one is 0 or beyond ``num_features``; the
        labels are not those of two classes; no line has a feature.

    References
    ----------
    C.-C. Chang and C.-J. Lin (2011), LIBSVM: a library for support vector machines.
    """
    from sklearn.datasets import load_svmlight_file

    path = Path(path)
    if not path.is_file():
        raise DataError(f"{path}: there is no such file; check the path of the data")
    try:
        with _open(path) as file:
            lines = _Lines(file)
            try:
                features, raw = load_svmlight_file(lines, n_features=num_features, zero_based=False)
            except (ValueError, OverflowError) as error:
                _refuse_broken_line(path, num_features)
                raise DataError(f"{path}: is no LIBSVM text ({_one_line(error)})") from error
        if lines.doubtful or not (np.isfinite(features.data).all() and np.isfinite(raw).all()):
            _refuse_broken_line(path, num_features)
    except EOFError as error:
        raise DataError(f"{path}: the compressed file is cut short or damaged; download or write it again") from error
    except (OSError, zlib.error, lzma.LZMAError) as error:
        raise DataError(f"{path}: cannot be read, download or write it again ({_one_line(error)})") from error

    if raw.size == 0:
        raise DataError(f"{path}: the file has no samples; download or write it again")
    if features.nnz == 0:
        raise DataError(f"{path}: no line has a feature; a line reads label index:value index:value ...")
    labels, notes = _to_signs(path, raw)
    if lines.unfinished:
        notes += ("the last line does not end in a newline: the file may be cut short",)
    index = np.int32 if features.nnz <= _HIGHEST_INDEX else np.int64
    indices, indptr = features.indices.astype(index), features.indptr.astype(index)
    features = sparse.csr_array((features.data, indices, indptr), shape=features.shape)
    features.eliminate_zeros()
    return LabelledData(features, labels, notes)


def embedded() -> LabelledData:
    """The Wisconsin diagnostic breast cancer set, which scikit-learn brings along: 569 samples of 30 features.

    +1 is malignant (212), -1 benign (357). Each feature is standardized over all samples, to mean 0 and standard
    deviation 1; raw, they differ by a factor of a million and no common step size would do.

    References
    ----------
    W. Wolberg, O. Mangasarian, N. Street, W. Street (1993), Breast Cancer Wisconsin (Diagnostic), UCI Machine Learning
    Repository, CC BY 4.0.
    """
    from sklearn.datasets import load_breast_cancer

    raw, target = load_breast_cancer(return_X_y=True)
    features = sparse.csr_array((raw - raw.mean(axis=0)) / raw.std(axis=0))
    note = "breast cancer (Wisconsin, diagnostic): +1 is malignant; features are standardized over all samples"
    return LabelledData(features, np.where(target == 0, 1.0, -1.0), (note,))


class _Lines:
    """The lines of a file, as scikit-learn wants them, with an eye on what it would let pass."""

    def __init__(self, file: io.BufferedIOBase) -> None:
        self.read = file.read
        self._file = file
        self.doubtful = False
        self.unfinished = False

    def __iter__(self) -> Iterator[bytes]:
        line = b"\n"
        for line in self._file:
            if b"_" in line:  # Python takes 1_0 for ten
                self.doubtful = True
            yield line
        self.unfinished = not line.endswith(b"\n")


def _open(path: Path) -> io.BufferedIOBase:
    match path.suffix.lower():
        case ".bz2":
            return bz2.open(path)
        case ".gz":
            return gzip.open(path)
        case ".xz":
            return lzma.open(path)
        case _:
            return path.open("rb")


def _to_signs(path: Path, raw: NDArray[np.float64]) -> tuple[NDArray[np.float64], tuple[str, ...]]:
    """Labels in {-1, +1}, and a note if they were not to begin with."""
    found = np.unique(raw)
    names = ", ".join(f"{label:g}" for label in found[:6])
    if found.size == 1:
        raise DataError(f"{path}: every label is {names}; two classes are needed")
    if tuple(found) not in ENCODINGS:
        more = f" and {found.size - 6} more" if found.size > 6 else ""
        raise DataError(f"{path}: the labels are {names}{more}; binary labels are 0, 1 or 1, 2 or -1, 1")
    notes = () if found[0] == -1 else (f"labels {names} are read as -1, +1",)
    return np.where(raw == found[1], 1.0, -1.0), notes


def _refuse_broken_line(path: Path, num_features: int | None) -> None:
    """Raise for the first broken line, if there is one."""
    with _open(path) as file:
        for number, line in enumerate(file, start=1):
            fields = [field.decode(errors="replace") for field in line.partition(b"#")[0].split()]
            fault = _fault(fields, num_features) if fields else None
            if fault:
                while file.read(2**20):  # damage to a compressed file shows at its end, and is then the cause
                    pass
                raise DataError(f"{path}, line {number}: {fault}")


def _fault(fields: list[str], num_features: int | None) -> str | None:
    """What is wrong with the label and the entries of a line."""
    label, *entries = fields
    if not _is_number(label):
        return f"the label {_quoted(label)} is no finite number"
    last = 0
    for entry in entries[1:] if entries and entries[0].startswith("qid:") else entries:
        name, colon, value = entry.partition(":")
        if not colon:
            return f"{_quoted(entry)} has no colon; write index:value"
        if not (name.isascii() and name.isdigit()):
            return f"the index {_quoted(name)} of {_quoted(entry)} is no whole number from 1"
        index = int(name[:20])
        if index == 0:
            return f"{_quoted(entry)} has index 0, but LIBSVM counts features from 1; add 1 to every index"
        if index <= last:
            return f"index {index} follows {last}; the indices of a line must increase"
        if num_features is not None and index > num_features:
            return f"feature {index} is beyond the {num_features} features; raise their number or drop the feature"
        if index > _HIGHEST_INDEX:
            return f"feature {_quoted(name)} is beyond the highest possible, {_HIGHEST_INDEX}"
        if not _is_number(value):
            return f"the value {_quoted(value)} of feature {index} is no finite number"
        last = index
    return None


def _is_number(text: str) -> bool:
    try:
        return text.isascii() and "_" not in text and math.isfinite(float(text))
    except ValueError:
        return False


def _quoted(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:40] + "...")


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
