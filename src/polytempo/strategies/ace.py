"""ACE and ACED (Mitigating Participation Imbalance Bias in Asynchronous Federated Learning under
Client Heterogeneity; anonymous, under review, 2025)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from polytempo.core.bank import ModelBank
from polytempo.core.errors import PolytempoError
from polytempo.core.messages import Dispatch, InFlights, Staleness, Update
from polytempo.core.objective import Drift
from polytempo.core.strategy import STRATEGIES, Context, Refill
from polytempo.core.task import Task
from polytempo.strategies.gradients import GradientStrategy

PAPER = "ACE 2025 (under review)"


@STRATEGIES.register("ace")
class ACE(GradientStrategy):
    """Each arrival moves the model by the mean of the latest gradients of all clients.

    The server caches the latest gradient U_i of every client. When g arrives from client j,
        U_j <- g
        u    = (1 / n) sum_i U_i
        w   <- w - eta u
    so that a client has the same influence however often it reports: use it where clients differ
    in data and speed. The price is server memory: one vector per client (reduced by `--bank half`
    or ace-8bit). A client that has left for good keeps its influence: aced forgets it.

    `server_lr`: eta, 0.2 sqrt(n / T) in the paper. `local_steps`: of a client, 1 in the paper; with
    more, g is the sum of their gradients (plain SGD, whatever the task's momentum).
    `every`: the server takes a step with every so many uploads, 1 in the paper's text.
    `start`: the paper begins with one gradient of every client at the initial model, and then takes
    its first step. "all" does so: every client is first sent the initial model, and the first step
    is taken once every client in training has reported at least once (clients that leave earlier
    are not waited for). A client that reports again before then is sent the initial model again,
    and its newest gradient counts. That takes long if delays vary: about n ln n updates if they are
    exponential, 500 for 100 clients. "first" takes steps from the first update on. In either case
    the mean is over the clients that have ever reported; once all have, the two are the same.

    An arrival costs O(d), since the sum of the cache is kept, in double precision so that it does
    not drift away from its single-precision parts.

    Where we depart from the paper: at its first step it sends the new model to all; here, those in
    training finish with the initial model, and are sent the new one when they report.
    """

    paper: ClassVar[str] = PAPER
    refill: ClassVar[Refill] = "same"
    all_train: ClassVar[bool] = True
    bits: ClassVar[Literal[8] | None] = None  # of the cache; None: as the context says
    state: ClassVar[tuple[str, ...]] = (
        *("model", "cache", "total", "reported", "started", "awaited", "sent", "since"),
    )

    every: Annotated[int, Field(ge=1)] = 1
    start: Literal["all", "first"] = "all"

    def setup(self, context: Context) -> None:
        super().setup(context)
        zeros = torch.zeros_like(context.initial)
        storage = context.storage
        if self.bits is not None:
            storage = replace(storage, bits=self.bits, seed=context.seed)
        self.cache = ModelBank(context.clients, zeros, storage=storage)  # U
        self.total = torch.zeros_like(zeros, dtype=torch.float64)  # sum_i U_i
        self.reported = np.zeros(context.clients, dtype=np.bool_)
        self.started = self.start == "first"
        # Who has to report before the first step: all, then those in training that have not yet.
        # They are listed once, and from then on followed, by who is sent a model.
        self.awaited = np.ones(context.clients, dtype=np.bool_)
        self.sent: list[int] | None = None
        self.since = 0  # uploads since the last step

    def fold(self, update: Update, staleness: Staleness) -> bool:
        self.total += self.store(update)
        if not (self.ready() and self.due()):
            return False
        self.descend(self.total / int(np.count_nonzero(self.reported)))  # u
        return True

    def store(self, update: Update) -> Tensor:
        """U_j <- g. Returns by how much it has changed, in double precision; and as it is kept, for
        that may be in fewer bits: the sum is always that of the cache."""
        j = update.client
        before = self.cache.row(j).double()
        self.cache.set(j, self.gradient(update))
        self.reported[j], self.awaited[j] = True, False
        return self.cache.row(j) - before

    def ready(self) -> bool:
        """Whether the initial gradients are in."""
        self.started = self.started or not bool(self.awaited.any())
        return self.started

    def due(self) -> bool:
        """Whether an upload, which is in, is the one for a step."""
        self.since = (self.since + 1) % self.every
        return self.since == 0

    def lost(self, client: int) -> None:
        self.awaited[client] = False
        if self.sent is not None:
            self.sent = [other for other in self.sent if other != client]

    def training(self, in_flight: InFlights) -> None:
        if self.started:
            return
        if self.sent is None:
            self.awaited[:] = False
            self.sent = [flight.client for flight in in_flight]
        self.awaited[self.sent] = ~self.reported[self.sent]
        self.sent = []

    def dispatched(self, dispatch: Dispatch) -> None:
        if self.sent is not None and not self.started:
            self.sent.append(dispatch.client)


@STRATEGIES.register("ace-8bit")
class ACE8bit(ACE):
    """ACE with the cached gradients in 8 bits: a quarter of the server's memory.

    Integers with a scale for each 128 neighbours, rounded at random so that they are right on
    average (`Storage(bits=8)`, whatever `--bank` says of the precision). u is the mean of what is
    cached. Clients upload in full precision. Options as in ace.
    """

    bits: ClassVar[Literal[8] | None] = 8


@STRATEGIES.register("ace-incremental")
class ACEIncremental(ACE):
    """ACE whose clients remember their last gradient and upload the difference to the new one.

    Client j keeps its gradient g_prev (0 at first) and uploads g - g_prev; the server keeps the
    mean alone, O(d) instead of O(n d):
        u <- u + (g - g_prev) / n
        w <- w - eta u
    The same models as ace's, but for rounding.

    Clients of this strategy keep nothing between trainings. What a client would remember is
    kept next to the server, in a bank, and travels with the model as the anchor of a `Drift`
    objective, which adds -g_prev to the gradient: what is uploaded is the difference. So nothing is
    saved here, neither memory nor traffic (a dispatch has twice the size): this is for studying the
    rule. And a client's memory changes when the server has the upload, not when it was sent, so
    that the two agree even if uploads are lost.

    Options as in ace, but one local step only: over several, the anchor would act on the way.
    """

    def __post_init__(self) -> None:
        if self.local_steps > 1 or self.local != "gradient":
            raise PolytempoError(
                f"ace-incremental takes one local step, got local_steps={self.local_steps}, "
                f"local={self.local}; use ace for more"
            )

    def task(self, client: int) -> Task:
        return replace(super().task(client), objective=Drift())

    def vectors_for(self, client: int) -> Mapping[str, Tensor]:
        return {"anchor": -self.cache.row(client)}  # -g_prev

    def gradient(self, update: Update) -> Tensor:
        """What the client remembers from now on: g = g_prev + what it has uploaded"""
        return self.cache.row(update.client) + update.vector


@STRATEGIES.register("aced")
class ACED(ACE):
    """ACE that leaves out clients that have not been heard from for a while.

    t counts the server's steps from the first, at t = 0, on, and t_start[i] is the t from which on
    client i has the model that it was last sent (1 for all at first). When g arrives from j,
        U_j <- g
        A    = {i : t - t_start[i] <= tau_algo}
        w   <- w - eta (1 / |A|) sum_{i in A} U_i
        t_start[j] <- t + 1
    A is never empty: the client that reported before is in it. Use it where clients vanish or are
    very late; one that comes back takes part again from the step after its update on.

    `tau_algo`: the paper uses 10 where clients drop out, 50 elsewhere, and finds 10 to 50 good for
    100 clients and 500 steps. With `every` = 1 one client is renewed per step, so at most
    tau_algo + 1 are in A, once the initial gradients are out of date; with the largest delay or
    more, it is ace. Other options as in ace. (Initial gradients of clients that report late count
    from when they are there.)

    t_start is the time of the last contact, as in the paper's Algorithm a.1; its text defines it as
    the time of the model behind the cached gradient.

    An arrival costs O(d) on average: the sum over A gains one gradient and loses those that fall
    out, each of which has been gained before.
    """

    state: ClassVar[tuple[str, ...]] = (*ACE.state, "t", "t_start", "active")

    tau_algo: Annotated[int, Field(ge=0)] = 10

    def setup(self, context: Context) -> None:
        super().setup(context)
        self.t = 0
        self.t_start = np.ones(context.clients, dtype=np.int64)
        self.active = np.ones(context.clients, dtype=np.bool_)  # A; `total` is the sum over it

    def fold(self, update: Update, staleness: Staleness) -> bool:
        j = update.client
        change = self.store(update)
        if self.active[j]:
            self.total += change
        if not self.ready():
            return False
        late = self.active & (self.t - self.t_start > self.tau_algo)
        for i in np.flatnonzero(late & self.reported):
            self.total -= self.cache.row(int(i))
        self.active &= ~late
        due = self.due()
        if due:
            self.descend(self.total / int(np.count_nonzero(self.active & self.reported)))
        self.t_start[j] = self.t + 1
        self.t += due
        if not self.active[j]:
            self.active[j] = True
            self.total += self.cache.row(j)
        return due


@STRATEGIES.register("aced-8bit")
class ACED8bit(ACED):
    """ACED with the cached gradients in 8 bits: a quarter of the server's memory.

    See ace-8bit; options as in aced.
    """

    bits: ClassVar[Literal[8] | None] = 8
