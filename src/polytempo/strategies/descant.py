"""Descant, Polytempo's own method: one melody for all, a line of one's own above it."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from polytempo.core.client_steps import Line, Prior
from polytempo.core.messages import Dispatch, Staleness, Update
from polytempo.core.strategy import STRATEGIES, Context, Strategy
from polytempo.core.task import Task
from polytempo.strategies.history import History


@STRATEGIES.register("descant")
class Descant(Strategy):
    """One shared model that every client trains under its own label prior, plus a line of its own.

    - A client adds the logarithm of its own label frequencies to the model's outputs, in training
      and in use (`Prior`). Labels that it does not have get almost no gradient, so what it learns
      does not undo what others have learned, and single updates may move the model far.
    - The shared model moves by displacements, as they arrive:
      `G <- G + s c d`, with `d = theta - G_sent`, `s = step (1 + tau)^-a (1 + fade t / n)^-1/2`
      and `c = max(0, 1 - <G - G_sent, d> / |d|^2)`: of the way that the client has proposed, only
      what others have not gone already since. The step is a relaxed projection onto the half-space
      `<x, d> >= <theta, d>`, so `G` never overshoots a client's proposal. On quadratic losses with
      a common minimum it never moves away from that, whatever the delays and rates
      (tests/strategies/test_descant.py).
    - Clients are served a moving average `E` of `G` over about `horizon` times n arrivals (over
      half of them at first), to which a client adds `beta` times its own line: the mean of its last
      displacements (`Line`). Counts, lines and the models in use never leave the client, and the
      server keeps two models however many clients there are.

    `prior`: what is added to each label count; 0: no prior. `weight_decay` replaces that of the
    local optimizer (none: leave it). For problems without labels the rest remains.
    """

    family: ClassVar[str] = "asynchronous, personalised"
    paper: ClassVar[str] = "Polytempo"
    single_model: ClassVar[bool] = True
    state: ClassVar[tuple[str, ...]] = ("history", "mean", "t")

    step: Annotated[float, Field(gt=0)] = 1.0
    a: Annotated[float, Field(ge=0)] = 0.5
    fade: Annotated[float, Field(ge=0)] = 0.3
    horizon: Annotated[float, Field(gt=0)] = 1.0
    beta: Annotated[float, Field(ge=0, le=1)] = 0.5
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
        n, now, sent = (
            self.context.clients,
            self.history.current,
            self.history.ago(staleness.versions),
        )
        moved = update.vector  # d
        rate = self.step * (1 + staleness.rounds) ** -self.a / (1 + self.fade * self.t / n) ** 0.5
        new = now + rate * (_left(now - sent, moved) if self.project else 1) * moved
        self.mean = torch.lerp(self.mean, new, 1 / min(self.horizon * n, max(1.0, self.t / 2)))
        self.history.release(update.client)
        self.history.add(new)
        return True


def _left(gone: Tensor, proposed: Tensor) -> float:
    """c: how much of the proposed way is left, of which others have gone a part."""
    square = float(proposed.dot(proposed))
    return max(0.0, 1 - float(gone.dot(proposed)) / square) if square > 0 else 0.0
