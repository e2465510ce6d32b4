"""FedAC (Zang et al.: Efficient Asynchronous Federated Learning with Prospective Momentum
Aggregation and Fine-Grained Correction, AAAI 2024)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from polytempo.core.bank import ModelBank
from polytempo.core.messages import Dispatch, Staleness, Update
from polytempo.core.objective import Drift
from polytempo.core.strategy import STRATEGIES, Context, Strategy
from polytempo.core.task import Task
from polytempo.strategies.history import History, cosine


@STRATEGIES.register("fedac")
class FedAC(Strategy):
    """Buffered updates act through moments, as in Adam; clients' drift is corrected at each step.

    Client i is sent w and c - c_i, adds the latter to the gradient of each of its K steps and
    returns its displacement Delta_i. On arrival, with w0 and c0 what it was sent,
        c_i' = c_i - c0 - Delta_i / (K eta_l)              the mean of its own gradients
        r_i  = max(cos(Delta_i, w - w0), 0.1), 1 if w = w0   does it go where the server went?
    and when the buffer is full, with q_i = r_i / sum r,
        d   = sum_i q_i Delta_i
        m  <- beta1 m + (1 - beta1) d
        u  <- beta2 u + (1 - beta2) d^2
        w  <- w + eta_g (beta1 m + (1 - beta1) d) / (sqrt(u) + epsilon)
        c  <- c + (1/n) sum_i (c_i' - c_i)                 the mean of all n clients' c_i

    `server_lr`: eta_g; in one aggregation no number of the model moves by more than 1.05 of it
    (with the default betas), so neither warm-up nor bias correction is needed. eta_l is the
    task's. PACE names one beta, 0.9: it is both here.
    `control=weighted` is `c <- c + sum_i q_i (c_i' - c_i)`, as public code has it. It leaves out
    the share of the buffer in all clients, so that c grows to about n / buffer_size times the mean
    gradient, and drives clients away instead of keeping them together. For replication only.

    Where we depart from the paper, of which we know the abstract and re-implementations that
    disagree: the server keeps each c_i, which follows from the upload, so the extra vector travels
    one way only, and a lost upload changes no c_i; with local momentum, K is replaced by what makes
    c_i' a mean of gradients (`effective_steps`). Weight decay is part of those gradients.

    Batch-norm statistics are not parameters, yet would take part in the moments: use
    `--buffers reset`.
    """

    family: ClassVar[str] = "asynchronous, one model"
    paper: ClassVar[str] = "Zang et al. 2024"
    single_model: ClassVar[bool] = True
    state: ClassVar[tuple[str, ...]] = (
        "models",
        "controls",
        "variates",
        "first",
        "second",
        "total",
        "drift",
        "weight",
        "count",
    )

    buffer_size: Annotated[int, Field(ge=1)] = 5
    server_lr: Annotated[float, Field(gt=0)] = 0.01
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.9
    epsilon: Annotated[float, Field(gt=0)] = 1e-8
    control: Literal["mean", "weighted"] = "mean"

    def setup(self, context: Context) -> None:
        super().setup(context)
        context.task.plain_sgd("fedac")
        zeros = torch.zeros_like(context.initial)
        self.models = History(context.initial)  # w
        self.controls = History(zeros)  # c
        self.variates = ModelBank(context.clients, zeros, storage=context.storage)  # c_i
        self.first, self.second = zeros.clone(), zeros.clone()  # m, u
        self.total, self.drift = zeros.clone(), zeros.clone()  # sums over the buffer, for d and c
        self.weight, self.count = 0.0, 0

    def task(self, client: int) -> Task:
        return replace(self.context.task, objective=Drift(), upload="delta")

    def model_for(self, client: int) -> Tensor:
        return self.models.current

    def vectors_for(self, client: int) -> Mapping[str, Tensor]:
        """c - c_i, which the client adds to the gradient of every step"""
        return {"anchor": self.controls.current - self.variates.row(client)}

    def fold(self, update: Update, staleness: Staleness) -> bool:
        i, delta, tau = update.client, update.vector, staleness.versions
        before = self.variates.row(i)  # c_i, as it was at the dispatch
        correction = self.controls.ago(tau) - before  # as it was sent
        steps = effective_steps(update.task, update.samples)
        self.variates.set(i, -correction - delta / (steps * update.task.lr))  # c_i'
        moved = self.models.current - self.models.ago(tau)
        weight = max(cosine(delta, moved), 0.1) if bool(moved.any()) else 1.0  # r_i
        self.lost(i)  # what it was sent is not needed any more
        self.total.add_(delta, alpha=weight)
        # (read back, for it may be kept in half precision: then c stays the mean of what is kept)
        change = self.variates.row(i) - before
        self.drift.add_(change, alpha=weight if self.control == "weighted" else 1.0)
        self.weight += weight
        self.count += 1
        if self.count < self.buffer_size:
            return False
        self._aggregate()
        return True

    def _aggregate(self) -> None:
        mean = self.total / self.weight  # d
        self.first.lerp_(mean, 1 - self.beta1)
        self.second.lerp_(mean.square(), 1 - self.beta2)
        ahead = torch.lerp(self.first, mean, 1 - self.beta1)  # the "prospective" momentum
        step = self.server_lr * ahead / (self.second.sqrt() + self.epsilon)
        self.models.add(self.models.current + step)
        share = self.weight if self.control == "weighted" else self.context.clients
        self.controls.add(self.controls.current + self.drift / share)
        self.total.zero_()
        self.drift.zero_()
        self.weight, self.count = 0.0, 0

    def dispatched(self, dispatch: Dispatch) -> None:
        self.models.hold(dispatch.client)
        self.controls.hold(dispatch.client)

    def lost(self, client: int) -> None:
        self.models.release(client)
        self.controls.release(client)


def effective_steps(task: Task, samples: int) -> float:
    """How many learning rates far a constant gradient of length 1 would carry the model.

    Without momentum that is K, the number of steps. With momentum mu a gradient acts again in all
    later steps, so that the k-th from the end counts 1 + mu + ... + mu^(k-1) times:
    `sum_{k=1..K} (1 - mu^k) / (1 - mu)`.
    """
    steps, mu = task.total_steps(samples), task.plain_sgd("this method").momentum
    return (steps - mu * (1 - mu**steps) / (1 - mu)) / (1 - mu)
