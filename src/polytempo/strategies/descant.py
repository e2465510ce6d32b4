"""Descant, Polytempo's own method: one melody for all, a line of one's own above it."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, ClassVar

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from polytempo.core.client_steps import SHARES, ClientStep, Gap, Line, Prior, way_left
from polytempo.core.errors import Refused
from polytempo.core.messages import Dispatch, Staleness, Update
from polytempo.core.strategy import STRATEGIES, Context, State, Strategy
from polytempo.core.task import Task
from polytempo.strategies.history import History

FEWEST = 20  # arrivals, over which losses are averaged at least
RECENT = 50  # arrivals, whose median length is the usual one
WIDE = 0.2  # gaps beyond that, which few samples often have, count as this
FAR = 10.0  # times the usual: sums of losses beyond that are scaled down to it


@STRATEGIES.register("descant")
class Descant(Strategy):
    """One shared model that every client trains under its own label prior, and a line of its own.

    - A client adds the logarithm of its own label frequencies to the model's outputs, in training
      and in use (`Prior`). Labels that it does not have get almost no gradient, so what it learns
      does not undo what others have learned, and single updates may move the model far.
    - It trains from where it was (`Line`): from `G_sent + beta^2 m` to theta. Its line m is the
      mean of `theta - G_sent` over its last `memory` trainings. What it uploads is the way from
      `G_sent` to the half-space `<x, d> >= <theta, d>`, `d = theta - G_sent - beta^2 m`: what this
      training has added, as far as the shared model lacks it.
    - The shared model moves by these ways w, as they arrive: `G <- G + r c w`, with
      `r = step (1 + tau)^-a (1 + fade t / n)^-1/2` and
      `c = max(0, 1 - <G - G_sent, w> / |w|^2)`: only what others have not gone already since. That
      is a relaxed projection onto the same half-space, so `G` never overshoots a client's proposal.
      On quadratic losses with a common minimum it never moves away from that, whatever the lines,
      delays and rates (tests/strategies/test_descant.py).
    - A way that is longer than `cut` times the usual, the median of the last 50, is cut to that.
      Where trainings are about to diverge, each way is longer than the last; this breaks the
      circle. Elsewhere hardly any is so long.
    - Clients are served a moving average `E` of `G` over about `horizon` times n arrivals (over
      half of them at first), to which each adds beta times its line.
    - `beta`, how much of the lines is good for everybody, is measured: each client keeps `hold_out`
      of its samples out of training and uploads, beside its way, what several shares of its line
      add to their summed loss under `G_sent`. Of moving averages of these sums over n arrivals (20,
      if n is less), `beta` is the minimum of the parabola through them and 0. It stays at 0.5 as
      long as nobody can say: clients of fewer than 16 samples hold out none. Sums more than ten
      times as large as usual are scaled down to that: one upload counts for ten at most.
    - Weight decay is measured in the same way: `decay` times the gap, the part of the summed losses
      of held-out samples under `G_sent` that as many trained samples do not have (`Gap`), 0.2 at
      most. So it is there where the shared model learns samples by heart, and nowhere else.
    - Both settle early, so after `measuring` times max(n, 20) arrivals nothing more is held out:
      clients train on all of their samples. Losses that are still on their way count; then `beta`
      and the gap stay.

    Label counts, lines and the models in use never leave the client, a training takes about as long
    as in FedAvg, and the server keeps two models, and those that clients in training were sent.

    The prior says how labels differ between clients, the line the rest: where the same sample means
    something else to each, lines grow into models of their own.

    `prior`: what is added to each label count; 0: no prior. `beta` (0: no line) is measured unless
    it is set. `hold_out` 0: nothing is held out, nothing but the way is uploaded (as `--dp` asks),
    `beta` is 0.5 unless it is set, and weight decay is that of the local optimizer, which it never
    falls below. `cut` 0: ways of any length count in full. Statistics of batch normalisation have
    no line; the server's move towards the client's at the rate r.
    """

    family: ClassVar[str] = "asynchronous, personalised"
    paper: ClassVar[str] = "Polytempo"
    single_model: ClassVar[bool] = True
    state: ClassVar[tuple[str, ...]] = (
        *("history", "mean", "t", "lengths"),
        *("heard", "share", "gap"),
    )

    step: Annotated[float, Field(gt=0)] = 1.0
    a: Annotated[float, Field(ge=0)] = 0.5
    fade: Annotated[float, Field(ge=0)] = 0.3
    horizon: Annotated[float, Field(gt=0)] = 1.0
    beta: Annotated[float, Field(ge=0, le=1)] | None = None
    memory: Annotated[int, Field(ge=1)] = 4
    prior: Annotated[float, Field(ge=0)] = 0.1
    hold_out: Annotated[float, Field(ge=0, le=0.5)] = 0.0625
    measuring: Annotated[float, Field(ge=1)] = 4.0
    decay: Annotated[float, Field(ge=0)] = 0.02
    cut: Annotated[float, Field(ge=0)] = 2.0
    project: bool = True

    def setup(self, context: Context) -> None:
        super().setup(context)
        self.history = History(context.initial)
        self.mean = context.initial
        self.t = 0
        self.lengths: list[float] = []  # of the last ways, as they came
        self.heard = Heard(len(SHARES))  # what they add to the losses of held-out samples
        self.gap = Heard(2)  # losses of held-out samples, and of as many others
        self.share = 0.5 if self.beta is None else self.beta  # of their lines, what clients use
        self.window = max(context.clients, FEWEST)  # losses are averaged over so many arrivals
        self.plain = replace(context.task, upload="delta")

    def task(self, client: int) -> Task:
        hold_out = self.hold_out if self.t < self.measuring * self.window else 0.0
        steps: list[ClientStep] = [Prior(self.prior)] if self.prior else []
        if self.beta != 0:
            steps.append(Line(self.share, self.memory, hold_out if self.beta is None else 0.0))
        if self.decay and hold_out:
            steps.append(Gap(hold_out))
        held, others = self.gap.mean.tolist()
        gap = min(WIDE, max(0.0, 1 - others / held)) if held > 0 else 0.0
        optimizer = self.plain.optimizer
        decay = max(optimizer.weight_decay, self.decay * gap)
        optimizer = replace(optimizer, weight_decay=decay)
        return replace(self.plain, client_steps=tuple(steps), optimizer=optimizer)

    def model_for(self, client: int) -> Tensor:
        return self.history.current

    def serve(self, client: int) -> Tensor:
        return self.mean

    def dispatched(self, dispatch: Dispatch) -> None:
        self.history.hold(dispatch.client)

    def lost(self, client: int) -> None:
        self.history.release(client)

    def fold(self, update: Update, staleness: Staleness) -> bool:
        self._hear(update)
        self.t += 1
        n, now = self.context.clients, self.history.current
        trained = sum(self.context.tensors) or len(now)
        gone, way = now - self.history.ago(staleness.versions), self._cut(update.vector, trained)
        rate = self.step * (1 + staleness.updates) ** -self.a / (1 + self.fade * self.t / n) ** 0.5
        left = way_left(gone[:trained], way[:trained]) if self.project else 1.0  # c
        new = now + rate * left * way
        # Of statistics, some of the way to those that the client has measured, never beyond.
        new[trained:] = (now + min(1.0, rate) * (way - gone))[trained:]
        self.mean = torch.lerp(self.mean, new, 1 / min(self.horizon * n, max(1.0, self.t / 2)))
        self.history.release(update.client)
        self.history.add(new)
        return True

    def _cut(self, way: Tensor, trained: int) -> Tensor:
        """The way w, of which what is trained is no longer than is usual."""
        length = float(way[:trained].norm())
        part = within(self.cut, length, self.lengths)
        self.lengths = [*self.lengths, length][-RECENT:]
        if part == 1:
            return way
        way = way.clone()
        way[:trained] *= part
        return way

    def _hear(self, update: Update) -> None:
        told = [
            (heard, update.extras[name].double().flatten())
            for name, heard in (("line.losses", self.heard), ("gap.losses", self.gap))
            if name in update.extras
        ]
        for heard, said in told:
            if len(said) != len(heard.mean):
                raise Refused(
                    f"client {update.client} sent {len(said)} numbers as its losses; expected "
                    f"{len(heard.mean)}"
                )
        for heard, said in told:
            heard.add(said, min(self.window, max(1.0, self.t / 2)))
        if self.heard.mean.any():
            self.share = lowest((0.0, *SHARES), (0.0, *self.heard.mean.tolist()))


class Heard:
    """A moving average of vectors. One that is much longer than usual is scaled down."""

    def __init__(self, size: int) -> None:
        self.mean = torch.zeros(size, dtype=torch.float64)
        self.lengths: list[float] = []  # as they came

    def add(self, said: Tensor, arrivals: float) -> None:
        """Average it in, over so many arrivals."""
        if length := float(said.norm()):  # who has nothing to say yet says zeros
            self.lengths = [*self.lengths, length][-RECENT:]
        self.mean = torch.lerp(self._near(self.mean), self._near(said), 1 / arrivals)

    def _near(self, vector: Tensor) -> Tensor:
        return vector * within(FAR, float(vector.norm()), self.lengths)

    def state_dict(self) -> State:
        return {"mean": self.mean, "lengths": self.lengths}

    def load_state_dict(self, state: State) -> None:
        self.mean, self.lengths = state["mean"], list(state["lengths"])


def within(times: float, length: float, lengths: list[float]) -> float:
    """The part of `length` that is within so many times the median of `lengths` (0: all of it)."""
    limit = times * float(np.median(lengths)) if lengths else 0.0
    return limit / length if 0 < limit < length else 1.0


def lowest(x: tuple[float, ...], y: tuple[float, ...]) -> float:
    """Where between the ends of x the parabola through these points (by least squares) is
    lowest."""
    c, b, a = np.polynomial.polynomial.polyfit(x, y, 2)
    ends = (x[0], x[-1])
    places = [*ends, -b / (2 * a)] if a > 0 and ends[0] < -b / (2 * a) < ends[1] else ends
    return float(min(places, key=lambda place: c + b * place + a * place * place))
