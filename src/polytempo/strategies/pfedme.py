"""pFedMe (T Dinh, Tran, Nguyen: Personalized Federated Learning with Moreau Envelopes, NeurIPS
2020)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from polytempo.core.client_steps import CLIENT_STEPS, ClientStep, Session
from polytempo.core.objective import Proximal
from polytempo.core.strategy import STRATEGIES, Strategy
from polytempo.core.task import Task
from polytempo.strategies.fedavg import FedAvg
from polytempo.strategies.fedbuff import FedBuff

OWN = "own model"


@CLIENT_STEPS.register("envelope")
class Envelope(ClientStep):
    """The training finds theta near the anchor w; then w takes a step of size `eta lam` towards
    it. This is done `rounds` times, with theta held near the w of that round. The last w is
    uploaded, the last theta kept and used."""

    lam: Annotated[float, Field(gt=0)]
    eta: Annotated[float, Field(gt=0)]
    rounds: Annotated[int, Field(ge=1)] = 1

    @property
    def keeps(self) -> tuple[str, ...]:
        return (OWN,)

    def work(self, task: Task, samples: int) -> float:
        return (self.rounds - 1) * replace(task, client_steps=(), own_epochs=None).work(samples)

    def after(self, session: Session) -> None:
        task = replace(session.task, upload="model", own_epochs=None)
        w, theta = session.received, session.trained()
        w = torch.lerp(w, theta, self.eta * self.lam)  # w <- w - eta lam (w - theta)
        for number in range(1, self.rounds):
            theta = session.train(theta, task, f"round {number}", anchor=w)
            w = torch.lerp(w, theta, self.eta * self.lam)
        session.put(w)
        session.memory[OWN] = theta

    def use(self, served: Tensor, memory: Mapping[str, Tensor]) -> Tensor:
        return memory.get(OWN, served)


class Moreau(Strategy):
    """Clients minimise the Moreau envelopes of their losses."""

    lam: Annotated[float, Field(gt=0)] = 15.0
    eta: Annotated[float, Field(gt=0)] = 0.05

    def task(self, client: int) -> Task:
        task = super().task(client)
        rounds = task.epochs if task.steps is None else 1
        step = Envelope(self.lam, self.eta, rounds)
        return replace(task, epochs=1, objective=Proximal(self.lam), client_steps=(step,))


@STRATEGIES.register("pfedme")
class PFedMe(Moreau, FedAvg):
    """The global model is trained on the clients' Moreau envelopes; their minimisers are personal.

    In each of R local rounds:
        theta_i <- argmin F_i(theta) + (lam/2) ||theta - w_i||^2    by SGD, from its last value
        w_i <- w_i - eta lam (w_i - theta_i)
    and at the server `w <- (1 - beta) w + beta mean w_i`. A client uses its theta_i.

    `lam`: 15, as in the paper. `eta`: 0.05 (0.005 to 0.01 there), since a local round is one epoch
    of the task here, and a training has as many as the task has epochs (5; with `--steps`, one
    round of so many steps) instead of 20 rounds of 5 steps. `beta`: 1.

    Where we depart: the steps towards theta_i use successive mini-batches, not one and the same;
    the mean is weighted by samples.
    """

    family: ClassVar[str] = "synchronous, personalised"
    paper: ClassVar[str] = "T Dinh et al. 2020"

    beta: Annotated[float, Field(gt=0)] = 1.0

    def replacement(self, mean: Tensor) -> Tensor:
        return super().replacement(torch.lerp(self.model.to(mean.dtype), mean, self.beta))


@STRATEGIES.register("pfedme-async")
class PFedMeAsync(Moreau, FedBuff):
    """pFedMe on arrival: the w_i are folded as in FedBuff, whose `server_lr` is beta."""

    family: ClassVar[str] = "asynchronous, personalised"
    paper: ClassVar[str] = "T Dinh et al. 2020, asynchronous"
