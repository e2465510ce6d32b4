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


class Gallery:
    """Matrices of a few moments, spread over the run: (round, time, matrix). When there are too
    many, every second one goes, and from then on only every second (fourth, ...) is kept."""

    def __init__(self) -> None:
        self.kept: list[tuple[int, float, FloatArray]] = []
        self.looked, self.stride = 0, 1

    def add(self, round_: int, time: float, matrix: FloatArray) -> None:
        if self.looked % self.stride == 0:
            self.kept.append((round_, time, np.array(matrix, dtype=np.float32)))
        if len(self.kept) > MATRICES:
            self.kept = self.kept[::2]
            self.stride *= 2
        self.looked += 1

    def until_now(
        self, round_: int, time: float, matrix: FloatArray | None
    ) -> list[tuple[int, float, FloatArray]]:
        """Those that were kept, and that of now."""
        if not self.kept or matrix is None or self.kept[-1][0] == round_:
            return self.kept
        return [*self.kept, (round_, time, np.array(matrix, dtype=np.float32))]

    def state_dict(self) -> State:
        return {
            "kept": [list(kept) for kept in self.kept],
            "looked": self.looked,
            "stride": self.stride,
        }

    def load_state_dict(self, state: State) -> None:
        self.kept = [(r, t, matrix) for r, t, matrix in state["kept"]]
        self.looked, self.stride = state["looked"], state["stride"]


class Clusters(Extension):
    """Looks at the strategy's clusters after every update. If it has none, nothing is kept.

    `changes` holds (round, time, client, cluster), one for each client whose cluster has changed;
    `alike` and `graphs` hold how alike clients were, and who learnt from whom.
    """

    name = "clusters"

    def __init__(self, engine: Engine) -> None:
        self.engine, self.groups = engine, engine.federation.groups
        self.changes: list[tuple[int, float, int, int]] = []
        self.alike, self.graphs = Gallery(), Gallery()
        self._now: IntArray | None = None

    def happened(self, event: events.Event) -> None:
        if isinstance(event, events.Upload | events.Drop):  # a drop may close a cohort
            self._look()

    def evaluated(self, scores: Mapping[int, Score]) -> dict[str, Any]:
        self._look()
        self._keep_matrices()
        return self._fit()

    def _look(self) -> None:
        """Note who has changed clusters."""
        found = self.engine.strategy.clusters()
        if found is None:
            return
        before = np.full(len(found), -1) if self._now is None else self._now
        for client in np.flatnonzero(found != before):
            change = self.engine.updates, self.engine.time, int(client), int(found[client])
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

    def _keep_matrices(self) -> None:
        """Those of this evaluation, unless nothing is known yet: everybody is like itself."""
        if self.engine.federation.clients > CLIENTS:
            return
        now, strategy = (self.engine.updates, self.engine.time), self.engine.strategy
        alike, graph = strategy.similarity(), strategy.collaboration()
        if alike is not None and np.isfinite(alike).sum() > len(alike):
            self.alike.add(*now, alike)
        if graph is not None:
            self.graphs.add(*now, graph)

    def _similarities(self) -> list[tuple[int, float, FloatArray]]:
        engine = self.engine
        return self.alike.until_now(engine.updates, engine.time, engine.strategy.similarity())

    def tables(self) -> dict[str, Sequence[Row]]:
        """clusters.csv: who has changed to which cluster, and when."""
        columns = ("updates", "time", "client", "cluster")
        rows = [dict(zip(columns, change, strict=True)) for change in self.changes]
        return {"clusters": rows}

    def arrays(self) -> dict[str, dict[str, Any]]:
        """similarity.npz and graph.npz: how alike clients were, and who learnt from whom, a few
        times."""
        found = {"similarity": self._similarities(), "graph": self.graphs.kept}
        return {name: stacked(kept) for name, kept in found.items() if kept}

    def plots(self) -> dict[str, dict[str, Any]]:
        clients, updates = self.engine.federation.clients, self.engine.updates
        plots: dict[str, dict[str, Any]] = {}
        if clients > DRAWN:
            return plots
        if self.changes and updates:
            plots["clusters"] = {"changes": self.changes, "clients": clients, "updates": updates}
        if kept := self._similarities():
            plots["similarity"] = {"matrices": kept}
        if (graph := self.engine.strategy.collaboration()) is not None:
            plots["graph"] = {"weights": graph}
        return {name: {**given, "groups": self.groups} for name, given in plots.items()}

    def state_dict(self) -> State:
        return {
            "changes": [list(change) for change in self.changes],
            "alike": self.alike.state_dict(),
            "graphs": self.graphs.state_dict(),
            "now": self._now,
        }

    def load_state_dict(self, state: State) -> None:
        self.changes = [(r, t, client, cluster) for r, t, client, cluster in state["changes"]]
        self.alike.load_state_dict(state["alike"])
        self.graphs.load_state_dict(state["graphs"])
        self._now = state["now"]


def stacked(kept: Sequence[tuple[int, float, FloatArray]]) -> dict[str, Any]:
    """Matrices and when they were taken, as arrays of a file."""
    updates, times, matrices = (np.array(part) for part in zip(*kept, strict=True))
    return {"updates": updates, "times": times, "matrices": matrices}


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
