"""Spectral splitting: how many groups a similarity matrix falls into, and which (CASA Eq. 12-14).

The eigenvalues of the normalised Laplacian `L = I - D^-1/2 A D^-1/2` are 1 minus those of the
normalised affinity `D^-1/2 A D^-1/2`, whose largest are what is computed. Nothing here is random:
the solvers start from a fixed vector and k-means from rows that are far apart.

A cluster that holds together is looked at on every arrival, and one that falls apart only once. So
`stays_whole` answers the one question that matters with a few steps of Lanczos' method, and only
where these leave a doubt is the spectrum computed.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from polytempo.core.bank import FloatArray, IntArray

COUNT = 10  # eigenvalues that are looked at (App. A.2.3)
DENSE = 200  # clients: of more, only the eigenvectors that are needed are computed
FEW = 32  # clients: of fewer, a spectrum is quickly computed
STEPS = (12, 24)  # after which it is asked whether a cluster stays whole
MARGIN = 0.01  # by which that must be certain: ten times the error of an eigenvalue here


class Spectrum(NamedTuple):
    """The widest gap in the first eigenvalues of the Laplacian."""

    parts: int  # R: the number of eigenvalues below the gap
    gap: float
    vectors: FloatArray  # [clients, at least R], of the smallest eigenvalues first


def spectrum(similarity: FloatArray) -> Spectrum:
    """Eq. 12 and 13."""
    gaps, vectors = _gaps(similarity)
    widest = int(np.argmax(gaps))
    return Spectrum(widest + 1, float(gaps[widest]), vectors)


def gap_by_chance(similarity: FloatArray, shuffles: int, stream: np.random.Generator) -> float:
    """The widest gap behind the first eigenvalue that is found where there are no groups: in as
    many matrices with the same similarities, dealt out to the pairs at random."""
    rows, columns = np.triu_indices(len(similarity), 1)
    widest, dealt = 0.0, similarity.copy()
    for _ in range(shuffles):
        values = stream.permutation(similarity[rows, columns])
        dealt[rows, columns] = dealt[columns, rows] = values
        widest = max(widest, float(_gaps(dealt)[0][1:].max()))
    return widest


def _gaps(similarity: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Between the smallest eigenvalues of the Laplacian, and their vectors."""
    size = len(similarity)
    affinity = _affinity(similarity)
    scale = 1 / np.sqrt(affinity.sum(1))
    affinity *= scale * scale[:, None]
    count = min(COUNT, size)
    if size <= DENSE:
        values, vectors = np.linalg.eigh(affinity)
    else:
        from scipy.sparse.linalg import eigsh

        again = np.random.default_rng(0)  # where to go on from, should that lead no further
        values, vectors = eigsh(
            affinity, count, which="LA", v0=_start(size), ncv=4 * count, tol=1e-3, rng=again
        )
    order = np.argsort(-values)[:count]
    return np.diff(1 - values[order]), vectors[:, order]


def stays_whole(similarity: FloatArray, needed: float) -> bool:
    """Whether `spectrum` would certainly find either one part or a gap of less than `needed`.

    The largest eigenvalue of the normalised affinity is 1, and the roots of the degrees are its
    vector. Lanczos' method, orthogonally to that one, has approximations of the next (Ritz values)
    after a few steps. None is above its eigenvalue, nor below it by more than its residual, so that
    the first gap is bounded from below and all others from above. (As any such method does, it
    overlooks an eigenvector to which the vector that it starts from is orthogonal.) Nothing is
    remembered from one arrival to the next: a resumed run answers the same.
    """
    size = len(similarity)
    if size <= FEW:
        return False
    affinity = _affinity(similarity)
    roots = np.sqrt(affinity.sum(1))
    basis = np.empty((max(STEPS) + 1, size))
    basis[0] = roots / np.linalg.norm(roots)
    diagonal, beside, new = [], [], _start(size)
    for k in range(1, max(STEPS) + 1):
        for _ in range(2):  # once leaves errors of rounding
            new = new - (basis[:k] @ new) @ basis[:k]
        beside.append(float(np.linalg.norm(new)))
        if beside[-1] < 1e-6:
            return False  # there is no other direction
        basis[k] = new / beside[-1]
        new = affinity @ (basis[k] / roots) / roots
        diagonal.append(float(basis[k] @ new))
        if k in STEPS:
            left = np.linalg.norm(new - (basis[: k + 1] @ new) @ basis[: k + 1])
            off = np.diag(beside[1:], 1)
            ritz, vectors = np.linalg.eigh(np.diag(diagonal) + off + off.T)
            low = ritz[::-1][: COUNT - 1]  # of the second to the tenth eigenvalue
            high = low + left * np.abs(vectors[-1, ::-1][: COUNT - 1])
            widest = float((high[:-1] - low[1:]).max())
            if widest + MARGIN < max(1 - high[0], needed):
                return True
    return False


def _affinity(similarity: FloatArray) -> FloatArray:
    """Cosines below 0 count as 0, and everybody's similarity to itself is 1, so that degrees are
    positive."""
    affinity = np.clip(similarity, 0.0, 1.0)
    np.fill_diagonal(affinity, 1.0)
    return affinity


def _start(size: int) -> FloatArray:
    """A vector of no particular direction."""
    return np.cos(np.arange(size))


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
