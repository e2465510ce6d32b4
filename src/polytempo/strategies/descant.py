"""Descant, Polytempo's own method: one melody for all, a line of one's own above it."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from polytempo.core.client_steps import Line, Prior, way_left
from polytempo.core.messages import Dispatch, Staleness, Update
from polytempo.core.strategy import STRATEGIES, Context, Strategy
from polytempo.core.task import Task
from polytempo.strategies.history import History


@STRATEGIES.register("descant")
class Descant(Strategy):
    """One shared model that every client trains under its own label prior, and a line of its own.

    - A client adds the logarithm of its own label frequencies to the model's outputs, in training
      and in use (`Prior`). Labels that it does not have get almost no gradient, so what it learns
      does not undo what others have learned, and single updates may move the model far.
    - It trains from where it was (`Line`): from `G_sent + u` to theta. Its line u is `beta` times
      the mean of `theta - G_sent` over its last `memory` trainings. What it uploads is the way from
      `G_sent` to the half-space `<x, d> >= <theta, d>`, `d = theta - G_sent - u`: what this
      training has added, as far as the shared model lacks it.
    - The shared model moves by these ways w, as they arrive: `G <- G + r c w`, with
      `r = step (1 + tau)^-a (1 + fade t / n)^-1/2` and
      `c = max(0, 1 - <G - G_sent, w> / |w|^2)`: only what others have not gone already since. That
      is a relaxed projection onto the same half-space, so `G` never overshoots a client's proposal.
      On quadratic losses with a common minimum it never moves away from that, whatever the lines,
      delays and rates (tests/strategies/test_descant.py).
    - Clients are served a moving average `E` of `G` over about `horizon` times n arrivals (over
      half of them at first), to which each adds its line. Label counts, lines and the models in use
      never leave the client, a training takes no longer than in FedAvg, and the server keeps two
      models, and those that clients in training were sent.

    The prior says how labels differ between clients, the line the rest: where the same sample means
    something else to each, lines grow into models of their own. Without labels there is no prior,
    and `beta` is 1.

    `prior`: what is added to each label count; 0: no prior. `beta` 0: no line. `weight_decay`
    replaces that of the local optimizer (none: leave it). Statistics of batch normalisation have no
    line; the server's move towards the client's at the rate r.
    """

    family: ClassVar[str] = "asynchronous, personalised"
    paper: ClassVar[str] = "Polytempo"
    single_model: ClassVar[bool] = True
    state: ClassVar[tuple[str, ...]] = ("history", "mean", "t")

    step: Annotated[float, Field(gt=0)] = 1.0
    a: Annotated[float, Field(ge=0)] = 0.5
    fade: Annotated[float, Field(ge=0)] = 0.3
    horizon: Annotated[float, Field(gt=0)] = 1.0
    beta: Annotated[float, Field(ge=0, le=1)] = 0.8
    memory: Annotated[int, Field(ge=1)] = 4
    prior: Annotated[float, Field(ge=0)] = 0.1
    weight_decay: Annotated[float, Field(ge=0)] | None = None
    project: bool = True

    def setup(self, context: Context) -> None:
        super().setup(context)
        self.history = History(context.initial)
        self.mean = context.initial
        self.t = 0
        prior = (Prior(self.prior),) if self.prior else ()
        line = (Line(self.beta, self.memory),) if self.beta else ()
        self.asked = replace(context.task, upload="delta", client_steps=(*prior, *line))
        if self.weight_decay is not None:
            optimizer = replace(context.task.optimizer, weight_decay=self.weight_decay)
            self.asked = replace(self.asked, optimizer=optimizer)

    def task(self, client: int) -> Task:
        return self.asked

    def model_for(self, client: int) -> Tensor:
        return self.history.current

    def serve(self, client: int) -> Tensor:
        return self.mean

    def dispatched(self, dispatch: Dispatch) -> None:
        self.history.hold(dispatch.client)

    def lost(self, client: int) -> None:
        self.history.release(client)

    def fold(self, update: Update, staleness: Staleness) -> bool:
        self.t += 1
        n, now = self.context.clients, self.history.current
        gone, way = now - self.history.ago(staleness.versions), update.vector  # way: w
        rate = self.step * (1 + staleness.updates) ** -self.a / (1 + self.fade * self.t / n) ** 0.5
        trained = sum(self.context.tensors) or len(now)
        left = way_left(gone[:trained], way[:trained]) if self.project else 1.0  # c
        new = now + rate * left * way
        # Of statistics, some of the way to those that the client has measured, never beyond.
        new[trained:] = (now + min(1.0, rate) * (way - gone))[trained:]
        self.mean = torch.lerp(self.mean, new, 1 / min(self.horizon * n, max(1.0, self.t / 2)))
        self.history.release(update.client)
        self.history.add(new)
        return True
