"""FADAS (Wang et al.: FADAS: Towards Federated Adaptive Asynchronous Optimization, ICML 2024)."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from polytempo.core.messages import Staleness, Update
from polytempo.core.strategy import STRATEGIES, Context, Strategy
from polytempo.core.task import Task


@STRATEGIES.register("fadas")
class FADAS(Strategy):
    """FedBuff with AMSGrad at the server, and smaller steps for buffers with stale updates.

    When M displacements are in, with tau the largest staleness (in versions) among them:
        Delta = their plain mean
        m <- beta1 m + (1 - beta1) Delta,   v <- beta2 v + (1 - beta2) Delta^2,   v^ <- max(v^, v)
        w <- w + eta m / (sqrt(v^) + epsilon),   eta = server_lr if tau <= patience
                                                       server_lr / tau otherwise
    `patience`: tau_c of the paper; a large one turns the adaptation to delay off. `buffer_size`: M.

    Where we depart: the paper's stale steps are `min(server_lr, 1 / tau)`, which never acts at the
    rates that are of use with it; here the rate is divided (so does AFL-Lib, which leaves out v^).
    The first moment is that of the paper, without bias correction.
    """

    family: ClassVar[str] = "asynchronous, one model"
    paper: ClassVar[str] = "Wang et al. 2024 (FADAS)"
    single_model: ClassVar[bool] = True
    state: ClassVar[tuple[str, ...]] = (
        *("model", "total", "count", "stalest"),
        *("first", "second", "largest"),
    )

    buffer_size: Annotated[int, Field(ge=1)] = 5
    server_lr: Annotated[float, Field(gt=0)] = 0.01
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.99
    epsilon: Annotated[float, Field(gt=0)] = 1e-8
    patience: Annotated[int, Field(ge=1)] = 1

    def setup(self, context: Context) -> None:
        super().setup(context)
        self.model = context.initial
        zeros = (torch.zeros_like(self.model) for _ in range(4))
        self.total, self.first, self.second, self.largest = zeros  # of the buffer; m, v, v^
        self.count = self.stalest = 0
        self.trained = sum(context.tensors) or len(self.total)  # statistics follow
        self.asked = replace(context.task, upload="delta")

    def task(self, client: int) -> Task:
        return self.asked

    def model_for(self, client: int) -> Tensor:
        return self.model

    def fold(self, update: Update, staleness: Staleness) -> bool:
        self.total.add_(update.vector)
        self.stalest = max(self.stalest, staleness.versions)
        self.count += 1
        if self.count < self.buffer_size:
            return False
        delta = self.total / self.buffer_size
        self.first = torch.lerp(delta, self.first, self.beta1)
        self.second = torch.lerp(delta.square(), self.second, self.beta2)
        self.largest = torch.maximum(self.largest, self.second)
        rate = self.server_lr / (self.stalest if self.stalest > self.patience else 1)
        step = rate * self.first / (self.largest.sqrt() + self.epsilon)
        step[self.trained :] = delta[self.trained :]
        self.model = self.model + step
        self.total.zero_()
        self.count = self.stalest = 0
        return True
