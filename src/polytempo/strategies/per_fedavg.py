"""Per-FedAvg (Fallah, Mokhtari, Ozdaglar: Personalized Federated Learning with Theoretical
Guarantees: A Model-Agnostic Meta-Learning Approach, NeurIPS 2020), first order."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from polytempo.core.errors import PolytempoError
from polytempo.core.optimizer import OPTIMIZERS, Moments, Sgd
from polytempo.core.strategy import STRATEGIES, Context, Strategy
from polytempo.core.task import Task
from polytempo.strategies.fedavg import FedAvg
from polytempo.strategies.fedbuff import FedBuff


@OPTIMIZERS.register("meta-sgd")
class MetaSgd(Sgd):
    """SGD in pairs of steps: the first, of size `alpha`, is a look ahead; the second goes from
    where the pair began, by the gradient found there. One that is left at the end is undone."""

    alpha: Annotated[float, Field(gt=0)] = 0.01

    def begin(self, theta: Tensor) -> Moments:
        more = {"begin": theta.clone(), "count": torch.zeros(1, dtype=theta.dtype)}
        return {**super().begin(theta), **more}

    def step(self, theta: Tensor, grad: Tensor, moments: Moments, lr: float) -> None:
        moments["count"] += 1
        if int(moments["count"]) % 2:
            moments["begin"].copy_(theta)
            theta.sub_(grad, alpha=self.alpha)  # theta' = theta - alpha grad F(theta; D)
        else:
            theta.copy_(moments["begin"])
            super().step(theta, grad, moments, lr)  # theta - beta grad F(theta'; D')

    def end(self, theta: Tensor, moments: Moments) -> None:
        if int(moments["count"]) % 2:
            theta.copy_(moments["begin"])


class LookingAhead(Strategy):
    """Clients train for what comes after a step of adaptation."""

    to_fine_tune: ClassVar[bool] = True

    alpha: Annotated[float, Field(gt=0)] | None = None

    def setup(self, context: Context) -> None:
        super().setup(context)
        sgd = context.task.optimizer
        if type(sgd) is not Sgd:
            other = sgd.name or type(sgd).__name__
            raise PolytempoError(
                f"{self.name} makes its steps of pairs of SGD's; use --optimizer sgd, not {other}"
            )
        ahead = context.task.lr if self.alpha is None else self.alpha
        self.optimizer = MetaSgd(sgd.weight_decay, sgd.momentum, ahead)

    def task(self, client: int) -> Task:
        return replace(super().task(client), optimizer=self.optimizer)


@STRATEGIES.register("per-fedavg")
class PerFedAvg(LookingAhead, FedAvg):
    """The model that is best after a step on a client's own samples: meta-learning, first order.

    Two mini-batches D, D' make one local step:
        theta' <- theta - alpha grad F_i(theta; D)
        theta  <- theta - beta grad F_i(theta'; D')
    and the server averages as in FedAvg. Judge it by the *adapted* metric: the model that is handed
    out is a starting point, for fine-tuning by each client.

    `alpha`: default the task's learning rate, which is beta. Momentum and weight decay are the
    task's; the look ahead has no momentum. The task's optimizer must be SGD.

    Where we depart: first order (FO) alone, not the paper's Hessian-free variant; clients adapt as
    with every strategy (`--adapt-epochs`), not by a single step.
    """

    family: ClassVar[str] = "synchronous, personalised"
    paper: ClassVar[str] = "Fallah et al. 2020 (first order)"


@STRATEGIES.register("per-fedavg-async")
class PerFedAvgAsync(LookingAhead, FedBuff):
    """Per-FedAvg on arrival: updates are folded as in FedBuff."""

    family: ClassVar[str] = "asynchronous, personalised"
    paper: ClassVar[str] = "Fallah et al. 2020 (first order), asynchronous"
