"""Private records, public ones and those of the test: where they come from, and how they are put in bounds.

Nothing that is done to a record depends on private ones: features and targets are shifted and scaled by means and
deviations of the *public* records, and then every record's features are scaled down to a norm of ``bound`` at most.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcfed.data.tables import Table, read_csv
from hpcfed.errors import ConfigError, DataError

Vector = NDArray[np.float64]

EMBEDDED = ("diabetes", "breast-cancer", "digits")
"""Sets that scikit-learn brings along."""


@dataclass(frozen=True, eq=False)
class RecordSets:
    """Who is private and who is not.

    Attributes
    ----------
    private, public, test : the records.
    classes : what targets 0, 1, ... stand for; empty if they are no classes.
    notes : what was assumed or done, a sentence each.
    """

    private: Table
    public: Table
    test: Table
    classes: Vector
    notes: tuple[str, ...] = ()


def made(
    task: str, records: int, public_records: int, dimension: int, shift: float, rng: np.random.Generator
) -> tuple[Table, Table]:
    """Made private and public records, which differ by ``shift``.

    =======  ===========================================================================================================
    task     records, with standard normal features a of a dimension d and models w
    =======  ===========================================================================================================
    mean     normal points around (1, ..., 1); public ones around (1 + shift, 1 - shift, 1 + shift, ...)
    ridge    targets ``<a, w>/sqrt(d) + 0.1 noise``, w standard normal
    lasso    labels 0 or 1 with odds ``exp <a, w>``, w normal in a quarter of its entries, 0 elsewhere
    softmax  three classes with odds ``exp <a, w_k>``, the w_k standard normal
    =======  ===========================================================================================================

    Public records of the last three have w with ``shift`` times normal numbers added to the entries that are not 0.
    The public mean lies beside the private one, so that no path to the one passes by the other.
    """
    if task == "mean":
        private = 1 + rng.standard_normal((records, dimension))
        centre = 1 + shift * (-1.0) ** np.arange(dimension)
        public = centre + rng.standard_normal((public_records, dimension))
        return Table(private, np.zeros(records)), Table(public, np.zeros(public_records))
    model = rng.standard_normal((3 if task == "softmax" else 1, dimension))
    if task == "lasso":
        model[:, max(1, dimension // 4) :] = 0
    moved = rng.standard_normal(model.shape) * (model != 0)
    private_records = _planted(task, model, records, rng)
    return private_records, _planted(task, model + shift * moved, public_records, rng)


def _planted(task: str, model: Vector, count: int, rng: np.random.Generator) -> Table:
    features = rng.standard_normal((count, model.shape[1]))
    scores = features @ model.T
    if task == "ridge":
        targets = scores[:, 0] / np.sqrt(model.shape[1]) + 0.1 * rng.standard_normal(count)
    elif task == "lasso":
        targets = (scores[:, 0] + rng.logistic(size=count) > 0).astype(float)
    else:
        targets = (scores + rng.gumbel(size=scores.shape)).argmax(axis=1).astype(float)
    return Table(features, targets)


def read(data: str, target: str | None, like: Table | None = None) -> tuple[Table, tuple[str, ...]]:
    """The records of an embedded set or a file, and the names of its features if it has any.

    Parameters
    ----------
    data : one of `EMBEDDED`, or a file: ``.csv``, ``.npz`` with images, LIBSVM text otherwise.
    target : the column of a ``.csv`` that is to be predicted.
    like : records that these must match.

    Raises
    ------
    DataError
        The file is not sound, or has another number of features.
    """
    suffix = Path(data).suffix.lower()
    names: tuple[str, ...] = ()
    if data in ("diabetes", "breast-cancer"):
        from sklearn import datasets

        load = datasets.load_diabetes if data == "diabetes" else datasets.load_breast_cancer
        table = Table(*(np.ascontiguousarray(part, np.float64) for part in load(return_X_y=True)))
    elif data == "digits" or suffix == ".npz":
        pictures = read_pictures(data)
        table = Table(_points(pictures.inputs()), pictures.labels.astype(float))
    elif suffix == ".csv":
        table, names = read_csv(data, target)
    else:
        from hpcfed.data.libsvm import read_libsvm

        labelled = read_libsvm(data, like.features.shape[1] if like is not None else None)
        table = Table(labelled.features.toarray(), labelled.labels)
    if like is not None and table.features.shape[1] != like.features.shape[1]:
        raise DataError(
            f"{data}: records have {table.features.shape[1]} features, the private ones {like.features.shape[1]}"
        )
    return table, names


def read_pictures(data: str) -> Any:
    """The training images of ``digits`` or a ``.npz``."""
    from hpcfed.data import images

    return images.embedded() if data == "digits" else images.read_images(data)[0]


def turned_digits(data: str, digits: tuple[int, int], most: int, most_public: int) -> tuple[Table, Table]:
    """The first images of one class as private points, and of another one, turned by 180 degrees, as public points.

    Raises
    ------
    DataError
        If there are no images of a class.
    """
    pictures = read_pictures(data)
    tables = []
    for digit, count in zip(digits, (most, most_public), strict=True):
        rows = np.flatnonzero(pictures.labels == digit)[:count]
        if not rows.size:
            raise DataError(f"{data}: no image has the label {digit}: choose others with --digits")
        tables.append(pictures.inputs(rows))
    private, public = tables[0], tables[1][:, :, ::-1, ::-1]
    return Table(_points(private), np.zeros(len(private))), Table(_points(public), np.zeros(len(public)))


def _points(pixels: Any) -> Vector:
    return np.ascontiguousarray(pixels.reshape(len(pixels), -1), np.float64)


def split(table: Table, fraction: float, flag: str, rng: np.random.Generator) -> tuple[Table, Table]:
    """The records without a random part of them, and the part, both in their order.

    Raises
    ------
    ConfigError
        If one of them would be empty; ``flag`` is the option that said so.
    """
    count = round(fraction * len(table))
    if not 0 < count < len(table):
        raise ConfigError(f"{flag} {fraction} of {len(table)} records is {count}: none, or none left")
    order = rng.permutation(len(table))
    return table.take(np.sort(order[count:])), table.take(np.sort(order[:count]))


def with_classes(sets: RecordSets, task: str, source: str) -> RecordSets:
    """Targets as whole numbers from 0, in the order of the classes.

    Raises
    ------
    DataError
        If there is one class only, or the lasso is given more than two.
    """
    tables = (sets.private, sets.public, sets.test)
    classes = np.unique(np.concatenate([table.targets for table in tables]))
    if len(classes) < 2:
        raise DataError(f"{source}: every target is {classes[0]:g}; --task {task} needs two classes")
    if task == "lasso" and len(classes) > 2:
        raise DataError(f"{source}: there are {len(classes)} classes; --task lasso needs two, softmax takes more")
    if task == "softmax" and len(classes) > 100:
        raise DataError(f"{source}: the targets have {len(classes)} values, which are no classes: use --task ridge")
    private, public, test = (
        Table(table.features, np.searchsorted(classes, table.targets).astype(float)) for table in tables
    )
    return replace(sets, private=private, public=public, test=test, classes=classes)


def with_signs(sets: RecordSets) -> RecordSets:
    """Two classes as -1 and +1, the greater one +1."""
    private, public, test = (
        Table(table.features, 2 * table.targets - 1) for table in (sets.private, sets.public, sets.test)
    )
    return replace(sets, private=private, public=public, test=test)


def corrupted(sets: RecordSets, fraction: float, rng: np.random.Generator) -> RecordSets:
    """Some of the public records with wrong targets: of the next class, or of another one of these records."""
    count = round(fraction * len(sets.public))
    rows = rng.permutation(len(sets.public))[:count]
    targets = sets.public.targets.copy()
    if len(sets.classes):
        targets[rows] = (targets[rows] + 1) % len(sets.classes)
        what = "have the label of the next class"
    else:
        targets[rows] = np.roll(targets[rows], 1)
        what = "have each other's targets"
    note = f"{count} of {len(targets)} public records are corrupted: they {what}"
    return replace(sets, public=Table(sets.public.features, targets), notes=(*sets.notes, note))


def in_bounds(sets: RecordSets, bound: float, *, standardize: bool) -> RecordSets:
    """The records within public bounds: ``|a| <= bound`` for the features a of each.

    Before that, if asked for, features get mean 0 and mean square 1/d over the *public* records, and so do targets that
    are no classes, with mean square 1. Features that do not vary there are shifted only.
    """
    notes = list(sets.notes)
    tables = [sets.private, sets.public, sets.test]
    if standardize:
        public = sets.public
        centre, width = public.features.mean(axis=0), _deviation(public.features) * np.sqrt(public.features.shape[1])
        tables = [Table((table.features - centre) / width, table.targets) for table in tables]
        notes.append("features have mean 0 and mean square 1/d over the public records")
        if not len(sets.classes):
            middle, spread = public.targets.mean(), float(_deviation(public.targets))
            tables = [Table(table.features, (table.targets - middle) / spread) for table in tables]
            notes.append(f"targets have mean 0 and mean square 1 there: one unit is {spread:.4g} of the data")
    norms = np.linalg.norm(tables[1].features, axis=1)
    notes.append(
        f"features of a norm above {bound:g} are scaled down to it: those of {np.mean(norms > bound):.1%} of the "
        "public records"
    )
    private, public, test = (Table(_shortened(table.features, bound), table.targets) for table in tables)
    return replace(sets, private=private, public=public, test=test, notes=tuple(notes))


def _deviation(values: Vector) -> Any:
    """Standard deviation over the records, 1 where nothing but rounding varies."""
    deviation = values.std(axis=0)
    return np.where(deviation > 1e-12 * np.abs(values).max(axis=0), deviation, 1.0)


def _shortened(features: Vector, bound: float) -> Vector:
    norms = np.linalg.norm(features, axis=1, keepdims=True)
    shortened: Vector = features * np.minimum(1, bound / np.maximum(norms, np.finfo(float).tiny))
    return shortened
