"""pFedGraph (Ye et al.: Personalized Federated Learning with Inferred Collaboration Graphs,
ICML 2023), as published and in the naive asynchronous form that PACE compares with."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field
from torch import Tensor

from polytempo.core.bank import PLAIN_STORAGE, FloatArray, ModelBank, Storage
from polytempo.core.messages import Staleness, Update
from polytempo.core.strategy import STRATEGIES, Context, Refill, Strategy
from polytempo.core.task import Measure, Pull, Task
from polytempo.strategies.graph import CollaborationGraph, collaboration_row


class GraphStrategy(Strategy):
    """What methods with a collaboration graph share: a model per client and the graph W.

    `gamma`: how much likeness counts against sample size in the graph (PACE's gamma and alpha;
    the reciprocal of the alpha of pFedGraph's public code).
    `lam`: strength of the pull towards the received model. Attractive, as in PACE Eq. 4; public
    code of pFedGraph has the opposite sign: give a negative value to replicate it.
    `similarity`: cosine, inner, l1 or l2 (scaled as `ModelBank.dissimilarity` says).
    `reference`: compare models as they are ("model", the papers' formula) or by their
    displacement from the common initial model (pFedGraph's practice: far more telling, since
    models that share an initialisation all look alike).
    """

    state: ClassVar[tuple[str, ...]] = ("bank", "graph")

    gamma: Annotated[float, Field(ge=0)] = 1.5
    lam: float = 0.01
    similarity: Measure = "cosine"
    reference: Literal["model", "displacement"] = "displacement"

    def setup(self, context: Context) -> None:
        super().setup(context)
        self.prior = context.shares()  # p
        self.bank = self.new_bank(context.clients, context.storage)  # phi
        self.graph = CollaborationGraph(self.prior)  # W

    def new_bank(self, rows: int, storage: Storage = PLAIN_STORAGE) -> ModelBank:
        """Vectors that are compared as models, or by their displacement from the initial one."""
        initial = self.context.initial
        origin = initial if self.reference == "displacement" else None
        return ModelBank(rows, initial, origin, storage)

    def task(self, client: int) -> Task:
        """The local loss plus `lam` times the dissimilarity from the received model (Eq. 4)."""
        if not self.lam:
            return self.context.task
        return replace(self.context.task, objective=Pull(self.lam, self.similarity))

    def model_for(self, client: int) -> Tensor:
        return self.bank.row(client)

    def revision(self, client: int) -> int:
        return self.bank.revision(client)

    def collaboration(self) -> FloatArray:
        return self.graph.matrix()


@STRATEGIES.register("pfedgraph")
class PFedGraph(GraphStrategy):
    """Synchronous personalised learning over a collaboration graph.

    When a cohort is complete, the row of each of its clients is estimated over the cohort, and the
    client's model becomes the row-weighted mean of the cohort's uploads. It is handed that model
    the next time it takes part. `clip`: cosines above it count as 1.

    The prior p is renormalised over the cohort: only its members are averaged.
    """

    family: ClassVar[str] = "synchronous, personalised"
    paper: ClassVar[str] = "Ye et al. 2023"
    refill: ClassVar[Refill] = "cohort"
    state: ClassVar[tuple[str, ...]] = ("bank", "graph", "cohort", "uploads")

    clip: float | None = 0.9

    def setup(self, context: Context) -> None:
        super().setup(context)
        self.cohort: list[int] = []
        self.uploads: list[Tensor] = []

    def fold(self, update: Update, staleness: Staleness) -> bool:
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
        clip = self.clip if self.similarity == "cosine" else None
        for client, vector in zip(self.cohort, self.uploads, strict=True):
            unlike = uploads.dissimilarity(vector, self.similarity)
            row = collaboration_row(unlike, prior, self.gamma, clip)
            everybody = np.zeros_like(self.prior)
            everybody[self.cohort] = row
            self.graph.set_row(client, everybody)
            self.bank.set(client, uploads.weighted_sum(row))
        self.cohort, self.uploads = [], []
        return True


@STRATEGIES.register("pfedgraph-async")
class PFedGraphAsync(GraphStrategy):
    """pFedGraph made asynchronous in the naive way: the first bar of PACE's Fig. 5.

    On each arrival the sender's row is estimated against the stored models of all, and the
    sender's stored model becomes the row-weighted mean of them. No staleness is accounted for, and
    means are mixed into means: accuracy collapses in the long run (PACE, Fig. 4). A baseline, not
    a recommendation.
    """

    family: ClassVar[str] = "asynchronous, personalised"
    paper: ClassVar[str] = "Liu et al. 2026 (PACE), baseline"

    def fold(self, update: Update, staleness: Staleness) -> bool:
        i, theta = update.client, update.vector
        self.bank.set(i, theta)
        unlike = self.bank.dissimilarity(theta, self.similarity)
        row = collaboration_row(unlike, self.prior, self.gamma)
        self.graph.set_row(i, row)
        self.bank.set(i, self.bank.weighted_sum(row))
        return True
