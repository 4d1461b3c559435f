"""Well-known sets for binary classification: what is in them, where they are, and whether a file at hand is whole."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hpcfed.data.libsvm import read_libsvm
from hpcfed.errors import DataError

SITE = "https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/binary.html"
"""LIBSVM data: classification (binary class). All files of the table are there."""

_ADULT = "Adult, UCI, CC BY 4.0"
_COVERTYPE = "Covertype, UCI, CC BY 4.0"
_WEB = "web pages, J. Platt 1998: cite"
_IJCNN = "IJCNN 2001 challenge, D. Prokhorov: cite"


@dataclass(frozen=True)
class KnownSet:
    """A set as it is published.

    Attributes
    ----------
    file : its name at `SITE`.
    rows, features : its size.
    positives : how many rows have the greater of the two labels; None where there is no trusted count.
    origin : source and licence.
    aliases : other names that it goes by.
    """

    file: str
    rows: int
    features: int
    positives: int | None
    origin: str
    aliases: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The file's name without the compression."""
        return _bare(self.file)


KNOWN = (
    KnownSet("a9a", 32_561, 123, 7_841, _ADULT),
    KnownSet("a9a.t", 16_281, 123, 3_846, _ADULT),
    KnownSet("w8a", 49_749, 300, 1_479, _WEB),
    KnownSet("w8a.t", 14_951, 300, None, _WEB),
    KnownSet("ijcnn1.bz2", 49_990, 22, 4_853, _IJCNN),
    KnownSet("ijcnn1.t.bz2", 91_701, 22, 8_712, _IJCNN),
    KnownSet("ijcnn1.tr.bz2", 35_000, 22, None, _IJCNN),
    KnownSet("ijcnn1.val.bz2", 14_990, 22, None, _IJCNN),
    KnownSet("covtype.libsvm.binary.bz2", 581_012, 54, 283_301, _COVERTYPE, ("covtype.binary", "covtype")),
    KnownSet("covtype.libsvm.binary.scale.bz2", 581_012, 54, 283_301, _COVERTYPE, ("covtype.binary.scale",)),
    KnownSet("phishing", 11_055, 68, None, "Phishing Websites, UCI, CC BY 4.0"),
    KnownSet("mushrooms", 8_124, 112, None, "Mushroom, UCI, CC BY 4.0"),
    KnownSet("rcv1_train.binary.bz2", 20_242, 47_236, None, "Reuters RCV1, D. Lewis et al. 2004: cite"),
    KnownSet("real-sim.bz2", 72_309, 20_958, None, "SRAA news groups, A. McCallum: cite"),
)


def check(path: str | Path) -> str:
    """Say which set a file is by its name, and whether its counts are the published ones.

    The name counts without folder, case, compression and ``.txt``; a name that goes on after that of a known set, like
    ``covtype.binary.sample``, is compared with that set.

    Raises
    ------
    DataError
        There is no such file.
    """
    path = Path(path)
    if not path.is_file():
        raise DataError(f"{path}: there is no such file; hpcfed data without a file lists the known sets")
    known = _named(path)
    try:
        data = read_libsvm(path)
    except DataError as error:
        expected = f"; a whole {known.name} has {_counts(known)}" if known else ""
        return f"{error}{expected}"
    rows, features = data.features.shape
    found = KnownSet(path.name, rows, features, int(np.count_nonzero(data.labels > 0)), "")
    if known is None:
        twin = next((each for each in KNOWN if each.positives is not None and _agree(found, each)), None)
        guess = f"it has the counts of {twin.name}" if twin else "no set of this name is known"
        return f"{path}: {guess}; {_counts(found)}"
    if _agree(found, known):
        return f"{path}: {known.name}, complete: {_counts(known)}"
    return f"{path}: not the complete {known.name}: {_counts(found)}, but published are {_counts(known)}"


def table(paths: Sequence[str | Path] = ()) -> str:
    """What `check` says of each file; without files, the known sets and where to get them.

    Raises
    ------
    DataError
        There is no such file.
    """
    if paths:
        return "\n".join(check(path) for path in paths)
    name, file = (max(len(getattr(each, field)) for each in KNOWN) for field in ("name", "file"))
    lines = [f"{'set':{name}}  {'rows':>7}  {'features':>8}  {'positive':>8}  {'file':{file}}  origin and terms"]
    lines += [
        f"{each.name:{name}}  {each.rows:>7,}  {each.features:>8,}  "
        f"{'-' if each.positives is None else f'{each.positives:,}':>8}  {each.file:{file}}  {each.origin}"
        for each in KNOWN
    ]
    lines += [f"The files are at {SITE}", "hpcfed data FILE... checks files at hand"]
    return "\n".join(lines)


def _bare(name: str) -> str:
    """A file's name in lower case without compression and ``.txt``."""
    return re.sub(r"(\.txt|\.bz2|\.gz|\.xz)+$", "", name.lower())


def _named(path: Path) -> KnownSet | None:
    """The set with this file's name, or the one with the longest name that it goes on from."""
    name = _bare(path.name)
    names = {alias: each for each in KNOWN for alias in (each.name, *each.aliases)}
    fitting = [known for known in names if re.match(re.escape(known) + r"($|[._-])", name)]
    return names[max(fitting, key=len)] if fitting else None


def _agree(found: KnownSet, known: KnownSet) -> bool:
    """Whether the counts can be those of the whole set, whose last features may occur in no row of it."""
    return (
        found.rows == known.rows
        and found.features <= known.features
        and (known.positives is None or found.positives == known.positives)
    )


def _counts(each: KnownSet) -> str:
    positives = "" if each.positives is None else f", {each.positives:,} positive"
    return f"{each.rows:,} rows x {each.features:,} features{positives}"
