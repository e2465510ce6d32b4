"""Spectral splitting: how many groups a similarity matrix falls into, and which (CASA Eq. 12-14).

The eigenvalues of the normalised Laplacian `L = I - D^-1/2 A D^-1/2` are 1 minus those of the
normalised affinity `D^-1/2 A D^-1/2`, whose largest are what is computed. Nothing here is random:
the solver starts from a fixed vector and k-means from rows that are far apart.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from polytempo.core.bank import FloatArray, IntArray

COUNT = 10  # eigenvalues that are looked at (App. A.2.3)
DENSE = 200  # clients: of more, only the eigenvectors that are needed are computed


class Spectrum(NamedTuple):
    """The widest gap in the first eigenvalues of the Laplacian."""

    parts: int  # R: the number of eigenvalues below the gap
    gap: float
    vectors: FloatArray  # [clients, at least R], of the smallest eigenvalues first


def spectrum(similarity: FloatArray) -> Spectrum:
    """Eq. 12 and 13. Cosines below 0 count as 0, and everybody's similarity to itself is 1, so that
    degrees are positive."""
    size = len(similarity)
    affinity = np.clip(similarity, 0.0, 1.0)
    np.fill_diagonal(affinity, 1.0)
    scale = 1 / np.sqrt(affinity.sum(1))
    affinity *= scale * scale[:, None]
    count = min(COUNT, size)
    if size <= DENSE:
        values, vectors = np.linalg.eigh(affinity)
    else:
        from scipy.sparse.linalg import eigsh

        start = np.cos(np.arange(size))  # of no particular direction
        again = np.random.default_rng(0)  # where to go on from, should that lead no further
        values, vectors = eigsh(
            affinity, count, which="LA", v0=start, ncv=4 * count, tol=1e-3, rng=again
        )
    order = np.argsort(-values)[:count]
    gaps = np.diff(1 - values[order])
    widest = int(np.argmax(gaps))
    return Spectrum(widest + 1, float(gaps[widest]), vectors[:, order])


def groups(found: Spectrum) -> IntArray:
    """Spectral clustering into `found.parts` groups: k-means of the rows of the eigenvectors,
    scaled to length 1. Returns the group of each row; numbers go by the first member."""
    from sklearn.cluster import KMeans  # takes a second, and few runs split anything

    points = found.vectors[:, : found.parts]
    points = points / np.linalg.norm(points, axis=1, keepdims=True).clip(1e-12)
    centres = points[:1]
    while len(centres) < found.parts:  # the row that is least like those that are chosen
        nearest = ((points[:, None] - centres) ** 2).sum(2).min(1)
        centres = np.vstack([centres, points[np.argmax(nearest)]])
    # With centres to start from, nothing is drawn at random.
    means = KMeans(found.parts, init=centres, n_init=1, max_iter=100, tol=0.0)
    labels = means.fit(points).labels_
    _, first, inverse = np.unique(labels, return_index=True, return_inverse=True)
    ranks: IntArray = np.argsort(np.argsort(first))[inverse]
    return ranks
