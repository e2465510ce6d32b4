"""ICFL (Yan, Tong, Wang: Clustered Federated Learning in Heterogeneous Environment, TNNLS 2023), in
our reading: neither code nor text is public. And asynchronous, as CASA's baseline."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field
from torch import Tensor

from polytempo.core.bank import FloatArray
from polytempo.core.messages import Update
from polytempo.core.strategy import STRATEGIES, Context, IntArray, Refill
from polytempo.strategies.splitting import spectrum
from polytempo.strategies.update_similarity import ArrivalUpdates, CohortUpdates, Updates


class Incremental(Updates):
    """Clusters have to be ever more alike."""

    state: ClassVar[tuple[str, ...]] = (*Updates.state, "arrivals")

    start: Annotated[float, Field(ge=-1, le=1)] = 0.85
    eps: Annotated[float, Field(ge=0)] = 4.0
    updates: Annotated[int, Field(ge=1)] = 500
    founders: Annotated[float, Field(gt=0)] = 10.0

    def setup(self, context: Context) -> None:
        super().setup(context)
        self.arrivals = 0

    @property
    def threshold(self) -> float:
        """alpha*(t)"""
        return 1 - (1 - self.start) * math.exp(-self.eps * self.t / self.updates)

    def note_update(self, update: Update) -> Tensor:
        change = super().note_update(update)
        self.arrivals += 1
        if self.arrivals > self.founders * self.context.clients:
            self.cluster[(self.cluster == 0) & ~self.heard] = -1
            self.changes += 1  # for those that are in no cluster
        if self.cluster[update.client] < 0:
            number = self.best_cluster(update, change)
            self.cluster[update.client] = number
            self.change(number, self.models[number])  # to the newcomer it is another one
        return change

    def best_cluster(self, update: Update, change: Tensor) -> int:
        """The cluster whose clients are most like the newcomer, if they are enough; else one of
        its own, which begins with the model that it was handed."""
        alike = {}
        for number in range(len(self.models)):
            members = self.members(number)
            if len(members):
                alike[number] = float(self.alike[update.client, members].mean())
        best = max(alike, key=alike.__getitem__)
        if alike[best] >= self.threshold:
            return best
        self.models.append(update.vector - change)
        self.revisions.append(self.changes)
        return len(self.models) - 1

    def parts(self, members: IntArray, similarity: FloatArray) -> IntArray | None:
        if similarity.min() >= self.threshold:
            return None
        side = spectrum((1 + similarity) / 2).vectors[:, 1] > 0  # the Fiedler vector
        parts = (side != side[0]).astype(np.int64)
        together = parts[:, None] == parts
        pairs = ~np.eye(len(members), dtype=np.bool_)
        if together.all() or not (together & pairs).any():
            return None
        within, across = similarity[together & pairs].mean(), similarity[~together].mean()
        return parts if within > across else None


@STRATEGIES.register("icfl")
class ICFL(Incremental, CohortUpdates):
    """A cluster in which two clients are less alike than a rising threshold is split in two.

    Our reading of a method whose text and code are not public: if the least cosine of two clients'
    last updates is below `alpha*(t) = 1 - (1 - start) exp(-eps t / updates)`, the cluster is parted
    by the signs of the Fiedler vector of the normalised Laplacian of (1 + cos) / 2, provided that
    clients are more alike within the parts than across. A newcomer joins the cluster that is most
    like it on average, if that reaches the threshold, or else opens one.

    `start`, `eps`: CASA's values. `updates`: the length of the run; the paper's have 500.
    `founders`: a client that has not uploaded after `founders` times n arrivals is a newcomer when
    it does. A cluster of two is not split, nor one with clients that have not uploaded yet.
    """

    family: ClassVar[str] = "synchronous, clustered"
    paper: ClassVar[str] = "Yan et al. 2023; our reading"
    refill: ClassVar[Refill] = "cohort"
    state: ClassVar[tuple[str, ...]] = (*Incremental.state, "cohort")


@STRATEGIES.register("icfl-async")
class ICFLAsync(Incremental, ArrivalUpdates):
    """ICFL made asynchronous in the naive way: `w_k <- (1 - alpha) w_k + alpha theta`, and the last
    update of each client is kept; the condition is checked on every arrival. `updates` is the
    number of arrivals expected (the paper's runs have 50,000)."""

    family: ClassVar[str] = "asynchronous, clustered"
    paper: ClassVar[str] = "Liu et al. 2024 (CASA), baseline; our reading"

    updates: Annotated[int, Field(ge=1)] = 50_000
