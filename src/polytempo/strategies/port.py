"""PORT (Su, Li: How Asynchronous can Federated Learning Be?, IWQoS 2022)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from polytempo.core.messages import Dispatch, InFlights, Staleness, Update
from polytempo.core.strategy import STRATEGIES, Context, Strategy
from polytempo.core.task import Task
from polytempo.strategies.history import History, cosine


@STRATEGIES.register("port")
class PORT(Strategy):
    """Updates are buffered and weighted by age and direction; the slowest clients are hurried.

    When m updates Delta_i are in (tau_i versions old, from |D_i| samples):
        S_i = Omega / (tau_i + Omega)                                       staleness
        I_i = (1 + cos(Delta_i, w^(v) - w^(v - tau_i))) / 2, 1 if tau_i <= 1  interference
        q_i = |D_i| (alpha S_i + beta I_i), divided by their sum
        w  <- w + sum_i q_i Delta_i
    and every client in training whose model is more than Omega versions old is sent an urgent
    request: it stops at the end of its epoch and reports what it has.

    `alpha`, `beta`: the weights of staleness and interference. `bound`: Omega. `buffer_size`: m.
    All defaults are PACE's. `average=models` replaces w by the weighted mean of the buffered
    models, w <- sum_i q_i theta_i, instead of adding the steps that clients took. Both public
    implementations do so; a stale update then counts for less the further w has moved since.
    `requests=false` sends no urgent requests: instead, the server collects updates without
    aggregating them while anybody over the bound is still in training.

    The interference is that of the server's movement since the client's own dispatch, whatever its
    staleness (a public implementation looks two versions back for all). A reference of length zero
    has cosine 0.
    """

    family: ClassVar[str] = "asynchronous, one model"
    paper: ClassVar[str] = "Su and Li 2022"
    single_model: ClassVar[bool] = True
    state: ClassVar[tuple[str, ...]] = ("models", "total", "weight", "count", "late", "asked")

    alpha: Annotated[float, Field(gt=0)] = 1.0  # above 0, so that some weight is
    beta: Annotated[float, Field(ge=0)] = 1.0
    bound: Annotated[int, Field(ge=1)] = 10
    buffer_size: Annotated[int, Field(ge=1)] = 5
    average: Literal["steps", "models"] = "steps"
    requests: bool = True

    def setup(self, context: Context) -> None:
        super().setup(context)
        self.models = History(context.initial)
        self.total = torch.zeros_like(context.initial)
        self.weight = 0.0
        self.count = 0
        self.late: list[int] = []  # in training and over the bound
        self.asked: list[int] = []  # who was so before, and has been sent a request

    def task(self, client: int) -> Task:
        return replace(self.context.task, upload="delta")

    def model_for(self, client: int) -> Tensor:
        return self.models.current

    def importance(self, delta: Tensor, tau: int) -> float:
        """alpha S + beta I. The model is the same when the buffer is full as on arrival."""
        freshness = self.bound / (tau + self.bound)  # S
        agreement = 1.0  # I
        if tau > 1:
            agreement = (1 + cosine(delta, self.models.current - self.models.ago(tau))) / 2
        return self.alpha * freshness + self.beta * agreement

    def fold(self, update: Update, staleness: Staleness) -> bool:
        weight = update.samples * self.importance(update.vector, staleness.versions)
        self.total.add_(update.vector, alpha=weight)
        if self.average == "models":  # theta_i - w instead of theta_i - w^(v - tau_i)
            since = self.models.current - self.models.ago(staleness.versions)
            self.total.sub_(since, alpha=weight)
        self.weight += weight
        self.count += 1
        self.models.release(update.client)
        waiting = not self.requests and any(client != update.client for client in self.late)
        if self.count < self.buffer_size or waiting:
            return False
        self.models.add(self.models.current + self.total / self.weight)
        self.total.zero_()
        self.weight, self.count = 0.0, 0
        return True

    def dispatched(self, dispatch: Dispatch) -> None:
        self.models.hold(dispatch.client)

    def lost(self, client: int) -> None:
        self.models.release(client)

    def training(self, in_flight: InFlights) -> None:
        over = takewhile(lambda flight: flight.staleness.versions > self.bound, in_flight)
        self.asked, self.late = self.late, sorted(flight.client for flight in over)

    def urgent(self, in_flight: InFlights) -> Sequence[int]:
        """Those over the bound, each once: a client that has reported is not in flight at the next
        call, so its next training starts unhurried."""
        asked = set(self.asked)
        return [client for client in self.late if client not in asked] if self.requests else ()
