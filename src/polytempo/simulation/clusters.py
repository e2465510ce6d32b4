"""Who was in which cluster, when, how alike clients were, and who learns from whom: for figures and
plots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from polytempo.core import events
from polytempo.core.bank import FloatArray
from polytempo.core.strategy import IntArray, State
from polytempo.data.partition import Array
from polytempo.simulation.extension import Extension, Row
from polytempo.training import Score

if TYPE_CHECKING:
    from polytempo.simulation.engine import Engine

FIGURES = ("clusters", "unclustered", "cluster_purity", "cluster_ari")
MATRICES = 12  # similarity matrices that are kept, spread over the run
CLIENTS = 500  # those of more clients are not: nobody could see them
DRAWN = 2_000  # nor are plots of more clients drawn; the graph, besides, is dense


class Clusters(Extension):
    """Looks at the strategy's clusters after every update. If it has none, nothing is kept.

    `changes` holds (round, time, client, cluster), one for each client whose cluster has changed;
    `matrices` holds (round, time, matrix).
    """

    name = "clusters"

    def __init__(self, engine: Engine) -> None:
        self.engine, self.groups = engine, engine.federation.groups
        self.changes: list[tuple[int, float, int, int]] = []
        self.matrices: list[tuple[int, float, FloatArray]] = []
        self.looked, self.stride = 0, 1  # evaluations with a matrix; every such one is kept
        self._now: IntArray | None = None

    def happened(self, event: events.Event) -> None:
        if isinstance(event, events.Upload | events.Drop):  # a drop may close a cohort
            self._look()

    def evaluated(self, scores: Mapping[int, Score]) -> dict[str, Any]:
        self._look()
        self._keep_similarity()
        return self._fit()

    def _look(self) -> None:
        """Note who has changed clusters."""
        found = self.engine.strategy.clusters()
        if found is None:
            return
        before = np.full(len(found), -1) if self._now is None else self._now
        for client in np.flatnonzero(found != before):
            change = self.engine.round, self.engine.time, int(client), int(found[client])
            self.changes.append(change)
        self._now = np.array(found)

    def figures(self) -> dict[str, Any]:
        """Those of the last evaluation."""
        last = self.engine.history[-1]
        return {name: last[name] for name in FIGURES if name in last}

    def _fit(self) -> dict[str, Any]:
        """How many clusters there are, and clients that are in none; where true groups are known,
        how well the others fit them."""
        found = self.engine.strategy.clusters()
        if found is None:
            return {}
        held = found >= 0
        figures: dict[str, Any] = {
            "clusters": len(np.unique(found[held])),
            "unclustered": int((~held).sum()),
        }
        if self.groups is not None:
            figures["cluster_purity"] = purity(self.groups[held], found[held])
            figures["cluster_ari"] = adjusted_rand(self.groups[held], found[held])
        return figures

    def _keep_similarity(self) -> None:
        """Keep the matrix of this evaluation. When there are too many, every second one goes, and
        from then on only every second (fourth, ...) evaluation is kept."""
        matrix = self.engine.strategy.similarity()
        if matrix is None or len(matrix) > CLIENTS:
            return
        if np.isfinite(matrix).sum() <= len(matrix):  # everybody is like itself
            return
        if self.looked % self.stride == 0:
            self.matrices.append(self._dated(matrix))
        if len(self.matrices) > MATRICES:
            self.matrices = self.matrices[::2]
            self.stride *= 2
        self.looked += 1

    def _dated(self, matrix: FloatArray) -> tuple[int, float, FloatArray]:
        return self.engine.round, self.engine.time, np.array(matrix, dtype=np.float32)

    def gallery(self) -> list[tuple[int, float, FloatArray]]:
        """The matrices that were kept, and that of now."""
        now = self.engine.strategy.similarity()
        if not self.matrices or now is None or self.matrices[-1][0] == self.engine.round:
            return self.matrices
        return [*self.matrices, self._dated(now)]

    def tables(self) -> dict[str, Sequence[Row]]:
        """clusters.csv: who has changed to which cluster, and when."""
        columns = ("round", "time", "client", "cluster")
        rows = [dict(zip(columns, change, strict=True)) for change in self.changes]
        return {"clusters": rows}

    def arrays(self) -> dict[str, dict[str, Any]]:
        """similarity.npz: how alike clients were, a few times."""
        kept = self.gallery()
        if not kept:
            return {}
        rounds, times, matrices = (np.array(part) for part in zip(*kept, strict=True))
        return {"similarity": {"rounds": rounds, "times": times, "matrices": matrices}}

    def plots(self) -> dict[str, dict[str, Any]]:
        clients, rounds = self.engine.federation.clients, self.engine.round
        plots: dict[str, dict[str, Any]] = {}
        if clients > DRAWN:
            return plots
        if self.changes and rounds:
            plots["clusters"] = {"changes": self.changes, "clients": clients, "rounds": rounds}
        if kept := self.gallery():
            plots["similarity"] = {"matrices": kept}
        if (graph := self.engine.strategy.collaboration()) is not None:
            plots["graph"] = {"weights": graph}
        return {name: {**given, "groups": self.groups} for name, given in plots.items()}

    def state_dict(self) -> State:
        return {
            "changes": [list(change) for change in self.changes],
            "matrices": [list(kept) for kept in self.matrices],
            "looked": [self.looked, self.stride],
            "now": self._now,
        }

    def load_state_dict(self, state: State) -> None:
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
