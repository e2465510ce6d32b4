"""EchoPFL (Li et al.: EchoPFL: Asynchronous Personalized Federated Learning on Mobile Devices with
On-Demand Staleness Control, IMWUT 2024), in our own reading.

Of the paper we know what its abstract says: every update is taken in when it arrives, however late;
the server finds clusters as it goes; and it broadcasts a cluster's model on demand, to keep slow
clients from being too stale. All formulas and constants here are ours.

On the arrival of theta from client i, with w_0 the initial model, m_k that of cluster k, tau_i the
updates folded into i's cluster since i was last sent a model:

    k     <- argmax_k cos(theta - w_0, m_k - w_0)          the nearest cluster
    if that cosine is below `join`: open a cluster, m_k <- theta
    else: m_k <- m_k + alpha (1 + tau_i)^-a (theta - m_k)
    while some l has cos(m_k - w_0, m_l - w_0) >= `merge`: k and the nearest such l become one, with
        the mean of both models, by their numbers of clients
    send m_k to its clients j in training with |m_k - r_j| > `broadcast` |m_k - w_0|, where r_j is
        what j was last sent

A client that is in no cluster yet is sent w_0, so that first uploads can be compared whenever they
come; of w_0, tau counts all updates since the beginning.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from polytempo.core.errors import PolytempoError
from polytempo.core.messages import Dispatch, InFlights, Staleness, Update
from polytempo.core.strategy import STRATEGIES, Context
from polytempo.strategies.clustered import Clustered
from polytempo.strategies.history import cosine


@STRATEGIES.register("echopfl")
class EchoPFL(Clustered):
    """Clusters that updates open, join and merge as they arrive; fresh models on demand.

    Our reading of a method of which we know the abstract. Use it when clients fall into groups of
    similar data, nobody knows how many, and some are slow. An update goes to the cluster whose
    model has moved from the initial one in the most similar direction, or opens one; clusters that
    have become alike are merged; a client may change its cluster with every upload. Clients in
    training are sent their cluster's model when it has changed much since they were last sent it.

    `join`: the cosine that an update needs to join a cluster. `merge`: the one at which two
    clusters become one, at least `join`. Clients that share a cluster share a past, and are hardly
    told apart later, whereas clusters that are too many are merged: if in doubt, choose a higher
    `join`. `alpha`, `a`: how much an update counts, and the exponent of its
    staleness decay. `broadcast`: the change of a cluster's model, relative to its distance from the
    initial one, beyond which clients in training are sent it. `multicast`: whether they are at all.

    A client that has not uploaded yet would use the mean of all clusters' models, by their sizes.
    """

    family: ClassVar[str] = "asynchronous, clustered"
    paper: ClassVar[str] = "Li et al. 2024; our reading"
    state: ClassVar[tuple[str, ...]] = (*Clustered.state, "missed", "received")

    join: Annotated[float, Field(ge=-1, le=1)] = 0.3
    merge: Annotated[float, Field(ge=-1, le=1)] = 0.5
    alpha: Annotated[float, Field(gt=0, le=1)] = 0.6
    a: Annotated[float, Field(ge=0)] = 0.5
    broadcast: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.2
    multicast: bool = True

    def __post_init__(self) -> None:
        if self.merge < self.join:
            raise PolytempoError(
                f"echopfl: merge is {self.merge}, below join, {self.join}: a cluster would be "
                "merged as soon as it is opened; use merge >= join"
            )

    def setup(self, context: Context) -> None:
        super().setup(context)
        self.cluster[:] = -1
        self.missed = np.zeros(context.clients, dtype=np.int64)  # tau
        self.received: dict[str, Tensor] = {}  # r, of who is in training

    def model_for(self, client: int) -> Tensor:
        number = int(self.cluster[client])
        return self.models[number] if number >= 0 else self.context.initial

    def serve(self, client: int) -> Tensor:
        return super().model_for(client) if self.changes else self.context.initial

    def dispatched(self, dispatch: Dispatch) -> None:
        self.received[str(dispatch.client)] = dispatch.params
        if self.cluster[dispatch.client] >= 0:
            self.missed[dispatch.client] = 0

    def lost(self, client: int) -> None:
        self.received.pop(str(client), None)

    def fold(self, update: Update, staleness: Staleness) -> bool:
        i, theta = update.client, update.vector
        self.received.pop(str(i), None)
        best, likeness = self.nearest(theta, own=int(self.cluster[i]))
        if likeness < self.join:
            self.cluster[i] = -1
            best = self.free()
            self.change(best, theta)
        else:
            weight = self.alpha * (1 + int(self.missed[i])) ** -self.a
            self.change(best, torch.lerp(self.models[best], theta, weight))
        self.cluster[i] = best
        self.unite(best)
        self.missed[(self.cluster == self.cluster[i]) | (self.cluster < 0)] += 1
        return True

    def nearest(self, model: Tensor, own: int = -1, but: int = -1) -> tuple[int, float]:
        """The cluster that is most like the model, and how much; of equals, `own` or the first.
        `but` is left out. Without any: -1, and less than any cosine."""
        found, initial = (-1, -2.0), self.context.initial
        numbers = np.flatnonzero(np.bincount(self.cluster + 1)[1:]).tolist()
        for number in sorted(numbers, key=lambda number: number != own):
            if number == but:
                continue
            likeness = cosine(model - initial, self.models[number] - initial)
            if likeness > found[1]:
                found = number, likeness
        return found

    def free(self) -> int:
        """The first number of no cluster."""
        number = next(k for k in range(len(self.models) + 1) if not (self.cluster == k).any())
        if number == len(self.models):
            self.models.append(self.context.initial)
            self.revisions.append(0)
        return number

    def unite(self, number: int) -> None:
        """Merge the cluster with those that it has become like."""
        while True:
            other, likeness = self.nearest(self.models[number], but=number)
            if likeness < self.merge:
                return
            number, other = min(number, other), max(number, other)
            ours, theirs = len(self.members(number)), self.members(other)
            share = len(theirs) / (ours + len(theirs))
            self.change(number, torch.lerp(self.models[number], self.models[other], share))
            self.cluster[theirs] = number

    def refresh(self, in_flight: InFlights) -> Sequence[int]:
        """The members in training whose cluster has moved on."""
        if not self.multicast:
            return ()
        return [flight.client for flight in in_flight if self.moved_on(flight.client)]

    def moved_on(self, client: int) -> bool:
        """Whether its cluster's model has changed enough since it was last sent it."""
        model, received = self.model_for(client), self.received[str(client)]
        if self.cluster[client] < 0 or model is received:
            return False
        way = torch.linalg.vector_norm(model - self.context.initial)
        return bool(torch.linalg.vector_norm(model - received) > self.broadcast * way)
