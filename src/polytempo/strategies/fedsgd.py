"""FedSGD (McMahan et al., AISTATS 2017): FedAvg with a single gradient per communication round."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from polytempo.core.messages import Staleness, Update
from polytempo.core.strategy import STRATEGIES, Context
from polytempo.core.task import Task
from polytempo.strategies.fedavg import FedAvg


@STRATEGIES.register("fedsgd")
class FedSGD(FedAvg):
    """Synchronous SGD: a cohort sends one gradient each, and the server steps by their mean.

    `g = sum_i |D_i| g_i / sum_i |D_i|`, then a step of SGD on the server with the task's learning
    rate (of the run's schedule) and momentum (weight decay is in the gradients): as if the cohort's
    mini-batches were one. The baseline for what local steps save: it needs two messages per client
    for every step. The task's epochs and steps have no meaning.

    Batch-norm statistics have no gradient: they would keep their initial values. Use models
    without batch normalisation.
    """

    state: ClassVar[tuple[str, ...]] = (*FedAvg.state, "momentum", "rate")

    def setup(self, context: Context) -> None:
        super().setup(context)
        self.beta = self.task(0).plain_sgd("fedsgd").momentum  # which is the server's here
        self.momentum = torch.zeros_like(self.total)
        self.rate = context.task.lr  # that the cohort was sent

    def task(self, client: int) -> Task:
        return replace(super().task(client), upload="gradient")

    def fold(self, update: Update, staleness: Staleness) -> bool:
        self.rate = update.task.lr
        return super().fold(update, staleness)

    def replacement(self, mean: Tensor) -> Tensor:
        self.momentum = self.beta * self.momentum + mean
        return (self.model - self.rate * self.momentum).to(self.model.dtype)
