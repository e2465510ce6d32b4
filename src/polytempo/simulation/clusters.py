"""Who was in which cluster, when, and how alike clients were: kept for figures and plots."""

from __future__ import annotations

from typing import Any

import numpy as np

from polytempo.core.bank import FloatArray
from polytempo.core.strategy import IntArray, State, Strategy
from polytempo.data.partition import Array

MATRICES = 12  # similarity matrices that are kept, spread over the run
CLIENTS = 500  # those of more clients are not: nobody could see them


class Clusters:
    """Looks at a strategy with clusters after every update. Of one without, nothing is kept.

    `changes` holds (round, time, client, cluster), one for each client whose cluster has changed;
    `matrices` holds (round, time, matrix).
    """

    def __init__(self, strategy: Strategy, groups: Array | None) -> None:
        self.strategy, self.groups = strategy, groups
        self.changes: list[tuple[int, float, int, int]] = []
        self.matrices: list[tuple[int, float, FloatArray]] = []
        self.looked, self.stride = 0, 1  # evaluations with a matrix; every such one is kept
        self._now: IntArray | None = None

    def look(self, round_: int, time: float) -> None:
        """Note who has changed clusters."""
        found = self.strategy.clusters()
        if found is None:
            return
        before = np.full(len(found), -1) if self._now is None else self._now
        for client in np.flatnonzero(found != before):
            self.changes.append((round_, time, int(client), int(found[client])))
        self._now = np.array(found)

    def figures(self) -> dict[str, Any]:
        """Number of clusters and, where true groups are known, how well they are found."""
        found = self.strategy.clusters()
        if found is None:
            return {}
        held = found >= 0
        figures: dict[str, Any] = {"clusters": len(np.unique(found[held]))}
        if self.groups is not None:
            figures["cluster_purity"] = purity(self.groups[held], found[held])
            figures["cluster_ari"] = adjusted_rand(self.groups[held], found[held])
        return figures

    def keep_similarity(self, round_: int, time: float) -> None:
        """Keep the matrix of this evaluation. When there are too many, every second one goes, and
        from then on only every second (fourth, ...) evaluation is kept."""
        matrix = self.strategy.similarity()
        if matrix is None or len(matrix) > CLIENTS:
            return
        if np.isfinite(matrix).sum() <= len(matrix):  # everybody is like itself
            return
        if self.looked % self.stride == 0:
            self.matrices.append((round_, time, np.array(matrix, dtype=np.float32)))
        if len(self.matrices) > MATRICES:
            self.matrices = self.matrices[::2]
            self.stride *= 2
        self.looked += 1

    def gallery(self, round_: int, time: float) -> list[tuple[int, float, FloatArray]]:
        """The matrices that were kept, and that of now."""
        now = self.strategy.similarity()
        if not self.matrices or now is None or self.matrices[-1][0] == round_:
            return self.matrices
        return [*self.matrices, (round_, time, np.array(now, dtype=np.float32))]

    def save(self) -> State:
        return {
            "changes": [list(change) for change in self.changes],
            "matrices": [list(kept) for kept in self.matrices],
            "looked": [self.looked, self.stride],
            "now": self._now,
        }

    def load(self, state: State) -> None:
        self.changes = [(r, t, client, cluster) for r, t, client, cluster in state["changes"]]
        self.matrices = [(r, t, matrix) for r, t, matrix in state["matrices"]]
        (self.looked, self.stride), self._now = state["looked"], state["now"]


def purity(truth: Array, found: Array) -> float | None:
    """The share of clients whose cluster consists, for the most part, of their own true group.
    Many small clusters are pure: see `adjusted_rand`."""
    from sklearn.metrics.cluster import contingency_matrix

    if not len(truth):
        return None
    return float(contingency_matrix(truth, found).max(axis=0).sum() / len(truth))


def adjusted_rand(truth: Array, found: Array) -> float | None:
    """The adjusted Rand index (Hubert and Arabie 1985) of clusters and true groups: 1 if they are
    the same, 0 on average if clusters are drawn at random."""
    from sklearn.metrics import adjusted_rand_score  # takes a second, and few runs have clusters

    return float(adjusted_rand_score(truth, found)) if len(truth) else None
