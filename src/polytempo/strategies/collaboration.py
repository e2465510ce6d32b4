"""What methods with a collaboration graph share, and their two simple forms: over a cohort, and on
every arrival. The third form, which copes with staleness, is PACE."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import numpy as np
from torch import Tensor

from polytempo.core.bank import PLAIN_STORAGE, FloatArray, ModelBank, Storage
from polytempo.core.client_steps import Basis
from polytempo.core.messages import Staleness, Update
from polytempo.core.objective import Proximal, Pull
from polytempo.core.strategy import Context, Refill, State, Strategy
from polytempo.core.task import Task
from polytempo.strategies.estimators import Bases, Graph, Likeness
from polytempo.strategies.graph import CollaborationGraph


class GraphStrategy(Strategy):
    """A model for every client, and the graph W.

    `graph`: how W is estimated: pfedgraph, fedamp or fedsac, with its own options
    (`graph.gamma=1`).
    `lam`: strength of the pull towards the received model. Attractive, as in PACE Eq. 4; public
    code of pFedGraph has the opposite sign: give a negative value to replicate it.
    """

    state: ClassVar[tuple[str, ...]] = ("bank", "rows", "bases")
    anchored: ClassVar[bool] = False  # clients keep their own models; what is mixed is an anchor

    graph: Graph = dataclasses.field(default_factory=Likeness)
    lam: float = 0.01

    def setup(self, context: Context) -> None:
        super().setup(context)
        self.prior = context.shares()  # p
        self.bank = self.new_bank(context.clients, context.storage)  # phi
        self.rows = CollaborationGraph(self.prior)  # W
        self.bases = Bases(context.clients)
        self.asked = self._task()

    def enrolled(self, client: int) -> None:
        self.prior[:] = self.context.shares()  # the graph looks at it as well

    def load_state_dict(self, state: State) -> None:
        self.prior[:] = self.context.shares()
        super().load_state_dict(state)

    def new_bank(self, rows: int, storage: Storage = PLAIN_STORAGE) -> ModelBank:
        """Vectors that are compared as models, or by their displacement from the initial one."""
        initial = self.context.initial
        origin = initial if self.graph.reference == "displacement" else None
        return ModelBank(rows, initial, origin, storage)

    def task(self, client: int) -> Task:
        return self.asked

    def _task(self) -> Task:
        """The local loss plus `lam` times the dissimilarity from the received model (PACE Eq. 4);
        with an anchor, plus `(lam/2) ||theta - anchor||^2`."""
        task = self.context.task
        if self.graph.directions:
            task = dataclasses.replace(task, client_steps=(Basis(self.graph.directions),))
        if not self.lam:
            return task
        objective = Proximal(self.lam) if self.anchored else Pull(self.lam, self.graph.measure)
        return dataclasses.replace(task, objective=objective)

    def model_for(self, client: int) -> Tensor:
        return self.bank.row(client)

    def vectors_for(self, client: int) -> Mapping[str, Tensor]:
        if self.anchored and self.rows.known(client):
            return {"anchor": self.bank.weighted_sum(self.rows.row(client))}
        return {}

    def revision(self, client: int) -> int:
        return self.bank.revision(client)

    def collaboration(self) -> FloatArray:
        return self.rows.matrix()

    def note_basis(self, update: Update) -> None:
        """Remember what came beside the model, or refuse the update."""
        if self.graph.directions:
            self.bases.set(update.client, update.extras["basis"])

    def overlap(self, client: int) -> FloatArray | None:
        """Of the client's features with everybody's, if the estimator asks for it."""
        return self.bases.overlap(client) if self.graph.directions else None


class CohortGraph(GraphStrategy):
    """The synchronous form. When a cohort is complete, the row of each of its clients is estimated
    over the cohort, and the client's model becomes the row-weighted mean of the cohort's uploads.
    It is handed that model the next time it takes part.

    The prior p is renormalised over the cohort: only its members are averaged.
    """

    refill: ClassVar[Refill] = "cohort"
    state: ClassVar[tuple[str, ...]] = (*GraphStrategy.state, "cohort", "uploads")

    def setup(self, context: Context) -> None:
        super().setup(context)
        self.cohort: list[int] = []
        self.uploads: list[Tensor] = []

    def fold(self, update: Update, staleness: Staleness) -> bool:
        self.note_basis(update)
        self.cohort.append(update.client)
        self.uploads.append(update.vector)
        return False

    def close_cohort(self) -> bool:
        if not self.cohort:
            return False
        uploads = self.new_bank(len(self.cohort))
        for k, vector in enumerate(self.uploads):
            uploads.set(k, vector)
        prior = self.prior[self.cohort] / self.prior[self.cohort].sum()
        for k, (client, vector) in enumerate(zip(self.cohort, self.uploads, strict=True)):
            unlike = uploads.dissimilarity(vector, self.graph.measure)
            overlap = self.overlap(client)
            among = None if overlap is None else overlap[self.cohort]
            row = self.graph.row(k, unlike, prior, among)
            everybody = np.zeros_like(self.prior)
            everybody[self.cohort] = row
            self.rows.set_row(client, everybody)
            self.bank.set(client, vector if self.anchored else uploads.weighted_sum(row))
        self.cohort, self.uploads = [], []
        return True


class ArrivalGraph(GraphStrategy):
    """The naive asynchronous form: the first bar of PACE's Fig. 5.

    On each arrival the sender's row is estimated against the stored models of all, and the sender's
    stored model becomes the row-weighted mean of them. No staleness is accounted for.
    """

    def fold(self, update: Update, staleness: Staleness) -> bool:
        self.note_basis(update)
        i, theta = update.client, update.vector
        self.bank.set(i, theta)
        self.estimate(i, self.bank.dissimilarity(theta, self.graph.measure))
        if not self.anchored:
            self.bank.set(i, self.bank.weighted_sum(self.rows.row(i)))
        return True

    def estimate(self, client: int, unlike: FloatArray) -> None:
        """Set the client's row of W."""
        row = self.graph.row(client, unlike, self.prior, self.overlap(client))
        self.rows.set_row(client, row)
