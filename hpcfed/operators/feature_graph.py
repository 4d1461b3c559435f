"""A graph between features: which pairs are related once the others are known, and with which sign.

Sparse inverse covariance selection on the standardized features (Friedman, Hastie, Tibshirani: Sparse inverse
covariance estimation with the graphical lasso, 2008, as scikit-learn solves it) gives a precision matrix ``T``; each
nonzero ``T_ij``, i < j, is an edge with the sign of the partial correlation ``-T_ij / sqrt(T_ii T_jj)``. The edge's row
of ``G`` is ``e_i - sign e_j``: it asks related features for related weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse
from numpy.typing import NDArray

from hpcfed.errors import ConfigError, DataError

Edges = NDArray[np.int64]  # (number of edges, 3): i, j, sign

RIDGE = 1e-3  # added to the covariance: constant or duplicate features make it singular


def build_edges(features: Any, penalty: float) -> Edges:
    """The signed edges between the columns of a sparse feature matrix (samples, features).

    Raises
    ------
    ConfigError
        If the graphical lasso fails at this penalty.
    """
    from sklearn.covariance import graphical_lasso

    mean = np.asarray(features.mean(axis=0)).ravel()
    second = np.asarray((features.T @ features).toarray()) / features.shape[0]
    covariance = second - np.outer(mean, mean)
    deviation = np.sqrt(np.maximum(np.diag(covariance), 0))
    deviation[deviation == 0] = 1.0
    correlation = covariance / np.outer(deviation, deviation) + RIDGE * np.eye(len(mean))
    try:
        _, precision = graphical_lasso(correlation, alpha=penalty, max_iter=200, tol=1e-3)
    except (FloatingPointError, ValueError) as error:
        raise ConfigError(
            f"--graph-penalty {penalty}: the graphical lasso fails ({error}): choose a larger one"
        ) from error
    i, j = np.nonzero(np.triu(precision, 1))
    return np.stack([i, j, -np.sign(precision[i, j])], axis=1).astype(np.int64)


def graph_matrix(edges: Edges, num_features: int) -> scipy.sparse.csr_array:
    """``B = [G; I]``, one row for each edge and one for each feature."""
    count = len(edges)
    rows = np.repeat(np.arange(count), 2)
    columns = edges[:, :2].reshape(-1)
    values = np.stack([np.ones(count), -edges[:, 2]], axis=1).reshape(-1)
    graph = scipy.sparse.csr_array((values, (rows, columns)), shape=(count, num_features))
    return scipy.sparse.csr_array(scipy.sparse.vstack([graph, scipy.sparse.eye_array(num_features)]))


def read_edges(path: Path, num_features: int) -> Edges:
    """The dataset ``graph`` of a run's ``result.h5``.

    Raises
    ------
    DataError
        If there is none or it does not fit the features.
    """
    import h5py

    try:
        with h5py.File(str(path), "r") as file:
            edges = np.asarray(file["graph"][()], np.int64)
    except (OSError, KeyError) as error:
        raise DataError(f"--graph {path} holds no graph: give the result.h5 of a run of logreg") from error
    fits = edges.ndim == 2 and edges.shape[1] == 3
    if not fits or (len(edges) and not (edges[:, :2].min() >= 0 and edges[:, :2].max() < num_features)):
        raise DataError(f"--graph {path}: its edges do not fit {num_features} features")
    return edges
