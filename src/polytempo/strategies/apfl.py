"""APFL (Deng et al.: Adaptive Personalized Federated Learning, 2020)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from polytempo.core.client_steps import CLIENT_STEPS, ClientStep, Session
from polytempo.core.objective import Plain
from polytempo.core.strategy import STRATEGIES, Strategy
from polytempo.core.task import Task
from polytempo.strategies.fedavg import FedAvg
from polytempo.strategies.fedbuff import FedBuff

OWN, ALPHA = "own model", "alpha"
LEAST = 1e-3  # of alpha: with less the own model has no say, and no gradient


@CLIENT_STEPS.register("mixture")
class Mixture(ClientStep):
    """The client keeps a model v and a number alpha, and uses `alpha v + (1 - alpha) w`, with w the
    model that it is served. After training w it adapts alpha, then trains v within the mixture."""

    alpha: Annotated[float, Field(ge=0, le=1)]
    adapt: bool = True

    @property
    def keeps(self) -> tuple[str, ...]:
        return (OWN, ALPHA)

    def work(self, task: Task, samples: int) -> float:
        return replace(task, client_steps=(), own_epochs=None).work(samples)

    def after(self, session: Session) -> None:
        v, w = session.memory.get(OWN, session.received), session.trained()
        alpha = float(session.memory.get(ALPHA, torch.tensor([self.alpha]))[0])
        task = replace(session.task, objective=Plain(), upload="model", own_epochs=None)
        if self.adapt:
            mixed = torch.lerp(w, v, alpha)
            slope = session.train(mixed, replace(task, upload="gradient"), ALPHA)
            # alpha <- alpha - eta <v - w, grad f(alpha v + (1 - alpha) w)>
            alpha = min(1.0, max(0.0, alpha - task.lr * float((v - w).dot(slope))))
        if alpha >= LEAST:
            mixed = torch.lerp(w, v, alpha)
            # v <- v - eta alpha grad f(mixed): the mixture moves by alpha as much
            trained = session.train(mixed, replace(task, lr=task.lr * alpha**2), OWN)
            v = v + (trained - mixed) / alpha
        session.memory[OWN], session.memory[ALPHA] = v, w.new_tensor([alpha])

    def use(self, served: Tensor, memory: Mapping[str, Tensor]) -> Tensor:
        if OWN not in memory:
            return served
        return torch.lerp(served, memory[OWN], float(memory[ALPHA][0]))


class Mixing(Strategy):
    """A mixture of the global model and one of the client's own."""

    alpha: Annotated[float, Field(ge=0, le=1)] = 0.5
    adapt: bool = True

    def task(self, client: int) -> Task:
        return replace(super().task(client), client_steps=(Mixture(self.alpha, self.adapt),))


@STRATEGIES.register("apfl")
class APFL(Mixing, FedAvg):
    """A client uses a mixture of the global model and its own, in shares that it adapts.

        w_i <- from w, as in FedAvg: uploaded
        alpha_i <- alpha_i - eta <v_i - w_i, grad F_i(m)>, kept within 0 and 1
        v_i <- v_i - eta alpha_i grad F_i(m), with m = alpha_i v_i + (1 - alpha_i) w_i: kept
    The model in use is m with the served w in place of w_i.

    `alpha`: the first one. `adapt=false` leaves it there. Training twice takes twice the time.

    Where we depart: the paper takes a step of w_i and one of v_i in turns; here w_i is trained
    first, and v_i then with the trained w_i, so that a step on v_i is a step on m at the learning
    rate `eta alpha_i^2` (of SGD; Adam does not scale so). Alpha is adapted once per training, as in
    the authors' code.
    """

    family: ClassVar[str] = "synchronous, personalised"
    paper: ClassVar[str] = "Deng et al. 2020"


@STRATEGIES.register("apfl-async")
class APFLAsync(Mixing, FedBuff):
    """APFL on arrival: the global model is FedBuff's."""

    family: ClassVar[str] = "asynchronous, personalised"
    paper: ClassVar[str] = "Deng et al. 2020, asynchronous"
