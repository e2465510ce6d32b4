"""What CFL and ICFL share: the last update of each client, how alike these are, and clusters that
are split by that; over a cohort, and on every arrival."""

from __future__ import annotations

from typing import Annotated, ClassVar

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from polytempo.core.bank import BoolArray, FloatArray, ModelBank
from polytempo.core.messages import Dispatch, Staleness, Update
from polytempo.core.strategy import Context, IntArray
from polytempo.strategies.clustered import Clustered, unknown


class Updates(Clustered):
    """Override `parts`, which says whether and how a cluster is split."""

    state: ClassVar[tuple[str, ...]] = (
        *Clustered.state,
        "t",
        "bank",
        "alike",
        "lengths",
        "received",
    )

    def setup(self, context: Context) -> None:
        super().setup(context)
        zero = torch.zeros_like(context.initial)
        self.t = 0  # looks at the clusters
        self.bank = ModelBank(context.clients, zero, storage=context.storage)  # last updates
        self.alike = unknown(context.clients)
        self.lengths = np.full(context.clients, np.nan)  # of the last updates
        self.received: dict[str, Tensor] = {}  # what who is in training started from

    def similarity(self) -> FloatArray:
        return self.alike.copy()

    def dispatched(self, dispatch: Dispatch) -> None:
        """Note what the client starts from."""
        self.received[str(dispatch.client)] = dispatch.params

    def lost(self, client: int) -> None:
        self.received.pop(str(client), None)

    @property
    def heard(self) -> BoolArray:
        """Who has uploaded."""
        return np.asarray(~np.isnan(self.lengths))

    def mean_update(self, clients: IntArray) -> Tensor:
        """The sample-weighted mean of the last updates of these clients."""
        weights = np.zeros(self.context.clients)
        weights[clients] = self.context.shares()[clients]
        return self.bank.weighted_sum(weights / weights.sum())

    def note_update(self, update: Update) -> Tensor:
        """Keep what training has changed, and compare it with what it has changed in others."""
        i = update.client
        change = update.vector - self.received.pop(str(i), self.context.initial)
        self.bank.set(i, change)
        self.lengths[i] = float(torch.linalg.vector_norm(change))
        known = self.heard
        cosines = -self.bank.dissimilarity(change, "cosine")[known]
        self.alike[i, known] = self.alike[known, i] = cosines
        self.alike[i, i] = 1.0
        return change

    def parts(self, members: IntArray, similarity: FloatArray) -> IntArray | None:
        """The part of each of these clients, that of the first being 0; None: all stay together."""
        raise NotImplementedError

    def look(self, number: int) -> None:
        """Split the cluster in two, if it is time."""
        members = self.members(number)
        if len(members) > 2 and bool(self.heard[members].all()):
            parts = self.parts(members, self.alike[np.ix_(members, members)])
            if parts is not None:
                self.split(number, parts)


class CohortUpdates(Updates):
    """The synchronous form: a cluster moves by the mean update of its clients in the cohort."""

    state: ClassVar[tuple[str, ...]] = (*Updates.state, "cohort")

    def setup(self, context: Context) -> None:
        super().setup(context)
        self.cohort: list[int] = []

    def fold(self, update: Update, staleness: Staleness) -> bool:
        self.note_update(update)
        self.cohort.append(update.client)
        return False

    def close_cohort(self) -> bool:
        if not self.cohort:
            return False
        self.t += 1
        cohort, self.cohort = np.array(self.cohort), []
        for number in np.unique(self.cluster[cohort]):
            ours = cohort[self.cluster[cohort] == number]
            self.change(int(number), self.models[number] + self.mean_update(ours))
            self.look(int(number))
        return True


class ArrivalUpdates(Updates):
    """The naive asynchronous form: an update moves its cluster's model by `alpha` of the way."""

    alpha: Annotated[float, Field(gt=0, lt=1)] = 0.3

    def fold(self, update: Update, staleness: Staleness) -> bool:
        self.t += 1
        self.note_update(update)
        number = int(self.cluster[update.client])
        self.change(number, torch.lerp(self.models[number], update.vector, self.alpha))
        self.look(number)
        return True
